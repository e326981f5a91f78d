"""What a run's owner asks of all ranks, passed on: to drain, and to dump their stacks.

Stacks lie beside the checkpoints, also those of ranks that answer nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msa_workloads.control import RankReport, RunState
from msa_workloads.control_worker import dump_by_signal, headline

FOLDER = "stacks"

ANSWER_SECONDS = 4.0
"""How long ranks get to dump their own stacks; they hear of the request within about a second."""

SIGNAL_SECONDS = 5.0
"""How long a rank that did not gets to follow the dump signal."""

NODE_SECONDS = 20.0
"""How long its machine gets to start the process that sends the signal."""

WRITERS = 16
"""Files written to the checkpoint's storage at once."""


def file_name(submission: str, rank: int) -> str:
    """Where a rank's stacks lie, relative to the checkpoints."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", submission).lstrip(".") or "run"
    return f"{FOLDER}/{safe}/rank-{rank}.txt"


def dump_stacks(state: RunState, uri: str, ask: Callable[[], int]) -> dict[str, Any]:
    """Dump all ranks' stacks; returns their ``folder`` and the ``lagging`` rank.

    ``ask`` tells all ranks and returns the request's number. The files are there on return.
    Raises RuntimeError when no rank runs yet.
    """
    reports = state.reports()
    if not reports:
        raise RuntimeError("no rank runs yet")
    texts = state.wait_for_stacks(ask(), set(reports), ANSWER_SECONDS)
    mute = [report for rank, report in reports.items() if rank not in texts]
    lagging = state.lagging()
    if mute and texts:
        last = min(mute, key=lambda report: report.place)
        lagging = {"rank": last.rank, "step": last.step, "node": last.node}
    texts |= _by_signal(mute)
    # With PyTorch, for which the control endpoint does not wait.
    from msa_workloads.storage import open_store

    store = open_store(uri)

    def write(rank: int) -> None:
        store.write(file_name(state.submission, rank), texts[rank].encode())

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, sorted(texts)))
    folder = file_name(state.submission, 0).rpartition("/")[0]
    return {"folder": f"{uri.rstrip('/')}/{folder}", "lagging": lagging}


def _by_signal(reports: list[RankReport]) -> dict[int, str]:
    """Stacks of ranks that cannot speak, fetched by a process of their own machine."""
    if not reports:
        return {}
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def on_node(report: RankReport) -> Any:
        there = NodeAffinitySchedulingStrategy(report.node_id, soft=False)
        remote = ray.remote(dump_by_signal).options(
            num_cpus=0, max_retries=0, scheduling_strategy=there
        )
        return remote.remote(report.pid, report.dump, SIGNAL_SECONDS)

    asked = {on_node(report): report for report in reports}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=NODE_SECONDS)
    texts = {
        report.rank: f"{headline(report)}\nits machine does not answer\n"
        for report in asked.values()
    }
    for reference in done:
        report = asked[reference]
        try:
            said = ray.get(reference)
        except Exception as error:
            said = f"its machine does not answer: {type(error).__name__}: {error}"
        texts[report.rank] = f"{headline(report)}\n\n{said}\n"
    return texts


class Watch:
    """Connects a run with the state that its control endpoint serves."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._board: Any = None
        self._told = False

    def attach(self, board: Any) -> None:
        """From now on the ranks of ``board`` can be asked."""
        self._board = board

    def stacks(self) -> dict[str, Any]:
        """See :func:`msa_workloads.control_stacks.dump_stacks`."""
        if self._board is None:
            raise RuntimeError("no rank runs yet")
        import ray

        board = self._board
        return dump_stacks(
            self.state, self.state.checkpoint_uri, lambda: ray.get(board.dump.remote())
        )

    def drained_before_it_began(self) -> bool:
        """Pass a drain request on; true when nothing runs that could be lost by stopping now."""
        if not self.state.draining:
            return False
        if not self._told:
            self._board.stop.remote()
            self._told = True
        return not self.state.begun

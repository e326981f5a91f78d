"""The actor through which a run's workers and its driver speak, and both ends of it.

It lives beside the driver, so that news of the run outlives every worker. Its process imports
this module, which therefore imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from msa_workloads.control import RankReport
from msa_workloads.control_worker import Orders


class Board:
    """Actor through which workers and driver speak; keeps only what is not taken."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Any]] = []
        self._reports: dict[int, RankReport] = {}
        self._orders = Orders()

    def post(self, kind: str, value: Any) -> None:
        """Add one event."""
        self._events.append((kind, value))

    def report(self, report: RankReport) -> Orders:
        """Keep a rank's newest report; returns what the driver wants of it."""
        self._reports[report.rank] = report
        return self._orders

    def take(self) -> list[tuple[str, Any]]:
        """All events since the last call, then the ranks' newest reports."""
        events = [*self._events, *(("report", report) for report in self._reports.values())]
        self._events, self._reports = [], {}
        return events

    def stop(self) -> None:
        """Ask all ranks to checkpoint and stop."""
        self._orders = dataclasses.replace(self._orders, stop=True)

    def dump(self) -> int:
        """Ask all ranks for their stacks; returns the request's number."""
        self._orders = dataclasses.replace(self._orders, dump=self._orders.dump + 1)
        return self._orders.dump


class BoardChannel:
    """A rank's way to the board."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def report(self, report: RankReport) -> Orders:
        import ray

        return ray.get(self._board.report.remote(report))

    def stacks(self, rank: int, number: int, text: str) -> None:
        import ray

        ray.get(self._board.post.remote("stacks", (rank, number, text)))


class BoardSink:
    """Rank 0's sink: rows go to the board."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def begin(self, rows: list[dict[str, Any]], plan: dict[str, Any]) -> None:
        del plan
        self._board.post.remote("begin", rows)

    def add(self, row: dict[str, Any]) -> None:
        self._board.post.remote("row", row)


def start_board() -> Any:
    """The board, on the driver's own node: it must outlive any worker's."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()


def take(board: Any) -> Iterator[tuple[str, Any]]:
    import ray

    yield from ray.get(board.take.remote())

"""Run a RunSpec on Ray: start or join a cluster, start the workers, show and record progress.

The driver owns the run's files. Rank 0 sends its rows to a small actor beside the driver, so that
progress is live wherever the workers are; workers checkpoint by themselves (see
:mod:`msa_workloads.checkpoint`), and after a lost worker Ray starts the group again, which resumes
from the newest whole checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msa_kernels.backend import BackendError
from rich.console import Console

from msa_workloads.checkpoint import CheckpointError, newest_complete
from msa_workloads.cluster import Cluster, ray_cluster, worker_environment
from msa_workloads.display import Display, print_summary
from msa_workloads.logs import log_path, log_to_file, short_traceback
from msa_workloads.parallel.mesh import UnsupportedError, check_supported
from msa_workloads.progress import MetricsFile, Silent, Tee
from msa_workloads.report import write_report
from msa_workloads.runspec import RunSpec
from msa_workloads.sources import DataError, open_source
from msa_workloads.storage import open_store
from msa_workloads.train import DivergedError, run

POLL_SECONDS = 0.3
"""How often the driver asks for news: smooth to watch, nothing in cost."""

FINAL = (UnsupportedError, DataError, CheckpointError, DivergedError)
"""Errors that another attempt would only repeat; they end the run at once, without retries."""


class RunFailed(RuntimeError):
    """The run failed; the message holds the first failing rank's own traceback, shortened."""


class Board:
    """Actor through which workers tell the driver what happens; keeps only what is not taken."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Any]] = []

    def post(self, kind: str, value: Any) -> None:
        """Add one event."""
        self._events.append((kind, value))

    def take(self) -> list[tuple[str, Any]]:
        """All events since the last call."""
        events, self._events = self._events, []
        return events


class BoardSink:
    """Rank 0's sink: rows go to the board."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def begin(self, rows: list[dict[str, Any]], plan: dict[str, Any]) -> None:
        del plan
        self._board.post.remote("begin", rows)

    def add(self, row: dict[str, Any]) -> None:
        self._board.post.remote("row", row)


def run_on_ray(spec: RunSpec, *, resume: bool, console: Console) -> dict[str, Any]:
    """Run ``spec`` on Ray and return its summary.

    Writes ``summary.json``, ``report.html``, ``metrics.jsonl`` and, for a local Ray, one log per
    rank into the spec's output folder. Without ``resume`` a checkpoint folder that already holds a
    whole checkpoint is refused, so that no run ever continues or overwrites another by accident.

    Raises :class:`UnsupportedError`, :class:`DataError` and :class:`CheckpointError` for what
    cannot be run as asked, :class:`DivergedError`, and :class:`RunFailed` for all other failures.
    """
    started = time.time()
    spec = _absolute(spec)
    check_supported(spec)
    _check_checkpoints(spec, resume, console)
    with _terminate_as_interrupt(), ray_cluster(spec) as cluster:
        if cluster.local:
            open_source(spec.data.source).entries()
        # The driver has decided whether to resume; from here on, restarts always do.
        worker_spec = dataclasses.replace(
            spec, checkpoint=dataclasses.replace(spec.checkpoint, resume="Latest")
        )
        outcome, restarts = _follow(worker_spec, cluster, console)
    summary = write_report(spec, outcome, wall_seconds=time.time() - started, restarts=restarts)
    print_summary(console, summary)
    return summary


def _follow(spec: RunSpec, cluster: Cluster, console: Console) -> tuple[dict[str, Any], int]:
    """Train in a thread and show its events here; returns the outcome and the restarts."""
    board = _start_board()
    training = _Training(spec, cluster, board)
    display = Display(console, spec)
    sink = Tee(MetricsFile(spec.output), display)
    attempts, failures = 0, []
    outcome: dict[str, Any] | None = None
    with display:
        training.start()
        done = False
        while not done:
            # Asked before the events are taken: what was posted until then is seen below.
            done = not training.wait(POLL_SECONDS)
            for kind, value in _take(board):
                if kind == "begin":
                    attempts += 1
                    failures.clear()
                    sink.begin(value, spec.plan)
                elif kind == "row":
                    sink.add(value)
                elif kind == "failed":
                    failures.append(value)
                    display.say(f"{value.splitlines()[0]}; waiting for what Ray decides")
                elif kind == "final":
                    raise value
                elif kind == "outcome":
                    outcome = value
    if outcome is None:
        raise RunFailed(_reason(failures, training.error, spec, cluster))
    return outcome, max(0, attempts - 1)


class _Training(threading.Thread):
    """``TorchTrainer.fit`` in a thread, so that the main thread is free to show and to stop."""

    def __init__(self, spec: RunSpec, cluster: Cluster, board: Any) -> None:
        super().__init__(name="ray-train", daemon=True)
        self._trainer = _trainer(spec, cluster, board)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self.error = error

    def wait(self, seconds: float) -> bool:
        """Whether it still runs after at most ``seconds``."""
        self.join(seconds)
        return self.is_alive()


def _trainer(spec: RunSpec, cluster: Cluster, board: Any) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # Imported with Ray, after the cluster has set Ray's environment.
    from msa_workloads.rendezvous import torch_config

    owns = spec.recovery.owner == "ray"
    return TorchTrainer(
        _worker,
        train_loop_config={"spec": spec.to_json(), "board": board, "local": cluster.local},
        torch_config=torch_config(spec.device, cluster.folder),
        scaling_config=ScalingConfig(
            num_workers=spec.mesh.world_size,
            use_gpu=spec.device == "gpu",
            resources_per_worker={"CPU": 1, **({"GPU": 1} if spec.device == "gpu" else {})},
        ),
        run_config=RunConfig(
            name=spec.name,
            storage_path=str(Path(spec.output) / "ray-train"),
            worker_runtime_env=(None if cluster.local else {"env_vars": worker_environment(spec)}),
            # One owner of recovery: Ray, or whoever started this attempt, never both.
            failure_config=FailureConfig(
                max_failures=spec.recovery.max_restarts if owns else 0,
                max_preemption_failures=spec.recovery.max_restarts if owns else 0,
                controller_failure_limit=spec.recovery.max_restarts if owns else 0,
            ),
        ),
    )


def _worker(config: dict[str, Any]) -> None:
    """What every Ray worker runs."""
    import ray
    from ray.train import get_context

    spec, board = RunSpec.from_json(config["spec"]), config["board"]
    rank = get_context().get_world_rank()
    try:
        if config["local"]:
            _redirect_output(log_to_file(Path(spec.output), rank))
        outcome = run(spec, BoardSink(board) if rank == 0 else Silent())
    except BackendError as error:
        ray.get(board.post.remote("final", UnsupportedError(f"attention: {error}")))
    except FINAL as error:
        ray.get(board.post.remote("final", error))
    except Exception as error:
        logging.getLogger(__name__).exception("rank %d failed", rank)
        text = f"rank {rank} failed: {_headline(error)}\n{short_traceback(error)}"
        ray.get(board.post.remote("failed", text))
        raise
    else:
        if rank == 0:
            ray.get(board.post.remote("outcome", outcome))


def _redirect_output(path: Path) -> None:
    """Send this worker's stdout and stderr, C libraries included, to its rank's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _start_board() -> Any:
    """The board, on the driver's own node: it must outlive any worker's."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()


def _take(board: Any) -> Iterator[tuple[str, Any]]:
    import ray

    yield from ray.get(board.take.remote())


def _absolute(spec: RunSpec) -> RunSpec:
    """Relative folders made absolute here, since workers start in folders of their own."""
    uri = spec.checkpoint.uri
    if "://" not in uri:
        uri = str(Path(uri).absolute())
    return dataclasses.replace(
        spec,
        output=str(Path(spec.output).absolute()),
        checkpoint=dataclasses.replace(spec.checkpoint, uri=uri),
    )


def _check_checkpoints(spec: RunSpec, resume: bool, console: Console) -> None:
    marker = newest_complete(open_store(spec.checkpoint.uri))
    if marker is not None and not resume:
        raise CheckpointError(
            f"{spec.checkpoint.uri} already holds a checkpoint of step {marker.step}; continue "
            "that run with --resume, or give this one a folder of its own"
        )
    if marker is None and resume:
        console.print(
            f"no whole checkpoint in {spec.checkpoint.uri}: starting at step 0", highlight=False
        )


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM (how Ray stops a job) unwind like Ctrl-C, so that everything is shut down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _headline(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _reason(
    failures: list[str], error: BaseException | None, spec: RunSpec, cluster: Cluster
) -> str:
    """The first rank's own traceback; later ones mostly say that a peer is gone."""
    where = (
        f"whole logs: {log_path(Path(spec.output), 0).parent}" if cluster.local
        else "whole logs: the Ray dashboard, or `ray logs`"
    )  # fmt: skip
    if failures:
        return f"{failures[0]}\n{where}"
    dead = getattr(error, "worker_failures", None)
    if dead:
        rank, cause = next(iter(dead.items()))
        return f"rank {rank} ended without a Python error: {_headline(cause)}\n{where}"
    cause = getattr(error, "controller_failure", error)
    return f"{_headline(cause) if cause else 'the workers returned no outcome'}\n{where}"

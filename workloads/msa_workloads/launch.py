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
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msa_kernels.backend import BackendError
from rich.console import Console

from msa_workloads.board import BoardChannel, BoardSink, start_board, take
from msa_workloads.checkpoint import CheckpointError, cut_short, newest_complete
from msa_workloads.cluster import Cluster, ray_cluster, worker_environment
from msa_workloads.cluster import ClusterError as ClusterError
from msa_workloads.control_stacks import Watch
from msa_workloads.control_worker import RankControl
from msa_workloads.display import Display, print_summary
from msa_workloads.failures import headline, lost_a_peer, reason
from msa_workloads.heads import Order
from msa_workloads.logs import log_path, log_to_driver, log_to_file, short_traceback
from msa_workloads.memory import peak_memory_bytes
from msa_workloads.parallel.mesh import UnsupportedError, check_supported
from msa_workloads.progress import MetricsFile, Silent, Sink, Tee
from msa_workloads.report import write_report
from msa_workloads.runspec import RunSpec
from msa_workloads.sources import DataError, open_source
from msa_workloads.space import StorageError
from msa_workloads.storage import open_store
from msa_workloads.train import DivergedError, run

POLL_SECONDS = 0.3
"""How often the driver asks for news: smooth to watch, nothing in cost."""

FINAL = (UnsupportedError, DataError, CheckpointError, StorageError, DivergedError)
"""Errors that another attempt would only repeat; they end the run at once, without retries."""

PEER_SECONDS = 10.0
"""How long a rank that lost a peer waits before it fails too; Ray looks at all of them about
every second."""


class Drained(Exception):
    """The run stopped because it was asked to, with a checkpoint of ``step`` (0: none needed)."""

    def __init__(self, step: int) -> None:
        super().__init__(f"drained at the checkpoint of step {max(0, step)}")
        self.step = max(0, step)


class RunFailed(RuntimeError):
    """The run failed; the message holds the first failing rank's own traceback, shortened."""


def run_on_ray(
    spec: RunSpec, *, resume: bool, console: Console, watch: Watch | None = None
) -> dict[str, Any]:
    """Run ``spec`` on Ray and return its summary, or raise :class:`Drained`.

    Writes ``summary.json``, ``report.html``, ``metrics.jsonl`` and, for a local Ray, one log per
    rank into the spec's output folder. Without ``resume`` a checkpoint folder that already holds a
    whole checkpoint is refused, so that no run ever continues or overwrites another by accident.

    Raises :class:`UnsupportedError`, :class:`DataError` and :class:`CheckpointError` for what
    cannot be run as asked, :class:`ClusterError`, :class:`StorageError`, :class:`DivergedError`,
    and :class:`RunFailed` for all other failures.
    """
    started = time.time()
    spec = _absolute(spec)
    check_supported(spec)
    restored = _check_checkpoints(spec, resume, console)
    if watch:
        watch.state.restored(restored)
    console.print(_starting(spec), highlight=False, markup=False, soft_wrap=True)
    # Once more with Ray, whose own handler prints a stack of its C++ side and aborts.
    with (
        _terminate_as_interrupt(),
        ray_cluster(spec) as cluster,
        _terminate_as_interrupt(),
    ):
        if cluster.local:
            open_source(spec.data.source).entries()
        # The driver has decided whether to resume; from here on, restarts always do.
        worker_spec = dataclasses.replace(
            spec, checkpoint=dataclasses.replace(spec.checkpoint, resume="Latest")
        )
        outcome, restarts = _follow(worker_spec, cluster, console, watch)
    if outcome["drained"]:
        raise Drained(outcome["last_checkpoint_step"])
    summary = write_report(spec, outcome, wall_seconds=time.time() - started, restarts=restarts)
    print_summary(console, summary)
    return summary


def _follow(
    spec: RunSpec, cluster: Cluster, console: Console, watch: Watch | None
) -> tuple[dict[str, Any], int]:
    """Train in a thread and show its events here; returns the outcome and the restarts."""
    board = start_board()
    training = _Training(spec, cluster, board, watched=watch is not None)
    display = Display(console, spec)
    sinks: list[Sink] = [MetricsFile(spec.output), display]
    if watch:
        watch.attach(board)
        sinks.append(watch.state)
    sink = Tee(*sinks)
    attempts, failures = 0, {}
    outcome: dict[str, Any] | None = None
    with display:
        training.start()
        done = False
        while not done:
            # Asked before the events are taken: what was posted until then is seen below.
            done = not training.wait(POLL_SECONDS)
            for kind, value in take(board):
                if kind == "begin":
                    attempts += 1
                    failures.clear()
                    sink.begin(value, spec.plan)
                elif kind == "row":
                    sink.add(value)
                elif kind == "report" and watch:
                    watch.state.heard(value)
                elif kind == "stacks" and watch:
                    watch.state.stacks(*value)
                elif kind == "failed":
                    rank, text = value
                    failures[rank] = text
                    display.say(f"{text.splitlines()[0]}; waiting for what Ray decides")
                elif kind == "final":
                    raise value
                elif kind == "outcome":
                    outcome = value
            if watch and watch.drained_before_it_began():
                raise Drained(watch.state.checkpoint_step)
    if outcome is None:
        raise RunFailed(f"{reason(failures, training.error)}\n{_logs(spec, cluster)}")
    return outcome, max(0, attempts - 1)


class _Training(threading.Thread):
    """``TorchTrainer.fit`` in a thread, so that the main thread is free to show and to stop."""

    def __init__(self, spec: RunSpec, cluster: Cluster, board: Any, *, watched: bool) -> None:
        super().__init__(name="ray-train", daemon=True)
        self._trainer = _trainer(spec, cluster, board, watched)
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


def _trainer(spec: RunSpec, cluster: Cluster, board: Any, watched: bool) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # Imported with Ray, after the cluster has set Ray's environment.
    from msa_workloads.rendezvous import torch_config

    owns = spec.recovery.owner == "ray"
    return TorchTrainer(
        _worker,
        train_loop_config={
            "spec": spec.to_json(),
            "board": board,
            "folder": str(cluster.folder) if cluster.folder else None,
            "watched": watched,
        },
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
        if config["folder"]:
            _redirect_output(log_to_file(Path(spec.output), rank))
        else:
            log_to_driver(rank)
        sink = BoardSink(board) if rank == 0 else Silent()
        if config["watched"]:
            with _control(spec, rank, board, config["folder"]) as control:
                outcome = run(spec, sink, control)
        else:
            outcome = run(spec, sink)
    except BackendError as error:
        ray.get(board.post.remote("final", UnsupportedError(f"attention: {error}")))
    except FINAL as error:
        ray.get(board.post.remote("final", error))
    except Exception as error:
        logging.getLogger(__name__).exception("rank %d failed", rank)
        text = f"rank {rank} failed: {headline(error)}\n{short_traceback(error)}"
        ray.get(board.post.remote("failed", (rank, text)))
        if lost_a_peer(text):
            # Ray is to find the rank that died before those that only noticed.
            threading.Event().wait(PEER_SECONDS)
        raise
    else:
        if rank == 0:
            ray.get(board.post.remote("outcome", outcome))


def _control(spec: RunSpec, rank: int, board: Any, folder: str | None) -> RankControl:
    import ray
    import torch
    from ray.train import get_context

    def memory() -> int:
        if spec.device == "cpu":
            return peak_memory_bytes(torch.device("cpu"))
        local = get_context().get_local_rank() % torch.cuda.device_count()
        return peak_memory_bytes(torch.device("cuda", local))

    return RankControl(
        BoardChannel(board),
        rank=rank,
        ranks=spec.mesh.world_size,
        node=ray.util.get_node_ip_address(),
        node_id=ray.get_runtime_context().get_node_id(),
        folder=folder or tempfile.gettempdir(),
        memory=memory,
    )


def _redirect_output(path: Path) -> None:
    """Send this worker's stdout and stderr, C libraries included, to its rank's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _logs(spec: RunSpec, cluster: Cluster) -> str:
    """Where to read more."""
    if cluster.local:
        return f"whole logs: {log_path(Path(spec.output), 0).parent}"
    return "whole logs: above, or the Ray dashboard"


def _starting(spec: RunSpec) -> str:
    """Said because nothing else is until the first step, which may be a minute."""
    count = spec.mesh.world_size
    workers = f"{count} worker" if count == 1 else f"{count} workers"
    if address := os.environ.get("RAY_ADDRESS"):
        return f"starting {workers} on the Ray cluster at {address}"
    return (
        f"starting a Ray of its own with {workers}; logs: {log_path(Path(spec.output), 0).parent}"
    )


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


def saved_orders(uri: str) -> dict[int, Order] | None:
    """The orders in which the newest whole checkpoint under ``uri`` stores heads, by layer, where
    they are not the model's; None without a checkpoint."""
    marker = newest_complete(open_store(uri))
    return None if marker is None else marker.orders


def _check_checkpoints(spec: RunSpec, resume: bool, console: Console) -> int:
    """The step of the newest whole checkpoint, or 0."""
    store = open_store(spec.checkpoint.uri)
    marker = newest_complete(store)
    if marker is not None and not resume:
        raise CheckpointError(
            f"{spec.checkpoint.uri} already holds a checkpoint of step {marker.step}; continue "
            "that run with --resume, or give this one a folder of its own"
        )
    if marker is None and resume:
        console.print(
            f"no whole checkpoint in {spec.checkpoint.uri}: starting at step 0", highlight=False
        )
    if resume and (left := cut_short(store)):
        console.print(f"not whole, so left out: {', '.join(left)}", highlight=False)
    return marker.step if marker else 0


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

"""The Ray cluster a run uses: the one around it, or a small local one of its own.

A local Ray listens on loopback only, takes no more than the run needs, sends no usage statistics,
starts no dashboard, keeps its files in a temporary folder, and has a fresh access token that never
touches the home folder. It ends with the run, also on Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_workloads.runspec import RunSpec

OBJECT_STORE_BYTES = 128 << 20
"""Shared memory of a local Ray; only metrics pass through it (Ray's least is 75 MiB)."""

LOOPBACK = "127.0.0.1"

START_ATTEMPTS = 4
"""Times a local Ray is started at most: Ray itself waits 30 s, too short on a busy machine."""

WORKER_START_SECONDS = 300
"""How long workers may take to start; importing torch takes a minute on a busy machine."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cluster:
    """``folder`` is the temporary one of a Ray that was started for this run, or None."""

    folder: Path | None

    @property
    def local(self) -> bool:
        """Whether this Ray was started for this run, on this machine."""
        return self.folder is not None


@contextlib.contextmanager
def ray_cluster(spec: RunSpec) -> Iterator[Cluster]:
    """Connect to the Ray of ``RAY_ADDRESS`` (set inside every Ray job), or start a local one."""
    with contextlib.ExitStack() as stack:
        folder: Path | None = None
        if not os.environ.get("RAY_ADDRESS"):
            folder = Path(stack.enter_context(_temporary_folder()))
            stack.enter_context(_environment(_local_environment(spec, folder)))
        # Imported only now: Ray reads its authentication mode from the environment on import.
        import ray

        if folder:
            _start_local(spec, folder)
        else:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        stack.callback(ray.shutdown)
        if folder:
            _check_loopback(ray.nodes())
        yield Cluster(folder)


def _start_local(spec: RunSpec, folder: Path) -> None:
    import ray

    for left in reversed(range(START_ATTEMPTS)):
        try:
            ray.init(
                address="local",
                num_cpus=spec.mesh.world_size,
                num_gpus=None if spec.device == "gpu" else 0,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder),
            )
            return
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
            log.warning("Ray did not start within its 30 s; trying again, %d times left", left)


def _check_loopback(nodes: list[dict[str, Any]]) -> None:
    addresses = {node["NodeManagerAddress"] for node in nodes}
    if addresses != {LOOPBACK}:
        raise RuntimeError(
            f"the local Ray listens on {', '.join(sorted(addresses))} instead of {LOOPBACK} only: "
            "ray was imported before the run; start it with `msa run` in a process of its own"
        )


def worker_environment(spec: RunSpec) -> dict[str, str]:
    """Environment of every worker: threads as planned, nothing that competes with them."""
    threads = {"OMP_NUM_THREADS": str(spec.threads), "MKL_NUM_THREADS": str(spec.threads)}
    return {"TOKENIZERS_PARALLELISM": "false", **(threads if spec.threads else {})}


def _local_environment(spec: RunSpec, folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        **worker_environment(spec),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(WORKER_START_SECONDS),
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        # Named for other systems, but it is what makes every Ray process bind to loopback only;
        # a node address of 127.0.0.1 alone is replaced by the machine's outer one.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the body's duration; a token of the user's own would win, so it goes."""
    names = [*values, "RAY_AUTH_TOKEN"]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(values)
    os.environ.pop("RAY_AUTH_TOKEN", None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    # Directly under the temporary root: Ray's sockets have paths of at most 107 bytes.
    folder = tempfile.mkdtemp(prefix="msa-ray-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

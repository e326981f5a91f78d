"""The Ray cluster a run uses: the one around it, or a small local one of its own.

A local Ray listens on loopback only, takes no more than the run needs, sends no usage statistics,
starts no dashboard, keeps its files in a temporary folder, and has a fresh access token that never
touches the home folder. It ends with the run, also on Ctrl-C.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import socket
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

TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(WORKER_START_SECONDS),
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}
"""Ray Train passes these on to its controller and workers."""

LOG_ENVIRONMENT = {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
"""The driver's output holds every rank's lines, each under its rank's name."""

PREFIX = "msa-ray-"

ROOT_BYTES = 26
"""Longest temporary root: Ray's sockets below it have 77 bytes more, and their paths at most 103
on macOS, 107 on Linux."""

SHORT_ROOT = Path("/tmp")
"""Used where the system's is longer, as those of macOS and of batch systems are."""

OWNER = "owner.lock"
"""Locked by the driver for as long as it lives, in its temporary folder."""

ANSWER_SECONDS = 10.0
"""For a connection to the cluster of ``RAY_ADDRESS``."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cluster:
    """``folder`` is the temporary one of a Ray that was started for this run, or None."""

    folder: Path | None

    @property
    def local(self) -> bool:
        """Whether this Ray was started for this run, on this machine."""
        return self.folder is not None


class ClusterError(RuntimeError):
    """The cluster of ``RAY_ADDRESS`` cannot be used."""


@contextlib.contextmanager
def ray_cluster(spec: RunSpec) -> Iterator[Cluster]:
    """Connect to the Ray of ``RAY_ADDRESS`` (set inside every Ray job), or start a local one.

    Raises :class:`ClusterError`.
    """
    with contextlib.ExitStack() as stack:
        folder: Path | None = None
        if address := os.environ.get("RAY_ADDRESS"):
            check_answers(address)
            stack.enter_context(_environment({**TRAIN_ENVIRONMENT, **LOG_ENVIRONMENT}))
        else:
            folder = Path(stack.enter_context(temporary_folder()))
            # A token of the user's own would win, so it goes.
            stack.enter_context(_environment(_local_environment(spec, folder), "RAY_AUTH_TOKEN"))
        # Imported only now: Ray reads its authentication mode from the environment on import.
        import ray

        if folder:
            _start_local(spec, folder)
        else:
            ray.init(log_to_driver=True, logging_level=logging.ERROR)
        stack.callback(ray.shutdown)
        if folder:
            _check_loopback(ray.nodes())
        yield Cluster(folder)


def check_answers(address: str) -> None:
    """Raise :class:`ClusterError` where nothing listens: Ray itself tries for many minutes."""
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            f"RAY_ADDRESS is {address}, which takes jobs: ray job submit -- msa run job.yaml"
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like are Ray's to read
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address} (RAY_ADDRESS): {error.strerror or error}; start "
            "it, or unset RAY_ADDRESS to train on this machine"
        ) from None


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
        **TRAIN_ENVIRONMENT,
        # Named for other systems, but it is what makes every Ray process bind to loopback only;
        # a node address of 127.0.0.1 alone is replaced by the machine's outer one.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


@contextlib.contextmanager
def _environment(values: dict[str, str], *unset: str) -> Iterator[None]:
    """Set variables, or take them away, for the body's duration."""
    before = {name: os.environ.get(name) for name in (*values, *unset)}
    os.environ.update(values)
    for name in unset:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder that goes with the body; those that killed drivers left behind go first."""
    root = _temporary_root()
    remove_abandoned(root)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=root)
    try:
        with _owned(Path(folder)):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _temporary_root() -> Path:
    root = Path(tempfile.gettempdir())
    if len(os.fsencode(root)) <= ROOT_BYTES:
        return root
    log.warning("%s is too long for Ray's sockets; its files go to %s", root, SHORT_ROOT)
    return SHORT_ROOT


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    with (folder / f"{OWNER}.new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under this name nobody ever sees it unlocked while this process lives.
        (folder / f"{OWNER}.new").rename(folder / OWNER)
        yield


def remove_abandoned(root: Path) -> list[Path]:
    """Remove the folders of local Rays whose drivers were killed; returns them.

    The system drops a process's locks however it ends, so one that can be had has no owner.
    """
    removed = []
    for folder in root.glob(f"{PREFIX}*"):
        try:
            with (folder / OWNER).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
        except OSError:
            # It has an owner, it is somebody else's, or it is being made just now.
            continue
    return removed

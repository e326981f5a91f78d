"""A machine inside this one: namespaces that hold its processes, mounts, network and host name.

The kernel takes all of them away when process 1 of the namespace ends, in one step and whatever
state they are in. So nothing here has to be undone one by one: a mount, a link, a route or a
process that a machine made is gone with it. Control groups are the exception (`remove_groups`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from .paths import Unavailable, locked
from .process import Process, run, spawn, wait_for

GROUPS = Path("/sys/fs/cgroup")
WEIGHT = 8
"""Processes that a cluster counts as: it has that many that are busy while Ray starts."""
INIT = Path(__file__).with_name("init.py")
# A shell without an environment of its own finds its tools here.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Machine:
    """A running machine. `init` is its process 1 as this machine sees it."""

    name: str
    folder: Path
    init: Process

    @classmethod
    def start(cls, name: str, folder: Path, setup: str = "", *, with_parent: bool) -> Machine:
        """Starts it; returns once the shell lines of the setup have run inside.

        with_parent: it ends when the calling thread does, even if that is killed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        ready, log = folder / "ready", folder / "init.log"
        ready.unlink(missing_ok=True)
        script = f'set -eu\nhostname {name}\n{setup}\nexec "$@"'
        argv = [
            _command("unshare"),
            *("--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc"),
            *("--propagation", "private", "--kill-child=KILL"),
            *("sh", "-c", script, "init"),
            *(sys.executable, "-I", "-S", str(INIT), str(ready)),
        ]
        outer = spawn(name, argv, log, {"PATH": PATH}, with_parent=with_parent)
        try:
            wait_for(ready.exists, f"machine {name} was up", 30, needs=[outer], log=log)
            inner = psutil.Process(outer.pid).children()[0]
        except BaseException:
            outer.stop(0)
            raise
        return cls(name, folder, Process(name, inner.pid, inner.create_time()))

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command that runs the given one inside."""
        inside = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        return [_command("nsenter"), "--target", str(self.init.pid), *inside, "--", *argv]

    def run(self, argv: Sequence[str], *, timeout_s: float = 60) -> str:
        """The output of a command inside; RuntimeError with its words when it fails."""
        return run(self.enter(argv), timeout_s=timeout_s, env={"PATH": PATH})

    def shell(self, script: str) -> str:
        """The output of shell lines run inside; the first that fails ends them."""
        return self.run(["sh", "-ec", script])

    def in_network(self, script: str) -> str:
        """Shell lines in its network alone: pids and files are those of outside."""
        inside = [_command("nsenter"), "--target", str(self.init.pid), "--net", "--"]
        return run([*inside, "sh", "-ec", script], env={"PATH": PATH})

    def spawn(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Starts a process inside."""
        return spawn(name, self.enter(argv), log, {"PATH": PATH} | dict(env or {}))

    def stop(self) -> None:
        """Takes the machine away, as a power cut would. Returns when every process is gone."""
        # The kernel reaps the namespace before it lets process 1 go.
        self.init.stop(grace_s=0)


def make_groups(path: str) -> None:
    """Makes a control group in every hierarchy of this machine (v1, v2 or both)."""
    # Locked: the parent that clusters share goes with the last of them.
    with locked("groups"):
        for root in _hierarchies():
            try:
                (root / path).mkdir(parents=True, exist_ok=True)
                for file in ("cpuset.cpus", "cpuset.mems"):
                    # A v1 cpuset admits nobody until it has both.
                    _inherit(root, Path(path), file)
                if (root / "cgroup.subtree_control").exists():
                    _delegate(root, Path(path))
            except OSError as problem:
                raise Unavailable(f"control groups cannot be made here: {problem}") from problem


def limit_groups(path: str, memory_bytes: int) -> None:
    """Bounds the memory of a control group, and gives its parent the weight of a few processes.

    To the scheduler a whole group weighs as much as a single process outside of it, so that on a
    busy machine a cluster would get next to nothing and time out.
    """
    parent = Path(path).parts[0]
    for root in _hierarchies():
        for file, value in (
            (f"{path}/memory.limit_in_bytes", memory_bytes),
            (f"{path}/memory.max", memory_bytes),
            (f"{parent}/cpu.shares", 1024 * WEIGHT),
            (f"{parent}/cpu.weight", 100 * WEIGHT),
        ):
            if (root / file).exists():
                (root / file).write_text(str(value))


def remove_groups(path: str) -> None:
    """Removes a control group with all below it; processes left in it are killed first."""
    with locked("groups"):
        for root in _hierarchies():
            group = root / path
            if not group.exists():
                continue
            below = sorted((found for found in group.rglob("*") if found.is_dir()), reverse=True)
            for folder in [*below, group]:
                _remove_group(folder)
            parent = group.parent
            if parent != root and not any(found.is_dir() for found in parent.iterdir()):
                parent.rmdir()


def require_linux_root() -> None:
    """Unavailable, with the reason, where a machine cannot be made."""
    if sys.platform != "linux":
        raise Unavailable(f"nodes need Linux namespaces; this is {sys.platform}")
    if os.geteuid() != 0:
        raise Unavailable("nodes need root: run as root, for example with sudo -E")
    for name in ("unshare", "nsenter", "ip", "mount"):
        _command(name)
    probe = [_command("unshare"), "--mount", "--net", "--pid", "--fork", "true"]
    done = subprocess.run(probe, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"namespaces cannot be made here: {done.stderr.strip()}")


def _command(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=PATH)
    if found is None:
        raise Unavailable(f"{name} is missing (Debian: util-linux, iproute2)")
    return found


def _hierarchies() -> list[Path]:
    roots: list[Path] = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2") and Path(where).is_relative_to(GROUPS):
            roots.append(Path(where))
    return roots


def _inherit(root: Path, path: Path, file: str) -> None:
    if not (root / file).exists() or (root / "cgroup.controllers").exists():
        return
    at = root
    for part in path.parts:
        value = (at / file).read_text()
        at = at / part
        if not (at / file).read_text().strip():
            (at / file).write_text(value)


def _delegate(root: Path, path: Path) -> None:
    at = root
    for part in path.parts:
        for controller in (at / "cgroup.controllers").read_text().split():
            (at / "cgroup.subtree_control").write_text(f"+{controller}")
        at = at / part


def _remove_group(folder: Path) -> None:
    def empty() -> bool:
        try:
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), 9)
            folder.rmdir()
        except (ProcessLookupError, OSError):
            return not folder.exists()
        return True

    wait_for(empty, f"the control group {folder} was empty", 20)

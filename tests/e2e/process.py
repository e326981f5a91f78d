"""Processes that are started, awaited and ended by identity: a pid and the time it started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_S = 0.05
"""Between two looks at a condition: short beside every start-up time here, cheap beside a core."""


KILL_TIMEOUT_S = 30.0
"""The kernel takes a machine's processes away one by one; a busy disk may hold one up."""


@dataclass(frozen=True)
class Process:
    """A process of ours. A pid alone could be somebody else's by the time it is ended."""

    name: str
    pid: int
    started: float
    log: Path | None = None

    def alive(self) -> bool:
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.started) < 0.5
            return same and found.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def stop(self, grace_s: float = 10.0) -> None:
        """Ends the process: SIGTERM, and SIGKILL after the grace. Returns when it is gone."""
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                self._end(signal.SIGTERM, grace_s)
        self._end(signal.SIGKILL, KILL_TIMEOUT_S)

    def _end(self, how: signal.Signals, timeout_s: float) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, how)
        # Not awaited with wait(): whose child it is, and when that reaps it, is not ours to say.
        wait_for(lambda: not self.alive(), f"{self.name} ended", timeout_s)


def spawn(
    name: str,
    argv: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    *,
    with_parent: bool = False,
) -> Process:
    """Starts a process in a session of its own, its output in the log.

    with_parent: the kernel kills it when the starting thread dies, however that dies (Linux).
    """
    command = list(argv)
    if with_parent and (setpriv := shutil.which("setpriv")):
        command = [setpriv, "--pdeathsig", "KILL", "--", *command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ if env is None else env),
        )
    # Before the first poll, which would reap a child that has ended already.
    started = psutil.Process(child.pid).create_time()
    # It may outlive us, on purpose: without this, Python would warn of that.
    child.returncode = child.poll()
    return Process(name, child.pid, started, log)


PATIENCE = 3
"""Deadlines are those of warm caches; a machine that was slower took 2.5 times as long."""


def wait_for(
    condition: Callable[[], object],
    what: str,
    timeout_s: float,
    *,
    needs: Sequence[Process] = (),
    log: Path | None = None,
) -> None:
    """Returns once the condition holds.

    TimeoutError after the deadline, and RuntimeError as soon as a process it needs has ended;
    both name what was awaited, and end with the last lines of the log, or of that process's own.
    """
    timeout_s *= PATIENCE
    deadline = time.monotonic() + timeout_s
    while not condition():
        gone = next((process for process in needs if not process.alive()), None)
        if gone:
            raise RuntimeError(f"{gone.name} ended before {what}{_tail(gone.log)}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{timeout_s:g} s passed before {what}{_tail(log)}")
        time.sleep(POLL_S)


def run(
    argv: Sequence[str],
    *,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> str:
    """What the command wrote to its standard output; RuntimeError with its words if it failed."""
    done = subprocess.run(
        list(argv),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=None if env is None else dict(env),
        cwd=cwd,
    )
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip())[-4000:]
        raise RuntimeError(f"{' '.join(argv[:6])} ... ended with {done.returncode}: {words}")
    return done.stdout


def free_ports(count: int) -> list[int]:
    """Different loopback ports that were free a moment ago."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _tail(log: Path | None, lines: int = 25) -> str:
    if log is None or not log.exists():
        return ""
    last = log.read_text(errors="replace").splitlines()[-lines:]
    return f"; the end of {log}:\n" + "\n".join(last)

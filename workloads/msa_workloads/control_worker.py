"""The worker's half of the control channel: a thread that reports, listens and dumps stacks.

It works while the training thread hangs in a collective, since that waits without the interpreter
lock. Where a rank holds the lock for good, the dump signal still works: it needs none.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import FileIO
from types import FrameType
from typing import Protocol

from msa_workloads.control import RankReport

DUMP_SIGNAL = signal.SIGUSR2
"""Writes the stacks of all threads to the rank's dump file; Ray and torch leave it alone."""

REPORT_SECONDS = 1.0
"""How often a rank reports, and so how late it hears of a drain request at most."""

REPORTS_PER_SECOND = 200
"""Of all ranks together: the board is one process."""

COLLECTIVE_PARTS = (
    f"torch{os.sep}distributed{os.sep}",
    f"msa_workloads{os.sep}parallel{os.sep}collective.py",
)
"""A thread whose innermost frames are of such a file waits for other ranks."""

PROC = "/proc/"

INNERMOST = 3
"""Frames looked at: wrappers and operators lie between a collective and its caller."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Orders:
    """What the driver wants of every rank. ``dump`` is the number of the newest request."""

    stop: bool = False
    dump: int = 0


class Channel(Protocol):
    """How a rank speaks with the driver; any error ends the rank's reports."""

    def report(self, report: RankReport) -> Orders: ...

    def stacks(self, rank: int, number: int, text: str) -> None: ...


class RankControl:
    """The control of one watched rank; use it as a context manager around the training."""

    def __init__(
        self, channel: Channel, *, rank: int, ranks: int, node: str, node_id: str, folder: str,
        memory: Callable[[], int],
    ) -> None:  # fmt: skip
        self._channel, self._memory = channel, memory
        self._seconds = max(REPORT_SECONDS, ranks / REPORTS_PER_SECOND)
        self._orders = Orders()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._speak, name="msa-control", daemon=True)
        self._dump, path = _dump_file(rank, folder)
        self._report = RankReport(
            rank=rank, pid=os.getpid(), node=node, node_id=node_id, dump=path
        )

    def __enter__(self) -> RankControl:
        faulthandler.register(DUMP_SIGNAL, file=self._dump, all_threads=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # The signal's handler stays: without it the signal would end the process.
        self._over.set()
        self._thread.join(self._seconds * 2)
        if os.path.isfile(self._report.dump) and not self._report.dump.startswith(PROC):
            os.unlink(self._report.dump)

    def enters(self, step: int, doing: str) -> None:
        self._report = replace(self._report, step=step, doing=doing)

    def saved(self, step: int) -> None:
        self._report = replace(self._report, checkpoint_step=step)

    def stop_requested(self) -> bool:
        return self._orders.stop

    def _speak(self) -> None:
        dumped = 0
        try:
            while True:
                last = self._over.wait(self._seconds if dumped == self._orders.dump else 0)
                report = replace(self._report, waits=waits(), memory_bytes=self._memory())
                self._orders = self._channel.report(report)
                if dumped < self._orders.dump:
                    dumped = self._orders.dump
                    self._channel.stacks(report.rank, dumped, self._stacks(report))
                if last:
                    return
        except Exception:
            # The driver is gone, and with it this process soon.
            log.exception("rank %d reports no more", self._report.rank)

    def _stacks(self, report: RankReport) -> str:
        """The stacks of all threads, written the way that the dump signal does."""
        names = [f"  {thread.ident:#018x} {thread.name}" for thread in threading.enumerate()]
        start = os.lseek(self._dump.fileno(), 0, os.SEEK_END)
        faulthandler.dump_traceback(self._dump, all_threads=True)
        size = os.fstat(self._dump.fileno()).st_size - start
        dump = os.pread(self._dump.fileno(), size, start).decode(errors="replace")
        return "\n".join([headline(report), "threads:", *names, "", dump])


def _dump_file(rank: int, folder: str) -> tuple[FileIO, str]:
    """A file for the dump signal, and the path by which others on this machine read it.

    Where the system lets one reach open files, it has no name: nothing is left of a killed rank.
    """
    handle, path = tempfile.mkstemp(prefix=f"msa-stacks-{rank}-", dir=folder)
    file = FileIO(handle, "r+")
    open_file = f"{PROC}{os.getpid()}/fd/{handle}"
    if not os.path.exists(open_file):
        return file, path
    os.unlink(path)
    return file, open_file


def headline(report: RankReport) -> str:
    """First line of a rank's dump: who it is and what it did."""
    doing = report.doing + (", waiting for other ranks" if report.waits else "")
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return (
        f"rank {report.rank}, pid {report.pid} on {report.node}, step {report.step}, {doing}; "
        f"at {when}"
    )


def waits(frames: dict[int, FrameType] | None = None) -> bool:
    """Whether any thread of this process is in a collective right now."""
    frames = sys._current_frames() if frames is None else frames
    return any(
        _in_collective(frame) for ident, frame in frames.items() if ident != threading.get_ident()
    )


def _in_collective(frame: FrameType | None) -> bool:
    for _ in range(INNERMOST):
        if frame is None:
            return False
        if any(part in frame.f_code.co_filename for part in COLLECTIVE_PARTS):
            return True
        frame = frame.f_back
    return False


def dump_by_signal(pid: int, path: str, seconds: float) -> str:
    """Stacks of a process on this machine that registered :data:`DUMP_SIGNAL` for ``path``.

    Works while the process holds its interpreter lock. Where nothing comes within ``seconds``,
    says in which state the kernel has it: a stopped process, or one that waits for a disk, cannot
    answer anything.
    """
    try:
        before = os.stat(path).st_size
        os.kill(pid, DUMP_SIGNAL)
    except OSError as error:
        return f"pid {pid} is gone: {error}"
    end, pause, size = time.monotonic() + seconds, threading.Event(), before
    while time.monotonic() < end:
        pause.wait(0.2)
        now = os.stat(path).st_size
        if now > before and now == size:
            with open(path, "rb") as file:
                file.seek(before)
                return file.read().decode(errors="replace")
        size = now
    return f"pid {pid} answers no signal; its state is {_kernel_state(pid)}"


def _kernel_state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/status") as file:
            return next(line.split(None, 1)[1].strip() for line in file if line[:6] == "State:")
    except (OSError, StopIteration):
        return "unknown"

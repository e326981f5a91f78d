"""The operator's wall clock: it never jumps, whatever is done to the machine's."""

from __future__ import annotations

import threading
import time

SLEW = 0.01
"""How much faster or slower it goes, at most, to come to the machine's time: it follows what
keeps a clock right, and a clock that is set by a day moves no deadline of a job."""


class SteadyClock:
    """Seconds since 1970, as the machine had it at the start, going on by the monotonic clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = time.time()
        self._read = time.monotonic()

    def __call__(self) -> float:
        """Now; never less than it was before."""
        with self._lock:
            read = time.monotonic()
            passed, self._read = read - self._read, read
            self._now += passed
            most = passed * SLEW
            self._now += max(-most, min(most, time.time() - self._now))
            return self._now

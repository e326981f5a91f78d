"""At most a few rounds compute at a time, however many wait for answers.

Python runs one thread at a time. With many that want to, the watches' thread would get a small
share, and what they bring would be old before it is known.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

AT_ONCE = 2
"""One computes while the next one gets ready."""


class Gate:
    """Held around what computes; opened around what waits."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._slots = threading.Semaphore(at_once)
        self._mine = threading.local()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Nothing to do with a thread that does not compute within the gate."""
        if not getattr(self._mine, "inside", False):
            yield
            return
        self._leave()
        try:
            yield
        finally:
            self._enter()

    def _enter(self) -> None:
        self._slots.acquire()
        self._mine.inside = True

    def _leave(self) -> None:
        self._mine.inside = False
        self._slots.release()

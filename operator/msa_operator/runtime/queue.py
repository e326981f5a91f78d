"""A queue of keys: each at most once in it, and never by two workers at a time.

Adding a key that is being worked on makes it come again afterwards, so no news is lost; adding it
for later keeps the earlier of two times. A key that failed comes again after a wait that doubles.
When more is due than can be done, what a person asks for goes first, then news, then looks that
are merely due.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from msa_operator.runtime.kube import jitter

K = TypeVar("K")
BACKOFF_S = 0.5
BACKOFF_MAX_S = 60.0
"""Long enough not to hurt a server in trouble, short enough that mending it is noticed."""
TURNS = 3
"""Keys that go before one that is merely due, when there are more than workers."""
GAP_S = 0.1
"""Between two rounds of one key: a cluster that starts tells of each pod many times."""


@dataclass(slots=True)
class _Entry:
    due: float | None = None
    """When it should be worked on; None when it waits for nothing."""
    news: float | None = None
    """When the first event came that no round has seen."""
    asked: bool = False
    """A person waits for it."""
    began: float | None = None
    not_before: float = float("-inf")
    failures: int = 0


@dataclass(frozen=True)
class Load:
    """How the queue does, at one moment. Times in seconds."""

    waiting: int
    busy: int
    overdue: float
    """How long the longest waiting key has been due."""
    longest: float
    """How long the longest round has been going on."""


@dataclass
class WorkQueue(Generic[K]):
    clock: Callable[[], float] = time.monotonic
    _entries: dict[K, _Entry] = field(default_factory=dict)
    _heap: list[tuple[float, int, K]] = field(default_factory=list)
    _asked: deque[K] = field(default_factory=deque)
    """Due, because a person asked for something."""
    _told: deque[K] = field(default_factory=deque)
    """Due, because of an event."""
    _usual: deque[K] = field(default_factory=deque)
    """Due, because it was time."""
    _turns: int = 0
    _serial: int = 0
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, key: K, after: float = 0.0, *, news: bool = False, asked: bool = False) -> None:
        """Have the key worked on in ``after`` seconds, or earlier if that is planned already.

        ``news``: because of an event, whose time :meth:`get` then tells; ``asked``: because of
        one that came of what a person did.
        """
        with self._changed:
            entry, now = self._entries.setdefault(key, _Entry()), self.clock()
            sooner = (asked and not entry.asked) or (news and entry.news is None)
            entry.asked = entry.asked or asked
            if news and entry.news is None:
                entry.news = now
            if sooner and entry.began is None and entry.due is not None and entry.due <= now:
                self._line(entry).append(key)  # where it is already, it is passed over later
                self._changed.notify()
            self._schedule(key, entry, now + after)

    def get(self) -> tuple[K, float | None] | None:
        """The next key that is due, and since when it has news; waits; None once closed."""
        with self._changed:
            while not self._closed:
                now = self.clock()
                key = self._next(now)
                if key is not None:
                    entry = self._entries[key]
                    news, entry.due, entry.news, entry.began = entry.news, None, None, now
                    entry.asked = False
                    return key, news
                wait = self._heap[0][0] - now if self._heap else None
                self._changed.wait(wait)
            return None

    def done(self, key: K, after: float | None, *, failed: bool = False) -> None:
        """A round is over; the key comes again in ``after`` seconds, or when it has news.

        ``failed``: it comes again after its backoff, or after ``after`` where that is longer.
        """
        with self._changed:
            entry = self._entries[key]
            now = self.clock()
            entry.began, entry.not_before = None, now + GAP_S
            entry.failures = entry.failures + 1 if failed else 0
            if failed:
                wait = min(BACKOFF_MAX_S, BACKOFF_S * 2 ** min(entry.failures - 1, 16))
                after = max(jitter(wait), after or 0.0)
                # News does not cut a backoff short: it is what protects a server in trouble.
                entry.not_before = now + after
            due, entry.due = entry.due, None
            if due is not None:
                self._schedule(key, entry, due)
            if after is not None:
                self._schedule(key, entry, now + after)
            elif entry.due is None:
                del self._entries[key]

    def forget(self, key: K) -> None:
        """No longer planned; a round that is going on ends as usual."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is not None and entry.began is None:
                del self._entries[key]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def load(self) -> Load:
        with self._changed:
            now = self.clock()
            due = [e.due for e in self._entries.values() if e.due is not None and e.began is None]
            began = [e.began for e in self._entries.values() if e.began is not None]
            return Load(
                sum(d <= now for d in due), len(began),
                max((now - d for d in due), default=0.0),
                max((now - b for b in began), default=0.0),
            )  # fmt: skip

    def _next(self, now: float) -> K | None:
        """A key that is due, by what it is due for; every fourth time one that is merely due."""
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is not None and entry.due == due and entry.began is None:
                self._line(entry).append(key)
        lines = (self._asked, self._told, self._usual)
        for line in (lines[2], *lines[:2]) if self._turns >= TURNS else lines:
            while line:
                key = line.popleft()
                entry = self._entries.get(key)
                # It may have been taken from another line, or been planned for later since.
                if entry is not None and entry.began is None and (entry.due or now + 1) <= now:
                    self._turns = 0 if line is self._usual else self._turns + 1
                    return key
        return None

    def _line(self, entry: _Entry) -> deque[K]:
        if entry.asked:
            return self._asked
        return self._usual if entry.news is None else self._told

    def _schedule(self, key: K, entry: _Entry, due: float) -> None:
        due = max(due, entry.not_before)
        if entry.due is not None and entry.due <= due:
            return
        entry.due = due
        if entry.began is None:
            self._serial += 1
            heapq.heappush(self._heap, (due, self._serial, key))
            self._changed.notify()

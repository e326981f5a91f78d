"""Exchange: rows of tensors between the ranks of a group, asynchronously, every byte counted.

Three ways to move the same rows: one ``all_to_all_single`` with split sizes, one batch of sends
and receives, or a ring of such batches in which step ``s`` receives from the rank ``s`` places
before. Buffers travel as bytes, so that every dtype works on gloo and NCCL alike. All ranks of a
group must start the same exchanges in the same order; whether one happens follows from the plan
that all of them share.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

Method = Literal["all_to_all", "p2p", "ring"]
METHODS: tuple[Method, ...] = ("all_to_all", "p2p", "ring")


@dataclass(frozen=True)
class Moved:
    """Bytes that this process has sent to and received from other ranks, by purpose."""

    purpose: str
    """keys (with values), gradients (of keys and values), heads (Ulysses), or needed: what the
    queries of a layer see and their rank does not own, once for each forward pass: calls that
    backward repeats need nothing new, whether or not it travels again."""
    sent: int
    received: int
    calls: int


class Pending:
    """Rows on their way. The buffers live as long as this object."""

    def __init__(
        self, rows: torch.Tensor, sending: torch.Tensor, works: Sequence[dist.Work],
        timed: _Timed | None,
    ) -> None:  # fmt: skip
        self._rows, self._sending, self._works = rows, sending, list(works)
        self._timed = timed

    def wait(self) -> torch.Tensor:
        """The received rows. On a GPU the current stream waits, not the host."""
        works, self._works = self._works, []
        if self._timed is not None and works:
            self._timed.waits()
        for work in works:
            work.wait()
        if self._timed is not None and works:
            self._timed.goes_on()
        return self._rows


def exchange(
    rows: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: dist.ProcessGroup,
    *,
    method: Method,
    purpose: str,
    tag: int = 0,
    kind: Hashable = None,
) -> Pending:
    """Send ``send[r]`` consecutive rows of ``rows`` to every rank ``r`` of the group.

    ``rows`` (sum of send, ...) is contiguous and ordered by receiver; ``receive[r]`` rows come
    from rank ``r``. Starts at once and returns what will hold (sum of receive, ...). With "p2p"
    and "ring" ranks that move nothing between them do not meet; ``tag`` tells apart exchanges of
    one pair that may overlap. Bytes are counted by ``kind`` and ``purpose``.
    """
    width = math.prod(rows.shape[1:]) * rows.element_size()
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    count(purpose, sum(send) * width, sum(receive) * width, kind)
    started = _Timed.begin(rows)
    if method == "all_to_all":
        work = dist.all_to_all_single(
            _bytes(received), _bytes(rows), [n * width for n in receive],
            [n * width for n in send], group=group, async_op=True,
        )  # fmt: skip
        works = [work] if work is not None else []
        return Pending(received, rows, works, _Timed.of(started, works))
    operations, at = [], 0
    for peer, piece in enumerate(_bytes(rows).split([n * width for n in send])):
        if len(piece):
            to = dist.get_global_rank(group, peer)
            operations.append(dist.P2POp(dist.isend, piece, to, group, tag))
    for peer, n in enumerate(receive):
        piece = _bytes(received)[at * width : (at + n) * width]
        at += n
        if n:
            sender = dist.get_global_rank(group, peer)
            operations.append(dist.P2POp(dist.irecv, piece, sender, group, tag))
    works = dist.batch_isend_irecv(operations) if operations else []
    return Pending(received, rows, works, _Timed.of(started, works))


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1).view(torch.uint8)


def words(rows: torch.Tensor) -> torch.Tensor:
    """The same memory in units of eight bytes, or ``rows`` where those do not fit: on a GPU a copy
    between different strides moves an element a thread, and is as slow as elements are narrow."""
    size = rows.element_size()
    steps = (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])
    if rows.stride(-1) != 1 or size >= 8 or any(step * size % 8 for step in steps):
        return rows
    return rows.view(torch.int64)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` in :func:`words`, where both have them."""
    to, of = words(target), words(source)
    if target.dtype != source.dtype or to is target or of is source:
        to, of = target, source
    to.copy_(of)


def count(purpose: str, sent: int, received: int, kind: Hashable = None) -> None:
    """Add to what has moved, unless counting is paused."""
    with _lock:
        if _state.paused:
            return
        before = _moved.get((kind, purpose), Moved(purpose, 0, 0, 0))
        _moved[kind, purpose] = Moved(
            purpose, before.sent + sent, before.received + received, before.calls + 1
        )


def moved() -> dict[str, Moved]:
    """What this process has moved since :func:`reset`, by purpose."""
    total: dict[str, Moved] = {}
    for kinds in moved_by_kind().values():
        for purpose, some in kinds.items():
            one = total.get(purpose, Moved(purpose, 0, 0, 0))
            total[purpose] = Moved(
                purpose, one.sent + some.sent, one.received + some.received,
                one.calls + some.calls,
            )  # fmt: skip
    return total


def moved_by_kind() -> dict[Any, dict[str, Moved]]:
    """The same for each kind of call (the pattern of a layer), for a run's report."""
    found: dict[Any, dict[str, Moved]] = {}
    with _lock:
        for (kind, purpose), some in _moved.items():
            found.setdefault(kind, {})[purpose] = some
    return found


def reset() -> None:
    """Forget what has moved and what was timed."""
    with _lock:
        _moved.clear()
        _timed.clear()


@contextmanager
def paused() -> Iterator[None]:
    """Do not count what moves meanwhile: evaluation is no part of a step."""
    before, _state.paused = _state.paused, True
    try:
        yield
    finally:
        _state.paused = before


def time_exchanges(on: bool) -> None:
    """From now on measure how long exchanges take and are waited for, or stop; GPUs only."""
    _state.timing = on


@dataclass(frozen=True)
class Hidden:
    """Seconds that exchanges took from start to arrival, and that a stream waited for them."""

    seconds: float
    waited: float
    exchanges: int

    @property
    def share(self) -> float:
        """Part of the exchanges behind which something was computed."""
        return max(0.0, 1.0 - self.waited / self.seconds) if self.seconds else 1.0


def hidden() -> Hidden | None:
    """What :func:`time_exchanges` measured, or None; waits for the device."""
    with _lock:
        some = [t for t in _timed if t.complete]
    if not some:
        return None
    torch.cuda.synchronize()
    return Hidden(sum(t.seconds for t in some), sum(t.waited for t in some), len(some))


class _Timed:
    """Events around one exchange. Its end is seen by a stream of its own, which waits for it, so
    that the stream that computes is not disturbed."""

    def __init__(self, started: torch.cuda.Event, done: torch.cuda.Event) -> None:
        self._started, self._done = started, done
        self._waits, self._goes_on = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.complete = False

    @staticmethod
    def begin(rows: torch.Tensor) -> torch.cuda.Event | None:
        """Before the exchange starts: where the stream that computes is now."""
        if not (_state.timing and rows.is_cuda):
            return None
        started = torch.cuda.Event(enable_timing=True)
        started.record()
        return started

    @classmethod
    def of(
        cls, started: torch.cuda.Event | None, works: Sequence[dist.Work]
    ) -> _Timed | None:  # fmt: skip
        """After it has started."""
        if started is None or not works:
            return None
        done = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            for work in works:
                work.wait()
            done.record()
        timed = cls(started, done)
        with _lock:
            _timed.append(timed)
        return timed

    def waits(self) -> None:
        self._waits.record()

    def goes_on(self) -> None:
        self._goes_on.record()
        self.complete = True

    @property
    def seconds(self) -> float:
        return self._started.elapsed_time(self._done) / 1000

    @property
    def waited(self) -> float:
        return self._waits.elapsed_time(self._goes_on) / 1000


@dataclass
class _State:
    paused: bool = False
    timing: bool = False


_state = _State()
_moved: dict[tuple[Hashable, str], Moved] = {}
_timed: list[_Timed] = []
_lock = threading.Lock()

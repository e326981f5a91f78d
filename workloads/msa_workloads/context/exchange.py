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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

Method = Literal["all_to_all", "p2p", "ring"]
METHODS: tuple[Method, ...] = ("all_to_all", "p2p", "ring")


@dataclass(frozen=True)
class Moved:
    """Bytes that this process has sent to and received from other ranks, by purpose."""

    purpose: str
    """keys (with values), gradients (of keys and values) or heads (Ulysses)."""
    sent: int
    received: int
    calls: int


class Pending:
    """Rows on their way. The buffers live as long as this object."""

    def __init__(self, rows: torch.Tensor, sending: torch.Tensor, works: Sequence[dist.Work]):
        self._rows, self._sending, self._works = rows, sending, list(works)

    def wait(self) -> torch.Tensor:
        """The received rows. On a GPU the current stream waits, not the host."""
        while self._works:
            self._works.pop(0).wait()
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
) -> Pending:
    """Send ``send[r]`` consecutive rows of ``rows`` to every rank ``r`` of the group.

    ``rows`` (sum of send, ...) is contiguous and ordered by receiver; ``receive[r]`` rows come
    from rank ``r``. Starts at once and returns what will hold (sum of receive, ...). With "p2p"
    and "ring" ranks that move nothing between them do not meet; ``tag`` tells apart exchanges of
    one pair that may overlap.
    """
    width = math.prod(rows.shape[1:]) * rows.element_size()
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    count(purpose, sum(send) * width, sum(receive) * width)
    if method == "all_to_all":
        work = dist.all_to_all_single(
            _bytes(received), _bytes(rows), [n * width for n in receive],
            [n * width for n in send], group=group, async_op=True,
        )  # fmt: skip
        return Pending(received, rows, [work] if work is not None else [])
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
    return Pending(received, rows, works)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1).view(torch.uint8)


def count(purpose: str, sent: int, received: int) -> None:
    with _lock:
        before = _moved.get(purpose, Moved(purpose, 0, 0, 0))
        _moved[purpose] = Moved(
            purpose, before.sent + sent, before.received + received, before.calls + 1
        )


def moved() -> dict[str, Moved]:
    """What this process has moved since :func:`reset`, by purpose: for a run's report."""
    with _lock:
        return dict(_moved)


def reset() -> None:
    """Forget what has moved."""
    with _lock:
        _moved.clear()


_moved: dict[str, Moved] = {}
_lock = threading.Lock()

"""Ulysses: an all-to-all that trades a share of the sequence for a share of the heads.

Between :func:`sequence_to_heads` and :func:`heads_to_sequence` a rank holds the rows of all ranks
of its group for some of the heads. Exact for every pattern; the bytes depend on the heads and not
on the pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from msa_kernels.pattern import Pattern, PerHead
from torch import Tensor

from msa_workloads.context.exchange import count


class HeadsError(ValueError):
    """Heads that cannot be split so; the message lists the valid degrees."""


def valid_degrees(q_heads: int, kv_heads: int) -> list[int]:
    """Numbers of ranks over which the heads split: each divides the query heads, and divides the
    key/value heads or is a multiple of them."""
    return [
        n
        for n in range(1, q_heads + 1)
        if q_heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]


@dataclass(frozen=True)
class HeadSplit:
    """Heads over ``degree`` ranks; rank ``r`` has the ``r``-th equal share of the query heads.

    Raises :class:`HeadsError` for degrees that do not split them.
    """

    q_heads: int
    kv_heads: int
    degree: int

    def __post_init__(self) -> None:
        valid = valid_degrees(self.q_heads, self.kv_heads)
        if self.degree not in valid:
            near = min(valid, key=lambda n: (abs(n - self.degree), n))
            raise HeadsError(
                f"{self.q_heads} query heads and {self.kv_heads} key/value heads do not split "
                f"over {self.degree} ranks; valid: {', '.join(map(str, valid))}; nearest: {near}"
            )

    @property
    def copies(self) -> int:
        """Ranks that hold a copy of one key/value head: 1 while there are heads enough."""
        return max(1, self.degree // self.kv_heads)

    def groups(self, rank: int) -> range:
        """The key/value heads that ``rank`` holds."""
        if self.copies > 1:
            head = rank // self.copies
            return range(head, head + 1)
        share = self.kv_heads // self.degree
        return range(rank * share, (rank + 1) * share)

    def pattern(self, pattern: Pattern, rank: int) -> Pattern:
        """The pattern that the heads of ``rank`` have, counted from its own first head."""
        mine = tuple(pattern.for_group(group) for group in self.groups(rank))
        return mine[0] if len(set(mine)) == 1 else PerHead(mine)


def sequence_to_heads(rows: Tensor, group: dist.ProcessGroup, copies: int = 1) -> Tensor:
    """(B, n, H, D) of every rank -> (B, ranks * n, H * copies / ranks, D), differentiable.

    Rows of the ranks follow each other. With ``copies`` every head goes to that many ranks, and
    their gradients are summed in fp32.
    """
    if copies == 1:
        return _ToHeads.apply(rows, group)
    return _ToHeads.apply(_Copies.apply(rows, copies), group)


def heads_to_sequence(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of :func:`sequence_to_heads` without copies."""
    return _ToSequence.apply(rows, group)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return rows.repeat_interleave(copies, 2)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        split = grad.unflatten(2, (-1, ctx.copies))
        wide = split.float() if grad.dtype.itemsize < 4 else split
        return wide.sum(3).to(grad.dtype), None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_heads(rows, group)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _gather_heads(grad, ctx.group), None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_heads(rows, group)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _scatter_heads(grad, ctx.group), None


def _scatter_heads(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    pieces = rows.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return _all_to_all(pieces, group).transpose(0, 1).flatten(1, 2)


def _gather_heads(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    pieces = rows.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    return _all_to_all(pieces, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _all_to_all(pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Piece ``r`` of (ranks, ...) goes to rank ``r``."""
    received = torch.empty_like(pieces)
    away = pieces.numel() * pieces.element_size() // len(pieces) * (len(pieces) - 1)
    count("heads", away, away)
    flat = [t.view(-1).view(torch.uint8) for t in (received, pieces)]
    dist.all_to_all_single(flat[0], flat[1], group=group)
    return received

"""Ulysses: an all-to-all that trades a share of the sequence for a share of the heads.

Between :func:`sequence_to_heads` and :func:`heads_to_sequence` a rank holds the rows of all ranks
of its group for some of the heads. Exact for every pattern; the bytes depend on the heads and not
on the pattern.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from msa_workloads.context.exchange import count, words
from msa_workloads.heads import HeadsError, HeadSplit, valid_degrees
from msa_workloads.parallel.adjoint import linear

__all__ = ["HeadSplit", "HeadsError", "heads_to_sequence", "sequence_to_heads", "valid_degrees"]


def sequence_to_heads(rows: Tensor, group: dist.ProcessGroup, copies: int = 1) -> Tensor:
    """(B, n, H, D) of every rank -> (B, ranks * n, H * copies / ranks, D), differentiable.

    Rows of the ranks follow each other. With ``copies`` every head goes to that many ranks, and
    their gradients are summed in fp32.
    """
    if copies > 1:
        rows = linear(
            rows, lambda some: some.repeat_interleave(copies, 2), partial(_summed, copies=copies)
        )
    return linear(rows, partial(_scatter_heads, group=group), partial(_gather_heads, group=group))


def heads_to_sequence(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of :func:`sequence_to_heads` without copies."""
    return linear(rows, partial(_gather_heads, group=group), partial(_scatter_heads, group=group))


def _summed(grad: Tensor, copies: int) -> Tensor:
    split = grad.unflatten(2, (-1, copies))
    wide = split.float() if grad.dtype.itemsize < 4 else split
    return wide.sum(3).to(grad.dtype)


def _scatter_heads(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    pieces = words(rows).unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return _all_to_all(pieces, group).transpose(0, 1).flatten(1, 2).view(rows.dtype)


def _gather_heads(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    pieces = words(rows).unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    return _all_to_all(pieces, group).permute(1, 2, 0, 3, 4).flatten(2, 3).view(rows.dtype)


def _all_to_all(pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Piece ``r`` of (ranks, ...) goes to rank ``r``."""
    received = torch.empty_like(pieces)
    away = pieces.numel() * pieces.element_size() // len(pieces) * (len(pieces) - 1)
    count("heads", away, away)
    flat = [t.view(-1).view(torch.uint8) for t in (received, pieces)]
    dist.all_to_all_single(flat[0], flat[1], group=group)
    return received

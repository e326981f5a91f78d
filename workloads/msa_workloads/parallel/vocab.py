"""Cross-entropy over a vocabulary that is split over tensor ranks; no rank ever holds all logits.

Equal to :mod:`msa_workloads.loss` on one process. Ranks enter with their slices of the rows
(:mod:`msa_workloads.parallel.rows`) and leave with the same loss; a chunk's hidden states are
gathered, each rank computes the logits of its part of the vocabulary, and one exchange of two
numbers per token and rank (log-sum-exp and the label's logit) gives the loss.

Gradients are computed in the same pass, while a chunk's logits exist: they are scaled in backward,
and logits are neither kept nor computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from msa_workloads.data import IGNORE
from msa_workloads.parallel.matmul import Sum, scaled_
from msa_workloads.parallel.rows import (
    all_gather,
    check_ids,
    own_part,
    pad_rows,
    part_bounds,
    reduce_scatter,
)


def summed_loss(hidden: Tensor, weight: DTensor, labels: Tensor, chunk: int = 0) -> Tensor:
    """Cross-entropy summed over all labels, an fp32 scalar, the same on every tensor rank.

    ``hidden`` is this rank's slice (B, n, H) of the rows, ``weight`` the output head (V, H)
    sharded by vocabulary, ``labels`` (B, S) those of all rows, with n = ceil(S / ranks). At most
    ``chunk`` tokens' logits exist at a time (0: all at once, and always one token a rank).
    Gradients are those of this one loss, whatever the number of ranks.
    """
    if not torch.is_grad_enabled():
        return token_losses(hidden, weight, labels, chunk).sum()
    return _Loss.apply(hidden, own_part(weight), labels, _part(weight), chunk)


@torch.no_grad()
def token_losses(hidden: Tensor, weight: DTensor, labels: Tensor, chunk: int = 0) -> Tensor:
    """Cross-entropy in nats per token, fp32 (B, S), 0 where ignored; without gradients."""
    part = _part(weight)
    chunks = _Chunks.of(hidden, labels, part, chunk)
    matrix = own_part(weight).detach()
    found = [_chunk_loss(rows, matrix, goals, part)[0] for rows, goals, _ in chunks]
    by_rank = torch.cat([losses.view(part.ranks, -1) for losses in found], 1)
    batch, length = labels.shape
    return by_rank.view(part.ranks, batch, -1).transpose(0, 1).reshape(batch, -1)[:, :length]


@dataclass(frozen=True)
class _Part:
    """Which entries of a vocabulary of ``size`` this rank has."""

    group: dist.ProcessGroup
    ranks: int
    size: int
    begin: int
    end: int


def _part(weight: DTensor) -> _Part:
    group = weight.device_mesh.get_group()
    ranks = dist.get_world_size(group)
    size = weight.shape[0]
    return _Part(group, ranks, size, *part_bounds(size, ranks, dist.get_rank(group)))


class _Chunks:
    """Pieces of equal rows of every rank: gathered hidden states (ranks * m, H) and labels."""

    def __init__(self, flat: Tensor, labels: Tensor, part: _Part, rows: int) -> None:
        self._flat, self._labels, self._part, self._rows = flat, labels, part, rows
        self._begins = range(0, len(flat), max(1, rows))

    @classmethod
    def of(cls, hidden: Tensor, labels: Tensor, part: _Part, chunk: int) -> _Chunks:
        check_ids("labels", labels, part.size, labels == IGNORE)
        padded = pad_rows(labels, part.ranks, IGNORE)
        by_rank = padded.unflatten(1, (part.ranks, -1)).transpose(0, 1).flatten(1)
        flat = hidden.flatten(0, -2)
        return cls(flat, by_rank, part, max(1, chunk // part.ranks) if chunk else len(flat))

    def __len__(self) -> int:
        return len(self._begins)

    def __iter__(self):
        for begin in self._begins:
            own = slice(begin, min(begin + self._rows, len(self._flat)))
            rows = all_gather(self._flat[own], self._part.group)
            yield rows, self._labels[:, own].flatten(), own


def _chunk_loss(
    rows: Tensor, matrix: Tensor, labels: Tensor, part: _Part
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (tokens,), logits (tokens, part of V) and log-sum-exp (tokens, 1), all fp32."""
    logits = (rows @ matrix.T).float()
    mine = (labels >= part.begin) & (labels < part.end)
    at = (labels - part.begin).where(mine, 0).unsqueeze(1)
    wanted = logits.gather(1, at).squeeze(1).where(mine, 0.0)
    told = torch.stack([torch.logsumexp(logits, 1), wanted])
    sums, goals = all_gather(told, part.group).view(part.ranks, 2, -1).unbind(1)
    total = torch.logsumexp(sums, 0)
    losses = (total - goals.sum(0)).where(labels != IGNORE, 0.0)
    return losses, logits, total.unsqueeze(1)


def _chunk_gradient(logits: Tensor, total: Tensor, labels: Tensor, part: _Part) -> Tensor:
    """Gradient of the chunk's summed loss for its logits, in place."""
    gradient = logits.sub_(total).exp_()
    mine = (labels >= part.begin) & (labels < part.end)
    at = (labels - part.begin).where(mine, 0).unsqueeze(1)
    gradient.scatter_add_(1, at, -mine.to(gradient.dtype).unsqueeze(1))
    return gradient.mul_((labels != IGNORE).unsqueeze(1))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, matrix: Tensor, labels: Tensor, part: _Part, chunk: int):
        wants_hidden, wants_matrix = ctx.needs_input_grad[:2]
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden).flatten(0, -2) if wants_hidden else None
        chunks = _Chunks.of(hidden, labels, part, chunk)
        d_matrix = Sum(matrix, len(chunks)) if wants_matrix else None
        for rows, goals, own in chunks:
            losses, logits, sums = _chunk_loss(rows, matrix, goals, part)
            total += losses.sum()
            if not (wants_hidden or wants_matrix):
                continue
            gradient = _chunk_gradient(logits, sums, goals, part).to(rows.dtype)
            if d_hidden is not None:
                d_hidden[own] = reduce_scatter(gradient @ matrix, part.group)
            if d_matrix is not None:
                d_matrix.add_product(gradient, rows)
        ctx.grads = (None if d_hidden is None else d_hidden.view_as(hidden)), d_matrix
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (d_hidden, d_matrix), ctx.grads = ctx.grads, None
        return (
            None if d_hidden is None else scaled_(d_hidden, grad),
            None if d_matrix is None else d_matrix.scaled(grad),
            *(None,) * 3,
        )

"""Oracle: attention evaluated pair by pair in fp64, with gradients, for tests and for ``check``.

Nothing here shares code with the implementations it judges except the pattern's own predicate:
no tiles, no parts, no folds, no online softmax. Memory is O(B * H * Sq * Sk).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from msa_kernels.pattern import Pattern
from msa_kernels.plan import Align


@dataclass(frozen=True)
class Result:
    """Outputs (B, Sq, Hq, D), LSE (B, Hq, Sq) and, when cotangents were given, gradients."""

    out: torch.Tensor
    lse: torch.Tensor
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    documents: torch.Tensor | None = None,
    bounds: tuple[Sequence[int], Sequence[int]] | None = None,
    align: Align = "bottom-right",
    dout: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Result:
    """Attention in fp64 on ``device``, whatever the inputs' dtype and device.

    Arguments as in :func:`msa_kernels.attention.msa_attention`; ``documents`` are ids (B, S) and
    ``bounds`` the cumulative query and key bounds of a packed batch of one row. A row that sees
    no key gives 0 and -inf, and gradients 0.
    """
    leaves = [t.detach().to(device, torch.float64).requires_grad_() for t in (q, k, v)]
    q64, k64, v64 = leaves
    dim, group = q.shape[3], q.shape[2] // k.shape[2]
    seen = visible(q, k, pattern, documents=documents, bounds=bounds, align=align).to(device)
    scores = torch.einsum("bqhd,bkhd->bhqk", q64, k64.repeat_interleave(group, 2))
    scores = scores * (dim**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -math.inf)
    some = seen.any(-1)
    lse = torch.logsumexp(torch.where(some[..., None], scores, 0.0), -1)
    weights = torch.where(seen, torch.exp(scores - lse[..., None]), 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v64.repeat_interleave(group, 2))
    grads = None
    if dout is not None or dlse is not None:
        loss = out.new_zeros(())
        if dout is not None:
            loss = loss + (out * dout.to(device, torch.float64)).sum()
        if dlse is not None:
            loss = loss + torch.where(some, lse * dlse.to(device, torch.float64), 0.0).sum()
        # The LSE alone says nothing of v.
        dq, dk, dv = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        grads = dq, dk, dv
    lse = torch.where(some, lse, -math.inf)
    return Result(out.detach(), lse.detach(), grads)


def visible(
    q: torch.Tensor,
    k: torch.Tensor,
    pattern: Pattern,
    *,
    documents: torch.Tensor | None = None,
    bounds: tuple[Sequence[int], Sequence[int]] | None = None,
    align: Align = "bottom-right",
) -> torch.Tensor:
    """Which keys each query of each head sees, bool (B, Hq, Sq, Sk), by the predicate alone."""
    group = q.shape[2] // k.shape[2]
    rows = []
    for b in range(q.shape[0]):
        at = _positions(b, q.shape[1], k.shape[1], documents, bounds, align)
        each = [pattern.for_group(h // group) for h in range(q.shape[2])]
        seen = {some: _visible(some, *at) for some in dict.fromkeys(each)}
        rows.append(torch.stack([seen[some] for some in each]))
    return torch.stack(rows)


def _positions(
    row: int,
    q_rows: int,
    k_rows: int,
    documents: torch.Tensor | None,
    bounds: tuple[Sequence[int], Sequence[int]] | None,
    align: Align,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Query positions, query documents, key positions, key documents: token by token."""
    shift = k_rows - q_rows if align == "bottom-right" else 0
    if documents is not None:
        position, document = _restarting(documents[row].tolist())
        return position, document, position, document
    if bounds is not None:
        q_bounds, k_bounds = ([int(b) for b in side] for side in bounds)
        sides = []
        for edges, other in ((q_bounds, k_bounds), (k_bounds, None)):
            position, document = [], []
            for d in range(len(edges) - 1):
                length = edges[d + 1] - edges[d]
                start = 0
                if other is not None and align == "bottom-right":
                    start = other[d + 1] - other[d] - length
                position += range(start, start + length)
                document += [d] * length
            sides += [np.array(position, np.int64), np.array(document, np.int64)]
        return sides[0], sides[1], sides[2], sides[3]
    return (
        np.arange(q_rows) + shift, np.zeros(q_rows, np.int64),
        np.arange(k_rows), np.zeros(k_rows, np.int64),
    )  # fmt: skip


def _restarting(ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    position, document = [0], [0]
    for before, now in itertools.pairwise(ids):
        position.append(position[-1] + 1 if now == before else 0)
        document.append(document[-1] + (now != before))
    return np.array(position), np.array(document)


def _visible(
    pattern: Pattern, q_at: np.ndarray, q_doc: np.ndarray, k_at: np.ndarray, k_doc: np.ndarray
) -> torch.Tensor:
    same = q_doc[:, None] == k_doc[None, :]
    seen = pattern.allows(q_at[:, None], k_at[None, :])
    return torch.from_numpy(np.logical_and(np.broadcast_to(seen, same.shape), same))

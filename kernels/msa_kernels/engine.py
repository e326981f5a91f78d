"""Engine: runs a pattern's parts through a tile kernel and puts the results together exactly.

Heads of equal pattern form a group; each part of a group's pattern is one kernel call on folded
views of the tensors; partial outputs are merged in fp32 (:mod:`msa_kernels.merge`) and partial
gradients added in fp32. A pattern of one part writes the final dtype directly.

Context parallelism calls these functions too, with the runs that a rank holds and, in backward,
with the LSE and delta of the whole sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from msa_kernels import fused
from msa_kernels.blocks import Runs
from msa_kernels.pattern import Pattern
from msa_kernels.plan import GradDtypes, PartPlan, TileKernel, plan, stack

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results and of the LSE: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    kernel: TileKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern,
    queries: Runs,
    keys: Runs,
    scale: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Sq, Hq, Dv) in ``out_dtype`` (that of q when None) and LSE (B, Hq, Sq).

    ``queries.rows`` is Sq and ``keys.rows`` is Sk.
    """
    dtype = out_dtype or q.dtype
    groups = head_groups(pattern, q.shape[2], k.shape[2])
    if len(groups) == 1:
        return _forward_group(
            kernel, q, k, v, plan(groups[0].pattern, queries, keys), scale, dtype
        )
    stacked = _stack(kernel, pattern, k, queries, keys)
    if stacked is not None:
        return kernel.forward(q, k, v, stacked, scale, dtype)
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulator(q.dtype))
    for group in groups:
        parts = plan(group.pattern, queries, keys)
        some, log = _forward_group(
            kernel, group.queries(q), group.keys(k), group.keys(v), parts, scale, dtype
        )
        group.put_queries(out, some)
        lse[:, group.query_heads(lse.device)] = log
    return out, lse


def backward(
    kernel: TileKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor | None,
    pattern: Pattern,
    queries: Runs,
    keys: Runs,
    scale: float,
    grad_dtype: torch.dtype | None = None,
    dq_dtype: torch.dtype | None = None,
) -> Gradients:
    """dQ, dK, dV in ``grad_dtype`` (that of q when None), dQ in ``dq_dtype`` where that is given.

    ``out``, ``lse`` and ``delta`` are those of the whole softmax, over every part and rank;
    delta = rowsum(dout * out) - dlse, (B, Hq, Sq) like ``lse``; None leaves rowsum(dout * out) to
    a kernel that forms it.
    """
    dtype = grad_dtype or q.dtype
    dtypes = (dq_dtype or dtype, dtype)
    groups = head_groups(pattern, q.shape[2], k.shape[2])
    if len(groups) == 1:
        parts = plan(groups[0].pattern, queries, keys)
        return _backward_group(kernel, q, k, v, out, dout, lse, delta, parts, scale, dtypes)
    stacked = _stack(kernel, pattern, k, queries, keys)
    if stacked is not None:
        return kernel.backward(q, k, v, out, dout, lse, delta, stacked, scale, dtypes)
    dq, dk, dv = _empty_like((q, k, v), dtypes)
    for group in groups:
        parts = plan(group.pattern, queries, keys)
        heads = group.query_heads(lse.device)
        some = _backward_group(
            kernel, group.queries(q), group.keys(k), group.keys(v), group.queries(out),
            group.queries(dout),
            lse[:, heads], None if delta is None else delta[:, heads], parts, scale, dtypes,
        )  # fmt: skip
        group.put_queries(dq, some[0])
        group.put_keys(dk, some[1])
        group.put_keys(dv, some[2])
    return dq, dk, dv


def _stack(
    kernel: TileKernel, pattern: Pattern, k: torch.Tensor, queries: Runs, keys: Runs
) -> PartPlan | None:
    """Heads of different patterns in one launch, where the kernel can."""
    stacks = getattr(kernel, "stacks", None)
    made = stack(pattern, k.shape[2], queries, keys) if stacks else None
    return made if made is not None and stacks is not None and stacks(made) else None


@dataclass(frozen=True)
class HeadGroup:
    """Key/value heads that share a pattern, with the query heads that read them."""

    pattern: Pattern
    members: tuple[int, ...]
    q_heads: int
    kv_heads: int

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        """The group's heads of (B, S, Hkv, D): a view where they are evenly spaced."""
        return k[:, :, self._index(k.device)]

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """The group's heads of (B, S, Hq, D)."""
        return self._grouped(q)[:, :, self._index(q.device)].flatten(2, 3)

    def put_keys(self, k: torch.Tensor, some: torch.Tensor) -> None:
        k[:, :, self._index(k.device)] = some

    def put_queries(self, q: torch.Tensor, some: torch.Tensor) -> None:
        ratio = self.q_heads // self.kv_heads
        self._grouped(q)[:, :, self._index(q.device)] = some.unflatten(2, (-1, ratio))

    def query_heads(self, device: torch.device) -> torch.Tensor:
        ratio = self.q_heads // self.kv_heads
        heads = [h * ratio + g for h in self.members for g in range(ratio)]
        return torch.tensor(heads, device=device)

    def _grouped(self, q: torch.Tensor) -> torch.Tensor:
        return q.unflatten(2, (self.kv_heads, self.q_heads // self.kv_heads))

    def _index(self, device: torch.device) -> slice | torch.Tensor:
        first, step = self.members[0], 1
        if len(self.members) > 1:
            step = self.members[1] - first
        end = max(self.members) + 1
        if self.members == tuple(range(first, end, step)):
            return slice(first, end, step)
        return torch.tensor(self.members, device=device)


@lru_cache(maxsize=256)
def head_groups(pattern: Pattern, q_heads: int, kv_heads: int) -> tuple[HeadGroup, ...]:
    """Key/value heads by equal pattern, each in one group."""
    members: dict[Pattern, list[int]] = {}
    for head in range(kv_heads):
        members.setdefault(pattern.for_group(head), []).append(head)
    return tuple(
        HeadGroup(shared, tuple(heads), q_heads, kv_heads) for shared, heads in members.items()
    )


def _forward_group(
    kernel: TileKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    parts: tuple[PartPlan, ...], scale: float, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if not parts:
        lse = q.new_full(
            (q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=accumulator(q.dtype)
        )
        return q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype), lse
    partial_dtype = dtype if len(parts) == 1 else accumulator(q.dtype)
    partials = []
    for part in parts:
        out, lse = kernel.forward(
            fold(q, part, part.q_order), fold(k, part, part.k_order), fold(v, part, part.k_order),
            part, scale, partial_dtype,
        )  # fmt: skip
        partials.append((unfold(out, part), unfold_rows(lse, part)))
    return fused.merge(partials, dtype)


def _backward_group(
    kernel: TileKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor | None,
    parts: tuple[PartPlan, ...], scale: float, dtypes: GradDtypes,
) -> Gradients:  # fmt: skip
    if not parts:
        dq, dk, dv = (grad.zero_() for grad in _empty_like((q, k, v), dtypes))
        return dq, dk, dv
    wide = accumulator(q.dtype)
    partial_dtypes = dtypes if len(parts) == 1 else (wide, wide)
    found: list[Gradients] = []
    for part in parts:
        dq, dk, dv = kernel.backward(
            fold(q, part, part.q_order), fold(k, part, part.k_order), fold(v, part, part.k_order),
            fold(out, part, part.q_order), fold(dout, part, part.q_order), fold_rows(lse, part),
            None if delta is None else fold_rows(delta, part), part, scale, partial_dtypes,
        )  # fmt: skip
        found.append(
            (unfold(dq, part), unfold(dk, part, keys=True), unfold(dv, part, keys=True))
        )  # fmt: skip
    each = (dtypes[0], dtypes[1], dtypes[1])
    dq, dk, dv = (
        fused.add(grads, dtype)
        for grads, dtype in zip(zip(*found, strict=True), each, strict=True)
    )
    return dq, dk, dv


def _empty_like(tensors: Gradients, dtypes: GradDtypes) -> Gradients:
    """Contiguous, of the shapes of q, k and v."""
    q, k, v = tensors
    dq = torch.empty(q.shape, dtype=dtypes[0], device=q.device)
    dk, dv = (torch.empty(t.shape, dtype=dtypes[1], device=t.device) for t in (k, v))
    return dq, dk, dv


def fold(rows: torch.Tensor, part: PartPlan, order: object) -> torch.Tensor:
    """(B, S, H, D) as the part's kernel sees it: a view wherever the strides allow."""
    if part.part.fold == 1:
        return rows
    if part.folds_as_view:
        batch, length, heads, dim = rows.shape
        return rows.reshape(batch, length // part.part.fold, part.part.fold * heads, dim)
    q_order, k_order = _orders(part, rows.device)
    return rows.index_select(1, q_order if order is part.q_order else k_order)


def unfold(rows: torch.Tensor, part: PartPlan, keys: bool = False) -> torch.Tensor:
    """The inverse of :func:`fold`."""
    if part.part.fold == 1:
        return rows
    if part.folds_as_view:
        batch, length, heads, dim = rows.shape
        return rows.reshape(batch, length * part.part.fold, heads // part.part.fold, dim)
    order = _orders(part, rows.device)[keys]
    return torch.empty_like(rows).index_copy_(1, order, rows)


def fold_rows(log: torch.Tensor, part: PartPlan) -> torch.Tensor:
    """(B, H, S), one number per query, as the part's kernel sees it."""
    if part.part.fold == 1:
        return log
    if part.folds_as_view:
        split = log.unflatten(2, (-1, part.part.fold))
        return split.permute(0, 3, 1, 2).flatten(1, 2)
    return log.index_select(2, _orders(part, log.device)[0])


def unfold_rows(log: torch.Tensor, part: PartPlan) -> torch.Tensor:
    """The inverse of :func:`fold_rows`."""
    if part.part.fold == 1:
        return log
    if part.folds_as_view:
        split = log.unflatten(1, (part.part.fold, -1))
        return split.permute(0, 2, 3, 1).flatten(2, 3)
    return torch.empty_like(log).index_copy_(2, _orders(part, log.device)[0], log)


def _orders(part: PartPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    orders = part.order(device)
    assert orders is not None
    return orders

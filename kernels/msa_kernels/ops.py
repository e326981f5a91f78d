"""Attention as PyTorch operators, one for each direction, with gradients, shapes and FLOPs.

The pattern travels as text (:mod:`msa_kernels.encoding`), documents and bounds as tensors: lists
are made and backends chosen inside the operator, so that a compiled graph holds neither lists nor
lengths. Both operators have fake kernels and FLOP formulas that count the pairs a pattern attends.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from msa_kernels import backend as backends
from msa_kernels import engine, fused
from msa_kernels.blocks import Runs
from msa_kernels.encoding import decode, pin
from msa_kernels.pattern import Pattern
from msa_kernels.placement import Placement
from msa_kernels.plan import Align, Request, TileKernel

# A compiled graph holds the text: which pattern a layer has is decided as it is traced.
torch.compiler.assume_constant_result(Pattern.encoded)


UNSAFE = (torch.Tag.cudagraph_unsafe,)
"""A recorded graph would hold on to lists that are remembered, and forgotten, outside of it."""


@torch.library.custom_op("msa::attention", mutates_args=(), tags=UNSAFE)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: str,
    scale: float,
    documents: Tensor | None,
    q_bounds: Tensor | None,
    k_bounds: Tensor | None,
    align: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Output (B, Sq, Hq, Dv) in q's dtype and LSE (B, Hq, Sq); ``backend`` is that of a tile
    kernel, or "auto" for the fastest of them."""
    view = _View(q, k, documents, q_bounds, k_bounds, align)
    what = decode(pattern)
    with launching_on(q.device):
        kernel = _kernel(backend, q, k, what, view.plain, False)
        backends.record(kernel.name, q, k, what, not view.plain)
        out, lse = engine.forward(
            kernel, view.enter(q), view.enter(k), view.enter(v), what, *view.runs, scale
        )  # fmt: skip
    return view.leave(out).contiguous(), view.leave_log(lse).contiguous()


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: str,
    scale: float,
    documents: Tensor | None,
    q_bounds: Tensor | None,
    k_bounds: Tensor | None,
    align: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    pin(pattern)  # A graph that is traced holds its text alone.
    batch, rows, heads, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[3]))
    return out, q.new_empty((batch, heads, rows), dtype=engine.accumulator(q.dtype))


@torch.library.custom_op("msa::attention_backward", mutates_args=(), tags=UNSAFE)
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    pattern: str,
    scale: float,
    documents: Tensor | None,
    q_bounds: Tensor | None,
    k_bounds: Tensor | None,
    align: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the inputs' dtype, from the cotangents of the output and of the LSE."""
    view = _View(q, k, documents, q_bounds, k_bounds, align)
    what = decode(pattern)
    with launching_on(q.device):
        kernel = _kernel(backend, q, k, what, view.plain, dlse is not None)
        if dout is None:
            dout = torch.zeros_like(out)
        delta = None
        if dlse is not None or not kernel.forms_delta:
            delta = view.enter_log(fused.row_delta(dout, out, dlse))
        dq, dk, dv = engine.backward(
            kernel, view.enter(q), view.enter(k), view.enter(v), view.enter(out),
            view.enter(dout), view.enter_log(lse), delta, what, *view.runs, scale,
        )  # fmt: skip
    return (
        view.leave(dq).contiguous(), view.leave(dk).contiguous(), view.leave(dv).contiguous()
    )  # fmt: skip


@attention_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    pattern: str,
    scale: float,
    documents: Tensor | None,
    q_bounds: Tensor | None,
    k_bounds: Tensor | None,
    align: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output) -> None:
    q, k, v, pattern, scale, documents, q_bounds, k_bounds, align, backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, documents, q_bounds, k_bounds)
    ctx.pattern, ctx.scale, ctx.align, ctx.backend = pattern, scale, align, backend
    ctx.held = decode(pattern)  # which backward finds by its text


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None):
    q, k, v, out, lse, documents, q_bounds, k_bounds = ctx.saved_tensors
    grads = (None, None, None)
    if dout is not None or dlse is not None:
        grads = attention_backward(
            q, k, v, out, lse, dout, dlse, ctx.pattern, ctx.scale, documents, q_bounds, k_bounds,
            ctx.align, ctx.backend,
        )  # fmt: skip
    return (*grads, *(None,) * 7)


attention.register_autograd(_backward, setup_context=_setup)


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one: kernels that are not PyTorch's own launch there, wherever
    their tensors are. Nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


_NOTHING = nullcontext()


class _View:
    """The call's tensors as the engine sees them: packed batches as one long sequence."""

    def __init__(
        self, q: Tensor, k: Tensor, documents: Tensor | None, q_bounds: Tensor | None,
        k_bounds: Tensor | None, align: str,
    ) -> None:  # fmt: skip
        placement = Placement(documents, q_bounds, k_bounds, _align(align))
        self.batch = q.shape[0]
        self.flat = placement.flattens and self.batch > 1
        self.plain = placement.plain(q.shape[1], k.shape[1])
        self.runs: tuple[Runs, Runs] = placement.runs(q.shape[1], k.shape[1])

    def enter(self, rows: Tensor) -> Tensor:
        return rows.reshape(1, -1, *rows.shape[2:]) if self.flat else rows

    def leave(self, rows: Tensor) -> Tensor:
        return rows.reshape(self.batch, -1, *rows.shape[2:]) if self.flat else rows

    def enter_log(self, log: Tensor) -> Tensor:
        return log.transpose(0, 1).flatten(1).unsqueeze(0) if self.flat else log

    def leave_log(self, log: Tensor) -> Tensor:
        return log[0].unflatten(1, (self.batch, -1)).transpose(0, 1) if self.flat else log


def _kernel(
    backend: str, q: Tensor, k: Tensor, pattern: Pattern, plain: bool, lse_gradient: bool
) -> TileKernel:
    """The tile kernel of that name, or the fastest that has the gradients asked for.

    Kernels understand each other's LSE: forward and backward need not be the same one.
    """
    request = Request(
        device=q.device, dtype=q.dtype, batch=q.shape[0], q_rows=q.shape[1], k_rows=k.shape[1],
        q_heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3], pattern=pattern,
        plain=plain, needs_grad=True, return_lse=lse_gradient,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return backends.tile_kernel(request, backend)


def _align(name: str) -> Align:
    return "top-left" if name == "top-left" else "bottom-right"


def attended_pairs(
    pattern: Pattern, placement: Placement, batch: int, q_rows: int, k_rows: int, kv_heads: int
) -> int:
    """Exact (query, key) pairs over the batch and the key/value heads, each counted once."""
    queries, keys = placement.runs(q_rows, k_rows)
    rows = 1 if placement.flattens else batch
    return rows * sum(_pairs(pattern.for_group(g), queries, keys) for g in range(kv_heads))


def _pairs(pattern: Pattern, queries: Runs, keys: Runs) -> int:
    """Documents that start at 0 on both sides count in closed form, others row by row."""
    length = dict(zip(keys.document.tolist(), keys.length.tolist(), strict=True))
    total = 0
    for document, rows, first in zip(
        queries.document.tolist(), queries.length.tolist(), queries.position.tolist(), strict=True
    ):
        n = length.get(document, 0)
        if first + rows == n and first >= 0 and pattern.causal:
            total += pattern.pairs(n) - pattern.pairs(first)
        elif first == 0 and rows == n:
            total += pattern.pairs(n)
        else:
            total += sum(pattern.row(i, n).bit_count() for i in range(max(0, first), first + rows))
    return total


def _flops(q, k, v, pattern, documents, q_bounds, k_bounds, align, products: int) -> int:
    placement = Placement(documents, q_bounds, k_bounds, _align(align))
    pairs = attended_pairs(
        decode(pattern), placement, q.shape[0], q.shape[1], k.shape[1], k.shape[2]
    )
    group = q.shape[2] // k.shape[2]
    return products * pairs * group * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.msa.attention, get_raw=True)
def _forward_flops(
    q, k, v, pattern, scale, documents, q_bounds, k_bounds, align, backend, *, out_val=None
) -> int:
    """2 D per pair for the scores and 2 Dv for the output."""
    return _flops(q, k, v, pattern, documents, q_bounds, k_bounds, align, 2)


@register_flop_formula(torch.ops.msa.attention_backward, get_raw=True)
def _backward_flops(
    q, k, v, out, lse, dout, dlse, pattern, scale, documents, q_bounds, k_bounds, align, backend,
    *, out_val=None,
) -> int:  # fmt: skip
    """Five products: scores, dP and dV, dQ, dK; 2.5 times the forward where Dv equals D."""
    return _flops(q, k, v, pattern, documents, q_bounds, k_bounds, align, 5)

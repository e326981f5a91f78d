"""The operators of context-parallel attention: what autograd, checkpointing and tracing see.

Tensors alone pass through them; all else that a call needs is found by its handle. Traced without
data they give the shapes of their results, and FLOP counters the pairs that a rank attends.
"""

from __future__ import annotations

import weakref

import torch
from msa_kernels.engine import accumulator
from msa_kernels.fused import row_delta
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from msa_workloads.context.passes import Call, backward, forward

calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
"""Calls that are alive, by handle."""


@torch.library.custom_op("msa::context_attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, call: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and the received keys and values that are kept for backward (bytes may be 0).

    An operator of its own, so that checkpointing policies can keep its results: computing them
    again would exchange the keys again. ``call`` is the handle of a :class:`Call` that is alive.
    """
    return forward(calls[call], q, k, v, scale)


@torch.library.custom_op("msa::context_attention_backward", mutates_args=())
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
    delta: Tensor | None, kept: Tensor, call: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV of this rank's rows, contributions of all ranks included."""
    return backward(calls[call], q, k, v, out, dout, lse, delta, kept, scale)


def _setup(ctx, inputs, output) -> None:
    q, k, v, call, scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[2])
    ctx.call, ctx.scale = calls[call], scale


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None, _dkept: Tensor | None):
    q, k, v, out, lse, kept = ctx.saved_tensors
    # Every rank takes part in the exchange, whether or not anything depends on its own rows.
    dout = torch.zeros_like(out) if dout is None else dout
    forms = dlse is None and getattr(ctx.call.kernel, "forms_delta", False)
    delta = None if forms else row_delta(dout, out, dlse)
    grads = attention_backward(q, k, v, out, dout, lse, delta, kept, ctx.call.handle, ctx.scale)
    return (*grads, None, None)


attention.register_autograd(_backward, setup_context=_setup)


@attention.register_fake
def _attention_shapes(
    q: Tensor, k: Tensor, v: Tensor, call: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulator(q.dtype))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, lse, k.new_empty(calls[call].kept_size(k))


@attention_backward.register_fake
def _backward_shapes(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
    kept: Tensor, call: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    return dq, dk, dv


@register_flop_formula(torch.ops.msa.context_attention, get_raw=True)
def _forward_flops(q, k, v, call, scale, *, out_val=None) -> int:
    """Two products for every pair that the rank's queries attend: scores and output."""
    return 2 * 2 * q.shape[0] * q.shape[3] * calls[call].area()


@register_flop_formula(torch.ops.msa.context_attention_backward, get_raw=True)
def _backward_flops(q, k, v, out, dout, lse, delta, kept, call, scale, *, out_val=None) -> int:
    """Five products: scores, dP and dV, dQ, dK."""
    return 5 * 2 * q.shape[0] * q.shape[3] * calls[call].area()

"""Row statistics of the backward pass: delta, and the LSE as the kernels read it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PAD = 128
"""Rows of statistics are padded to a multiple of this: the largest query tile."""


@triton.jit(do_not_specialize=["rows", "padded"])
def _pad_kernel(lse, delta, lse_out, delta_out, rows, padded, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    value = tl.load(lse + line * rows + at, mask=inside, other=float("-inf"))
    # exp2(x - inf) is 0: rows without keys, and rows that do not exist, weigh nothing.
    value = tl.where(value == float("-inf"), float("inf"), value * 1.4426950408889634)
    tl.store(lse_out + line * padded + at, value, mask=at < padded)
    value = tl.load(delta + line * rows + at, mask=inside, other=0.0)
    tl.store(delta_out + line * padded + at, value, mask=at < padded)


def padded_stats(lse: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``lse`` in base 2 with +inf for empty rows, and ``delta``; (B, H, S) -> (B, H, padded S)."""
    batch, heads, rows = lse.shape
    padded = -(-rows // PAD) * PAD
    lse_out = lse.new_empty((batch, heads, padded))
    delta_out = torch.empty_like(lse_out)
    grid = (batch * heads, triton.cdiv(padded, 1024))
    _pad_kernel[grid](
        lse.contiguous(), delta.contiguous(), lse_out, delta_out, rows, padded, BLOCK=1024
    )
    return lse_out, delta_out


@triton.jit(do_not_specialize=["rows"])
def _delta_kernel(
    out, dout, dlse, delta, rows, heads, stride_ob, stride_os, stride_oh, stride_db, stride_ds,
    stride_dh, head_dim, HAS_DLSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(rows, BLOCK)
    line = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = line // heads, line % heads
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, HEAD_DIM)
    inside = (at < rows)[:, None] & (d < head_dim)[None, :]
    far = at.to(tl.int64)[:, None]
    o = tl.load(
        out + batch * stride_ob + head * stride_oh + far * stride_os + d[None, :], mask=inside,
        other=0.0,
    )  # fmt: skip
    do = tl.load(
        dout + batch * stride_db + head * stride_dh + far * stride_ds + d[None, :], mask=inside,
        other=0.0,
    )  # fmt: skip
    value = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        value -= tl.load(dlse + line * rows + at, mask=at < rows, other=0.0)
    tl.store(delta + line * rows + at, value, mask=at < rows)


def delta(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """``rowsum(dout * out) - dlse`` (maths of the softmax backward), fp32 (B, H, S).

    out and dout (B, S, H, D) with a contiguous last dimension; dlse (B, H, S) or None.
    """
    batch, rows, heads, head_dim = out.shape
    result = torch.empty((batch, heads, rows), dtype=torch.float32, device=out.device)
    grid = (triton.cdiv(rows, 64) * batch * heads,)  # other axes end at 65,535
    _delta_kernel[grid](
        out, dout, result if dlse is None else dlse.contiguous(), result, rows, heads,
        *out.stride()[:3], *dout.stride()[:3], head_dim, HAS_DLSE=dlse is not None,
        HEAD_DIM=triton.next_power_of_2(head_dim), BLOCK=64,
    )  # fmt: skip
    return result


@triton.jit
def _scale_kernel(total, out, count, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(total + at, mask=at < count) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)


def scaled(total: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """``total * scale`` in ``dtype`` in one pass; total is fp32, contiguous, and used up."""
    out = total if dtype == total.dtype else torch.empty_like(total, dtype=dtype)
    _scale_kernel[(triton.cdiv(total.numel(), 4096),)](
        total, out, total.numel(), scale, BLOCK=4096
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    a, a_lse, b, b_lse, out, lse, rows, heads, stride_ab, stride_as, stride_ah, stride_bb,
    stride_bs, stride_bh, stride_ob, stride_os, stride_oh, head_dim, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(rows, BLOCK)
    line = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = line // heads, line % heads
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, HEAD_DIM)
    inside = (at < rows)[:, None] & (d < head_dim)[None, :]
    far = at.to(tl.int64)[:, None]
    a_log = tl.load(a_lse + line * rows + at, mask=at < rows, other=float("-inf"))
    b_log = tl.load(b_lse + line * rows + at, mask=at < rows, other=float("-inf"))
    largest = tl.maximum(a_log, b_log)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    a_weight, b_weight = tl.exp(a_log - largest), tl.exp(b_log - largest)
    total = a_weight + b_weight
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    a_tile = tl.load(
        a + batch * stride_ab + head * stride_ah + far * stride_as + d[None, :], mask=inside,
        other=0.0,
    )  # fmt: skip
    b_tile = tl.load(
        b + batch * stride_bb + head * stride_bh + far * stride_bs + d[None, :], mask=inside,
        other=0.0,
    )  # fmt: skip
    merged = a_tile.to(tl.float32) * (a_weight / total)[:, None]
    merged += b_tile.to(tl.float32) * (b_weight / total)[:, None]
    tl.store(
        out + batch * stride_ob + head * stride_oh + far * stride_os + d[None, :],
        merged.to(out.dtype.element_ty), mask=inside,
    )  # fmt: skip
    merged_log = tl.where(empty, float("-inf"), largest + tl.log(total))
    tl.store(lse + line * rows + at, merged_log, mask=at < rows)


Partial = tuple[torch.Tensor, torch.Tensor]


def merge(a: Partial, b: Partial, dtype: torch.dtype) -> Partial:
    """:func:`msa_kernels.merge.merge` of two partials in one pass, the output in ``dtype``."""
    batch, rows, heads, head_dim = a[0].shape
    out = torch.empty((batch, rows, heads, head_dim), dtype=dtype, device=a[0].device)
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=out.device)
    grid = (triton.cdiv(rows, 64) * batch * heads,)  # other axes end at 65,535
    _merge_kernel[grid](
        a[0], a[1].contiguous(), b[0], b[1].contiguous(), out, lse, rows, heads,
        *a[0].stride()[:3], *b[0].stride()[:3], *out.stride()[:3], head_dim,
        HEAD_DIM=triton.next_power_of_2(head_dim), BLOCK=64,
    )  # fmt: skip
    return out, lse

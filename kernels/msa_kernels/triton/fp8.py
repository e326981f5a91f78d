"""Queries, keys and values in e4m3: the copies that the 8-bit forward kernels read.

A tile of 128 queries or keys of a head has one scale, a channel of a head's values another: their
largest absolute value becomes 448, the largest that e4m3 holds. Values are stored transposed, a
channel's keys side by side, since 8-bit tensor cores read both operands along the dimension that
is summed over.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

TILE = 128
"""Rows that share a scale."""
LARGEST = 448.0
SMALLEST_PEAK = 1e-12
"""Peaks below are taken for this: scales stay so large that products of two are no subnormals."""

EMULATED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter rounds wrongly where a mantissa overflows: round before it."""


class Quantised(NamedTuple):
    """Value times scale is what was quantised; heads are padded with zeros to a width W."""

    q: torch.Tensor
    """e4m3 (B, Hq, Sq, W)."""
    k: torch.Tensor
    """e4m3 (B, Hkv, Sk, W)."""
    v: torch.Tensor
    """e4m3 (B, Hkv, W, padded Sk), zero beyond Sk."""
    q_scale: torch.Tensor
    """fp32 (B, Hq, tiles)."""
    k_scale: torch.Tensor
    """fp32 (B, Hkv, tiles)."""
    v_scale: torch.Tensor
    """fp32 (B, Hkv, W)."""


@triton.jit
def to_e4m3(x):
    """fp32 values of at most 448 to the nearest e4m3, ties to even."""
    if EMULATED:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        # Below 2^-6 numbers are 2^-9 apart, as those of fp32 are from 2^14 on.
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
    return x.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    x, out, scale, rows, heads, stride_b, stride_s, stride_h, head_dim, peak_floor,
    LARGEST: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, TILE)
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tl.program_id(0) // heads % tiles
    batch = (tl.program_id(0) // heads // tiles).to(tl.int64)
    at = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    value = tl.load(
        x + batch * stride_b + head * stride_h + at * stride_s + d,
        mask=(at < rows) & (d < head_dim), other=0.0,
    ).to(tl.float32)  # fmt: skip
    peak = tl.maximum(tl.max(tl.max(tl.abs(value), 1), 0), peak_floor)
    line = batch * heads + head
    tl.store(scale + line * tiles + tile, peak / LARGEST)
    value = tl.clamp(value * (LARGEST / peak), -LARGEST, LARGEST)
    tl.store(out + (line * rows + at) * WIDTH + d, to_e4m3(value), mask=at < rows)


@triton.jit(do_not_specialize=["rows", "padded"])
def _columns_kernel(
    x, out, scale, rows, padded, heads, stride_b, stride_s, stride_h, head_dim,
    LARGEST: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, IN_FRAGMENTS: tl.constexpr,
):  # fmt: skip
    tiles = padded // TILE
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tl.program_id(0) // heads % tiles
    line = (tl.program_id(0) // heads // tiles).to(tl.int64) * heads + head
    slot = tl.arange(0, TILE)
    key = slot
    if IN_FRAGMENTS:
        # Of every 16 keys: 8 b + 2 c + e is stored as 4 c + 2 b + e.
        key = slot // 16 * 16 + slot // 2 % 2 * 8 + slot // 4 % 4 * 2 + slot % 2
    at = (tile * TILE + key).to(tl.int64)[:, None]
    d = tl.arange(0, WIDTH)
    value = tl.load(
        x + (line // heads) * stride_b + head * stride_h + at * stride_s + d[None, :],
        mask=(at < rows) & (d < head_dim)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    value *= (1.0 / tl.load(scale + line * WIDTH + d))[None, :]
    value = to_e4m3(tl.clamp(value, -LARGEST, LARGEST))
    to = (line * WIDTH + d)[:, None] * padded + (tile * TILE + slot)[None, :]
    tl.store(out + to, tl.trans(value))


def quantised(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int, in_fragments: bool
) -> Quantised:
    """Copies of q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D), the last dimension contiguous.

    ``in_fragments`` orders the keys of v, within every 16, as :mod:`hopper_fp8` multiplies them.
    """
    (q8, q_scale), (k8, k_scale) = (_rows(x, width) for x in (q, k))
    batch, rows, heads, head_dim = v.shape
    padded = triton.cdiv(rows, TILE) * TILE
    peaks = torch.linalg.vector_norm(v, ord=float("inf"), dim=1).float().clamp(SMALLEST_PEAK)
    v_scale = torch.nn.functional.pad(peaks / LARGEST, (0, width - head_dim), value=1.0)
    v8 = torch.empty((batch, heads, width, padded), dtype=torch.float8_e4m3fn, device=v.device)
    _columns_kernel[(padded // TILE * heads * batch,)](
        v, v8, v_scale, rows, padded, heads, *v.stride()[:3], head_dim, LARGEST=LARGEST,
        WIDTH=width, TILE=TILE, IN_FRAGMENTS=in_fragments, num_warps=8,
    )  # fmt: skip
    return Quantised(q8, k8, v8, q_scale, k_scale, v_scale)


def _rows(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows, heads, head_dim = x.shape
    tiles = triton.cdiv(rows, TILE)
    out = torch.empty((batch, heads, rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((batch, heads, tiles), dtype=torch.float32, device=x.device)
    _rows_kernel[(tiles * heads * batch,)](
        x, out, scale, rows, heads, *x.stride()[:3], head_dim, SMALLEST_PEAK, LARGEST=LARGEST,
        WIDTH=width, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return out, scale

"""Queries, keys and values in e4m3: the copies that the 8-bit forward kernels read.

A tile of 128 queries or keys of a head has one scale, a channel of a head's values another: their
largest absolute value becomes 448, the largest that e4m3 holds. Values are stored transposed, a
channel's keys side by side, since 8-bit tensor cores read both operands along the dimension that
is summed over.

Two things that change no result but for rounding make roundings small. Queries and keys are
multiplied by a Hadamard matrix over its norm, an orthogonal one, so that no single channel carries
a score. And the mean of a head's keys is subtracted from them, which adds the same number to all
scores of a query: softmax does not see it, the LSE gets it back.
"""

from __future__ import annotations

import functools
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
    shift: torch.Tensor
    """fp32 (B, Hq, Sq): every query times the mean of its keys."""


@triton.jit
def _within(x, most: tl.constexpr):
    """What is not a number stays so: it has to show in the output."""
    return tl.clamp(x, -most, most, propagate_nan=tl.PropagateNan.ALL)


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
    x, out, scale, rotation, centre, shift, rows, heads, stride_b, stride_s, stride_h, head_dim,
    peak_floor, unit, LARGEST: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, TILE)
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tl.program_id(0) // heads % tiles
    batch = (tl.program_id(0) // heads // tiles).to(tl.int64)
    line = batch * heads + head
    at = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = at < rows
    d = tl.arange(0, WIDTH)
    value = tl.load(
        x + batch * stride_b + head * stride_h + at[:, None] * stride_s + d[None, :],
        mask=inside[:, None] & (d < head_dim)[None, :], other=0.0,
    )  # fmt: skip
    # Products with 1 and -1: exact but for the fp32 sum.
    value = tl.dot(value, tl.load(rotation + d[:, None] * WIDTH + d[None, :]))
    mean = tl.load(centre + (line // GROUP) * WIDTH + d)[None, :]
    if KEYS:
        value = tl.where(inside[:, None], value - mean, 0.0)
    else:
        tl.store(shift + line * rows + at, tl.sum(value * mean, 1) * (unit * unit), mask=inside)
    peak = tl.maximum(tl.max(tl.max(tl.abs(value), 1), 0), peak_floor)
    tl.store(scale + line * tiles + tile, peak * unit / LARGEST)
    value = to_e4m3(_within(value * (LARGEST / peak), LARGEST))
    tl.store(out + (line * rows + at)[:, None] * WIDTH + d[None, :], value, mask=inside[:, None])


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
    value = to_e4m3(_within(value, LARGEST))
    to = (line * WIDTH + d)[:, None] * padded + (tile * TILE + slot)[None, :]
    tl.store(out + to, tl.trans(value))


def quantised(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int, in_fragments: bool
) -> Quantised:
    """Copies of q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D), the last dimension contiguous.

    ``in_fragments`` orders the keys of v, within every 16, as :mod:`hopper_fp8` multiplies them.
    """
    batch, rows, heads, head_dim = v.shape
    empty = functools.partial(torch.empty, device=v.device)
    mean = torch.nn.functional.pad(k.mean(1, dtype=torch.float32), (0, width - head_dim))
    centre = mean @ rotation(width, torch.float32, v.device)
    shift = empty((batch, q.shape[2], q.shape[1]), dtype=torch.float32)
    made = []
    for x in (q, k):
        tiles = triton.cdiv(x.shape[1], TILE)
        shape = (batch, x.shape[2], x.shape[1], width)
        copy = empty(shape, dtype=torch.float8_e4m3fn)
        scale = empty((*shape[:2], tiles), dtype=torch.float32)
        _rows_kernel[(tiles * x.shape[2] * batch,)](
            x, copy, scale, rotation(width, x.dtype, x.device), centre, shift, x.shape[1],
            x.shape[2], *x.stride()[:3], head_dim, SMALLEST_PEAK, width**-0.5, LARGEST=LARGEST,
            WIDTH=width, TILE=TILE, GROUP=x.shape[2] // heads, KEYS=x is k, num_warps=8,
        )  # fmt: skip
        made += [copy, scale]
    padded = triton.cdiv(rows, TILE) * TILE
    peaks = torch.linalg.vector_norm(v, ord=float("inf"), dim=1).float().clamp(SMALLEST_PEAK)
    v_scale = torch.nn.functional.pad(peaks / LARGEST, (0, width - head_dim), value=1.0)
    v8 = empty((batch, heads, width, padded), dtype=torch.float8_e4m3fn)
    _columns_kernel[(padded // TILE * heads * batch,)](
        v, v8, v_scale, rows, padded, heads, *v.stride()[:3], head_dim, LARGEST=LARGEST,
        WIDTH=width, TILE=TILE, IN_FRAGMENTS=in_fragments, num_warps=8,
    )  # fmt: skip
    return Quantised(made[0], made[2], v8, made[1], made[3], v_scale, shift)


@functools.lru_cache(maxsize=16)
def rotation(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The Hadamard matrix of ``width``, a power of two: 1 and -1, symmetric; its square is
    ``width`` times the identity (Sylvester's construction)."""
    made = torch.ones((1, 1))
    while len(made) < width:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made.to(device, dtype)

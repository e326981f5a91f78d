"""The project's own GPU kernels as one :class:`msa_kernels.plan.TileKernel`.

On Hopper the Gluon kernels run where the head size and the strides suit them, everywhere else
their plain Triton twins; both read the same lists. Nothing here falls back in silence: what cannot
run is refused with the reason before anything is launched.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton

from msa_kernels.backend import is_hopper
from msa_kernels.capabilities import few_rules
from msa_kernels.pattern import PatternError
from msa_kernels.plan import GradDtypes, PartPlan, Request
from msa_kernels.triton import backward, forward, stats, tables, tma
from msa_kernels.triton.lists import device_lists
from msa_kernels.triton.predicate import Predicate, encode
from msa_kernels.triton.tables import SMALLEST, Tile

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run element by element on the CPU: for tests only."""

MAX_HEAD_DIM = 256
NARROW = 128
"""Head sizes above it have other tiles on Hopper, and no backward of one pass there."""
HOPPER = {
    "forward": {64: (128, 2), 128: (128, 2), 256: (64, 2)},
    "dq": {64: (128, 2), 128: (128, 2), 256: (32, 2)},
    "dkv": {64: (64, 2), 128: (64, 2), 256: (64, 2)},
}
"""Rows of the tile that streams past the resident ones, and how many are in flight, by padded head
size. 128 rows are resident; of keys above a head size of 128, 64."""
FUSED = {64: (128, 2), 128: (64, 2)}
"""The same for the backward of one pass, by padded head size."""


class TritonKernel:
    """Tile kernels written in Triton; see :class:`msa_kernels.plan.TileKernel`."""

    forms_delta = False

    def __init__(
        self, hopper: bool | None = None, tiles: Mapping[str, Tile] | None = None,
        fused: bool = False,
    ) -> None:  # fmt: skip
        """``hopper`` False keeps to the plain kernels; None decides by the device. ``tiles``
        stand for those of the tuning tables, by kernel: for measuring them. ``fused`` has a
        backward of one pass, which holds an fp32 copy of dQ and whose dQ differs in its last bits
        between runs."""
        self.name = "triton-fused" if fused else "triton"
        self._hopper = hopper
        self._tiles = tiles or {}
        self._fused = fused

    def refuses(self, request: Request) -> str | None:
        if request.device.type != "cuda" and not INTERPRETED:
            return f"needs a GPU, the tensors are on {request.device.type}"
        if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"dtype {request.dtype}; use bfloat16, float16 or float32"
        if request.head_dim > MAX_HEAD_DIM:
            return f"head size {request.head_dim}, at most {MAX_HEAD_DIM}"
        if self._fused and request.deterministic:
            return "its backward accumulates dQ with atomics: not deterministic"
        if self._fused and self._hopper is not False and (missing := _fused_lacks()):
            return missing
        try:
            groups = {request.pattern.for_group(g) for g in range(request.kv_heads)}
            reasons = [few_rules(part) for group in groups for part in group.parts()]
        except PatternError as error:
            return str(error)
        return next((reason for reason in reasons if reason), None)

    def stacks(self, plan: PartPlan) -> bool:
        """Whether heads of different rules run in one launch: when only values differ."""
        return plan.kept("stacks", lambda: len({encode(p.part)[:3] for p in plan.heads}) == 1)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PartPlan, scale: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        q, k, v = (_unit_stride(t) for t in (q, k, v))
        batch, q_rows, q_heads, head_dim = q.shape
        kv_heads = k.shape[2]
        out = torch.empty((batch, q_rows, q_heads, head_dim), dtype=out_dtype, device=q.device)
        lse = torch.empty((batch, q_heads, q_rows), dtype=torch.float32, device=q.device)
        hopper = self._uses_hopper(q, k, v)
        width = tma.width(head_dim)
        block, stages = HOPPER["forward"][width]
        plain = self._tile(q, "forward")
        tiles = (128, block) if hopper else plain[:2]
        lists = device_lists(plan, *tiles, q.device)
        common, constants = _arguments(plan, q, k, tiles)
        items = lists.tiles * q_heads * batch
        log2_scale = scale * math.log2(math.e)
        walk = (lists.pointers, lists.middles, lists.index, lists.order)
        if hopper:
            from msa_kernels.triton import hopper_forward

            each, shares = lists.shares(q_heads * batch)
            hopper_forward.forward_kernel[(shares * q_heads * batch,)](
                tma.tile(q, 64), tma.tile(k, block), tma.tile(v, block), out, lse, *walk, *common,
                q_heads, kv_heads, lists.tiles, each, *out.stride()[:3], head_dim, log2_scale,
                HEAD_DIM=width, BLOCK_N=block, STAGES=stages,
                **constants, num_warps=4,
            )  # fmt: skip
        else:
            forward.forward_kernel[(items,)](
                q, k, v, out, lse, *walk, *common, q_heads, kv_heads, lists.tiles,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], head_dim,
                log2_scale, HEAD_DIM=_width(head_dim), BLOCK_M=tiles[0], BLOCK_N=tiles[1],
                PRECISION=_precision(q), **constants, num_warps=plain.warps,
                num_stages=plain.stages,
            )  # fmt: skip
        return out, lse

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor | None, plan: PartPlan,
        scale: float, grad_dtypes: GradDtypes,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        assert delta is not None
        q, k, v, dout = (_unit_stride(t) for t in (q, k, v, dout.to(q.dtype)))
        of_queries, of_keys = grad_dtypes
        dq = _sums(q) if self._fused else torch.empty(q.shape, dtype=of_queries, device=q.device)
        dk = torch.empty(k.shape, dtype=of_keys, device=q.device)
        dv = torch.empty(v.shape, dtype=of_keys, device=q.device)
        lse, delta = stats.padded_stats(lse, delta)
        narrow = q.shape[3] <= NARROW
        if self._uses_hopper(q, k, v, dout) and (narrow or not self._fused):
            self._hopper_backward(q, k, v, dout, dq, dk, dv, lse, delta, plan, scale)
        else:
            self._plain_backward(q, k, v, dout, dq, dk, dv, lse, delta, plan, scale)
        if self._fused:
            dq = stats.scaled(dq, scale, of_queries)
        return dq, dk, dv

    def _hopper_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor,
        dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, lse: torch.Tensor,
        delta: torch.Tensor, plan: PartPlan, scale: float,
    ) -> None:  # fmt: skip
        from msa_kernels.triton import hopper_dkv, hopper_dq

        batch, _, q_heads, head_dim = q.shape
        kv_heads = k.shape[2]
        width = tma.width(head_dim)
        if self._fused:
            from msa_kernels.triton import hopper_fused

            block, stages = FUSED[width]
            lists = device_lists(plan, block, 128, q.device, transposed=True)
            common, constants = _arguments(plan, q, k, (block, 128))
            hopper_fused.fused_kernel[(lists.tiles * kv_heads * batch,)](
                tma.tile(q, block), tma.tile(dout, block), tma.tile(k, 64), tma.tile(v, 64),
                tma.line(lse, block), tma.line(delta, block), tma.sums(dq), dk, dv, lists.pointers,
                lists.middles, lists.index, lists.order, *common, kv_heads, lists.tiles,
                *dk.stride()[:3], head_dim, scale, HEAD_DIM=width, BLOCK_M=block, STAGES=stages,
                **constants, num_warps=4,
            )  # fmt: skip
            return
        block, stages = HOPPER["dq"][width]
        lists = device_lists(plan, 128, block, q.device)
        common, constants = _arguments(plan, q, k, (128, block))
        each, shares = lists.shares(q_heads * batch)
        hopper_dq.dq_kernel[(shares * q_heads * batch,)](
            tma.tile(q, 64), tma.tile(dout, 64), tma.tile(k, block), tma.tile(v, block), dq, lse,
            delta, lists.pointers, lists.middles, lists.index, lists.order, *common, q_heads,
            kv_heads, lists.tiles, each, lse.shape[2], *dq.stride()[:3], head_dim, scale,
            HEAD_DIM=width, BLOCK_N=block, STAGES=stages, **constants, num_warps=4,
        )  # fmt: skip
        block, stages = HOPPER["dkv"][width]
        tiles = _hopper_tiles("dkv", head_dim)
        lists = device_lists(plan, *tiles, q.device, transposed=True)
        common, constants = _arguments(plan, q, k, tiles)
        items = lists.tiles * kv_heads * batch
        hopper_dkv.dkv_kernel[(items,)](
            tma.tile(q, block), tma.tile(dout, block), tma.tile(k, 64), tma.tile(v, 64),
            tma.line(lse, block), tma.line(delta, block), dk, dv, lists.pointers, lists.middles,
            lists.index, lists.order, *common, kv_heads, lists.tiles, *dk.stride()[:3], head_dim,
            scale, HEAD_DIM=width, BLOCK_M=block, STAGES=stages, **constants, num_warps=4,
        )  # fmt: skip

    def _plain_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor,
        dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, lse: torch.Tensor,
        delta: torch.Tensor, plan: PartPlan, scale: float,
    ) -> None:  # fmt: skip
        batch, _, q_heads, head_dim = q.shape
        kv_heads = k.shape[2]
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
        scales = (head_dim, scale, scale * math.log2(math.e))
        for kind in ("dkv",) if self._fused else ("dq", "dkv"):
            plain = self._tile(q, kind)
            tiles = plain[:2]
            lists = device_lists(plan, *tiles, q.device, transposed=kind == "dkv")
            common, constants = _arguments(plan, q, k, tiles)
            walk = (lists.pointers, lists.middles, lists.index, lists.order)
            shape = {"HEAD_DIM": _width(head_dim), "BLOCK_M": tiles[0], "BLOCK_N": tiles[1]}
            options: dict[str, Any] = {**constants, **shape, "PRECISION": _precision(q)}
            options |= {"num_warps": plain.warps, "num_stages": plain.stages}
            sizes = (q_heads, kv_heads, lists.tiles, lse.shape[2])
            if kind == "dq":
                backward.dq_kernel[(lists.tiles * q_heads * batch,)](
                    q, k, v, dout, dq, lse, delta, *walk, *common, *sizes, *strides,
                    *dq.stride()[:3], *scales, **options,
                )  # fmt: skip
            else:
                backward.dkv_kernel[(lists.tiles * kv_heads * batch,)](
                    q, k, v, dout, dq, dk, dv, lse, delta, *walk, *common, *sizes, *strides,
                    *dq.stride()[:3], *dk.stride()[:3], *scales, FUSED=self._fused, **options,
                )  # fmt: skip

    def _tile(self, q: torch.Tensor, kernel: str) -> Tile:
        if kernel in self._tiles:
            return self._tiles[kernel]
        return _tile_of(q.device, q.dtype, q.shape[-1], kernel)

    def _uses_hopper(self, *tensors: torch.Tensor) -> bool:
        if self._hopper is False or INTERPRETED or not is_hopper(tensors[0].device):
            return False
        return all(
            t.dtype in (torch.bfloat16, torch.float16)
            and t.shape[-1] % 8 == 0
            and t.data_ptr() % 16 == 0
            and all(stride % 8 == 0 for stride in t.stride()[:-1])
            for t in tensors
        )


def _unit_stride(rows: torch.Tensor) -> torch.Tensor:
    """Kernels step through a row's numbers one by one."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def prepare(plan: PartPlan, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Make and upload what forward and backward need of ``plan`` before they are called.

    For whoever changes documents every step, such as a loader's worker: a later call finds it.
    """
    hopper = is_hopper(device) and head_dim % 8 == 0 and dtype in (torch.bfloat16, torch.float16)
    plan.kept(("predicate", device), lambda: _upload(plan, device))
    if not plan.simple:
        plan.maps(device)
    sizes = {
        kind: _hopper_tiles(kind, head_dim)
        if hopper
        else _tile_of(device, dtype, head_dim, kind)[:2]
        for kind in ("forward", "dq", "dkv")
    }
    for kind, tiles in sizes.items():
        device_lists(plan, *tiles, device, transposed=kind == "dkv")


def _tile_of(device: torch.device, dtype: torch.dtype, head_dim: int, kernel: str) -> Tile:
    if INTERPRETED:
        return SMALLEST
    width = max(64, _width(head_dim))
    if device.type != "cuda":
        return tables.anywhere(kernel, dtype, width)
    return tables.tile(device, kernel, dtype, width)


def _hopper_tiles(kind: str, head_dim: int) -> tuple[int, int]:
    """(queries, keys) of a tile."""
    block, _ = HOPPER[kind][tma.width(head_dim)]
    if kind == "dkv":
        return block, 128 if head_dim <= NARROW else 64
    return 128, block


@functools.lru_cache(maxsize=1)
def _fused_lacks() -> str | None:
    """Why this Triton cannot run the backward of one pass, if there is a Hopper GPU for it."""
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda")):
        return None
    try:
        importlib.import_module("msa_kernels.triton.hopper_fused")
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} lacks what it is made of ({error}); use 'triton'"
    return None


def _arguments(
    plan: PartPlan, q: torch.Tensor, k: torch.Tensor, tiles: tuple[int, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What every kernel takes alike: token maps, predicate, sizes; and its constants."""
    device = q.device
    predicate, params, table = plan.kept(("predicate", device), lambda: _upload(plan, device))
    if plan.simple:
        maps = (params,) * 4
        starts = (plan.q_start, plan.k_start)
    else:
        token = plan.maps(device)
        maps = (token.q_position, token.q_document, token.k_position, token.k_document)
        starts = (0, 0)
    common = (*maps, params, table, *predicate.table_blocks, q.shape[1], k.shape[1], *starts)
    constants = {
        "FLAGS": predicate.flags, "RULES": predicate.rules, "MINUS": predicate.minus,
        "LOOKUP": max(_lookup(one, tiles) for one in plan.heads or (plan,)),
        "SIMPLE": plan.simple, "GROUP": q.shape[2] // k.shape[2], "PER_HEAD": bool(plan.heads),
    }  # fmt: skip
    return common, constants


def _upload(plan: PartPlan, device: torch.device) -> tuple[Predicate, torch.Tensor, torch.Tensor]:
    """The predicate, its values (heads, rules, 8) and block-list table (heads, rows, columns)."""
    each = [encode(one.part) for one in plan.heads or (plan,)]
    rows, columns = (max(p.table_blocks[side] for p in each) for side in range(2))
    tables = np.zeros((len(each), rows, columns), np.uint8)
    for table, predicate in zip(tables, each, strict=True):
        table[: predicate.table.shape[0], : predicate.table.shape[1]] = predicate.table
    return (
        each[0]._replace(table_blocks=(rows, columns)),
        torch.from_numpy(np.stack([p.params for p in each])).to(device),
        torch.from_numpy(tables).to(device),
    )


def _lookup(plan: PartPlan, tiles: tuple[int, int]) -> int:
    """How partial tiles decide block-list membership; see :func:`predicate.allowed`."""
    rules = (*plan.part.rules, *plan.part.minus)
    sizes = [rule.table[0] for rule in rules if rule.table is not None]
    if not sizes:
        return 0
    aligned = all(sizes[0] % t == 0 for t in tiles)
    if not (plan.simple and aligned and plan.q_start % tiles[0] == plan.k_start % tiles[1] == 0):
        return 2
    return 0 if len(rules) == 1 else 1


def _sums(q: torch.Tensor) -> torch.Tensor:
    """What a fused backward adds dQ up in."""
    return torch.zeros(q.shape, dtype=torch.float32, device=q.device)


def _width(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _precision(q: torch.Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"

"""Tiled attention in plain torch: exact, on any device, with memory linear in the sequence.

The portable implementation of every pattern (``backend="torch"``). A query tile meets its listed
keys in chunks gathered as few contiguous slices, so that nearly all time goes to matrix products;
scores exist for one chunk at a time and are recomputed in the backward pass. Everything is
accumulated in fp32, or in fp64 for fp64 inputs.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from msa_kernels.masks import element_mask
from msa_kernels.plan import GradDtypes, PartPlan, Request

BLOCK_Q = 64
"""Query rows of a tile. Larger wastes pairs at the edges of a window, smaller wastes the matrix
units: 64 was fastest for windows up to 512 on the CPUs measured and within 10 % for 8192."""
BLOCK_K = 32
"""Granularity of key lists. Slices of neighbouring tiles are joined, so small tiles cost nothing
and keep what is computed close to what is allowed."""
CHUNK = 2048
"""Most keys per product: bounds the scores that exist at a time to 512 KiB per query head in
fp32, which stays in a core's cache."""
MASK_BYTES = 16 << 20
"""Masks of partial tiles kept per plan; beyond it they are recomputed at each use."""
MASKS_BYTES = 64 << 20
"""Masks kept of all plans; beyond it those of the plans used longest ago go."""


@dataclass(frozen=True)
class Chunk:
    """Up to ``CHUNK`` keys of one query tile."""

    slices: tuple[tuple[int, int], ...]
    """Key rows ``[begin, end)``, ascending."""
    partial: tuple[tuple[int, int], ...]
    """Columns ``[begin, end)`` of the chunk that need the element mask."""


@dataclass(frozen=True)
class Tile:
    begin: int
    end: int
    chunks: tuple[Chunk, ...]


class TorchTiles:
    """:class:`msa_kernels.plan.TileKernel` in plain torch."""

    name = "torch"
    forms_delta = False

    def refuses(self, request: Request) -> str | None:
        if not request.dtype.is_floating_point or request.dtype.itemsize < 2:
            return f"computes in fp64, fp32, bf16 and fp16, not in {request.dtype}"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PartPlan, scale: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        batch, q_rows, q_heads, _dim = q.shape
        work = _working(q.dtype)
        groups = _Groups(batch, q_heads, k.shape[2])
        keys, values = groups.keys(k), groups.keys(v)
        out = q.new_zeros((batch, q_rows, q_heads, v.shape[3]), dtype=out_dtype)
        lse = q.new_full((batch, q_heads, q_rows), -math.inf, dtype=work)
        for tile in schedule(plan):
            queries = groups.queries(q[:, tile.begin : tile.end], work, scale)
            top = total = accumulated = None
            for at, chunk in enumerate(tile.chunks):
                scores = torch.bmm(queries, _take(keys, chunk, work).transpose(1, 2))
                _hide(scores, plan, tile, at, chunk)
                largest = scores.amax(-1, keepdim=True)
                if top is not None:
                    largest = torch.maximum(largest, top)
                # A row that has seen nothing yet has -inf here: 0 keeps its exponents at -inf.
                finite = torch.where(largest == -math.inf, 0.0, largest)
                weights = scores.sub_(finite).exp_()
                part = weights.sum(-1, keepdim=True)
                product = torch.bmm(weights, _take(values, chunk, work))
                if top is not None and total is not None and accumulated is not None:
                    shrink = torch.exp(top - finite)
                    part.addcmul_(total, shrink)
                    product.addcmul_(accumulated, shrink)
                top, total, accumulated = largest, part, product
            if top is None or total is None or accumulated is None:
                continue
            empty = total == 0
            safe = torch.where(empty, 1.0, total)
            out[:, tile.begin : tile.end] = groups.rows(accumulated.div_(safe))
            found = torch.where(empty, -math.inf, top + torch.log(safe))
            lse[:, :, tile.begin : tile.end] = groups.per_row(found)
        return out, lse

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor | None, plan: PartPlan,
        scale: float, grad_dtypes: GradDtypes,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        assert delta is not None
        work = _working(q.dtype)
        groups = _Groups(q.shape[0], q.shape[2], k.shape[2])
        keys, values = groups.keys(k), groups.keys(v)
        dq = torch.zeros_like(q, dtype=grad_dtypes[0], memory_format=torch.contiguous_format)
        dk = torch.zeros_like(keys, dtype=work, memory_format=torch.contiguous_format)
        dv = torch.zeros_like(values, dtype=work, memory_format=torch.contiguous_format)
        for tile in schedule(plan):
            queries = groups.queries(q[:, tile.begin : tile.end], work, scale)
            cotangent = groups.queries(dout[:, tile.begin : tile.end], work, 1.0)
            row_lse = groups.stacked(lse[:, :, tile.begin : tile.end], work)
            # An empty row must stay at weight 0; exp(-inf - (-inf)) would be NaN.
            row_lse = torch.where(row_lse == -math.inf, math.inf, row_lse)
            row_delta = groups.stacked(delta[:, :, tile.begin : tile.end], work)
            total = None
            for at, chunk in enumerate(tile.chunks):
                some_keys = _take(keys, chunk, work)
                scores = torch.bmm(queries, some_keys.transpose(1, 2))
                _hide(scores, plan, tile, at, chunk)
                weights = scores.sub_(row_lse).exp_()
                _add(dv, chunk, weights, cotangent)
                slopes = torch.bmm(cotangent, _take(values, chunk, work).transpose(1, 2))
                slopes.sub_(row_delta).mul_(weights)
                _add(dk, chunk, slopes, queries)
                if total is None:
                    total = torch.bmm(slopes, some_keys)
                else:
                    total.baddbmm_(slopes, some_keys)
            if total is not None:
                dq[:, tile.begin : tile.end] = groups.rows(total.mul_(scale))
        return dq, groups.unstacked(dk, grad_dtypes[1]), groups.unstacked(dv, grad_dtypes[1])


def schedule(plan: PartPlan, block_q: int = BLOCK_Q, block_k: int = BLOCK_K) -> tuple[Tile, ...]:
    """Query tiles with their keys as chunks of contiguous slices, made once per plan.

    Tiles that see nothing are left out.
    """

    def make() -> tuple[Tile, ...]:
        lists = plan.tiles(block_q, block_k)
        tiles = []
        for t in range(lists.q_tiles):
            entries = slice(int(lists.ptr[t]), int(lists.ptr[t + 1]))
            chunks = _chunks(lists.index[entries], lists.full[entries], block_k, lists.k_rows)
            if chunks:
                end = min(lists.q_rows, (t + 1) * block_q)
                tiles.append(Tile(t * block_q, end, chunks))
        return tuple(tiles)

    return plan.kept(("schedule", block_q, block_k), make)


def _chunks(
    index: np.ndarray, full: np.ndarray, block: int, rows: int
) -> tuple[Chunk, ...]:  # fmt: skip
    per_chunk = CHUNK // block
    return tuple(
        _chunk(index[n : n + per_chunk], full[n : n + per_chunk], block, rows)
        for n in range(0, len(index), per_chunk)
    )


def _chunk(index: np.ndarray, full: np.ndarray, block: int, rows: int) -> Chunk:
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    firsts = index[np.concatenate([[0], breaks])]
    lasts = index[np.concatenate([breaks - 1, [len(index) - 1]])]
    slices = tuple(
        (int(a) * block, min(rows, (int(b) + 1) * block))
        for a, b in zip(firsts, lasts, strict=True)
    )
    columns = sum(end - begin for begin, end in slices)
    edges = np.flatnonzero(np.diff(~full, prepend=False, append=False))
    partial = tuple(
        (int(a) * block, min(columns, int(b) * block))
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    )
    return Chunk(slices, partial)


@dataclass(frozen=True)
class _Groups:
    """Query heads of one key/value head stacked as rows of one product.

    Stacked queries are (B * Hkv, G * rows, D), keys (B * Hkv, rows, D).
    """

    batch: int
    q_heads: int
    kv_heads: int

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        """A view for batch 1, where batch and heads need no joining; otherwise a copy."""
        return k.transpose(1, 2).reshape(self.batch * self.kv_heads, k.shape[1], k.shape[3])

    def queries(self, q: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        rows = q.shape[1]
        heads = q.reshape(self.batch, rows, self.kv_heads, self.group, q.shape[3])
        stacked = heads.permute(0, 2, 3, 1, 4).to(dtype)
        return (stacked * scale).reshape(self.batch * self.kv_heads, self.group * rows, -1)

    def rows(self, stacked: torch.Tensor) -> torch.Tensor:
        """Stacked (B * Hkv, G * rows, D) as (B, rows, Hq, D)."""
        heads = stacked.view(self.batch, self.q_heads, -1, stacked.shape[-1])
        return heads.transpose(1, 2)

    def stacked(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(B, Hq, rows) as a column beside stacked queries."""
        return rows.to(dtype).reshape(self.batch * self.kv_heads, -1, 1)

    def per_row(self, column: torch.Tensor) -> torch.Tensor:
        return column.view(self.batch, self.q_heads, -1)

    def unstacked(self, keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(B * Hkv, rows, D) as (B, rows, Hkv, D), contiguous."""
        split = keys.view(self.batch, self.kv_heads, keys.shape[1], keys.shape[2])
        return split.transpose(1, 2).to(dtype).contiguous()


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _take(keys: torch.Tensor, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    pieces = [keys[:, begin:end] for begin, end in chunk.slices]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)).to(dtype)


def _add(grad: torch.Tensor, chunk: Chunk, left: torch.Tensor, right: torch.Tensor) -> None:
    """``grad[keys of the chunk] += left^T right``."""
    for (begin, end), columns in zip(chunk.slices, _columns(chunk), strict=True):
        grad[:, begin:end].baddbmm_(left[:, :, columns].transpose(1, 2), right)


def _columns(chunk: Chunk) -> Iterator[slice]:
    at = 0
    for begin, end in chunk.slices:
        yield slice(at, at + end - begin)
        at += end - begin


def _hide(scores: torch.Tensor, plan: PartPlan, tile: Tile, at: int, chunk: Chunk) -> None:
    """Set what the part does not allow to -inf, in place."""
    if not chunk.partial:
        return
    rows = tile.end - tile.begin
    heads = scores.view(scores.shape[0], -1, rows, scores.shape[2])
    for columns, hidden in zip(chunk.partial, _masks(plan, tile, at, chunk, scores), strict=True):
        heads[..., columns[0] : columns[1]].masked_fill_(hidden, -math.inf)


def _masks(
    plan: PartPlan, tile: Tile, at: int, chunk: Chunk, scores: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Hidden pairs of each partial stretch, kept while the budgets last."""
    kept, key = plan.kept("masks", _Masks), (scores.device, tile.begin, at)
    found = _shelf.get(kept, key)
    if found is None:
        found = _make_masks(plan, tile, chunk, scores.device)
        _shelf.put(kept, key, found)
    return found


@dataclass(eq=False)
class _Masks:
    """The masks of one plan."""

    by_chunk: dict[Hashable, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    bytes: int = 0


class _Shelf:
    """The masks of all plans, those of the plan used last at the end.

    Masks of a plan go together: of a plan used from end to end, over and over, a part that is
    kept serves every time, and one that makes room for the next never.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._plans: OrderedDict[_Masks, None] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, kept: _Masks, key: Hashable) -> tuple[torch.Tensor, ...] | None:
        with self._lock:
            if kept in self._plans:
                self._plans.move_to_end(kept)
            return kept.by_chunk.get(key)

    def put(self, kept: _Masks, key: Hashable, masks: tuple[torch.Tensor, ...]) -> None:
        size = sum(mask.untyped_storage().nbytes() for mask in masks)
        with self._lock:
            if key in kept.by_chunk or kept.bytes + size > MASK_BYTES:
                return
            kept.by_chunk[key] = masks
            kept.bytes += size
            self.bytes += size
            self._plans[kept] = None
            self._plans.move_to_end(kept)
            while self.bytes > MASKS_BYTES:
                oldest, _ = self._plans.popitem(last=False)
                self.bytes -= oldest.bytes
                oldest.by_chunk.clear()
                oldest.bytes = 0


_shelf = _Shelf()


def _make_masks(
    plan: PartPlan, tile: Tile, chunk: Chunk, device: torch.device
) -> tuple[torch.Tensor, ...]:
    maps = plan.maps(device)
    rows = slice(tile.begin, tile.end)
    position = torch.cat([maps.k_position[a:b] for a, b in chunk.slices])
    document = torch.cat([maps.k_document[a:b] for a, b in chunk.slices])
    return tuple(
        ~element_mask(
            plan,
            maps.q_position[rows, None], maps.q_document[rows, None],
            position[None, a:b], document[None, a:b],
        )
        for a, b in chunk.partial
    )  # fmt: skip

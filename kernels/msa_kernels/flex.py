"""Every pattern through PyTorch's FlexAttention, with block masks made from our tile lists.

The block mask is constructed, never searched for: full and partial tiles and their transposes come
from :meth:`PartPlan.tiles`. Its index arrays are dense and padded to the longest row, so the
sequence length is capped.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from msa_kernels import engine
from msa_kernels.backend import Direct
from msa_kernels.blocks import TileLists
from msa_kernels.merge import merge
from msa_kernels.ops import attention
from msa_kernels.pattern import Pattern
from msa_kernels.placement import Placement
from msa_kernels.plan import PartPlan, Request, plan
from msa_kernels.rules import Rule

BLOCK = 128


class Flex(Direct):
    """:class:`msa_kernels.backend.Direct` on ``torch.nn.attention.flex_attention``."""

    name = "flex"

    def refuses(self, request: Request) -> str | None:
        return request.outside(self.name)

    @torch.compiler.disable(
        reason="backend='flex' makes its block lists on the host: outside of a graph"
    )
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern,
        placement: Placement, scale: float, return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        if isinstance(q, FakeTensor):
            # Lists would be fake too, and real calls would meet them in the plan: only shapes are
            # asked for, and those of the operator are the same.
            out, lse = attention(
                q, k, v, pattern.encoded(), scale, placement.documents, placement.q_bounds,
                placement.k_bounds, placement.align, "torch",
            )  # fmt: skip
            return out, lse if return_lse else None
        if not torch.is_grad_enabled():  # FlexAttention on a CPU looks at the tensors alone.
            q, k, v = q.detach(), k.detach(), v.detach()
        batch = q.shape[0]
        runs = placement.runs(q.shape[1], k.shape[1])
        if placement.flattens:
            q, k, v = (t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v))
        outs = q.new_empty((*q.shape[:3], v.shape[3]))
        logs = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        for group in engine.head_groups(pattern, q.shape[2], k.shape[2]):
            heads = group.queries(q), group.keys(k), group.keys(v)
            partials = [_part(*heads, part, scale) for part in plan(group.pattern, *runs)]
            if partials:
                out, lse = partials[0] if len(partials) == 1 else merge(partials, q.dtype)
            else:
                out, lse = torch.zeros_like(heads[0]), logs.new_full((), -torch.inf)
            group.put_queries(outs, out)
            logs[:, group.query_heads(logs.device)] = lse
        if placement.flattens:
            outs = outs.reshape(batch, -1, *outs.shape[2:])
            logs = logs[0].unflatten(1, (batch, -1)).transpose(0, 1)
        return outs, logs if return_lse else None


def _part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PartPlan, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    q = engine.fold(q, part, part.q_order).transpose(1, 2)
    k = engine.fold(k, part, part.k_order).transpose(1, 2)
    v = engine.fold(v, part, part.k_order).transpose(1, 2)
    mask = part.kept(("flex", q.device), lambda: block_mask(part, q.device))
    check_lengths(mask, q.shape[2], k.shape[2])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, aux = _attention(q.device.type)(
            q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
    assert aux.lse is not None
    return engine.unfold(out.transpose(1, 2), part), engine.unfold_rows(aux.lse, part)


@cache
def _attention(device: str):
    return torch.compile(flex_attention) if device == "cuda" else flex_attention


def check_lengths(mask: BlockMask, q_rows: int, k_rows: int) -> None:
    """Raises ValueError unless the mask was made for exactly these lengths."""
    if tuple(mask.seq_lengths) != (q_rows, k_rows):
        raise ValueError(
            f"the block mask is for {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} "
            f"keys, the tensors have {q_rows} and {k_rows}"
        )


def block_mask(part: PartPlan, device: torch.device) -> BlockMask:
    """The part as a BlockMask of 128 x 128 tiles for all batch rows and heads."""
    lists = part.tiles(BLOCK, BLOCK)
    partial, full = lists.select(full=False), lists.select(full=True)
    arrays = [
        tensor
        for side in (partial, full, partial.transposed, full.transposed)
        for tensor in _padded(side, device)
    ]
    return BlockMask(
        (lists.q_rows, lists.k_rows), *arrays, BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_mask_mod(part, device),
    )  # fmt: skip


def _padded(lists: TileLists, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts (1, 1, tiles) and indices (1, 1, tiles, widest row), both int32."""
    count = np.diff(lists.ptr)
    index = np.zeros((lists.q_tiles, max(1, int(count.max(initial=0)))), np.int32)
    row = np.repeat(np.arange(lists.q_tiles), count)
    index[row, np.arange(len(row)) - lists.ptr[:-1][row]] = lists.index
    return (
        torch.from_numpy(count.astype(np.int32))[None, None].to(device),
        torch.from_numpy(index)[None, None].to(device),
    )


def _mask_mod(part: PartPlan, device: torch.device):
    tables = {
        id(rule): _dense_table(rule, device)
        for rule in (*part.part.rules, *part.part.minus)
        if rule.table is not None
    }

    def allows(rule: Rule, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        if rule.table is None:
            return rule.allows(i, j)
        size = rule.table[0]
        table = tables[id(rule)]
        q_block, k_block = i // size, j // size
        inside = (q_block >= 0) & (q_block < table.shape[0]) & (k_block < table.shape[1])
        q_block = q_block.clamp(0, table.shape[0] - 1)
        k_block = k_block.clamp(0, table.shape[1] - 1)
        return inside & table[q_block, k_block] & replace(rule, table=None).allows(i, j)

    def allowed(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        ok = allows(part.part.rules[0], i, j)
        for rule in part.part.rules[1:]:
            ok = ok | allows(rule, i, j)
        for rule in part.part.minus:
            ok = ok & ~allows(rule, i, j)
        return ok

    if part.simple:
        q_start, k_start = part.q_start, part.k_start
        return lambda b, h, q, k: allowed(q + q_start, k + k_start)
    maps = part.maps(device)

    def mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        same = (maps.q_document[q] == maps.k_document[k]) & (maps.q_document[q] >= 0)
        return same & allowed(maps.q_position[q], maps.k_position[k])

    return mask


def _dense_table(rule: Rule, device: torch.device) -> torch.Tensor:
    assert rule.table is not None
    rows = rule.table[1]
    width = max((row[-1] + 1 for row in rows if row), default=1)
    table = torch.zeros(max(1, len(rows)), width, dtype=torch.bool)
    for q, row in enumerate(rows):
        table[q, list(row)] = True
    return table.to(device)

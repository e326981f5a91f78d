"""Tile lists on the device, in the order in which kernels walk them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from msa_kernels.plan import PartPlan
from msa_kernels.walks import Walk

TURNS = 4
"""Programs for each SM, at least, where rows are shared out: the last ones end almost together."""
SHARE = 64
"""Tiles that a program should have to do: filling and draining a pipeline costs as much as two."""


@dataclass(frozen=True)
class DeviceLists:
    """Row ``t`` visits ``index[pointers[t]:pointers[t + 1]]``; tiles before ``middles[t]`` are
    partial, the rest full. ``order`` names the rows, longest first. int32 each; ``index`` has one
    entry more than is listed, so that an empty last row may still be read ahead. Where every
    key/value head has lists of its own, those of head ``h`` start at ``h * (tiles + 1)`` in
    ``pointers`` and at ``h * tiles`` in ``middles`` and ``order``."""

    pointers: torch.Tensor
    middles: torch.Tensor
    index: torch.Tensor
    order: torch.Tensor
    tiles: int

    def shares(self, heads: int) -> tuple[int, int]:
        """How many neighbouring rows of a head's list one program takes, and how many programs
        that makes of a head: rows of few tiles are taken together, as long as every SM has its
        turn often. ``heads`` are those of the whole batch."""
        tiles = max(1, (self.index.numel() - 1) // self.order.numel())
        turns = self.tiles * heads // _processors(self.order.device)
        each = max(1, min(-(-SHARE // tiles), turns // TURNS))
        return each, -(-self.tiles // each)


def device_lists(
    plan: PartPlan, block_q: int, block_k: int, device: torch.device, transposed: bool = False
) -> DeviceLists:
    """Lists of ``plan`` on ``device``, built once and kept with the plan."""

    def make() -> DeviceLists:
        heads = plan.heads or (plan,)
        return _upload([one.walk(block_q, block_k, transposed) for one in heads], device)

    return plan.kept(("device lists", block_q, block_k, device, transposed), make)


def _upload(each: Sequence[Walk], device: torch.device) -> DeviceLists:
    starts = np.cumsum([0, *(len(walk.index) for walk in each)])
    if starts[-1] >= 1 << 31:
        raise ValueError(f"{starts[-1]} tiles over all heads exceed 32-bit pointers")
    host = (
        np.concatenate([w.pointers + s for w, s in zip(each, starts, strict=False)]),
        np.concatenate([w.middles + s for w, s in zip(each, starts, strict=False)]),
        np.concatenate([*(w.index for w in each), np.zeros(1, np.int32)]),
        np.concatenate([w.order for w in each]),
    )
    # Pinned staging would save little: lists are a few megabytes and go over once per layout.
    return DeviceLists(
        *(torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device) for a in host),
        tiles=len(each[0].middles),
    )


@functools.lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

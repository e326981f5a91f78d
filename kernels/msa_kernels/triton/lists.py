"""Tile lists on the device, in the order in which kernels walk them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from msa_kernels.plan import PartPlan
from msa_kernels.walks import Walk


@dataclass(frozen=True)
class DeviceLists:
    """``work`` int32 (heads, tiles, 4): a tile, where its entries of ``index`` begin, where its
    full tiles do (those before are partial), and where they end; tiles with the longest lists
    first. One head, unless every key/value head has lists of its own. ``index`` is int32, with one
    entry more than is listed, so that an empty last list may still be read ahead."""

    work: torch.Tensor
    index: torch.Tensor
    tiles: int


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
    work = np.stack([
        np.stack([w.order, w.pointers[w.order] + s, w.middles[w.order] + s,
                  w.pointers[w.order + 1] + s], 1)
        for w, s in zip(each, starts, strict=False)
    ])  # fmt: skip
    index = np.concatenate([*(w.index for w in each), np.zeros(1, np.int32)])
    # Pinned staging would save little: lists are a few megabytes and go over once per layout.
    return DeviceLists(
        torch.from_numpy(work.astype(np.int32)).to(device), torch.from_numpy(index).to(device),
        tiles=work.shape[1],
    )  # fmt: skip

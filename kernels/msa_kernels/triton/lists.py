"""Tile lists on the device, in the order in which kernels walk them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from msa_kernels.blocks import TileLists
from msa_kernels.plan import PartPlan


@dataclass(frozen=True)
class DeviceLists:
    """Row ``t`` visits ``index[pointers[t]:pointers[t + 1]]``; tiles before ``middles[t]`` are
    partial, the rest full. ``order`` names the rows, longest first. int32 each; ``index`` has one
    entry more than is listed, so that an empty last row may still be read ahead."""

    pointers: torch.Tensor
    middles: torch.Tensor
    index: torch.Tensor
    order: torch.Tensor
    tiles: int


def device_lists(
    plan: PartPlan, block_q: int, block_k: int, device: torch.device, transposed: bool = False
) -> DeviceLists:
    """Lists of ``plan`` on ``device``, built once and kept with the plan."""

    def make() -> DeviceLists:
        lists = plan.tiles(block_q, block_k)
        return _upload(lists.transposed if transposed else lists, device)

    return plan.kept(("device lists", block_q, block_k, device, transposed), make)


def _upload(lists: TileLists, device: torch.device) -> DeviceLists:
    length = np.diff(lists.ptr)
    owner = np.repeat(np.arange(lists.q_tiles), length)
    walk = np.lexsort((lists.index, lists.full, owner))
    partial = np.bincount(owner[~lists.full], minlength=lists.q_tiles)
    index = np.append(lists.index[walk], np.int32(0))
    order = np.argsort(-length, kind="stable")
    host = (lists.ptr, lists.ptr[:-1] + partial, index, order)
    # Pinned staging would save little: lists are a few megabytes and go over once per layout.
    return DeviceLists(
        *(torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device) for a in host),
        tiles=lists.q_tiles,
    )

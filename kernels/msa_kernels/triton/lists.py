"""Tile lists on the device, in the order in which kernels walk them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from msa_kernels.blocks import TileLists
from msa_kernels.plan import PartPlan


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


def device_lists(
    plan: PartPlan, block_q: int, block_k: int, device: torch.device, transposed: bool = False
) -> DeviceLists:
    """Lists of ``plan`` on ``device``, built once and kept with the plan."""

    def make() -> DeviceLists:
        heads = plan.heads or (plan,)
        if transposed:
            return _upload([one.tiles_by_key(block_q, block_k) for one in heads], device)
        return _upload([one.tiles(block_q, block_k) for one in heads], device)

    return plan.kept(("device lists", block_q, block_k, device, transposed), make)


def _upload(each: Sequence[TileLists], device: torch.device) -> DeviceLists:
    hosts = [_walk(lists) for lists in each]
    starts = np.cumsum([0, *(len(index) for _, _, index, _ in hosts)])
    if starts[-1] >= 1 << 31:
        raise ValueError(f"{starts[-1]} tiles over all heads exceed 32-bit pointers")
    pointers, middles, index, order = zip(*hosts, strict=True)
    host = (
        np.concatenate([p + s for p, s in zip(pointers, starts, strict=False)]),
        np.concatenate([m + s for m, s in zip(middles, starts, strict=False)]),
        np.concatenate([*index, np.zeros(1, np.int32)]),
        np.concatenate(order),
    )
    # Pinned staging would save little: lists are a few megabytes and go over once per layout.
    return DeviceLists(
        *(torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device) for a in host),
        tiles=each[0].q_tiles,
    )


def _walk(lists: TileLists) -> tuple[np.ndarray, ...]:
    """Pointers, middles, entries with the partial ones of each row first, and rows by length."""
    length = np.diff(lists.ptr)
    before = np.concatenate([[0], np.cumsum(~lists.full, dtype=np.int32)])
    middle = lists.ptr[:-1] + np.diff(before[lists.ptr])
    partial = np.flatnonzero(~lists.full)
    full = np.flatnonzero(lists.full)
    walk = np.empty_like(lists.index)
    # The n-th partial entry of all follows those before it, and the full entries of earlier rows.
    row = np.repeat(np.arange(lists.q_tiles, dtype=np.int32), length)
    fulls = lists.ptr - before[lists.ptr]
    walk[np.arange(len(partial)) + fulls[row[partial]]] = lists.index[partial]
    partials = before[lists.ptr][1:]
    walk[np.arange(len(full)) + partials[row[full]]] = lists.index[full]
    order = np.argsort(-length, kind="stable")
    return lists.ptr.astype(np.int64), middle, walk, order

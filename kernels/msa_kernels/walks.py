"""Walks: tile lists in the order in which GPU kernels read them, partial tiles first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msa_kernels.blocks import Ints, TileLists


@dataclass(frozen=True)
class Walk:
    """Tile ``t`` visits ``index[pointers[t]:pointers[t + 1]]``: before ``middles[t]`` tiles that
    need the element mask, from there on full ones, each ascending. int64, int64, int32."""

    pointers: Ints
    middles: Ints
    index: NDArray[np.int32]

    @classmethod
    def of(cls, lists: TileLists) -> Walk:
        full = lists.full
        before = np.concatenate([[0], np.cumsum(~full, dtype=np.int32)])[lists.ptr]
        begins = lists.ptr.astype(np.int64)
        count = np.diff(before)
        index = np.empty_like(lists.index)
        # The n-th partial entry of all follows those before it, and the full entries of earlier
        # tiles; likewise the n-th full one.
        at = np.repeat((begins - before)[:-1].astype(np.int32), count)
        at += _numbers(len(at))
        index[at] = lists.index[~full]
        at = np.repeat(before[1:], np.diff(begins) - count)
        at += _numbers(len(at))
        index[at] = lists.index[full]
        return cls(begins, begins[:-1] + count, index)

    @property
    def order(self) -> Ints:
        """Tiles by the length of their lists, longest first."""
        return np.argsort(-np.diff(self.pointers), kind="stable")


def written(first: Ints, count: Ints) -> NDArray[np.int32]:
    """``first[n], first[n] + 1, ...``, ``count[n]`` of them, for every ``n`` in turn.

    Raises ValueError where there are more than 32-bit pointers can name.
    """
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    if total >= 1 << 31:
        raise ValueError(f"{total} tiles exceed 32-bit pointers: use larger tiles")
    made = np.repeat((first - (ends - count)).astype(np.int32), count)
    made += _numbers(total)
    return made


def _numbers(count: int) -> NDArray[np.int32]:
    """``0, 1, ...``, to be read only. Short ones are views of one array: fresh memory for every
    list costs more than what is computed with it."""
    return _SHARED[:count] if count <= len(_SHARED) else np.arange(count, dtype=np.int32)


_SHARED = np.arange(1 << 20, dtype=np.int32)


def pointers(per_tile: NDArray[np.number]) -> Ints:
    """Where each tile's entries begin, and the end of all."""
    return np.concatenate([[0], np.cumsum(per_tile)]).astype(np.int64)

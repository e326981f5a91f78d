"""Block lists as stretches of neighbouring blocks, in both directions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from msa_kernels.memo import by_identity

Ints = NDArray[np.int64]
Rows = tuple[tuple[int, ...], ...]
"""Key blocks of every query block, ascending."""


@by_identity(kept=16)
def stretches(rows: Rows) -> tuple[Ints, Ints, Ints]:
    """Where each row's stretches begin (rows + 1,), and their first and last block + 1."""
    ptr = np.cumsum([0, *(len(row) for row in rows)])
    listed = np.fromiter((k for row in rows for k in row), np.int64, int(ptr[-1]))
    begins = np.diff(listed, prepend=-2) != 1
    begins[ptr[:-1][ptr[:-1] < len(listed)]] = True
    at = np.flatnonzero(begins)
    last = np.append(at[1:], len(listed))[: len(at)] - 1
    return np.searchsorted(at, ptr), listed[at], listed[last] + 1


@by_identity(kept=16)
def turned(rows: Rows) -> tuple[Ints, Ints, Ints]:
    """:func:`stretches` by key block, up to the last one that is listed: of the query blocks
    whose rows name it."""
    width = 1 + max((row[-1] for row in rows if row), default=-1)
    by_key: list[list[int]] = [[] for _ in range(width)]
    for q, row in enumerate(rows):
        for k in row:
            by_key[k].append(q)
    return stretches(tuple(map(tuple, by_key)))

"""Patterns, layouts and brute force shared by the tests of context parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from msa_kernels.pattern import (
    Block,
    BlockList,
    Columns,
    Dense,
    Dilated,
    Documents,
    Pattern,
    PerHead,
    SinkWindow,
    Union,
    Window,
)
from msa_workloads.context.layout import Layout, contiguous, from_chunks, residues, zigzag

LISTED = ((0,), (0, 1), (0, 2), (1, 3), (0, 4), (5,), (0, 6), (2, 3, 7), (8,), (1, 9), (3, 10))

PATTERNS: dict[str, Pattern] = {
    "dense": Dense(),
    "bidirectional": Dense(causal=False),
    "window": Window(9),
    "window of one": Window(1),
    "window both ways": Window(6, causal=False),
    "dilated": Dilated(4),
    "dilated window": Dilated(3, 4),
    "block": Block(7),
    "columns": Columns(6, 2),
    "sinks": SinkWindow(7, 3),
    "listed": BlockList(8, LISTED),
    "listed both ways": BlockList(8, ((3,), *LISTED[1:]), causal=False),
    "union": Union((Window(3), Dilated(4))),
    "union of three": Union((Block(5), Columns(5, 1), Dilated(3, 6))),
    "limited": Dilated(4).limited(21),
}
PER_HEAD: dict[str, Pattern] = {
    "window and dilated": PerHead((Window(5), Dilated(4))),
    "dense and sinks": PerHead((Dense(), SinkWindow(4, 2))),
}

LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": contiguous,
    "rotated": lambda tokens, ranks: contiguous(tokens, ranks, 1, 2),
    "zigzag": zigzag,
    "residues": lambda tokens, ranks: residues(tokens, ranks, 4),
    "residues, contiguous": lambda tokens, ranks: residues(tokens, ranks, 4, "contiguous"),
    "chunks": lambda tokens, ranks: scattered(tokens, ranks),
    "split": lambda tokens, ranks: contiguous(tokens, 1, ranks).split(ranks),
}


def scattered(tokens: int, ranks: int) -> Layout:
    """Three chunks a rank, in an order that no rule would choose."""
    size = -(-tokens // (3 * ranks))
    numbers = sorted(range(3 * ranks), key=lambda n: (n * 7 % (3 * ranks), n))
    if ranks % 7 == 0:
        numbers = list(range(3 * ranks))[::-1]
    return from_chunks(tokens, size, [numbers[r::ranks] for r in range(ranks)])


def seen(pattern: Pattern, documents: Sequence[int], padded: int) -> np.ndarray:
    """The predicate on all pairs, bool (padded, padded): what everything is checked against."""
    total = sum(documents)
    at = np.arange(total)
    out = np.zeros((padded, padded), bool)
    packed = pattern & Documents(tuple(documents))
    out[:total, :total] = packed.allows(at[:, None], at[None, :])
    return out


def lengths(total: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Documents that end at the given cuts and at ``total``."""
    edges = sorted({0, total, *(c for c in cuts if 0 < c < total)})
    return tuple(b - a for a, b in itertools.pairwise(edges))

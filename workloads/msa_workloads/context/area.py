"""Area: how many keys each query attends, exactly, by arithmetic on whole arrays of positions.

The keys that one rule shows to a query are an interval, thinned by a step and by columns; a union
of rules is counted by inclusion and exclusion over their intersections, which are of the same
form. What is not (tables, many rules) is counted row by row on the bits of an integer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from msa_kernels.pattern import Pattern
from msa_kernels.rules import Rule, union_row

from msa_workloads.context.intervals import Bounds, Ints

MAX_RULES = 6
"""Unions of more rules are counted row by row: 2 ** 6 intersections cost as much."""


def row_area(pattern: Pattern, lengths: Sequence[int], padded: int) -> Ints:
    """Keys attended by every token of a packed sequence, int64 (padded,); 0 for padding.

    ``pattern`` is that of one head (ask ``for_group`` first); ``lengths`` are the documents'.
    """
    docs = Bounds.of(lengths)
    total = int(docs.stop[-1]) if len(docs.stop) else 0
    area = np.zeros(padded, np.int64)
    document, position = docs.at(np.arange(total))
    area[:total] = _counts(pattern.rules(), position, docs.length[document])
    return area


def _counts(rules: Sequence[Rule], i: Ints, length: Ints) -> Ints:
    rules = [rule for rule in rules if not rule.empty]
    if len(rules) > MAX_RULES or any(rule.table is not None for rule in rules):
        return _row_by_row(rules, i, length)
    total = np.zeros_like(i)
    for size in range(1, len(rules) + 1):
        for some in itertools.combinations(rules, size):
            columns = {rule.columns for rule in some if rule.columns is not None}
            if len(columns) > 1:
                return _row_by_row(rules, i, length)
            total += (-1) ** (size + 1) * _intersection(some, next(iter(columns), None), i, length)
    return total


def _row_by_row(rules: Sequence[Rule], i: Ints, length: Ints) -> Ints:
    pairs, where = np.unique(np.stack([i, length]), axis=1, return_inverse=True)
    counts = [union_row(rules, int(a), int(n)).bit_count() for a, n in pairs.T]
    return np.asarray(counts, np.int64)[where.reshape(-1)]


def _intersection(
    rules: Sequence[Rule], columns: tuple[int, int] | None, i: Ints, length: Ints
) -> Ints:
    """Keys that every one of ``rules`` allows."""
    low, high = np.zeros_like(i), length.copy()
    for rule in rules:
        if rule.hi is not None:
            np.maximum(low, i - rule.hi + 1, out=low)
        if rule.lo is not None:
            np.minimum(high, i - rule.lo + 1, out=high)
        if rule.sinks is not None:
            np.minimum(high, rule.sinks, out=high)
        if rule.block is not None:
            start = i // rule.block * rule.block
            np.maximum(low, start, out=low)
            np.minimum(high, start + rule.block, out=high)
    np.maximum(high, low, out=high)
    step = math.lcm(*(rule.step for rule in rules))
    if columns is None:
        return _below(high, i, step) - _below(low, i, step)
    size, count = columns
    total = np.zeros_like(i)
    if step == 1:
        for edge, sign in ((high, 1), (low, -1)):
            total += sign * (edge // size * count)
            total += sign * np.maximum(0, edge % size - (size - count))
        return total
    # A column at offset o holds keys that are o modulo size; with those that are i modulo step
    # they share one residue modulo the least common multiple, or none.
    shared = math.gcd(size, step)
    period, inverse = math.lcm(size, step), pow(size // shared, -1, step // shared)
    for offset in range(size - count, size):
        apart = i - offset
        residue = offset + size * (apart // shared * inverse % (step // shared))
        found = _below(high, residue, period) - _below(low, residue, period)
        total += np.where(apart % shared == 0, found, 0)
    return total


def _below(stop: Ints, residue: Ints, step: int) -> Ints:
    """Numbers in ``[0, stop)`` that are ``residue`` modulo ``step``."""
    if step == 1:
        return stop
    return (stop - residue % step + step - 1) // step

"""Reach: the exact set of keys that a set of queries sees, or of queries that see a set of keys.

Derived from a pattern's rules by interval arithmetic: the cost grows with the number of
stretches, not with the number of tokens, except where a rule leaves gaps between the keys of
neighbouring queries and the gaps have to be listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from msa_kernels.rules import Rule

from msa_workloads.context.intervals import (
    NONE,
    Bounds,
    Ints,
    Line,
    Stretches,
    ceil_div,
    expand,
    union,
)


def modulus(rules: Iterable[Rule], stride: int) -> int:
    """The classes in which all sets of these rules are intervals."""
    return math.lcm(stride, *(rule.step for rule in rules))


def keys_seen(
    rules: Sequence[Rule], queries: Stretches, docs: Bounds, line: Line
) -> tuple[Ints, Ints]:
    """Keys that any of the queries sees, united per tag: ``[start, stop)`` on the line."""
    return _united([_reach(rule, queries, docs) for rule in rules], docs, line)


def queries_seeing(
    rules: Sequence[Rule], keys: Stretches, docs: Bounds, line: Line
) -> tuple[Ints, Ints]:
    """Queries that see any of the keys, united per tag: ``[start, stop)`` on the line."""
    return _united([_reach(rule, keys, docs, mirrored=True) for rule in rules], docs, line)


def _united(found: Sequence[Stretches], docs: Bounds, line: Line) -> tuple[Ints, Ints]:
    put = [line.put(s, docs) for s in found]
    return union(
        np.concatenate([NONE, *(start for start, _ in put)]),
        np.concatenate([NONE, *(stop for _, stop in put)]),
    )


def _reach(rule: Rule, sources: Stretches, docs: Bounds, mirrored: bool = False) -> Stretches:
    """What one rule lets the sources reach; with ``mirrored`` sources are keys, else queries."""
    if rule.empty:
        return sources[np.empty(0, np.int64)]
    if rule.columns is not None and rule.step > 1:
        raise ValueError(f"a rule with both step and columns is not known: {rule}")
    low = np.zeros_like(sources.first)
    high = docs.length[sources.document]
    if mirrored:
        if rule.sinks is not None:
            at = np.arange(len(sources.first))
            sources, keep = sources.within(at, low, np.minimum(high, rule.sinks))
            low, high = low[keep], high[keep]
        if rule.columns is not None:
            sources = _only_columns(sources, rule.columns)
            low, high = np.zeros_like(sources.first), docs.length[sources.document]
    elif rule.sinks is not None:
        high = np.minimum(high, rule.sinks)
    if rule.block is not None:
        size = rule.block
        at, number = _numbers(sources, size)
        sources, keep = sources.within(at, number * size, (number + 1) * size)
        at, number = at[keep], number[keep]
        low, high = np.maximum(low[at], number * size), np.minimum(high[at], (number + 1) * size)
    if rule.table is not None:
        sources, low, high = _table(rule.table, sources, low, high, mirrored)
    reached = _band(rule, sources, low, high, mirrored)
    if rule.columns is not None and not mirrored:
        reached = _cut_columns(reached, rule.columns)
    return reached


def _band(rule: Rule, s: Stretches, low: Ints, high: Ints, mirrored: bool) -> Stretches:
    """Targets at the distances that the band allows, clipped to ``[low, high)``.

    In class coordinates modulo ``step`` a source at ``x`` reaches ``x + near .. x + far``.
    Neighbouring sources lie ``gap`` apart: when a source reaches at least that many targets the
    union is one interval, otherwise each source has its own.
    """
    step = rule.step
    index = np.arange(len(s.first))
    parts = step // math.gcd(s.stride, step)
    if parts > 1:
        index = np.repeat(index, np.minimum(parts, s.count))
        s = s.split(parts)
    residue, gap = s.first % step, s.stride // step
    least = ceil_div(low[index] - residue, step)
    most = ceil_div(high[index] - residue, step)
    near, far = (rule.lo, None if rule.hi is None else rule.hi - 1)
    if not mirrored:
        near, far = (None if far is None else -far), (None if near is None else -near)
    near = None if near is None else -(-near // step)
    far = None if far is None else far // step
    first, last = s.first // step, s.last // step
    tag, document = s.tag, s.document
    if near is not None and far is not None and far - near + 1 < gap:
        if far < near:
            return s[np.empty(0, np.int64)]
        at, within = expand(s.count)
        first = last = first[at] + within * gap
        tag, document, residue = tag[at], document[at], residue[at]
        least, most = least[at], most[at]
    begin = least if near is None else np.maximum(least, first + near)
    end = most if far is None else np.minimum(most, last + far + 1)
    keep = end > begin
    return Stretches(
        tag[keep], document[keep], (residue + begin * step)[keep], (end - begin)[keep], step
    )


def _numbers(s: Stretches, size: int) -> tuple[Ints, Ints]:
    """Every block of ``size`` positions that a stretch may touch: its stretch, and its number."""
    begin = s.first // size
    at, within = expand(s.last // size - begin + 1)
    return at, begin[at] + within


def _table(
    table: tuple[int, tuple[tuple[int, ...], ...]],
    s: Stretches,
    low: Ints,
    high: Ints,
    mirrored: bool,
) -> tuple[Stretches, Ints, Ints]:
    """Sources cut at the table's blocks, each once for every block that its own one lists."""
    size, rows = table
    pointers, listed = _lists(rows, mirrored)
    at, number = _numbers(s, size)
    known = number < len(pointers) - 1
    at, number = at[known], number[known]
    again, within = expand(pointers[number + 1] - pointers[number])
    at, number = at[again], number[again]
    target = listed[pointers[number] + within]
    cut, keep = s.within(at, number * size, (number + 1) * size)
    at, target = at[keep], target[keep]
    return cut, np.maximum(low[at], target * size), np.minimum(high[at], (target + 1) * size)


@lru_cache(maxsize=16)
def _lists(rows: tuple[tuple[int, ...], ...], mirrored: bool) -> tuple[Ints, Ints]:
    """The table in compressed rows; by key block when mirrored."""
    q = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    k = np.fromiter((k for row in rows for k in row), np.int64, len(q))
    if mirrored:
        order = np.argsort(k, kind="stable")
        q, k = k[order], q[order]
    return np.searchsorted(q, np.arange(int(q.max(initial=-1)) + 2)), k


def _only_columns(s: Stretches, columns: tuple[int, int]) -> Stretches:
    """The positions of the stretches that are columns, as stretches of stride 1."""
    if s.stride > 1:
        at, within = expand(s.count)
        first = s.first[at] + within * s.stride
        s = Stretches(s.tag[at], s.document[at], first, np.ones_like(first), 1)
    return _cut_columns(s, columns)


def _cut_columns(s: Stretches, columns: tuple[int, int]) -> Stretches:
    length, count = columns
    at, number = _numbers(s, length)
    end = (number + 1) * length
    return s.within(at, end - count, end)[0]

"""Rules: the one form in which every sparse pattern is stated.

A :class:`Rule` is a conjunction of simple conditions on a query position ``i`` and a key position
``j``; a pattern is the union of its rules. Exact pair counts, tile lists, communication ranges and
kernel masks are all derived from rules, so a new pattern kind only has to say its rules.

Pure Python integers and no imports beyond the standard library. ``Rule.allows`` uses ``&``, ``|``,
``~``-free comparisons and integer arithmetic only, so it serves ints, NumPy arrays, torch tensors
and a FlexAttention mask alike.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

FARTHEST = 1 << 30
"""Positions of the rows of tensors are below it, and as many before 0 where queries outnumber
keys: distances and products with one fit the 32 bits in which kernels compare them."""


@dataclass(frozen=True)
class Rule:
    """``lo <= i - j < hi`` and every other condition that is set.

    ``lo=None`` leaves keys after the query visible (bidirectional); ``hi=None`` has no far end.
    """

    lo: int | None = 0
    hi: int | None = None
    step: int = 1
    """``i`` and ``j`` are in the same residue class modulo ``step``."""
    sinks: int | None = None
    """``j < sinks``."""
    block: int | None = None
    """``i // block == j // block``."""
    columns: tuple[int, int] | None = None
    """``(l, c)``: ``j mod l >= l - c``."""
    table: tuple[int, tuple[tuple[int, ...], ...]] | None = None
    """``(size, rows)``: key block ``j // size`` is in ``rows[i // size]``."""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step must be at least 1, found {self.step}")

    @property
    def empty(self) -> bool:
        """True when the band alone shows that nothing is ever allowed."""
        band = self.lo is not None and self.hi is not None and self.lo >= self.hi
        return band or self.sinks == 0

    def allows(self, i: Any, j: Any) -> Any:
        """Whether query ``i`` sees key ``j``, element by element. Keys are at least 0."""
        ok = j >= 0
        if self.lo is not None:
            ok = ok & (i - j >= self.lo)
        if self.hi is not None:
            ok = ok & (i - j < self.hi)
        if self.step > 1:
            ok = ok & ((i - j) % self.step == 0)
        if self.sinks is not None:
            ok = ok & (j < self.sinks)
        if self.block is not None:
            ok = ok & (i // self.block == j // self.block)
        if self.columns is not None:
            length, count = self.columns
            ok = ok & (j % length >= length - count)
        if self.table is not None:
            size, rows = self.table
            hit = j < 0
            for q, keys in enumerate(rows):
                row = j < 0
                for k in keys:
                    row = row | (j // size == k)
                hit = hit | ((i // size == q) & row)
            ok = ok & hit
        return ok

    def span(self, first: int, last: int, n: int) -> tuple[int, int]:
        """Smallest ``[start, stop)`` holding every key of ``range(n)`` that queries
        ``first..last`` (inclusive) see under the band, sink and block conditions."""
        start = 0 if self.hi is None else max(0, first - self.hi + 1)
        stop = n if self.lo is None else min(n, last - self.lo + 1)
        if self.sinks is not None:
            stop = min(stop, self.sinks)
        if self.block is not None:
            start = max(start, first // self.block * self.block)
            stop = min(stop, (last // self.block + 1) * self.block)
        return start, max(start, stop)

    def row(self, i: int, n: int) -> int:
        """Keys of ``range(n)`` visible from query ``i``, as the bits of an integer."""
        start, stop = self.span(i, i, n)
        if start >= stop:
            return 0
        if self.step > 1:
            bits = progression(start + (i - start) % self.step, stop, self.step)
        else:
            bits = interval(start, stop)
        if self.columns is not None:
            length, count = self.columns
            bits &= _column_bits(length, count, 1 << (stop - 1).bit_length())
        if self.table is not None:
            size, rows = self.table
            q = i // size
            keys = rows[q] if 0 <= q < len(rows) else ()
            bits &= functools.reduce(
                lambda seen, k: seen | interval(k * size, (k + 1) * size), keys, 0
            )
        return bits

    @property
    def period(self) -> int:
        """Rows ``i`` and ``i + period`` look alike far from the start."""
        return math.lcm(self.step, self.block or 1, self.columns[0] if self.columns else 1)

    @property
    def reach(self) -> int:
        """Distance beyond which only conditions that repeat with ``period`` and sinks matter."""
        return max(0, self.hi or 0, self.lo or 0) + (self.block or 0)

    def folded(self, fold: int) -> Rule | None:
        """This rule between members of one residue class modulo ``fold``, in class coordinates.

        With ``i = a + fold * u`` and ``j = a + fold * v`` (``0 <= a < fold``) the result speaks
        of ``u`` and ``v``. None when the answer would depend on ``a``.
        """
        if fold == 1:
            return self
        if self.table is not None or self.columns is not None or self.sinks is not None:
            return None
        if self.block is not None and self.block % fold:
            return None
        step = self.step // math.gcd(self.step, fold)
        return Rule(
            lo=None if self.lo is None else -(-self.lo // fold),
            hi=None if self.hi is None else -(-self.hi // fold),
            step=step,
            block=None if self.block is None else self.block // fold,
        )

    def without(self, other: Rule) -> Rule | None:
        """``self`` minus ``other`` where that is one rule again, else None."""
        if replace(other, lo=None, hi=None) != Rule(lo=None):
            return None
        if _at_least(self.lo, other.lo):
            if other.hi is None:
                return replace(self, lo=0, hi=0)
            return replace(self, lo=other.hi if self.lo is None else max(self.lo, other.hi))
        if _at_most(self.hi, other.hi):
            low = other.lo
            assert low is not None
            return replace(self, hi=low if self.hi is None else min(self.hi, low))
        return None

    def limited(self, window: int) -> Rule:
        """This rule within the last ``window`` tokens, the query's own included."""
        return replace(self, hi=window if self.hi is None else min(self.hi, window))

    def bounded(self, end: int) -> Rule:
        """What this rule says of queries and keys less than ``end`` apart and at positions below
        it, without a number above ``end``: a window larger than any distance is no window."""
        lo = None if self.lo is not None and self.lo <= -end else self.lo
        hi = None if self.hi is not None and self.hi >= end else self.hi
        if (lo is not None and lo >= end) or (hi is not None and hi <= -end):
            return _NOTHING
        rule = replace(self, lo=lo, hi=hi)
        if self.step >= end:  # The only multiple of it that is a distance is 0.
            rule = replace(rule, lo=max(0, lo or 0), hi=1 if hi is None else min(1, hi), step=1)
        if self.sinks is not None and self.sinks >= end:
            rule = replace(rule, sinks=None)
        if self.block is not None and self.block > end:
            rule = replace(rule, block=end)
        if self.columns is not None and self.columns[0] > end:
            first = self.columns[0] - self.columns[1]
            if first >= end:
                return _NOTHING
            rule = replace(rule, columns=(end, end - first))
        if self.table is not None:
            rule = replace(rule, table=_table_below(*self.table, end))
        return rule


_NOTHING = Rule(lo=0, hi=0)


def _table_below(
    size: int, rows: tuple[tuple[int, ...], ...], end: int
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """A block list without the blocks that begin at ``end`` or after it."""
    blocks = -(-end // size)
    if len(rows) > blocks or any(row and row[-1] >= blocks for row in rows):
        rows = tuple(row[: bisect.bisect_left(row, blocks)] for row in rows[:blocks])
    return min(size, end), rows


@dataclass(frozen=True)
class Part:
    """One pass of a kernel: keys that any of ``rules`` allows and none of ``minus`` does.

    With ``fold > 1`` the part runs inside each residue class modulo ``fold`` of the sequence and
    all rules are in class coordinates. Different parts of one pattern never share a pair.
    """

    fold: int
    rules: tuple[Rule, ...]
    minus: tuple[Rule, ...] = ()

    def allows(self, i: Any, j: Any) -> Any:
        ok = any_allows(self.rules, i, j)
        for rule in self.minus:
            ok = ok & (rule.allows(i, j) ^ True)
        return ok


def lower(rules: Iterable[Rule]) -> tuple[Part, ...]:
    """Split a union of rules into disjoint parts, dilated ones folded into residue classes.

    Rules of the same fold share one part (one pass reads each key tile once). A part named later
    gives up what an earlier one has, analytically where the difference of two bands is a band.
    A dilated rule whose overlap with an earlier part depends on the residue joins the unfolded
    part instead.
    """
    groups: dict[int, list[Rule]] = {}
    for rule in rules:
        if not rule.empty:
            groups.setdefault(rule.step, []).append(rule)
    while stuck := next((fold for fold in groups if not _foldable(groups, fold)), None):
        groups.setdefault(1, []).extend(groups.pop(stuck))

    parts: list[Part] = []
    earlier: list[Rule] = []
    for fold, members in groups.items():
        keep, minus = _fold_all(members, fold), []
        for taken in _fold_all(earlier, fold):
            rest = [k.without(taken) for k in keep]
            if None in rest:
                minus.append(taken)
            else:
                keep = [r for r in rest if r is not None and not r.empty]
        if keep:
            parts.append(Part(fold, tuple(keep), tuple(minus)))
        earlier.extend(members)
    return tuple(parts)


def _foldable(groups: dict[int, list[Rule]], fold: int) -> bool:
    """Every rule of this group and of those before it has a form that no residue changes."""
    before = itertools.takewhile(lambda f: f != fold, groups)
    rules = (*groups[fold], *(r for f in before for r in groups[f]))
    return all(rule.folded(fold) is not None for rule in rules)


def _fold_all(rules: Iterable[Rule], fold: int) -> list[Rule]:
    folded = (rule.folded(fold) for rule in rules)
    return [r for r in folded if r is not None and not r.empty]


def any_allows(rules: Iterable[Rule], i: Any, j: Any) -> Any:
    """Union of the rules' predicates; False everywhere when there are none."""
    nothing = (j < 0) & (j >= 0) & (i < j)
    return functools.reduce(lambda ok, rule: ok | rule.allows(i, j), rules, nothing)


def union_row(rules: Iterable[Rule], i: int, n: int) -> int:
    bits = 0
    for rule in rules:
        bits |= rule.row(i, n)
    return bits


def interval(start: int, stop: int) -> int:
    """Bits ``start <= b < stop``."""
    return ((1 << (stop - start)) - 1) << start if stop > start else 0


def progression(start: int, stop: int, step: int) -> int:
    """Bits ``start, start + step, ...`` below ``stop``."""
    count = -(-(stop - start) // step)
    if count <= 0:
        return 0
    return (_comb(step, (count - 1).bit_length()) & interval(0, count * step)) << start


@functools.lru_cache(maxsize=256)
def _comb(step: int, doublings: int) -> int:
    """Bits ``0, step, 2 * step, ...``, ``2 ** doublings`` of them."""
    bits = 1
    for n in range(doublings):
        bits |= bits << (step << n)
    return bits


@functools.lru_cache(maxsize=64)
def _column_bits(length: int, count: int, n: int) -> int:
    return functools.reduce(
        lambda bits, c: bits | progression(c, n, length), range(length - count, length), 0
    )


def _at_least(value: int | None, bound: int | None) -> bool:
    return bound is None or (value is not None and value >= bound)


def _at_most(value: int | None, bound: int | None) -> bool:
    return bound is None or (value is not None and value <= bound)

"""Pair counts: exactly how many pairs a union of rules attends, in closed form where one exists.

Pairs of a union are those of its first rule and of the others, less those that both attend; and
what two rules attend together is nearly always a rule again. One rule is an arithmetic series for
every block and run of columns, few of which differ. Pure Python integers of any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from msa_kernels.rules import Rule, union_row

Table = tuple[int, tuple[tuple[int, ...], ...]]


def union_pairs(rules: Iterable[Rule], n: int) -> int:
    """Exact number of pairs that any of ``rules`` allows among ``n`` positions.

    In closed form unless two rules have blocks, columns or block lists that do not fit into one
    another: those are counted row by row, but only until the pattern has settled and two periods
    have passed; from there each residue class of rows grows by a constant per period.
    """
    if n < 1:
        return 0
    near = [rule.bounded(n) for rule in rules]
    closed = _union(near, n)
    return _by_rows(near, n) if closed is None else closed


def _union(rules: list[Rule], n: int) -> int | None:
    """Pairs of a union, or None where two rules have no rule in common."""
    rules = _apart(rules)
    if not rules:
        return 0
    first, rest = rules[0], rules[1:]
    shared = [meet(first, rule) for rule in rest]
    both = [rule.bounded(n) for rule in shared if rule is not None]
    if len(both) < len(shared):
        return None
    alone, others, twice = _pairs(first, n), _union(rest, n), _union(both, n)
    if alone is None or others is None or twice is None:
        return None
    return alone + others - twice


def _apart(rules: list[Rule]) -> list[Rule]:
    """Without rules that allow nothing, and without those that lie in another one."""
    kept: list[Rule] = []
    for rule in dict.fromkeys(rules):
        if rule.empty or any(meet(rule, other) == rule for other in kept):
            continue
        kept = [other for other in kept if meet(rule, other) != other]
        kept.append(rule)
    return kept


def meet(a: Rule, b: Rule) -> Rule | None:
    """The rule of the pairs that both allow, or None where that is no single rule."""
    block, columns, table = a.block or b.block, a.columns or b.columns, a.table or b.table
    if a.block is not None and b.block is not None:
        block = min(a.block, b.block)
        if max(a.block, b.block) % block:
            return None
    if a.columns is not None and b.columns is not None:
        if a.columns[0] != b.columns[0]:
            return None
        columns = min(a.columns, b.columns)
    if a.table is not None and b.table is not None and a.table != b.table:
        if a.table[0] != b.table[0]:
            return None
        pairs = zip(a.table[1], b.table[1], strict=False)
        table = a.table[0], tuple(tuple(sorted({*mine} & {*other})) for mine, other in pairs)
    return Rule(
        _largest(a.lo, b.lo), _least(a.hi, b.hi), math.lcm(a.step, b.step),
        _least(a.sinks, b.sinks), block, columns, table,
    )  # fmt: skip


def _pairs(rule: Rule, n: int) -> int | None:
    rule = rule.bounded(n)
    if rule.empty:
        return 0
    if rule.table is not None:
        return _table_pairs(rule, rule.table, n)
    if rule.block is None and rule.columns is None and rule.sinks is None:
        return _band_pairs(rule, n)
    if rule.lo is None or rule.lo < 0:
        return None
    keys = n if rule.sinks is None else min(n, rule.sinks)
    block = rule.block or n
    whole = keys // block
    differ = 1
    if rule.columns is not None:
        length, count = rule.columns
        differ = length // math.gcd(length, block)
        inner = 1 if rule.step == 1 else 1 + min(rule.step, block // length)
        if keys // length < min(differ, whole) * inner:
            return _by_runs(rule, length, count, keys, n)
    total = 0
    for first in range(min(differ, whole)):
        alike = -(-(whole - first) // differ)
        total += alike * _Box(rule, first * block, (first + 1) * block, n).pairs
    if whole * block < keys:
        total += _Box(rule, whole * block, min(n, (whole + 1) * block), keys).pairs
    return total


def _by_runs(rule: Rule, length: int, count: int, keys: int, n: int) -> int | None:
    """Pairs of a rule with columns, from those of one without, run of columns by run."""
    plain = replace(rule, columns=None)
    total = 0
    for first in range(length - count, keys, length):
        for sign, end in ((1, min(keys, first + count)), (-1, first)):
            found = _pairs(replace(plain, sinks=end), n)
            if found is None:
                return None
            total += sign * found
    return total


@dataclass(frozen=True)
class _Box:
    """Queries and keys of positions ``[start, end)``, keys below ``sinks``: all of one block."""

    rule: Rule
    start: int
    end: int
    sinks: int

    @property
    def pairs(self) -> int:
        assert self.rule.lo is not None
        far = 0 if self.rule.hi is None else self._beyond(self.rule.hi)
        return self._beyond(self.rule.lo) - far

    def _beyond(self, distance: int) -> int:
        """Pairs at ``distance`` and more. A key ``j`` has one query for every multiple of the
        step in ``[distance, end - j)``."""
        stop = min(self.end - distance, self.sinks)
        if stop <= self.start:
            return 0
        nearer = -(-distance // self.rule.step)
        if self.rule.columns is None:
            return self._of(self.start, stop, nearer)
        length, count = self.rule.columns
        if self.rule.step == 1:
            keys, places = (
                a - b
                for a, b in zip(
                    _columns(length, count, stop), _columns(length, count, self.start), strict=True
                )
            )
            return (self.end - distance) * keys - places
        return self._of_runs(length, count, stop, nearer)

    def _of(self, first: int, stop: int, nearer: int) -> int:
        """Pairs of the keys ``[first, stop)``, each without the ``nearer`` ones."""

        def below(m: int) -> int:
            """Sum of ``ceil(k / step)`` over ``1 <= k <= m``."""
            full, rest = divmod(m, self.rule.step)
            return self.rule.step * full * (full + 1) // 2 + rest * (full + 1)

        return below(self.end - first) - below(self.end - stop) - (stop - first) * nearer

    def _of_runs(self, length: int, count: int, stop: int, nearer: int) -> int:
        """Pairs of runs of columns: whole ones that are a period apart lose a constant each."""
        first = self.start // length
        total = 0
        whole = range(first + (self.start % length > length - count), stop // length)
        for run in {first, stop // length}.difference(whole[:1]):
            low = max(self.start, (run + 1) * length - count)
            high = min(stop, (run + 1) * length)
            if low < high:
                total += self._of(low, high, nearer)
        period = self.rule.step // math.gcd(self.rule.step, length)
        lost = count * length * period // self.rule.step
        for run in whole[:period]:
            terms = -(-(whole.stop - run) // period)
            base = self._of((run + 1) * length - count, (run + 1) * length, nearer)
            total += terms * base - lost * terms * (terms - 1) // 2
        return total


def _columns(length: int, count: int, stop: int) -> tuple[int, int]:
    """How many columns lie below ``stop``, and the sum of their positions."""
    full, rest = divmod(stop, length)
    more = max(0, rest - (length - count))
    run = count * (2 * length - count - 1) // 2
    begin = stop - more
    return (
        full * count + more,
        full * run + count * length * full * (full - 1) // 2
        + more * begin + more * (more - 1) // 2,
    )  # fmt: skip


def _table_pairs(rule: Rule, table: Table, n: int) -> int | None:
    """Listed blocks, whole or cut by the band."""
    if rule.step > 1 or rule.block is not None or rule.columns is not None:
        return None
    size, rows = table
    lo, hi = rule.lo, rule.hi
    keys = n if rule.sinks is None else min(n, rule.sinks)
    total = 0
    for q, row in enumerate(rows):
        q0, q1 = q * size, min(n, (q + 1) * size)
        if q0 >= n:
            break
        for k in row:
            k0, k1 = k * size, min(keys, (k + 1) * size)
            if k0 >= k1:
                break
            nearest, farthest = q0 - k1 + 1, q1 - 1 - k0
            if lo is None or nearest >= lo:
                total += (q1 - q0) * (k1 - k0)
            else:
                total += _farther(lo, q0, q1, k0, k1)
            if hi is not None and farthest >= hi:
                total -= _farther(hi, q0, q1, k0, k1)
    return total


def _farther(distance: int, q0: int, q1: int, k0: int, k1: int) -> int:
    """Pairs of a rectangle at ``distance`` and more: triangles at its four corners."""

    def triangle(side: int) -> int:
        return side * (side + 1) // 2 if side > 0 else 0

    return (
        triangle(q1 - distance - k0) - triangle(q0 - distance - k0)
        - triangle(q1 - distance - k1) + triangle(q0 - distance - k1)
    )  # fmt: skip


def _band_pairs(rule: Rule, n: int) -> int:
    """Pairs at distance d number n - |d|: an arithmetic series on either side of zero."""
    low = 1 - n if rule.lo is None else max(rule.lo, 1 - n)
    high = n if rule.hi is None else min(rule.hi, n)

    def below(distance: int) -> int:
        """Pairs at the multiples of ``step`` in ``[0, distance)``."""
        terms = -(-max(0, distance) // rule.step)
        return terms * n - rule.step * terms * (terms - 1) // 2

    if low >= high:
        return 0
    if low >= 0:
        return below(high) - below(low)
    backward = below(1 - low) - n
    return below(high) + backward if high > 0 else backward - (below(1 - high) - n)


def _by_rows(rules: list[Rule], n: int) -> int:
    if any(r.lo is None or r.lo < 0 or r.table is not None for r in rules):
        return sum(union_row(rules, i, n).bit_count() for i in range(n))
    period = math.lcm(*(r.period for r in rules))
    # From here on no row's near part touches the sinks of any rule.
    settled = max((r.reach for r in rules), default=0) + max(
        (r.sinks or 0 for r in rules), default=0
    )
    settled = -(-settled // period) * period
    explicit = min(n, settled)
    total = sum(union_row(rules, i, n).bit_count() for i in range(explicit))
    for first in range(explicit, min(n, settled + period)):
        terms = -(-(n - first) // period)
        base = union_row(rules, first, first + 1).bit_count()
        grown = union_row(rules, first + period, first + period + 1).bit_count()
        total += terms * base + (grown - base) * terms * (terms - 1) // 2
    return total


def _largest(a: int | None, b: int | None) -> int | None:
    return max((v for v in (a, b) if v is not None), default=None)


def _least(a: int | None, b: int | None) -> int | None:
    return min((v for v in (a, b) if v is not None), default=None)

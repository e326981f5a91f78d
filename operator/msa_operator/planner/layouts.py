"""Layouts: who owns which part of a sequence, and which keys travel; exact integers, no tensors.

For one document of the full length. A rank owns chunks: of the sequence itself or, where ranks own
residue classes, of its class, whose ranks are alike in all classes.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msa_kernels.pattern import BlockTopK, Pattern
from msa_kernels.rules import Rule

SHIFTS = 64
"""Positions tried for the first cut of a rotated layout."""

Chunks = tuple[tuple[int, int], ...]
"""Ranges of one rank, in units of its residue class."""


def possible_layouts(
    weights: Sequence[tuple[Pattern, int]], length: int, ranks: int
) -> Iterator[tuple[str, int, list[Chunks]]]:
    """Name, number of residue classes, and the chunks of every rank inside its class."""
    yield "contiguous", 1, _contiguous(length, ranks)
    if length >= 2 * ranks:
        yield "zigzag", 1, _zigzag(length, ranks)
    if ranks == 2 and all(map(_windowed, (rule for p, _ in weights for rule in rules_of(p)))):
        # Only a window has rows at its start that are shorter than all others.
        yield "rotated", 1, _rotated(weights, length)
    steps = {rule.step for pattern, _ in weights for rule in rules_of(pattern)} - {1}
    strides = {math.gcd(step, ranks) for step in steps} - {1}
    for stride in sorted(strides):
        shares, size = ranks // stride, -(-length // stride)
        if size >= 2 * shares:
            inner = _zigzag(size, shares) if shares > 1 else [((0, size),)]
            yield f"residues {stride}", stride, [inner[r % shares] for r in range(ranks)]


def _contiguous(length: int, ranks: int) -> list[Chunks]:
    size = -(-length // ranks)
    return [
        ((min(length, r * size), min(length, (r + 1) * size)),) for r in range(ranks)
    ]  # fmt: skip


def _zigzag(length: int, ranks: int) -> list[Chunks]:
    size = -(-length // (2 * ranks))
    cuts = [min(length, n * size) for n in range(2 * ranks + 1)]
    mirrored = [(r, 2 * ranks - 1 - r) for r in range(ranks)]
    return [tuple((cuts[n], cuts[n + 1]) for n in pair) for pair in mirrored]


def _rotated(weights: Sequence[tuple[Pattern, int]], length: int) -> list[Chunks]:
    """Rank 0 owns a middle half; the cut that makes both ranks equally busy."""
    half = -(-length // 2)

    def owned(shift: int) -> list[Chunks]:
        return [((shift, shift + half),), ((0, shift), (shift + half, length))]

    def busiest(shift: int) -> float:
        return max(
            sum(w * area(p, chunks, length, 1, 2) for p, w in weights) for chunks in owned(shift)
        )

    shifts = sorted({half // 2 * n // SHIFTS for n in range(SHIFTS)})
    return owned(min(shifts, key=busiest))


def area(pattern: Pattern, chunks: Chunks, length: int, stride: int, ranks: int) -> float:
    """Attended pairs of a rank; an even share where rows of a chunk cannot be told apart."""
    if isinstance(pattern, BlockTopK):
        return 1.0
    folded = _folded(pattern, stride)
    if not pattern.causal or (stride > 1 and folded is None):
        return pattern.pairs(length) / ranks
    inner = pattern if stride == 1 else _Folded(folded or ())
    return sum(_pairs(inner, end) - _pairs(inner, begin) for begin, end in chunks if end > begin)


@lru_cache(maxsize=1 << 14)
def _pairs(pattern: Pattern, rows: int) -> int:
    """Pairs of the first ``rows`` queries of a causal pattern: they see no later key."""
    rules = rules_of(pattern)
    if len(rules) == 1 and rules[0] == Rule(block=rules[0].block) and rules[0].block:
        full, rest = divmod(rows, rules[0].block)
        return full * rules[0].block * (rules[0].block + 1) // 2 + rest * (rest + 1) // 2
    return pattern.pairs(rows) if rows else 0


def _windowed(rule: Rule) -> bool:
    return (rule.lo is not None and rule.hi is not None) or rule.sinks is not None


def received(pattern: Pattern, chunks: Chunks, length: int, stride: int) -> float:
    """Tokens that the queries of these chunks reach and that their rank does not own.

    An upper bound for patterns with gaps, whose spans are counted whole; columns are counted by
    their share.
    """
    own = sum(end - begin for begin, end in chunks)
    if isinstance(pattern, BlockTopK):
        return min(length - own, own * pattern.topk * pattern.block)
    rules = _folded(pattern, stride)
    if rules is None:
        return length - own
    travels = _travels(rules, chunks, -(-length // stride))
    return sum(high - low for low, high in travels) * _density(rules)


def _travels(rules: Iterable[Rule], chunks: Chunks, length: int) -> list[tuple[int, int]]:
    """Stretches that the queries of these chunks reach and that are not among them."""
    return _outside(
        (rule.span(b, e - 1, length) for rule in rules for b, e in chunks if e > b), chunks
    )


def _outside(
    spans: Iterable[tuple[int, int]], chunks: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """What of the spans is in no chunk, as disjoint stretches in order."""
    found, mine = [], _joined(chunks)
    for low, high in _joined(spans):
        for begin, end in mine:
            if low < begin < high:
                found.append((low, begin))
            if begin < high:
                low = max(low, end)
        if high > low:
            found.append((low, high))
    return found


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union, as disjoint stretches in order."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(span for span in spans if span[1] > span[0]):
        if out and low <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], high)
        else:
            out.append((low, high))
    return out


def _density(rules: Iterable[Rule]) -> float:
    """Part of a stretch that columns are."""
    columns = {rule.columns for rule in rules}
    one = columns.pop() if len(columns) == 1 else None
    return 1.0 if one is None else one[1] / one[0]


@dataclass(frozen=True)
class Share:
    """What one rank does for the heads of one pattern; tokens, of one sequence."""

    own: int
    received: float
    sent: float
    """Rows that it sends: once for every rank that needs them."""
    passes: tuple[tuple[int, int], ...]
    """Queries of each pass that waits for keys, and the own keys that it takes along."""
    stretch: int
    """Rows from the first query that waits to the last."""
    whole: bool = False
    """All queries wait, in one pass."""
    sorted: bool = False
    """Its keys are put in order by an index."""

    def split(self, method: str) -> bool:
        """Queries that wait are computed on own and on received keys apart, and merged: the rule
        of the workers, by which they wait where half of the rows do not."""
        if not self.received:
            return False
        if method == "ring":
            return True
        return not self.whole and 2 * sum(rows for rows, _ in self.passes) > self.own


MOST_PASSES = 4
"""Stretches of queries that wait, each a pass of its own; more are one pass."""


@lru_cache(maxsize=1024)
def shares(
    pattern: Pattern, weights: tuple[tuple[Pattern, int], ...], length: int, ranks: int, name: str
) -> tuple[Share, ...]:
    """Of every rank (of one residue class, where all are alike) in the layout of this name."""
    stride, owned = next(
        (s, o) for n, s, o in possible_layouts(weights, length, ranks) if n == name
    )
    own = -(-length // ranks)
    rules = None if isinstance(pattern, BlockTopK) else _folded(pattern, stride)
    if rules is None:
        away = length - own
        return (Share(own, away, away, ((own, own),), own, whole=True, sorted=True),)
    owned, size = owned[: ranks // stride], -(-length // stride)
    travels = [_travels(rules, chunks, size) for chunks in owned]
    sent = _sent(travels, owned)
    density = _density(rules)
    found = []
    for some, chunks, away in zip(travels, owned, sent, strict=True):
        came = sum(high - low for low, high in some) * density
        passes, stretch = _waiting(rules, chunks, size, own) if came else ((), 0)
        found.append(Share(own, came, away * density, passes, stretch))
    return tuple(dict.fromkeys(found))


def _sent(travels: Sequence[list[tuple[int, int]]], owned: Sequence[Chunks]) -> list[int]:
    """Rows that each owner sends, of what travels to every rank."""
    steps: Counter[int] = Counter()
    for low, high in itertools.chain.from_iterable(travels):
        steps[low] += 1
        steps[high] -= 1
    edges = sorted(steps)
    receivers = list(itertools.accumulate(steps[edge] for edge in edges))
    widths = (b - a for a, b in itertools.pairwise(edges))
    before = [0, *itertools.accumulate(n * w for n, w in zip(receivers, widths, strict=False))]

    def upto(token: int) -> int:
        at = bisect.bisect_right(edges, token) - 1
        return 0 if at < 0 else before[at] + receivers[at] * (token - edges[at])

    return [sum(upto(end) - upto(begin) for begin, end in chunks) for chunks in owned]


def _waiting(
    rules: Sequence[Rule], chunks: Chunks, length: int, own: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Passes of the queries that see a key of another rank, and the rows between them."""
    mine = _joined(chunks)
    starts = [0, *itertools.accumulate(end - begin for begin, end in mine)]
    rows: list[tuple[int, int]] = []
    for at, (begin, end) in zip(starts, mine, strict=False):
        for rule in rules:
            low, high = rule.span(begin, end - 1, length)
            if _outside([(low, min(high, begin))], mine):
                rows.append((at, at + _rows_before(rule, begin, end)))
            if _outside([(end, high)], mine):
                last = end - begin if rule.lo is None else min(end - begin, -rule.lo)
                rows.append((at + end - begin - last, at + end - begin))
    joined = _joined(rows)
    if not joined:
        return (), 0
    stretch = joined[-1][1] - joined[0][0]
    if len(joined) > MOST_PASSES:
        return ((sum(b - a for a, b in joined), own),), stretch

    def keys(first: int, last: int) -> int:
        """Own rows from the first to the last that these queries see."""
        seen = []
        for at, (begin, end) in zip(starts, mine, strict=False):
            low, high = max(first, at), min(last, at + end - begin)
            if high <= low:
                continue
            for rule in rules:
                span = rule.span(begin + low - at, begin + high - at - 1, length)
                for there, (b, e) in zip(starts, mine, strict=False):
                    if min(span[1], e) > max(span[0], b):
                        seen += [there + max(span[0], b) - b, there + min(span[1], e) - b]
        return max(seen) - min(seen) if seen else 0

    return tuple((b - a, keys(a, b)) for a, b in joined), stretch


def _rows_before(rule: Rule, begin: int, end: int) -> int:
    """Of a chunk's first rows, those that may see a key before it."""
    rows = end - begin
    if rule.block is not None:
        rows = min(rows, -begin % rule.block)
    if rule.hi is not None:
        rows = min(rows, rule.hi - 1)
    return rows


@lru_cache(maxsize=256)
def rules_of(pattern: Pattern) -> tuple[Rule, ...]:
    """None of a pattern that selects its keys at run time."""
    return () if isinstance(pattern, BlockTopK) else pattern.rules()


def _folded(pattern: Pattern, stride: int) -> tuple[Rule, ...] | None:
    """The rules inside a residue class, or None when any reaches other classes."""
    if stride == 1:
        return rules_of(pattern)
    folded = [
        rule.folded(stride) if rule.step % stride == 0 else None for rule in rules_of(pattern)
    ]
    return None if None in folded else tuple(rule for rule in folded if rule is not None)


@dataclass(frozen=True)
class _Folded(Pattern):
    """Rules of a residue class as a pattern of their own."""

    inner: tuple[Rule, ...]

    def rules(self) -> tuple[Rule, ...]:
        return self.inner

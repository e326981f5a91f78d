"""How context ranks share a sequence: the layout, and how keys travel, each with its price.

Priced for one document of the full length, with exact pair counts and the spans of keys that the
ranks' queries reach; pure integers, so that a plan can be explained without the workers. The
workers price again with the documents that the run really has, and keep the rule: of the layouts
whose busiest rank attends at most 3 % more than the best one's, the one that receives least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msa_kernels.pattern import BlockTopK, Pattern
from msa_kernels.rules import Rule
from msa_workloads.heads import valid_degrees
from msa_workloads.runspec import ContextSpec

TOLERANCE = 0.03
"""Imbalance accepted for fewer bytes."""

HIDDEN = 2.0
"""Heads are exchanged only where that moves this many times fewer bytes: keys travel behind the
attention of local queries, while an exchange of heads is waited for."""

SHIFTS = 64
"""Positions tried for the first cut of a rotated layout."""


@dataclass(frozen=True)
class LayoutPrice:
    """One layout, averaged over layers and key/value heads."""

    name: str
    balance: float
    """Attended area, largest over mean."""
    received: float
    """Tokens that the busiest receiver receives for one head."""

    def __str__(self) -> str:
        return f"{self.name} (busiest rank {self.balance:.2f} x mean, {self.received:,.0f} tokens)"


@dataclass(frozen=True)
class ContextChoice:
    """What was chosen for a context degree, and what for."""

    spec: ContextSpec
    layouts: tuple[LayoutPrice, ...]
    """The expected layout first, then the others."""
    halo: float
    """Tokens whose keys and values travel to the busiest rank for each layer; where heads are
    exchanged, as many as make up the same bytes."""
    held: float
    """Tokens of remote keys and values that a rank holds at once."""
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        """For people, one line."""
        return "; ".join(self.reasons)


ONE = ContextChoice(ContextSpec(), (), 0.0, 0.0, ())
"""Of a context degree of 1."""


@dataclass(frozen=True)
class Heads:
    """Heads of one tensor rank."""

    query: int
    key_value: int


def choose(
    weights: tuple[tuple[Pattern, int], ...], length: int, ranks: int, heads: Heads, width: int
) -> ContextChoice:
    """The layout and method for ``ranks`` that share sequences of ``length`` tokens.

    ``weights`` counts the key/value heads of all layers that have each pattern of one head;
    ``width`` is bytes per element. Ring is left to whoever knows the memory that is free.
    """
    if ranks == 1:
        return ONE
    layouts = price_layouts(weights, length, ranks)
    own = -(-length // ranks)
    best = layouts[0]
    reasons = [
        f"{best.name} layout expected: busiest rank {best.balance:.2f} x mean, receives "
        f"{best.received:,.0f} tokens per head of {own:,} owned"
        + (f"; not {', '.join(map(str, layouts[1:]))}" if layouts[1:] else "")
    ]
    exchange = _key_bytes(best.received, own, heads.key_value, width)
    options = []
    for share in valid_degrees(heads.query, heads.key_value):
        if share == 1 or ranks % share:
            continue
        outer = price_layouts(weights, length, ranks // share)[0] if share < ranks else None
        copies = max(1, share // heads.key_value)
        moved = _head_bytes(own, share, heads, copies, width)
        if outer is not None:
            kept = max(1, heads.key_value // share)
            moved += _key_bytes(outer.received, own * share, kept, width)
        options.append((moved, share))
    spec = ContextSpec()
    halo = held = best.received
    if options:
        moved, share = min(options)
        ratio = moved / exchange if exchange else math.inf
        if ratio * HIDDEN < 1:
            spec = ContextSpec(heads=share)
            halo = best.received * ratio
            held = 0.0
            reasons.append(
                f"heads are exchanged over {share} ranks: {ratio:.0%} of the bytes of keys and "
                "values"
            )
        else:
            shown = f"{ratio:.1f} x the bytes" if exchange else "no key travels"
            reasons.append(f"keys travel, not heads (Ulysses over {share}: {shown})")
    return ContextChoice(spec, layouts, halo, held, tuple(reasons))


def _key_bytes(received: float, own: int, heads: int, width: int) -> float:
    """Per head size of 1: keys and values forward, again in backward where they are not kept,
    and their fp32 gradients."""
    passes = 1 if received <= own else 2
    return 2 * received * heads * (passes * width + 4)


def _head_bytes(own: int, share: int, heads: Heads, copies: int, width: int) -> float:
    """Queries, outputs, keys and values forward, and all of them again in backward."""
    each = 2 * heads.query + 2 * heads.key_value * copies
    return 2 * (share - 1) / share * own * each * width


@lru_cache(maxsize=1024)
def price_layouts(
    weights: tuple[tuple[Pattern, int], ...], length: int, ranks: int
) -> tuple[LayoutPrice, ...]:
    """Every layout that ``ranks`` can have, the best first."""
    if ranks == 1:
        return (LayoutPrice("contiguous", 1.0, 0.0),)
    total = sum(weight for _, weight in weights)
    found = []
    for name, stride, owned in _layouts(weights, length, ranks):
        area, received = [0.0] * ranks, [0.0] * ranks
        for pattern, weight in weights:
            for rank, chunks in enumerate(owned):
                area[rank] += weight * _area(pattern, chunks, length, stride, ranks)
                received[rank] += weight * _received(pattern, chunks, length, stride)
        mean = sum(area) / ranks
        found.append(
            LayoutPrice(name, max(area) / mean if mean else 1.0, max(received) / total)
        )  # fmt: skip
    least = min(price.balance for price in found)
    return tuple(
        sorted(found, key=lambda p: (p.balance > (1 + TOLERANCE) * least, p.received, p.balance))
    )


Chunks = tuple[tuple[int, int], ...]
"""Ranges of one rank, in units of its residue class."""


def _layouts(
    weights: Sequence[tuple[Pattern, int]], length: int, ranks: int
) -> Iterator[tuple[str, int, list[Chunks]]]:
    """Name, number of residue classes, and the chunks of every rank inside its class."""
    yield "contiguous", 1, _contiguous(length, ranks)
    if length >= 2 * ranks:
        yield "zigzag", 1, _zigzag(length, ranks)
    if ranks == 2 and all(map(_windowed, (rule for p, _ in weights for rule in _rules(p)))):
        # Only a window has rows at its start that are shorter than all others.
        yield "rotated", 1, _rotated(weights, length)
    steps = {rule.step for pattern, _ in weights for rule in _rules(pattern)} - {1}
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
            sum(w * _area(p, chunks, length, 1, 2) for p, w in weights) for chunks in owned(shift)
        )

    shifts = sorted({half // 2 * n // SHIFTS for n in range(SHIFTS)})
    return owned(min(shifts, key=busiest))


def _area(pattern: Pattern, chunks: Chunks, length: int, stride: int, ranks: int) -> float:
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
    rules = _rules(pattern)
    if len(rules) == 1 and rules[0] == Rule(block=rules[0].block) and rules[0].block:
        full, rest = divmod(rows, rules[0].block)
        return full * rules[0].block * (rules[0].block + 1) // 2 + rest * (rest + 1) // 2
    return pattern.pairs(rows) if rows else 0


def _windowed(rule: Rule) -> bool:
    return (rule.lo is not None and rule.hi is not None) or rule.sinks is not None


def _received(pattern: Pattern, chunks: Chunks, length: int, stride: int) -> float:
    """Tokens that the queries of these chunks reach and that their rank does not own.

    An upper bound for patterns with gaps, whose spans are counted whole; columns are counted by
    their share.
    """
    own = sum(end - begin for begin, end in chunks)
    if isinstance(pattern, BlockTopK):
        return min(length - own, own * pattern.topk * pattern.block)
    rules = _rules(pattern)
    if stride > 1:
        folded = _folded(pattern, stride)
        if folded is None:
            return length - own
        rules, length = folded, -(-length // stride)
    spans = [
        rule.span(begin, end - 1, length) for rule in rules for begin, end in chunks if end > begin
    ]
    reached = total = 0
    for low, high in sorted(spans):
        low = max(low, reached)
        if high > low:
            inside = sum(max(0, min(high, e) - max(low, b)) for b, e in chunks)
            total += high - low - inside
            reached = high
    columns = {rule.columns for rule in rules}
    if len(columns) == 1 and (one := columns.pop()) is not None:
        return total * one[1] / one[0]
    return total


@lru_cache(maxsize=256)
def _rules(pattern: Pattern) -> tuple[Rule, ...]:
    return () if isinstance(pattern, BlockTopK) else pattern.rules()


def _folded(pattern: Pattern, stride: int) -> tuple[Rule, ...] | None:
    """The rules inside a residue class, or None when any reaches other classes."""
    folded = [rule.folded(stride) if rule.step % stride == 0 else None for rule in _rules(pattern)]
    return None if None in folded else tuple(rule for rule in folded if rule is not None)


@dataclass(frozen=True)
class _Folded(Pattern):
    """Rules of a residue class as a pattern of their own."""

    inner: tuple[Rule, ...]

    def rules(self) -> tuple[Rule, ...]:
        return self.inner

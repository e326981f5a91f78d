"""How context ranks share a sequence: the layout, and how keys travel, each with its price.

Priced for one document of the full length, with exact pair counts and the spans of keys that the
ranks' queries reach; pure integers, so that a plan can be explained without the workers. The
workers price again with the documents that the run really has, and keep the rule: of the layouts
whose busiest rank attends at most 3 % more than the best one's, the one that receives least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from msa_kernels.pattern import Pattern
from msa_workloads.heads import valid_degrees
from msa_workloads.runspec import ContextSpec

from msa_operator.planner.layouts import area, possible_layouts, received

TOLERANCE = 0.03
"""Imbalance accepted for fewer bytes."""

HIDDEN = 2.0
"""Heads are exchanged only where that moves this many times fewer bytes: keys travel behind the
attention of local queries, while an exchange of heads is waited for."""


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
    """Tokens whose keys and values travel to the busiest rank as such, and not by its heads."""
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
        options.append((moved, share, 0.0 if outer is None else outer.received))
    spec = ContextSpec()
    halo = held = best.received
    if options:
        moved, share, others = min(options)
        ratio = moved / exchange if exchange else math.inf
        if ratio * HIDDEN < 1:
            spec = ContextSpec(heads=share)
            halo = best.received * ratio
            held = others
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
    for name, stride, owned in possible_layouts(weights, length, ranks):
        pairs, needed = [0.0] * ranks, [0.0] * ranks
        for pattern, weight in weights:
            for rank, chunks in enumerate(owned):
                pairs[rank] += weight * area(pattern, chunks, length, stride, ranks)
                needed[rank] += weight * received(pattern, chunks, length, stride)
        mean = sum(pairs) / ranks
        found.append(
            LayoutPrice(name, max(pairs) / mean if mean else 1.0, max(needed) / total)
        )  # fmt: skip
    least = min(price.balance for price in found)
    return tuple(
        sorted(found, key=lambda p: (p.balance > (1 + TOLERANCE) * least, p.received, p.balance))
    )

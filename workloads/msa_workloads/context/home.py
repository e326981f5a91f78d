"""The home layout of a run: one rule, chosen once by its price over all layers and heads.

Changing layouts between layers would move all activations, so that a run has one home. A rule is
a fixed layout, or chunks that are dealt anew for the documents of every sequence; whichever it
is, all sequences have as many rows on a rank. Rules are priced on sequences of the run's own data
with the exact numbers of :mod:`~msa_workloads.context.solver`: among those whose busiest ranks
are within a tolerance of the best, the one whose busiest receivers receive least; among those
that receive about as little, the one of fewest chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from msa_kernels.pattern import Pattern

from msa_workloads.context import solver
from msa_workloads.context.layout import Layout, LayoutError, contiguous, zigzag
from msa_workloads.context.solver import TOLERANCE, Candidate

Kind = Literal["auto", "contiguous", "rotated", "zigzag", "residues", "balanced"]

Packing = tuple[int, ...]
"""Lengths of the documents of one sequence."""

LAYOUTS_KEPT = 64
"""Dealt layouts remembered, by documents: sequences in flight, and those that are alike."""


SIMPLER = 1.1
"""Of two layouts whose busiest receivers are this close the one with fewer chunks is taken: every
chunk is a stretch of its own for kernels and copies, which the price does not see."""


@dataclass(frozen=True)
class Home:
    """Which layout a sequence of ``tokens`` over ``ranks`` has; the same on every rank."""

    name: str
    tokens: int
    ranks: int
    fixed: Layout | None
    """The layout of every sequence, or None where chunks are dealt for each."""
    chunks: int = 0
    """Chunks per rank that are dealt."""
    patterns: tuple[tuple[Pattern, int], ...] = ()
    multiple: int = 1

    @property
    def pieces(self) -> int:
        """Chunks of the rank that has most."""
        return max(map(len, self.fixed.chunks)) if self.fixed else self.chunks

    def of(self, documents: Packing) -> Layout:
        """The layout of a sequence of these documents."""
        return self.fixed or self._dealt(documents).layout

    def measure(self, documents: Packing) -> Candidate:
        """Its exact price: the area of every rank, and the tokens that it receives."""
        if self.fixed is None:
            return self._dealt(documents)
        return solver.measure(self.name, self.fixed, dict(self.patterns), documents)

    def _dealt(self, documents: Packing) -> Candidate:
        return _deal(self.chunks, self.tokens, self.ranks, self.patterns, documents, self.multiple)


@dataclass(frozen=True)
class Rule:
    """A home and its price on some sequences, weighted over layers and heads."""

    home: Home
    priced: tuple[Candidate, ...]

    @property
    def busiest(self) -> int:
        """Attended pairs of the busiest rank, summed over the sequences."""
        return sum(max(c.area) for c in self.priced)

    @property
    def balance(self) -> float:
        """Attended area, largest over mean."""
        total = sum(sum(c.area) for c in self.priced)
        return self.busiest * self.home.ranks / total if total else 1.0

    @property
    def received(self) -> tuple[int, int]:
        """Tokens of the busiest receiver, and of all; times the heads that need them."""
        most = sum(max(c.received) for c in self.priced)
        return most, sum(sum(c.received) for c in self.priced)

    def describe(self) -> dict[str, Any]:
        """For a run's report."""
        return {
            "layout": self.home.name,
            "balance": round(self.balance, 4),
            "received_max": self.received[0] // len(self.priced),
            "received_total": self.received[1] // len(self.priced),
        }


def choose(
    tokens: int,
    ranks: int,
    patterns: Mapping[Pattern, int],
    packings: Sequence[Packing],
    *,
    kind: Kind = "auto",
    multiple: int = 1,
    tolerance: float = TOLERANCE,
) -> list[Rule]:
    """Every rule of this kind with its price on ``packings``, the best first.

    ``patterns`` counts, for every pattern of one head, the key/value heads of all layers that
    have it. Rows of a rank are a multiple of ``multiple``. Raises
    :class:`~msa_workloads.context.layout.LayoutError` when no rule of the kind fits.
    """
    if ranks == 1:
        kind = "auto"  # all layouts are one: heads alone are split
    packings = list(dict.fromkeys(packings)) or [(tokens,)]
    weights = tuple(patterns.items())
    areas = [solver.weighted_area(patterns, documents, tokens) for documents in packings]
    found: dict[Layout, Rule] = {}
    fixed = solver.fixed_layouts(tokens, ranks, patterns, np.sum(areas, 0), multiple)
    for name, layout in fixed:
        if kind in ("auto", name.split()[0]) and layout not in found:
            home = Home(name, tokens, ranks, layout, 0, weights, multiple)
            found[layout] = Rule(home, tuple(
                solver.measure(name, layout, patterns, documents, rows)
                for documents, rows in zip(packings, areas, strict=True)
            ))  # fmt: skip
    rules = list(found.values())
    if kind in ("auto", "balanced") and ranks > 1:
        for chunks in solver.chunk_counts(tokens, ranks, multiple):
            home = Home(f"balanced {chunks}", tokens, ranks, None, chunks, weights, multiple)
            rules.append(Rule(home, tuple(home.measure(documents) for documents in packings)))
    if not rules:
        _refuse(kind, tokens, ranks, multiple)
    mean = sum(sum(c.area) for c in rules[0].priced) / ranks
    bar = solver.most_area(min(rule.busiest for rule in rules), mean, tolerance)
    even = [rule for rule in rules if rule.busiest <= bar]
    fewest = min(rule.received[0] for rule in even)

    def price(rule: Rule) -> tuple[bool, bool, int, int, int]:
        more = rule.received[0] > SIMPLER * fewest
        return rule not in even, more, 0 if more else rule.home.pieces, *rule.received

    return sorted(rules, key=price)


def _refuse(kind: Kind, tokens: int, ranks: int, multiple: int) -> None:
    """Say why no rule of the kind fits."""
    makers: dict[str, Callable[..., Layout]] = {"zigzag": zigzag}
    makers.get(kind, contiguous)(tokens, ranks, multiple)  # raises where the length is too short
    if kind == "residues":
        raise LayoutError(
            "layout residues needs a pattern that steps (Dilated, Strided, Columns) by a multiple "
            f"of a divisor of {ranks} ranks; nearest: zigzag, contiguous"
        )
    raise LayoutError(
        f"layout {kind} needs at least {solver.CHUNKS_PER_RANK[0] * ranks * multiple} tokens for "
        f"{ranks} ranks, found {tokens}; nearest: zigzag, contiguous"
    )


@lru_cache(maxsize=LAYOUTS_KEPT)
def _deal(
    chunks: int, tokens: int, ranks: int, patterns: tuple[tuple[Pattern, int], ...],
    documents: Packing, multiple: int,
) -> Candidate:  # fmt: skip
    return solver.deal(chunks, tokens, ranks, dict(patterns), documents, multiple=multiple)

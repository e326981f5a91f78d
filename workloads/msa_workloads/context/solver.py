"""The choice of a layout: least attended area on the busiest rank, then fewest bytes.

All candidates give every rank as many tokens. Their areas and the tokens they move are exact (not
estimates); the choice is lexicographic: among the layouts whose busiest rank is even within a
tolerance (:func:`most_area`), the one whose busiest receiver receives least. Balance alone would
scatter neighbouring tokens over ranks and multiply what windows have to fetch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from msa_kernels.pattern import Pattern

from msa_workloads.context.area import row_area
from msa_workloads.context.commplan import comm_plan
from msa_workloads.context.intervals import Ints
from msa_workloads.context.layout import (
    Layout,
    LayoutError,
    contiguous,
    from_chunks,
    residues,
    zigzag,
)

TOLERANCE = 0.03
"""Imbalance accepted for fewer bytes: what two GPUs of one machine differ by anyway."""

CHUNKS_PER_RANK = (4, 8, 16, 32)
MAX_CHUNKS = 1024
"""Of all ranks: bounds the solver's matrix of what chunks need of each other to 8 MiB."""
MAX_SWAPPED = 256
"""Chunks of all ranks up to which pairs are swapped: every swap looks at all pairs."""


@dataclass(frozen=True)
class Candidate:
    """A layout and its price, weighted over layers and heads."""

    name: str
    layout: Layout
    area: tuple[int, ...]
    """Attended pairs of every rank."""
    received: tuple[int, ...]
    """Tokens that every rank receives, times the heads that need them."""

    @property
    def balance(self) -> float:
        """Attended area, largest over mean; 1 when nothing is attended."""
        return max(self.area) * len(self.area) / max(1, sum(self.area)) if any(self.area) else 1.0

    def describe(self) -> dict[str, Any]:
        """For a plan's explanation."""
        return {
            "layout": self.name,
            "balance": round(self.balance, 4),
            "received_max": max(self.received),
            "received_total": sum(self.received),
        }


@dataclass(frozen=True)
class Choice:
    """The chosen layout with every alternative, the best first."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def layout(self) -> Layout:
        return self.candidates[0].layout


def solve(
    tokens: int,
    ranks: int,
    patterns: Mapping[Pattern, int],
    documents: tuple[int, ...] | None = None,
    *,
    multiple: int = 1,
    tolerance: float = TOLERANCE,
) -> Choice:
    """Choose how ``ranks`` own a sequence of packed ``documents`` (one when None).

    ``patterns`` counts, for every pattern of one head, the key/value heads of all layers that
    have it. Chunks are multiples of ``multiple`` tokens. Deterministic. Raises
    :class:`~msa_workloads.context.layout.LayoutError` when no layout fits.
    """
    lengths = documents or (tokens,)
    rows = weighted_area(patterns, lengths, tokens)
    found: dict[Layout, Candidate] = {}
    for name, layout in _layouts(tokens, ranks, patterns, lengths, rows, multiple, tolerance):
        if layout not in found:
            found[layout] = measure(name, layout, patterns, lengths, rows)
    if not found:
        contiguous(tokens, ranks, multiple)  # says why
    return Choice(tuple(_best(list(found.values()), tolerance)))


def _best(found: list[Candidate], tolerance: float) -> list[Candidate]:
    """Sorted by price, the best first."""
    mean = sum(found[0].area) / len(found[0].area)
    bar = most_area(min(max(c.area) for c in found), mean, tolerance)

    def price(c: Candidate) -> tuple[bool, int, int]:
        return max(c.area) > bar, max(c.received), sum(c.received)

    return sorted(found, key=price)


def most_area(least: int, mean: float, tolerance: float) -> float:
    """The area that the busiest rank may have for fewer bytes: ``tolerance`` over the mean of the
    ranks where some choice is that even, and over the most even choice where none is."""
    bar = (1 + tolerance) * mean
    return bar if least <= bar else (1 + tolerance) * least


def weighted_area(
    patterns: Mapping[Pattern, int], documents: tuple[int, ...], tokens: int
) -> Ints:
    """Keys that every token attends, times the heads that have each pattern, int64 (tokens,)."""
    rows = np.zeros(tokens, np.int64)
    for pattern, weight in patterns.items():
        rows += weight * row_area(pattern, documents, tokens)
    return rows


def measure(
    name: str,
    layout: Layout,
    patterns: Mapping[Pattern, int],
    documents: tuple[int, ...],
    rows: Ints | None = None,
) -> Candidate:
    """The exact price of one layout; ``rows`` is the weighted area of every token, if known."""
    if rows is None:
        rows = weighted_area(patterns, documents, layout.tokens)
    padded = np.zeros(layout.padded, np.int64)
    padded[: layout.tokens] = rows
    area = padded[layout.permutation].reshape(layout.ranks, -1).sum(1)
    received = np.zeros(layout.ranks, np.int64)
    for pattern, weight in patterns.items():
        received += weight * comm_plan(pattern, layout, documents).tokens.sum(1)
    return Candidate(name, layout, tuple(area.tolist()), tuple(received.tolist()))


def _layouts(
    tokens: int,
    ranks: int,
    patterns: Mapping[Pattern, int],
    documents: tuple[int, ...],
    rows: Ints,
    multiple: int,
    tolerance: float,
) -> Iterator[tuple[str, Layout]]:
    yield from fixed_layouts(tokens, ranks, patterns, rows, multiple)
    if ranks == 1 or (len(documents) == 1 and _windowed(patterns)):
        # Every full stretch of a window has the same area: cutting it finer only adds halos.
        return
    for per_rank in chunk_counts(tokens, ranks, multiple):
        yield from _dealt(per_rank, tokens, ranks, patterns, documents, rows, multiple, tolerance)


def fixed_layouts(
    tokens: int, ranks: int, patterns: Mapping[Pattern, int], rows: Ints, multiple: int = 1
) -> Iterator[tuple[str, Layout]]:
    """Layouts that a rule makes, whatever the documents are; those that do not fit are left out.

    ``rows`` is the area of every token, which decides how far a rotated layout is shifted.
    """
    simple = {
        "contiguous": lambda: contiguous(tokens, ranks, multiple),
        "zigzag": lambda: zigzag(tokens, ranks, multiple),
        "rotated": lambda: contiguous(
            tokens, ranks, multiple, _best_shift(rows, tokens, ranks, multiple)
        ),
    }
    steps = sorted({rule.step for pattern in patterns for rule in pattern.rules()} - {1})
    for step in steps:
        for inner in ("zigzag", "contiguous"):
            simple[f"residues {step}, {inner}"] = lambda step=step, inner=inner: residues(
                tokens, ranks, step, inner, multiple
            )
    for name, make in simple.items():
        try:
            yield name, make()
        except LayoutError:
            continue


def chunk_counts(tokens: int, ranks: int, multiple: int = 1) -> list[int]:
    """Chunks per rank that are worth dealing for a sequence."""
    return [
        n for n in CHUNKS_PER_RANK if n * ranks <= MAX_CHUNKS and n * ranks * multiple <= tokens
    ]


def deal(
    per_rank: int,
    tokens: int,
    ranks: int,
    patterns: Mapping[Pattern, int],
    documents: tuple[int, ...],
    *,
    multiple: int = 1,
    tolerance: float = TOLERANCE,
) -> Candidate:
    """The best way to deal ``per_rank`` chunks to every rank for these documents.

    All results for the same numbers have the same rows, whatever the documents are.
    """
    rows = weighted_area(patterns, documents, tokens)
    dealt = _dealt(per_rank, tokens, ranks, patterns, documents, rows, multiple, tolerance)
    return _best([measure(name, layout, patterns, documents, rows) for name, layout in dealt],
                 tolerance)[0]  # fmt: skip


def _dealt(
    per_rank: int, tokens: int, ranks: int, patterns: Mapping[Pattern, int],
    documents: tuple[int, ...], rows: Ints, multiple: int, tolerance: float,
) -> Iterator[tuple[str, Layout]]:  # fmt: skip
    chunks = per_rank * ranks
    size = -(-tokens // (chunks * multiple)) * multiple
    area = _chunk_area(rows, size, chunks)
    even = _deal(area, ranks, None, 0.0)
    yield f"balanced {per_rank}", from_chunks(tokens, size, even)
    shared = _shared(patterns, documents, tokens, size, chunks)
    near = _deal(area, ranks, shared, tolerance)
    yield f"balanced {per_rank}, near", from_chunks(tokens, size, near)
    if chunks <= MAX_SWAPPED:
        swapped = _swap(even, area, shared, tolerance)
        yield f"balanced {per_rank}, swapped", from_chunks(tokens, size, swapped)


def _windowed(patterns: Mapping[Pattern, int]) -> bool:
    rules = [rule for pattern in patterns for rule in pattern.rules()]
    return all((r.lo is not None and r.hi is not None) or r.sinks is not None for r in rules)


def _best_shift(rows: Ints, tokens: int, ranks: int, multiple: int) -> int:
    """The shift of contiguous cuts that makes the busiest rank least busy."""
    size = contiguous(tokens, ranks, multiple).rows
    before = np.zeros(size * ranks + 1, np.int64)
    before[1 : tokens + 1] = np.cumsum(rows)
    before[tokens + 1 :] = before[tokens]
    shifts = np.arange(0, size, multiple)
    cuts = before[shifts[None, :] + size * np.arange(ranks)[:, None]]
    area = np.diff(cuts, axis=0)
    last = before[-1] - cuts[-1] + cuts[0]
    busiest = np.maximum(area.max(0, initial=0), last)
    return int(shifts[np.argmin(busiest)])


def _chunk_area(rows: Ints, size: int, chunks: int) -> Ints:
    padded = np.zeros(size * chunks, np.int64)
    padded[: len(rows)] = rows
    return padded.reshape(chunks, size).sum(1)


def _shared(
    patterns: Mapping[Pattern, int], documents: tuple[int, ...], tokens: int, size: int,
    chunks: int,
) -> Ints:  # fmt: skip
    """Tokens that two chunks need of each other, (chunks, chunks), symmetric."""
    alone = from_chunks(tokens, size, [[n] for n in range(chunks)])
    need = np.zeros((chunks, chunks), np.int64)
    for pattern, weight in patterns.items():
        need += weight * comm_plan(pattern, alone, documents).tokens
    return need + need.T


def _deal(area: Ints, ranks: int, shared: Ints | None, slack: float) -> list[list[int]]:
    """Equal numbers of chunks for all ranks, largest area first.

    Without ``shared`` each goes to the rank with least area. With it, to the rank whose chunks it
    shares most tokens with, among those that stay within ``slack`` of the mean even when their
    free places are filled with chunks of no area.
    """
    each = len(area) // ranks
    limit = (1 + slack) * max(area.sum() / ranks, area.max(initial=0))
    load, count = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    affinity = np.zeros((ranks, len(area)), np.int64)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for chunk in np.argsort(-area, kind="stable").tolist():
        free = count < each
        rank = int(np.argmin(np.where(free, load, np.iinfo(np.int64).max)))
        if shared is not None:
            fits = free & (load + area[chunk] <= limit)
            if fits.any():
                score = np.where(fits, affinity[:, chunk], -1)
                best = np.flatnonzero(score == score.max())
                rank = int(best[np.argmin(load[best])])
            affinity[rank] += shared[:, chunk]
        owned[rank].append(chunk)
        load[rank] += area[chunk]
        count[rank] += 1
    return owned


def _swap(
    owned: list[list[int]], area: Ints, shared: Ints, slack: float
) -> list[list[int]]:  # fmt: skip
    """Swap chunks of two ranks while that puts more of what they share on one rank.

    The best swap first, at most one for each chunk; no rank's area exceeds the mean by more than
    ``slack``, or what it was.
    """
    ranks, chunks = len(owned), len(area)
    rank = np.empty(chunks, np.int64)
    for r, mine in enumerate(owned):
        rank[mine] = r
    load = np.bincount(rank, area, ranks).astype(np.int64)
    limit = max(int((1 + slack) * load.mean()), int(load.max()))
    affinity = np.stack([shared[:, rank == r].sum(1) for r in range(ranks)])
    for _ in range(chunks):
        # gain[c, d]: c goes to d's rank and d to c's.
        moved = affinity[rank].T - affinity[rank, np.arange(chunks)][:, None]
        gain = moved + moved.T - 2 * shared
        grown = load[rank][:, None] - area[:, None] + area[None, :]
        within = grown <= limit
        fits = within & within.T & (rank[:, None] != rank[None, :])
        gain = np.where(fits, gain, 0)
        c, d = divmod(int(gain.argmax()), chunks)
        if gain[c, d] <= 0:
            break
        r, s = rank[c], rank[d]
        affinity[r] += shared[:, d] - shared[:, c]
        affinity[s] += shared[:, c] - shared[:, d]
        load[r] += area[d] - area[c]
        load[s] += area[c] - area[d]
        rank[c], rank[d] = s, r
    return [np.flatnonzero(rank == r).tolist() for r in range(ranks)]

"""Communication plans: the keys that every rank needs and does not own, and who sends them.

A plan is exact: a token is sent to a rank if and only if one of the rank's queries sees it and
the rank does not own it. It is made on the host from a pattern's rules, a layout and the lengths
of the documents, for all ranks at once, and remembered; every rank computes the same plan, so
that ranks never have to agree by talking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from msa_kernels.pattern import Pattern
from numpy.typing import NDArray

from msa_workloads.context.intervals import Bounds, Ints, Line, Stretches, expand, in_documents
from msa_workloads.context.layout import Layout, LayoutError
from msa_workloads.context.reach import keys_seen, modulus

PLANS_KEPT = 128
"""Remembered per process: the patterns of a model times the documents of batches in flight."""


@dataclass(frozen=True, eq=False)
class CommPlan:
    """Pieces of the line that move: ``length`` points from ``start``, sorted by
    (receiver, owner, start)."""

    layout: Layout
    docs: Bounds
    line: Line
    receiver: Ints
    owner: Ints
    start: Ints
    length: Ints

    @cached_property
    def tokens(self) -> Ints:
        """Tokens that move, int64 (ranks, ranks): ``tokens[receiver, owner]``."""
        ranks = self.layout.ranks
        total = np.bincount(
            self.receiver * ranks + self.owner, self.length, ranks * ranks
        )  # fmt: skip
        return total.astype(np.int64).reshape(ranks, ranks)

    @property
    def moves(self) -> bool:
        """Anything moves between any two ranks."""
        return bool(len(self.length))

    def incoming(self, rank: int) -> tuple[Ints, Ints]:
        """Tokens that ``rank`` receives, by owner and then by token; and how many per owner."""
        return self._listed(self.receiver == rank, self.owner), self.tokens[rank]

    def outgoing(self, rank: int) -> tuple[Ints, Ints]:
        """Tokens that ``rank`` sends, by receiver and then by token; and how many per receiver."""
        return self._listed(self.owner == rank, self.receiver), self.tokens[:, rank]

    def ranges(self, receiver: int, owner: int) -> list[tuple[int, int]]:
        """The tokens that move from ``owner`` to ``receiver`` as ``[start, stop)`` ranges."""
        here = (self.receiver == receiver) & (self.owner == owner)
        tokens = self._listed(here, self.owner)
        breaks = np.flatnonzero(np.diff(tokens) != 1) + 1
        pieces = np.split(tokens, breaks) if len(tokens) else []
        return [(int(p[0]), int(p[-1]) + 1) for p in pieces]

    def _listed(self, here: NDArray[np.bool_], peer: Ints) -> Ints:
        at, within = expand(self.length[here])
        tokens = self.line.token(self.start[here][at] + within)
        return tokens[np.lexsort((tokens, peer[here][at]))]


@dataclass(frozen=True)
class GroupPlan:
    """The plan of the key/value heads that share a pattern."""

    pattern: Pattern
    kv_heads: tuple[int, ...]
    plan: CommPlan


def comm_plan(pattern: Pattern, layout: Layout, documents: tuple[int, ...]) -> CommPlan:
    """The plan of one head's pattern, from a bounded cache.

    ``documents`` are the lengths of the packed documents; they fill ``layout.tokens``.
    """
    if sum(documents) != layout.tokens:
        raise LayoutError(
            f"documents hold {sum(documents)} tokens, the layout is for {layout.tokens}"
        )
    return _comm_plan(pattern, layout, documents)


def group_plans(
    pattern: Pattern, kv_heads: int, layout: Layout, documents: tuple[int, ...]
) -> Iterator[GroupPlan]:
    """One plan for each distinct pattern among the key/value heads."""
    members: dict[Pattern, list[int]] = {}
    for head in range(kv_heads):
        members.setdefault(pattern.for_group(head), []).append(head)
    for shared, heads in members.items():
        yield GroupPlan(shared, tuple(heads), comm_plan(shared, layout, documents))


def plan_bytes(
    pattern: Pattern,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    layout: Layout,
    documents: tuple[int, ...],
) -> Ints:
    """Bytes of keys and values that move in one forward pass of one layer and one sequence,
    int64 (ranks, ranks) as ``[receiver, owner]``: 2 * heads * head size * itemsize per token."""
    total = np.zeros((layout.ranks, layout.ranks), np.int64)
    for group in group_plans(pattern, kv_heads, layout, documents):
        total += group.plan.tokens * (2 * len(group.kv_heads) * head_dim * itemsize)
    return total


@lru_cache(maxsize=PLANS_KEPT)
def _comm_plan(pattern: Pattern, layout: Layout, documents: tuple[int, ...]) -> CommPlan:
    docs, rules = Bounds.of(documents), pattern.rules()
    line = Line(modulus(rules, layout.stride), layout.padded)
    start, stop = keys_seen(rules, owned(layout, docs), docs, line)
    receiver = start // line.size
    start, stop = start - receiver * line.size, stop - receiver * line.size
    edges, owners = _owners(layout, line)
    # The owners' pieces cover every token, so that an interval meets a run of them.
    first = np.searchsorted(edges, start, "right") - 1
    last = np.searchsorted(edges, stop, "left")
    at, within = expand(last - first)
    piece = first[at] + within
    ends = np.append(edges[1:], line.size)
    begin = np.maximum(start[at], edges[piece])
    length = np.minimum(stop[at], ends[piece]) - begin
    receiver, owner = receiver[at], owners[piece]
    away = owner != receiver
    receiver, owner, begin, length = receiver[away], owner[away], begin[away], length[away]
    order = np.lexsort((begin, owner, receiver))
    return CommPlan(
        layout, docs, line, receiver[order], owner[order], begin[order], length[order]
    )  # fmt: skip


def owned(layout: Layout, docs: Bounds, rank: int | None = None) -> Stretches:
    """The tokens of every rank (of one) as stretches of documents, tagged with the rank."""
    ranks = range(layout.ranks) if rank is None else (rank,)
    table = np.asarray(
        [(r, c.residue, c.begin, c.end) for r in ranks for c in layout.chunks[r]], np.int64
    )
    tag, residue, begin, end = table.T
    return in_documents(
        tag, residue + layout.stride * begin, end - begin, layout.stride, docs
    )  # fmt: skip


def _owners(layout: Layout, line: Line) -> tuple[Ints, Ints]:
    """Where on the line each owner's piece starts, ascending, and the owner."""
    table = np.asarray(
        [(r, c.residue, c.begin, c.end) for r, mine in enumerate(layout.chunks) for c in mine],
        np.int64,
    )
    rank, residue, begin, end = table.T
    whole = Stretches(
        rank, np.zeros_like(rank), residue + layout.stride * begin, end - begin, layout.stride
    )
    fine = whole.split(line.modulus // layout.stride)
    edges = line.at(fine.first)
    order = np.argsort(edges, kind="stable")
    return edges[order], fine.tag[order]

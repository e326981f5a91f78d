"""Tile lists of parts whose rows see stretches of keys, without judging rectangles.

What bands, sinks, blocks, block lists and their unions give, in either direction: the keys that
the queries of a tile see, or the queries that see the keys of one, form a few stretches per rule
and document. Lists are written down from the two ends of each, so that laying out a batch of new
documents costs little more than writing its lists; :func:`msa_kernels.blocks.build` serves
everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msa_kernels.blocks import Ints, Runs, TileLists
from msa_kernels.listed import Rows, stretches, turned
from msa_kernels.rules import Part, Rule
from msa_kernels.walks import Walk, pointers, written

_FAR = 1 << 40
_AT_ONCE = 1 << 22
"""Tiles of block lists that are sorted at a time: bounds a build at about 100 MB."""


def serves(part: Part, other: Runs) -> bool:
    """Whether :func:`build` can list ``part`` with ``other`` as the side that is walked."""
    return (
        not part.minus
        and all(_contiguous(rule) for rule in part.rules)
        and bool((np.diff(np.sort(other.document)) > 0).all())
    )


def _contiguous(rule: Rule) -> bool:
    # A block that leaves out its nearest keys has a gap where one block meets the next.
    gap = rule.block is not None and rule.lo is not None and rule.lo > 0
    return rule.step == 1 and rule.columns is None and not gap


@dataclass(frozen=True)
class Spans:
    """One part laid on tiles: the tiles of ``other`` that every tile of ``own`` visits, not yet
    written out. Queries and keys, or with ``by_key`` keys and queries."""

    part: Part
    own: Runs
    other: Runs
    block_own: int
    block_other: int
    by_key: bool

    def lists(self) -> TileLists:
        """As :func:`msa_kernels.blocks.build` makes them."""
        if any(rule.table is not None for rule in self.part.rules):
            return self._sorted()
        found = self._stretches()
        count = found.end - found.begin
        per_tile = np.bincount(found.tile, count, self._tiles)
        return self._lists(per_tile, written(found.begin, count), np.repeat(found.full, count))

    def walk(self) -> Walk:
        """In the order of kernels: partial tiles first."""
        if any(rule.table is not None for rule in self.part.rules):
            return Walk.of(self._sorted())
        found = self._stretches()
        order = np.argsort(found.tile * 2 + found.full, kind="stable")
        count = found.end - found.begin
        partial = np.bincount(found.tile, np.where(found.full, 0, count), self._tiles)
        begins = pointers(np.bincount(found.tile, count, self._tiles))
        index = written(found.begin[order], count[order])
        return Walk(begins, begins[:-1] + partial.astype(np.int64), index)

    @property
    def _tiles(self) -> int:
        return -(-self.own.rows // self.block_own)

    def _lists(
        self, per_tile: NDArray[np.number], index: NDArray[np.int32], full: NDArray[np.bool_]
    ) -> TileLists:
        return TileLists(
            pointers(per_tile).astype(np.int32), index, full, self.block_own, self.block_other,
            self.own.rows, self.other.rows,
        )  # fmt: skip

    def _spans(self) -> list[_Span]:
        pieces = _pieces(self.own, self.other, self.block_own)
        return [
            _span(rule, pieces, self.other, self.block_other, self.by_key)
            for rule in self.part.rules
        ]

    def _stretches(self) -> _Stretches:
        """Tiles of one kind next to each other, without overlap, ascending.

        Without block lists every rule has one span for each piece of a tile, so that columns of
        the arrays below are pieces.
        """
        spans = self._spans()
        if not spans:
            none = np.zeros(0, np.int64)
            return _Stretches(none, none, none, none.astype(bool))
        tile = np.concatenate([s.tile for s in spans])
        begin = np.concatenate([s.begin for s in spans])
        end = np.concatenate([s.end for s in spans])
        base = tile * (-(-self.other.rows // self.block_other) + 1)
        order = np.argsort(base + begin, kind="stable")
        piece = order % max(1, len(spans[0].tile))
        tile, begin, end, base = tile[order], begin[order], end[order], base[order]
        # Each stretch without what those before it hold, and cut where one becomes full.
        reach = np.maximum.accumulate(np.where(end > begin, base + end, 0))
        before = np.concatenate([[0], reach[:-1]])[: len(base)] - base
        begin = np.maximum(begin, before)
        covered = []
        for span in spans:
            whole = span.rows == self.block_own
            low = np.where(whole, span.full_begin, 0)[piece]
            covered.append((low, np.maximum(low, np.where(whole, span.full_end, 0)[piece])))
        inner = [np.clip(edge, begin, np.maximum(begin, end)) for both in covered for edge in both]
        edges = np.stack([begin, *inner, np.maximum(begin, end)], 1)
        if len(spans) > 1:
            edges.sort(axis=1)
        start, stop = edges[:, :-1], edges[:, 1:]
        row, column = np.nonzero(stop > start)
        start, stop = start[row, column], stop[row, column]
        full = np.zeros(len(row), bool)
        for low, high in covered:
            full |= (start >= low[row]) & (stop <= high[row])
        return _Stretches(tile[row], start, stop, full)

    def _sorted(self) -> TileLists:
        """Block lists: the tiles of all stretches, sorted, and which of them are covered whole.

        A tile's queries may be of several blocks of the list, so that pieces cover it together.
        """
        width = -(-self.other.rows // self.block_other) + 1
        bits = self.block_own.bit_length()
        rules = len(self.part.rules)
        keys, full = [], []
        for tile, begin, end, mark in self._marked():
            # Tile, tile of the other side, rule and covered rows as one number.
            number = np.repeat(
                (((tile * width + begin) * rules) << bits) + mark, end - begin
            )  # fmt: skip
            number += written(np.zeros_like(begin), end - begin).astype(np.int64) * (rules << bits)
            number.sort()
            rows = number & ((1 << bits) - 1)
            number >>= bits
            first = np.flatnonzero(np.diff(number, prepend=-1))
            whole = np.add.reduceat(rows, first) == self.block_own if len(first) else rows == -1
            number = number[first] // rules
            first = np.flatnonzero(np.diff(number, prepend=-1))
            keys.append(number[first])
            full.append(np.logical_or.reduceat(whole, first) if len(first) else whole)
        key = np.concatenate([*keys, np.empty(0, np.int64)])
        owner = key // width
        index = (key - owner * width).astype(np.int32)
        per_tile = np.bincount(owner, minlength=self._tiles)
        return self._lists(per_tile, index, np.concatenate([*full, np.empty(0, bool)]))

    def _marked(self) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
        """Stretches (tile, begin, end) with one mark for all of each: its rule, and the rows that
        it covers, 0 where partial. Some tiles with all of their stretches at a time."""
        bits = self.block_own.bit_length()
        pieces = []
        for at, span in enumerate(self._spans()):
            low = np.clip(span.full_begin, span.begin, span.end)
            high = np.clip(span.full_end, low, span.end)
            edges = (span.begin, low, high, span.end)
            for n, rows in enumerate((0, span.rows, 0)):
                mark = np.broadcast_to((at << bits) + rows, span.tile.shape)
                some = np.flatnonzero(edges[n + 1] > edges[n])
                pieces.append([a[some] for a in (span.tile, edges[n], edges[n + 1], mark)])
        tile, begin, end, mark = (np.concatenate(column) for column in zip(*pieces, strict=True))
        total = int((end - begin).sum())
        if total <= _AT_ONCE:
            yield tile, begin, end, mark
            return
        per_tile = np.bincount(tile, end - begin, self._tiles)
        group = (np.cumsum(per_tile) - per_tile) // _AT_ONCE
        order = np.argsort(group[tile], kind="stable")
        ends = np.flatnonzero(np.diff(group[tile][order])) + 1
        for some in np.split(order, ends):
            yield tile[some], begin[some], end[some], mark[some]


@dataclass(frozen=True)
class _Stretches:
    tile: Ints
    begin: Ints
    end: Ints
    full: NDArray[np.bool_]


@dataclass(frozen=True)
class _Pieces:
    """Tiles cut at run ends: tile, positions [first, stop), and the run of their document on the
    other side, of which positions [low, high) count."""

    tile: Ints
    first: Ints
    stop: Ints
    run: Ints
    low: Ints
    high: Ints

    def __getitem__(self, at: Ints) -> _Pieces:
        return _Pieces(
            self.tile[at], self.first[at], self.stop[at], self.run[at], self.low[at], self.high[at]
        )


@dataclass(frozen=True)
class _Span:
    """Tiles [begin, end) that the rows of a piece touch under one rule, and those they cover."""

    tile: Ints
    begin: Ints
    end: Ints
    full_begin: Ints
    full_end: Ints
    rows: Ints
    """Rows of the piece, 0 where it covers nothing."""


def _pieces(own: Runs, other: Runs, block: int) -> _Pieces:
    first_tile = own.begin // block
    count = (own.begin + own.length - 1) // block - first_tile + 1
    run = np.repeat(np.arange(len(count)), count)
    tile = first_tile[run] + np.arange(len(run)) - (np.cumsum(count) - count)[run]
    row = np.maximum(tile * block, own.begin[run])
    end = np.minimum((tile + 1) * block, (own.begin + own.length)[run])
    shift = (own.position - own.begin)[run]
    order = np.argsort(other.document, kind="stable")
    docs, document = other.document[order], own.document[run]
    where = np.searchsorted(docs, document)
    found = where < len(docs)
    found[found] = docs[where[found]] == document[found]
    at = np.flatnonzero(found)
    mine = order[where[at]]
    low = other.position[mine]
    return _Pieces(
        tile[at], (row + shift)[at], (end + shift)[at], mine, low, low + other.length[mine]
    )


def _span(rule: Rule, pieces: _Pieces, other: Runs, block: int, by_key: bool) -> _Span:
    if rule.table is not None:
        pieces = _at_table(*rule.table, pieces, by_key)
    first, stop, rows = pieces.first, pieces.stop, pieces.stop - pieces.first
    if by_key and rule.sinks is not None:
        rows = np.where(stop <= rule.sinks, rows, 0)
        stop = np.minimum(stop, rule.sinks)
    some = stop > first
    # Row x of this side sees rows x + near .. x + far of the other one.
    near, far = (rule.lo, rule.hi) if by_key else (_mirrored(rule.hi), _mirrored(rule.lo))
    low = np.full_like(first, -_FAR) if near is None else first + near
    high = np.full_like(first, _FAR) if far is None else stop - 1 + far
    all_low = low if near is None else stop - 1 + near
    all_high = high if far is None else first + far
    if not by_key:
        low, all_low = np.maximum(low, 0), np.maximum(all_low, 0)
        if rule.sinks is not None:
            high, all_high = np.minimum(high, rule.sinks), np.minimum(all_high, rule.sinks)
    if rule.block is not None:
        start = first // rule.block * rule.block
        last = (stop - 1) // rule.block * rule.block
        low, all_low = np.maximum(low, start), np.maximum(all_low, start)
        high = np.minimum(high, last + rule.block)
        all_high = np.minimum(all_high, np.where(start == last, start + rule.block, -_FAR))
    shift = (other.begin - other.position)[pieces.run]
    low, all_low = np.maximum(low, pieces.low), np.maximum(all_low, pieces.low)
    high, all_high = np.minimum(high, pieces.high), np.minimum(all_high, pieces.high)
    some &= high > low
    begin = np.where(some, (low + shift) // block, 0)
    end = np.where(some, (high + shift - 1) // block + 1, 0)
    full_begin = -((-(all_low + shift)) // block)
    full_end = np.where(some, (all_high + shift) // block, 0)
    return _Span(pieces.tile, begin, end, full_begin, full_end, rows)


def _at_table(size: int, rows: Rows, pieces: _Pieces, by_key: bool) -> _Pieces:
    """Pieces cut at the list's blocks, each once for every stretch of blocks that it names."""
    ptr, first, stop = turned(rows) if by_key else stretches(rows)
    block = pieces.first // size
    count = (pieces.stop - 1) // size - block + 1
    if (count > 1).any():
        at = np.repeat(np.arange(len(count)), count)
        block = block[at] + written(np.zeros_like(count), count)
        pieces = pieces[at]
    inside = np.flatnonzero((block >= 0) & (block < len(ptr) - 1))
    block, pieces = block[inside], pieces[inside]
    pieces = replace(
        pieces, first=np.maximum(pieces.first, block * size),
        stop=np.minimum(pieces.stop, (block + 1) * size),
    )  # fmt: skip
    count = ptr[block + 1] - ptr[block]
    stretch = written(ptr[block], count)
    pieces = pieces[np.repeat(np.arange(len(count)), count)]
    return replace(
        pieces, low=np.maximum(pieces.low, first[stretch] * size),
        high=np.minimum(pieces.high, stop[stretch] * size),
    )  # fmt: skip


def _mirrored(end: int | None) -> int | None:
    return None if end is None else 1 - end

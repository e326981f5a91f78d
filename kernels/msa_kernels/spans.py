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
_AT_ONCE = 1 << 13
"""Stretches of block lists that are worked on at a time: arrays that stay in a core's cache, and
in memory that the process has already, take half the time of those that need new pages."""


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

    def _spans(self, pieces: _Pieces) -> list[_Span]:
        return [
            _span(rule, pieces, self.other, self.block_other, self.by_key)
            for rule in self.part.rules
        ]

    def _stretches(self) -> _Stretches:
        """Tiles of one kind next to each other, without overlap, ascending.

        Without block lists every rule has one span for each piece of a tile, so that columns of
        the arrays below are pieces.
        """
        spans = self._spans(_pieces(self.own, self.other, self.block_own))
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
        width = (-(-self.other.rows // self.block_other)).bit_length()
        bits = self.block_own.bit_length()
        shift = bits + len(self.part.rules).bit_length()
        # Half as wide, twice as fast; sums that pass its ends come back from the other one.
        kind = np.int32 if self._tiles << (width + shift) < 1 << 31 else np.int64
        keys, full = [], []
        for first, count in self._marked(width, bits, shift, kind):
            number = np.repeat(first - ((np.cumsum(count, dtype=kind) - count) << shift), count)
            number += np.arange(len(number), dtype=kind) << shift
            number.sort()
            rows = number & ((1 << bits) - 1)
            number >>= bits
            begins = _changes(number)
            whole = np.add.reduceat(rows, begins) == self.block_own
            number = number[begins] >> (shift - bits)
            if len(self.part.rules) > 1:
                begins = _changes(number)
                number, whole = number[begins], np.logical_or.reduceat(whole, begins)
            keys.append(number)
            full.append(whole)
        key = np.concatenate([*keys, np.empty(0, kind)])
        index = (key & ((1 << width) - 1)).astype(np.int32, copy=False)
        per_tile = np.bincount(key >> width, minlength=self._tiles)
        return self._lists(per_tile, index, np.concatenate([*full, np.empty(0, bool)]))

    def _marked(
        self, width: int, bits: int, shift: int, kind: type[np.signedinteger]
    ) -> Iterator[tuple[Ints, Ints]]:
        """First tiles of stretches and their lengths, all of some tiles at a time.

        A tile is one number of a ``kind``: the tile, in ``width`` bits the tile of the other side,
        its rule, and in ``bits`` the rows that the stretch covers whole, 0 where it is partial.
        """
        pieces = _pieces(self.own, self.other, self.block_own)
        weight = sum(_named(rule, pieces, self.by_key) for rule in self.part.rules)
        for some in _portions(pieces.tile, np.broadcast_to(weight, pieces.tile.shape)):
            firsts, counts, tiles = [], [], []
            for at, span in enumerate(self._spans(pieces[some])):
                low = np.minimum(np.maximum(span.full_begin, span.begin), span.end)
                high = np.minimum(np.maximum(span.full_end, low), span.end)
                tile = span.tile << width
                for begin, end, rows in (
                    (span.begin, low, 0), (low, high, span.rows), (high, span.end, 0),
                ):  # fmt: skip
                    firsts.append(((tile + begin) << shift) + ((at << bits) + rows))
                    counts.append(end - begin)
                    tiles.append(span.tile)
            first = np.concatenate(firsts).astype(kind, copy=False)
            count = np.concatenate(counts).astype(kind, copy=False)
            if int(count.sum()) <= 4 * _AT_ONCE:
                if count.any():
                    yield first, count
                continue
            tile = np.concatenate(tiles)
            order = np.flatnonzero(count)
            order = order[np.argsort(tile[order], kind="stable")]
            tile, first, count = tile[order], first[order], count[order]
            for at in _portions(tile, count):
                yield first[at], count[at]


def _changes(values: Ints) -> Ints:
    """Where a sorted array that is not empty takes another value, its beginning included."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def _named(rule: Rule, pieces: _Pieces, by_key: bool) -> Ints | int:
    """About how many stretches a rule gives each piece."""
    if rule.table is None:
        return 1
    size, rows = rule.table
    ptr, _, _ = turned(rows) if by_key else stretches(rows)
    return np.diff(ptr, append=ptr[-1])[np.clip(pieces.first // size, 0, len(ptr) - 1)] + 1


def _portions(tile: Ints, weight: Ints) -> Iterator[slice]:
    """Entries of ascending tiles in portions of whole tiles, of about ``_AT_ONCE`` in weight."""
    sums = np.cumsum(weight)
    if not len(sums):
        return
    firsts = np.flatnonzero(np.diff(tile, prepend=-1))
    portion = (sums - weight)[firsts] // _AT_ONCE
    begins = firsts[np.flatnonzero(np.diff(portion, prepend=-1))]
    for begin, end in zip(begins, [*begins[1:], len(tile)], strict=True):
        yield slice(int(begin), int(end))


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

    def __getitem__(self, at: Ints | slice) -> _Pieces:
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
    high = low + other.length[mine]
    return _Pieces(tile[at], (row + shift)[at], (end + shift)[at], mine, low, high)


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
    low = all_low = pieces.low
    high = all_high = pieces.high
    if near is not None:
        low, all_low = np.maximum(low, first + near), np.maximum(low, stop + (near - 1))
    if far is not None:
        high, all_high = np.minimum(high, stop + (far - 1)), np.minimum(high, first + far)
    if not by_key and rule.sinks is not None:
        high, all_high = np.minimum(high, rule.sinks), np.minimum(all_high, rule.sinks)
    if rule.block is not None:
        start = first // rule.block * rule.block
        last = (stop - 1) // rule.block * rule.block
        low, all_low = np.maximum(low, start), np.maximum(all_low, start)
        high = np.minimum(high, last + rule.block)
        all_high = np.minimum(all_high, np.where(start == last, start + rule.block, -_FAR))
    shift = (other.begin - other.position)[pieces.run]
    some &= high > low
    begin = np.where(some, _floor(low + shift, block), 0)
    end = np.where(some, _floor(high + shift - 1, block) + 1, 0)
    full_begin = _floor(all_low + (shift + (block - 1)), block)
    full_end = np.where(some, _floor(all_high + shift, block), 0)
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
    return _Pieces(
        *(np.repeat(a, count) for a in (pieces.tile, pieces.first, pieces.stop, pieces.run)),
        low=np.maximum(np.repeat(pieces.low, count), (first * size)[stretch]),
        high=np.minimum(np.repeat(pieces.high, count), (stop * size)[stretch]),
    )


def _floor(rows: Ints, block: int) -> Ints:
    """``rows // block``: for powers of two without a division, which costs more than all else."""
    bits = block.bit_length() - 1
    return rows >> bits if block == 1 << bits else rows // block


def _mirrored(end: int | None) -> int | None:
    return None if end is None else 1 - end

"""Tile lists: which key tiles each query tile visits, derived from rules by host arithmetic.

Never from an N x N mask: every (query tile, key tile) rectangle is judged by closed-form tests on
its corners. A rectangle that no rule touches is not listed; one that a rule covers wholly is
*full* and needs no mask; the rest is *partial*. Packed documents, unequal lengths and sequences
laid out over ranks are all one thing here: :class:`Runs`, stretches of consecutive positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msa_kernels.listed import stretches
from msa_kernels.rules import Part, Rule

Ints = NDArray[np.int64]
_CANDIDATES = 1 << 21
"""Rectangles judged at a time: bounds the memory of a build at about 200 bytes each."""


@dataclass(frozen=True)
class Runs:
    """Where the rows of a tensor sit: run ``r`` holds rows ``begin[r] .. begin[r] + length[r]``
    with positions ``position[r], position[r] + 1, ...`` of document ``document[r]``.

    Runs ascend by row and do not overlap; rows in no run see nothing and are seen by nothing.
    All four are int64 of shape (runs,). Positions count from the start of the document (of the
    residue class in a folded part) and may be negative for queries before the first key.
    """

    begin: Ints
    length: Ints
    position: Ints
    document: Ints
    rows: int
    """Rows of the tensor."""

    @classmethod
    def whole(cls, rows: int, position: int = 0) -> Runs:
        """One document of ``rows`` tokens, the first at ``position``."""
        return cls.of([(0, rows, position, 0)], rows)

    @classmethod
    def documents(cls, lengths: Sequence[int] | Ints) -> Runs:
        """Packed documents of these lengths, each counted from its own start."""
        size = np.asarray(lengths, np.int64)
        end = np.cumsum(size)
        zero = np.zeros_like(size)
        total = int(end[-1]) if len(end) else 0
        return cls(end - size, size, zero, np.arange(len(size)), total)

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int, int, int]], rows: int) -> Runs:
        """From ``(begin, length, position, document)`` tuples."""
        table = np.asarray([r for r in runs if r[1] > 0], np.int64).reshape(-1, 4)
        begin, length, position, document = np.ascontiguousarray(table.T)
        ends = begin + length
        if (begin[1:] < ends[:-1]).any() or (len(ends) and (ends[-1] > rows or begin[0] < 0)):
            raise ValueError(f"runs must ascend without overlap inside {rows} rows")
        return cls(begin, length, position, document, rows)

    @functools.cached_property
    def content(self) -> tuple[int, bytes, bytes, bytes, bytes]:
        """Equal for equal runs: a key for caches."""
        arrays = (self.begin, self.length, self.position, self.document)
        begin, length, position, document = (a.tobytes() for a in arrays)
        return self.rows, begin, length, position, document

    def token_maps(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Position and document of every row, int32 (rows,); document -1 outside all runs."""
        shift = (self.position - self.begin).astype(np.int32)
        if len(shift) and int(self.length.sum()) == self.rows:
            position = np.arange(self.rows, dtype=np.int32)
            position += np.repeat(shift, self.length)
            return position, np.repeat(self.document.astype(np.int32), self.length)
        position = np.zeros(self.rows, np.int32)
        document = np.full(self.rows, -1, np.int32)
        run, within = _expand(self.length)
        rows = self.begin[run] + within
        position[rows] = rows + shift[run]
        document[rows] = self.document[run]
        return position, document


@dataclass(frozen=True)
class TileLists:
    """Compressed rows of tiles: query tile ``t`` visits ``index[ptr[t]:ptr[t + 1]]``, ascending.

    ``ptr`` int32 (query tiles + 1,), ``index`` int32 (entries,), ``full`` bool (entries,).
    """

    ptr: NDArray[np.int32]
    index: NDArray[np.int32]
    full: NDArray[np.bool_]
    block_q: int
    block_k: int
    q_rows: int
    k_rows: int

    @property
    def q_tiles(self) -> int:
        return len(self.ptr) - 1

    @functools.cached_property
    def k_tiles(self) -> int:
        return -(-self.k_rows // self.block_k)

    @functools.cached_property
    def transposed(self) -> TileLists:
        """The same tiles listed by key tile: what the dK/dV pass walks."""
        owner = np.repeat(np.arange(self.q_tiles, dtype=np.int32), np.diff(self.ptr))
        order = np.argsort(self.index, kind="stable")
        return TileLists(
            _pointers(self.index, self.k_tiles), owner[order], self.full[order],
            self.block_k, self.block_q, self.k_rows, self.q_rows,
        )  # fmt: skip

    def select(self, full: bool) -> TileLists:
        """Only the full or only the partial tiles."""
        keep = self.full == full
        owner = np.repeat(np.arange(self.q_tiles), np.diff(self.ptr))[keep]
        return TileLists(
            _pointers(owner, self.q_tiles), self.index[keep], self.full[keep],
            self.block_q, self.block_k, self.q_rows, self.k_rows,
        )  # fmt: skip


def build(part: Part, queries: Runs, keys: Runs, block_q: int, block_k: int) -> TileLists:
    """Tile lists of one part. ``queries`` and ``keys`` are in the part's (folded) coordinates.

    Every allowed pair lies in a listed tile, and a full tile holds allowed pairs only. A listed
    tile holds at least one allowed pair, except that a tile may be left in which ``part.minus``
    empties without one of its rules covering it alone.
    """
    q_tiles, k_tiles = -(-queries.rows // block_q), -(-keys.rows // block_k)
    if q_tiles * k_tiles >= 1 << 62 or max(q_tiles, k_tiles) >= 1 << 31:
        raise ValueError(f"{q_tiles} x {k_tiles} tiles exceed 32-bit indices")
    owners, index, full = [], [], []
    for some in _segments(queries, block_q, block_k, keys):
        found: list[tuple[Ints, Ints]] = []
        for rule in part.rules:
            tile, k_tile, rect = _rectangles(rule, some, keys, block_k)
            hit = touches(rule, *rect)
            for cut in part.minus:
                hit &= ~covers(cut, *rect)
            tile, k_tile, rect = tile[hit], k_tile[hit], tuple(r[hit] for r in rect)
            whole = covers(rule, *rect)
            for cut in part.minus:
                whole &= ~touches(cut, *rect)
            size = np.where(whole, (rect[1] - rect[0]) * (rect[3] - rect[2]), 0)
            key, where = np.unique(tile * k_tiles + k_tile, return_inverse=True)
            found.append((key, np.bincount(where, size, len(key)).astype(np.int64)))
        listed = _distinct([key for key, _ in found])
        is_full = np.zeros(len(listed), bool)
        for key, covered in found:
            is_full[np.searchsorted(listed, key[covered == block_q * block_k])] = True
        owners.append((listed // k_tiles).astype(np.int32))
        index.append((listed % k_tiles).astype(np.int32))
        full.append(is_full)
    entries = np.concatenate([*index, np.empty(0, np.int32)])
    if len(entries) >= 1 << 31:
        raise ValueError(f"{len(entries)} tiles exceed 32-bit pointers: use larger tiles")
    return TileLists(
        _pointers(np.concatenate([*owners, np.empty(0, np.int32)]), q_tiles),
        entries, np.concatenate([*full, np.empty(0, bool)]),
        block_q, block_k, queries.rows, keys.rows,
    )  # fmt: skip


@dataclass(frozen=True)
class _Segments:
    """Pieces of query tiles that lie in one run: tile, positions [first, stop), document."""

    tile: Ints
    first: Ints
    stop: Ints
    document: Ints

    def __getitem__(self, at: slice | Ints) -> _Segments:
        return _Segments(self.tile[at], self.first[at], self.stop[at], self.document[at])


def _segments(queries: Runs, block_q: int, block_k: int, keys: Runs) -> Iterator[_Segments]:
    """Query tiles cut at run ends, a batch of whole tiles at a time."""
    if not len(queries.begin):
        return
    first_tile = queries.begin // block_q
    last_tile = (queries.begin + queries.length - 1) // block_q
    run, within = _expand(last_tile - first_tile + 1)
    tile = first_tile[run] + within
    row = np.maximum(tile * block_q, queries.begin[run])
    end = np.minimum((tile + 1) * block_q, queries.begin[run] + queries.length[run])
    shift = queries.position[run] - queries.begin[run]
    order = np.argsort(tile, kind="stable")
    all_of = _Segments(tile, row + shift, end + shift, queries.document[run])[order]
    step = max(1, _CANDIDATES // max(1, -(-keys.rows // block_k)))
    cuts = np.flatnonzero(np.diff(all_of.tile, prepend=-1) != 0)[::step]
    for begin, end in zip(cuts, [*cuts[1:], len(all_of.tile)], strict=True):
        yield all_of[begin:end]


Rect = tuple[Ints, ...]


def _rectangles(rule: Rule, some: _Segments, keys: Runs, block_k: int) -> tuple[Ints, Ints, Rect]:
    """Candidates: every segment against every key tile (cut at run ends) in the rule's span."""
    if rule.table is not None:
        some, lo, hi = _table_spans(rule, some)
    else:
        lo, hi = _span(rule, some.first, some.stop)
    order = np.argsort(keys.document, kind="stable")
    docs = keys.document[order]
    first_run = np.searchsorted(docs, some.document, "left")
    at, within = _expand(np.searchsorted(docs, some.document, "right") - first_run)
    run = order[first_run[at] + within]
    lo = np.maximum(lo[at], keys.position[run])
    hi = np.minimum(hi[at], keys.position[run] + keys.length[run])
    shift = keys.begin[run] - keys.position[run]
    k_first = (lo + shift) // block_k
    count = np.where(hi > lo, (hi + shift - 1) // block_k - k_first + 1, 0)
    again, within = _expand(count)
    k_tile = k_first[again] + within
    row_shift = shift[again]
    k0 = np.maximum(k_tile * block_k - row_shift, lo[again])
    k1 = np.minimum((k_tile + 1) * block_k - row_shift, hi[again])
    pick = at[again]
    return some.tile[pick], k_tile, (some.first[pick], some.stop[pick], k0, k1)


def _span(rule: Rule, first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """:meth:`Rule.span` for arrays, without an upper end of the sequence."""
    far = np.full_like(first, 1 << 40)
    lo = np.zeros_like(first) if rule.hi is None else np.maximum(0, first - rule.hi + 1)
    hi = far if rule.lo is None else stop - rule.lo
    if rule.sinks is not None:
        hi = np.minimum(hi, rule.sinks)
    if rule.block is not None:
        lo = np.maximum(lo, first // rule.block * rule.block)
        hi = np.minimum(hi, ((stop - 1) // rule.block + 1) * rule.block)
    return lo, hi


def _table_spans(rule: Rule, some: _Segments) -> tuple[_Segments, Ints, Ints]:
    """Segments cut at the table's query blocks, each once for every stretch of key blocks that
    it lists."""
    assert rule.table is not None
    size, rows = rule.table
    ptr, first, stop = stretches(rows)
    q_first = some.first // size
    at, within = _expand((some.stop - 1) // size - q_first + 1)
    q = q_first[at] + within
    inside = (q >= 0) & (q < len(rows))
    at, q = at[inside], q[inside]
    again, within = _expand(ptr[q + 1] - ptr[q])
    stretch = ptr[q[again]] + within
    q, pick = q[again], at[again]
    cut = _Segments(
        some.tile[pick], np.maximum(some.first[pick], q * size),
        np.minimum(some.stop[pick], (q + 1) * size), some.document[pick],
    )  # fmt: skip
    return cut, first[stretch] * size, stop[stretch] * size


def touches(rule: Rule, q0: Ints, q1: Ints, k0: Ints, k1: Ints) -> NDArray[np.bool_]:
    """Whether queries ``[q0, q1)`` see any key of ``[k0, k1)``. All int64 of one shape."""
    if rule.block is not None:
        first = np.maximum(q0 // rule.block, k0 // rule.block)
        last = np.minimum((q1 - 1) // rule.block, (k1 - 1) // rule.block)
        hit = np.zeros(q0.shape, bool)
        # All blocks strictly between the first and the last are whole: one of them stands for all.
        for block in (first, np.minimum(first + 1, last), last):
            start, stop = block * rule.block, (block + 1) * rule.block
            hit |= (first <= last) & _band_touches(
                rule, np.maximum(q0, start), np.minimum(q1, stop),
                np.maximum(k0, start), np.minimum(k1, stop),
            )  # fmt: skip
        return hit
    if rule.sinks is not None:
        k1 = np.minimum(k1, rule.sinks)
    if rule.columns is not None:
        if rule.hi is not None:
            k0 = np.maximum(k0, q0 - rule.hi + 1)
        if rule.lo is not None:
            k1 = np.minimum(k1, q1 - rule.lo)
        columns = _column_count(rule.columns, np.maximum(k1, k0)) - _column_count(rule.columns, k0)
        return columns > 0
    return _band_touches(rule, q0, q1, k0, k1)


def _band_touches(rule: Rule, q0: Ints, q1: Ints, k0: Ints, k1: Ints) -> NDArray[np.bool_]:
    """A multiple of ``step`` among the distances that occur and that the band allows."""
    low, high = q0 - k1 + 1, q1 - 1 - k0
    if rule.lo is not None:
        low = np.maximum(low, rule.lo)
    if rule.hi is not None:
        high = np.minimum(high, rule.hi - 1)
    return (q1 > q0) & (k1 > k0) & (high // rule.step * rule.step >= low)


def covers(rule: Rule, q0: Ints, q1: Ints, k0: Ints, k1: Ints) -> NDArray[np.bool_]:
    """Whether every query of ``[q0, q1)`` sees every key of ``[k0, k1)``; neither is empty.

    A rule with a table answers for rectangles inside one of its listed blocks.
    """
    low, high = q0 - k1 + 1, q1 - 1 - k0
    ok = np.ones(q0.shape, bool)
    if rule.lo is not None:
        ok &= low >= rule.lo
    if rule.hi is not None:
        ok &= high < rule.hi
    if rule.step > 1:
        ok &= (low == high) & (low % rule.step == 0)
    if rule.sinks is not None:
        ok &= k1 <= rule.sinks
    if rule.block is not None:
        block = q0 // rule.block
        ok &= (block == (q1 - 1) // rule.block) & (block == k0 // rule.block)
        ok &= block == (k1 - 1) // rule.block
    if rule.columns is not None:
        columns = _column_count(rule.columns, k1) - _column_count(rule.columns, k0)
        ok &= columns == k1 - k0
    return ok


def _column_count(columns: tuple[int, int], stop: Ints) -> Ints:
    """Columns among keys ``[0, stop)``."""
    length, count = columns
    return stop // length * count + np.maximum(0, stop % length - (length - count))


def _expand(count: Ints) -> tuple[Ints, Ints]:
    """For each unit of ``count``: the entry it belongs to, and its number within the entry."""
    owner = np.repeat(np.arange(len(count)), count)
    starts = np.cumsum(count) - count
    return owner, np.arange(len(owner)) - starts[owner]


def _distinct(keys: list[Ints]) -> Ints:
    """Sorted values of arrays that are each sorted and without repeats."""
    if len(keys) == 1:
        return keys[0]
    # np.union1d hashes, which takes many times as long as sorting what is nearly sorted.
    values = np.sort(np.concatenate([*keys, np.empty(0, np.int64)]), kind="stable")
    return values[np.diff(values, prepend=-1) != 0]


def _pointers(owner: NDArray[np.integer], count: int) -> NDArray[np.int32]:
    return np.searchsorted(np.sort(owner), np.arange(count + 1)).astype(np.int32)

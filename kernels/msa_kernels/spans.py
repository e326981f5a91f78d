"""Tile lists of parts whose rows see contiguous keys, without judging rectangles.

What bands, sinks, blocks and their unions give, in either direction: the keys that the queries of
a tile see, or the queries that see the keys of one, form one stretch per rule and document. Its
tiles are written down from its two ends, so that laying out a batch of new documents costs as much
as writing its lists; :func:`msa_kernels.blocks.build` serves everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msa_kernels.blocks import Ints, Runs, TileLists
from msa_kernels.rules import Part, Rule

_FAR = 1 << 40


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
    return rule.step == 1 and rule.columns is None and rule.table is None and not gap


def build(
    part: Part, own: Runs, other: Runs, block_own: int, block_other: int, by_key: bool
) -> TileLists:
    """For every tile of ``own`` the tiles of ``other``: queries and keys, or with ``by_key`` keys
    and queries. :func:`serves` must hold. Lists as :func:`msa_kernels.blocks.build` makes them.
    """
    pieces = _pieces(own, block_own)
    at, found = _match(pieces.document, other)
    tiles = -(-own.rows // block_own)
    spans = [_span(rule, pieces, at, found, other, block_other, by_key) for rule in part.rules]
    if not spans or not len(at):
        zero = np.zeros(0, np.int32)
        return TileLists(
            np.zeros(tiles + 1, np.int32), zero, zero.astype(bool), block_own, block_other,
            own.rows, other.rows,
        )  # fmt: skip
    begin = np.concatenate([s.begin for s in spans])
    end = np.concatenate([s.end for s in spans])
    piece = np.tile(at, len(spans))
    # Stretches of one tile in ascending order, each without what those before it hold.
    width = -(-other.rows // block_other) + 1
    base = pieces.tile[piece] * width
    order = np.argsort(base + begin, kind="stable")
    begin, end, piece, base = begin[order], end[order], piece[order], base[order]
    reach = np.maximum.accumulate(np.where(end > begin, base + end, 0))
    before = np.concatenate([[0], reach[:-1]]) - base
    begin = np.maximum(begin, before)
    count = np.maximum(end - begin, 0)
    total = int(count.sum())
    if total >= 1 << 31:
        raise ValueError(f"{total} tiles exceed 32-bit pointers: use larger tiles")
    number = np.repeat(np.arange(len(count), dtype=np.int32), count)
    first = begin - (np.cumsum(count) - count)
    index = (np.arange(total) + first[number]).astype(np.int32)
    full = np.zeros(total, bool)
    place = np.zeros(len(pieces.tile), np.int64)
    place[at] = np.arange(len(at))
    for span in spans:
        mine = place[piece]
        low, high = span.full_begin[mine], span.full_end[mine]
        if (high > low).any():
            full |= (index >= low[number]) & (index < high[number])
    per_tile = np.bincount(pieces.tile[piece], count, tiles).astype(np.int64)
    pointers = np.concatenate([[0], np.cumsum(per_tile)]).astype(np.int32)
    return TileLists(pointers, index, full, block_own, block_other, own.rows, other.rows)


@dataclass(frozen=True)
class _Pieces:
    """Tiles cut at run ends: tile, positions [first, stop), document; whether it is all of one."""

    tile: Ints
    first: Ints
    stop: Ints
    document: Ints
    whole: NDArray[np.bool_]


@dataclass(frozen=True)
class _Span:
    """Tiles [begin, end) that a piece touches under one rule, and those it covers."""

    begin: Ints
    end: Ints
    full_begin: Ints
    full_end: Ints


def _pieces(runs: Runs, block: int) -> _Pieces:
    first_tile = runs.begin // block
    count = (runs.begin + runs.length - 1) // block - first_tile + 1
    run = np.repeat(np.arange(len(count)), count)
    tile = first_tile[run] + np.arange(len(run)) - (np.cumsum(count) - count)[run]
    row = np.maximum(tile * block, runs.begin[run])
    end = np.minimum((tile + 1) * block, (runs.begin + runs.length)[run])
    shift = (runs.position - runs.begin)[run]
    return _Pieces(tile, row + shift, end + shift, runs.document[run], end - row == block)


def _match(document: Ints, other: Runs) -> tuple[Ints, Ints]:
    """Pieces that have a run of their document on the other side, and that run."""
    order = np.argsort(other.document, kind="stable")
    docs = other.document[order]
    where = np.searchsorted(docs, document)
    found = where < len(docs)
    found[found] = docs[where[found]] == document[found]
    at = np.flatnonzero(found)
    return at, order[where[at]]


def _span(
    rule: Rule, pieces: _Pieces, at: Ints, run: Ints, other: Runs, block: int, by_key: bool
) -> _Span:
    first, stop, whole = pieces.first[at], pieces.stop[at], pieces.whole[at]
    if by_key and rule.sinks is not None:
        whole = whole & (stop <= rule.sinks)
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
    position, length = other.position[run], other.length[run]
    shift = other.begin[run] - position
    low, all_low = np.maximum(low, position), np.maximum(all_low, position)
    high = np.minimum(high, position + length)
    all_high = np.minimum(all_high, position + length)
    some &= high > low
    begin = np.where(some, (low + shift) // block, 0)
    end = np.where(some, (high + shift - 1) // block + 1, 0)
    full_begin = -((-(all_low + shift)) // block)
    full_end = np.where(some & whole, (all_high + shift) // block, 0)
    return _Span(begin, end, full_begin, full_end)


def _mirrored(end: int | None) -> int | None:
    return None if end is None else 1 - end

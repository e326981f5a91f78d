"""Tile lists: they cover exactly what the predicate allows, and stay small."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels.blocks import Runs, TileLists, build
from msa_kernels.pattern import BlockList, Dense, SinkWindow, Window
from msa_kernels.rules import Part
from msa_kernels.spans import Spans, serves
from msa_kernels.testing import patterns, placed, seen_pairs
from msa_kernels.walks import Walk

TILES = st.sampled_from([1, 4, 7, 8, 13, 16])


def covered(lists: TileLists) -> np.ndarray:
    cover = np.zeros((lists.q_tiles * lists.block_q, lists.k_tiles * lists.block_k), bool)
    for q in range(lists.q_tiles):
        for k in lists.index[lists.ptr[q] : lists.ptr[q + 1]]:
            rows = slice(q * lists.block_q, (q + 1) * lists.block_q)
            cover[rows, k * lists.block_k : (k + 1) * lists.block_k] = True
    return cover


def entries(lists: TileLists) -> set[tuple[int, int, bool]]:
    owner = np.repeat(np.arange(lists.q_tiles), np.diff(lists.ptr))
    return set(zip(owner.tolist(), lists.index.tolist(), lists.full.tolist(), strict=True))


@settings(deadline=None, max_examples=250)
@given(st.data(), placed(), TILES, TILES)
def test_lists_cover_exactly_the_allowed_pairs(
    data: st.DataObject, where: tuple[Runs, Runs], block_q: int, block_k: int
) -> None:
    pattern = data.draw(patterns(120, per_head=False))
    queries, keys = where
    for part in (*pattern.parts(), Part(1, pattern.rules())):
        lists = build(part, queries, keys, block_q, block_k)
        seen = seen_pairs(part.allows, queries, keys)
        assert not (seen & ~covered(lists)[: queries.rows, : keys.rows]).any()
        for q in range(lists.q_tiles):
            some = slice(lists.ptr[q], lists.ptr[q + 1])
            assert (np.diff(lists.index[some]) > 0).all()
            for k, full in zip(lists.index[some], lists.full[some], strict=True):
                tile = seen[q * block_q :, k * block_k :][:block_q, :block_k]
                if full:
                    assert tile.shape == (block_q, block_k)
                    assert tile.all()
                elif not part.minus:
                    assert tile.any(), "a tile without pairs is listed"


@settings(deadline=None, max_examples=80)
@given(st.data(), placed(), TILES, TILES)
def test_transposed_lists_hold_the_same_tiles(
    data: st.DataObject, where: tuple[Runs, Runs], block_q: int, block_k: int
) -> None:
    pattern = data.draw(patterns(120, per_head=False))
    for part in pattern.parts():
        lists = build(part, *where, block_q, block_k)
        turned = lists.transposed
        assert entries(lists) == {(q, k, full) for k, q, full in entries(turned)}
        assert len(lists.select(True).index) + len(lists.select(False).index) == len(lists.index)


@settings(deadline=None, max_examples=400)
@given(st.data(), placed(), TILES, TILES)
def test_spans_write_down_the_same_lists(
    data: st.DataObject, where: tuple[Runs, Runs], block_q: int, block_k: int
) -> None:
    """In both directions; a tile of several stretches of one document may stay partial."""
    pattern = data.draw(patterns(120, per_head=False))
    for part in pattern.parts():
        lists = build(part, *where, block_q, block_k)
        one = all(len(runs.begin) == len(set(runs.document.tolist())) for runs in where)
        for by_key in (False, True):
            own, other = reversed(where) if by_key else where
            if not serves(part, other):
                continue
            sizes = (block_k, block_q) if by_key else (block_q, block_k)
            spans = Spans(part, own, other, *sizes, by_key)
            found = spans.lists()
            wanted = lists.transposed if by_key else lists
            assert (found.ptr == wanted.ptr).all()
            assert (found.index == wanted.index).all()
            assert not (found.full & ~wanted.full).any()
            if one:
                assert (found.full == wanted.full).all()
            assert (found.q_rows, found.k_rows) == (wanted.q_rows, wanted.k_rows)
            walk, same = spans.walk(), Walk.of(found)
            assert (walk.pointers == found.ptr).all()
            assert (walk.middles == same.middles).all()
            assert (walk.index == same.index).all()


@settings(deadline=None, max_examples=60)
@given(st.data(), placed(), TILES, TILES)
def test_a_walk_visits_partial_tiles_first(
    data: st.DataObject, where: tuple[Runs, Runs], block_q: int, block_k: int
) -> None:
    for part in data.draw(patterns(120, per_head=False)).parts():
        lists = build(part, *where, block_q, block_k)
        walk = Walk.of(lists)
        for q in range(lists.q_tiles):
            begin, middle, end = walk.pointers[q], walk.middles[q], walk.pointers[q + 1]
            some = slice(lists.ptr[q], lists.ptr[q + 1])
            index, full = lists.index[some], lists.full[some]
            assert walk.index[begin:middle].tolist() == index[~full].tolist()
            assert walk.index[middle:end].tolist() == index[full].tolist()
        length = np.diff(walk.pointers)[walk.order]
        assert (np.diff(length) <= 0).all()


def test_long_block_lists_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(tuple(sorted({q // 3, q // 2, q})) for q in range(40))
    part = BlockList(16, rows).parts()[0]
    runs = Runs.documents([300, 21, 319])
    for by_key in (False, True):
        spans = Spans(part, runs, runs, 16, 16, by_key)
        whole = spans.lists()
        with monkeypatch.context() as patch:
            patch.setattr("msa_kernels.spans._AT_ONCE", 7)
            pieces = spans.lists()
        assert len(whole.index) > 10 * 7
        for name in ("ptr", "index", "full"):
            assert (getattr(whole, name) == getattr(pieces, name)).all()


@pytest.mark.parametrize("tiles", [1000, 4097])
def test_lists_of_many_tiles_are_what_the_list_names(tiles: int) -> None:
    """The longer ones are sorted as wider numbers than the others."""
    rows = tuple(tuple(sorted({0, q // 3, q})) for q in range(tiles))
    runs = Runs.whole(tiles * 128)
    lists = Spans(BlockList(128, rows).parts()[0], runs, runs, 128, 128, False).lists()
    assert (lists.ptr == np.cumsum([0, *map(len, rows)])).all()
    assert (lists.index == np.concatenate(rows)).all()
    assert lists.full.sum() == len(lists.index) - tiles


@pytest.mark.parametrize("pattern", [Window(8192), SinkWindow(8192, 512)])
def test_a_million_tokens_need_little_memory(pattern: Window | SinkWindow) -> None:
    runs = Runs.whole(1 << 20)
    tracemalloc.start()
    try:
        lists = build(pattern.parts()[0], runs, runs, 128, 128)
        assert lists.transposed.k_tiles == 8192
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200e6
    assert lists.full.mean() > 0.9


def test_a_sparse_list_visits_only_what_it_lists() -> None:
    rows = tuple(tuple(sorted({0, q // 3, q})) for q in range(64))
    lists = build(BlockList(128, rows).parts()[0], Runs.whole(8192), Runs.whole(8192), 128, 128)
    assert [tuple(lists.index[lists.ptr[q] : lists.ptr[q + 1]]) for q in range(64)] == list(rows)
    assert lists.full.sum() == len(lists.index) - 64


def test_runs_refuse_overlap_and_overflow() -> None:
    with pytest.raises(ValueError, match="overlap"):
        Runs.of([(0, 5, 0, 0), (4, 2, 0, 1)], 10)
    with pytest.raises(ValueError, match="overlap"):
        Runs.of([(0, 11, 0, 0)], 10)
    with pytest.raises(ValueError, match="32-bit"):
        build(Dense().parts()[0], Runs.whole(1 << 33), Runs.whole(1), 1, 1)

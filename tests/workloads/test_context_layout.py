"""Layouts give every token one owner, keep a batch together, and balance what ranks attend."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels.pattern import Block, Columns, Dense, Dilated, PatternError, Union, Window
from msa_workloads.context.area import row_area
from msa_workloads.context.layout import (
    Chunk,
    Layout,
    LayoutError,
    contiguous,
    residues,
    zigzag,
)
from msa_workloads.context.solver import measure, solve

sys.path.insert(0, str(Path(__file__).parent))
from context_cases import LAYOUTS, PATTERNS, lengths, seen


def test_zigzag_content():
    layout = zigzag(16, 4)
    owned = [layout.tokens_of(rank).tolist() for rank in range(4)]
    assert owned == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    area = measure("zigzag", layout, {Dense(): 1}, (16,)).area
    assert set(area) == {34}
    restored = np.arange(16)[layout.permutation][layout.inverse]
    assert restored.tolist() == list(range(16))


def test_residues_are_whole_classes_and_then_zigzag_inside_them():
    assert [r[:3].tolist() for r in map(residues(16, 4, 8).tokens_of, range(2))] == [
        [0, 4, 8], [1, 5, 9],
    ]  # fmt: skip
    more = residues(32, 4, 2)
    assert more.stride == 2
    assert more.tokens_of(0).tolist() == [0, 2, 4, 6, 24, 26, 28, 30]
    assert more.tokens_of(3).tolist() == [9, 11, 13, 15, 17, 19, 21, 23]
    # No common factor: there is one class, the sequence itself.
    assert residues(30, 3, 4) == zigzag(30, 3)


@pytest.mark.parametrize("name", LAYOUTS)
@given(tokens=st.integers(24, 90), ranks=st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_round_trip(name: str, tokens: int, ranks: int):
    layout = LAYOUTS[name](tokens, ranks)
    order = layout.permutation
    assert sorted(order.tolist()) == list(range(layout.padded))
    assert (order[layout.inverse] == np.arange(layout.padded)).all()
    batch = {
        "tokens": torch.arange(2 * tokens).view(2, tokens),
        "labels": torch.arange(2 * tokens).view(2, tokens) + 7,
        "documents": torch.zeros(2, tokens, dtype=torch.int32),
        "weights": torch.rand(2, tokens, 3),
    }
    shards = [layout.shard(batch, rank) for rank in range(ranks)]
    for key, whole in batch.items():
        assert torch.equal(layout.gather([s[key] for s in shards]), whole)
        assert all(s[key].shape[1] == layout.rows for s in shards)
    for rank, shard in enumerate(shards):
        padding = torch.from_numpy(layout.tokens_of(rank) >= tokens)
        assert (shard["labels"][:, padding] == -100).all()
        assert (shard["documents"][:, padding] == -1).all()
        ranges = [t for r in layout.ranges(rank) for t in r]
        assert ranges == layout.tokens_of(rank).tolist()


def test_nothing_is_dropped_at_odd_lengths():
    layout = zigzag(7, 2)
    assert layout.padded == 8
    assert sorted(layout.permutation[layout.permutation < 7].tolist()) == list(range(7))


@given(
    name=st.sampled_from(sorted(PATTERNS)),
    tokens=st.integers(1, 80),
    cuts=st.lists(st.integers(1, 79), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_area_is_exact(name: str, tokens: int, cuts: list[int]):
    documents = lengths(tokens, cuts)
    expected = seen(PATTERNS[name], documents, tokens + 3).sum(1)
    assert (row_area(PATTERNS[name], documents, tokens + 3) == expected).all()


def test_area_of_steps_and_columns_together():
    pattern = Union((Dilated(6), Columns(9, 4), Block(4), Columns(9, 4).limited(12)))
    expected = seen(pattern, (50, 31), 81).sum(1)
    assert (row_area(pattern, (50, 31), 81) == expected).all()


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_causal_zigzag_is_balanced(ranks: int):
    tokens = 256 * ranks - 5
    found = measure("zigzag", zigzag(tokens, ranks), {Dense(): 1}, (tokens,))
    assert found.balance <= 1.03
    assert measure("", contiguous(tokens, ranks), {Dense(): 1}, (tokens,)).balance > 1.4


@pytest.mark.parametrize(("ranks", "classes"), [(2, 4), (4, 4), (8, 4), (16, 4), (12, 8), (6, 4)])
def test_residue_layouts_are_balanced_where_ranks_exceed_residues_too(ranks: int, classes: int):
    tokens = 9600
    layout = residues(tokens, ranks, classes)
    assert layout.stride == np.gcd(ranks, classes)
    assert measure("", layout, {Dilated(classes): 1}, (tokens,)).balance <= 1.03
    if ranks % classes == 0 and ranks > classes:
        inner = residues(tokens, ranks, classes, "contiguous")
        assert measure("", inner, {Dilated(classes): 1}, (tokens,)).balance > 1.4


@given(seed=st.integers(0, 10_000), ranks=st.sampled_from([2, 3, 4, 8]))
@settings(max_examples=25, deadline=None)
def test_the_solver_balances_packed_documents(seed: int, ranks: int):
    random = np.random.default_rng(seed)
    tokens = 16_384
    cuts = np.cumsum(random.lognormal(np.log(1500), 1.0, 64).astype(int) + 1)
    documents = lengths(tokens, cuts.tolist())
    choice = solve(tokens, ranks, {Dense(): 1}, documents, multiple=16)
    assert choice.best.balance <= 1.03
    again = solve(tokens, ranks, {Dense(): 1}, documents, multiple=16)
    assert again.layout == choice.layout


def test_the_solver_prefers_what_each_pattern_wants():
    tokens = 32_768
    assert solve(tokens, 8, {Window(256): 1}).best.name == "contiguous"
    assert solve(tokens, 8, {Dense(): 1}).best.name == "zigzag"
    assert solve(tokens, 4, {Dilated(8): 1}).best.received == (0, 0, 0, 0)
    assert solve(tokens, 8, {Dilated(4): 1}).best.name == "residues 4, zigzag"
    bounded = solve(tokens, 8, {Dilated(4, 64): 1}).best
    assert (bounded.name, max(bounded.received)) == ("residues 4, contiguous", 63)
    assert solve(tokens, 1, {Dense(): 1}).best.received == (0,)
    mixed = solve(tokens, 4, {Window(64): 28, Dense(): 4}).best
    assert mixed.balance <= 1.03


def test_two_ranks_share_the_short_rows_of_a_window():
    tokens, window = 131_072, 8192
    choice = solve(tokens, 2, {Window(window): 1}, multiple=128)
    best = choice.best
    assert best.name == "rotated" and best.balance < 1.001
    chunks = best.layout.chunks
    assert chunks[0] == (Chunk(0, chunks[0][0].begin, chunks[0][0].begin + tokens // 2),)
    assert 0 < chunks[0][0].begin < window
    # Keys and values of 8 heads of 128 in bf16: at most 42 MiB out of either rank.
    assert sum(best.received) * 2 * 8 * 128 * 2 <= 42 << 20
    halves = measure("", contiguous(tokens, 2), {Window(window): 1}, (tokens,))
    assert halves.balance > 1.03


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: zigzag(7, 4), "at least 8; nearest: zigzag over 3 ranks or contiguous over 4"),
        (lambda: contiguous(3, 4), "at least 4; nearest: contiguous over 3 ranks or 4 tokens"),
        (lambda: residues(12, 8, 4), "at least 16; nearest: residues over 6 ranks"),
        (lambda: contiguous(0, 2), "too short"),
        (lambda: residues(16, 4, 4, "spiral"), "inner must be zigzag or contiguous"),
        (lambda: contiguous(16, 2, 1, 8), "shift must be 0 to 7"),
        (lambda: zigzag(12, 2).split(4), "build the layout with multiple=4"),
        (lambda: zigzag(8, 0), "at least 1"),
        (lambda: solve(3, 4, {Dense(): 1}), "too short for contiguous over 4 ranks"),
        (lambda: Layout("x", 4, 1, ((Chunk(0, 0, 2),), (Chunk(0, 1, 3),))), "exactly one owner"),
        (lambda: Layout("x", 4, 1, ((Chunk(0, 0, 3),), (Chunk(0, 3, 4),))), "different numbers"),
        (lambda: zigzag(8, 2).shard({"tokens": torch.zeros(1, 9)}, 0), r"must be \(batch, 8"),
    ],
)
def test_impossible_splits_name_the_nearest_valid_one(make, says: str):
    with pytest.raises(LayoutError, match=says):
        make()


def test_patterns_without_rules_have_no_area():
    from msa_kernels.pattern import BlockTopK

    with pytest.raises(PatternError, match="selected at run time"):
        row_area(BlockTopK(4, 2), (16,), 16)

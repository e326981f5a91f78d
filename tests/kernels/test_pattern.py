"""Patterns: exact counts, one predicate, and a description that reads back."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels.pairs import union_pairs
from msa_kernels.pattern import (
    Block,
    BlockList,
    BlockTopK,
    Columns,
    Dense,
    Dilated,
    Documented,
    Documents,
    Fixed,
    Limited,
    Pattern,
    PatternError,
    PerHead,
    SinkWindow,
    Strided,
    Union,
    Window,
    from_dict,
)
from msa_kernels.rules import FARTHEST, Rule, any_allows
from msa_kernels.testing import patterns

LENGTHS = st.integers(1, 300)


def pairs_by_predicate(pattern: Pattern, n: int) -> int:
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    return int(np.broadcast_to(pattern.allows(i, j), (n, n)).sum())


@settings(deadline=None, max_examples=150)
@given(st.data(), LENGTHS)
def test_pairs_equal_the_count(data: st.DataObject, n: int) -> None:
    pattern = data.draw(patterns(n, per_head=False))
    assert pattern.pairs(n) == pairs_by_predicate(pattern, n)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 90))
def test_rows_are_the_predicate_as_bits(data: st.DataObject, n: int) -> None:
    pattern = data.draw(patterns(n, per_head=False))
    for i in range(n):
        bits = sum(1 << j for j in range(n) if pattern.allows(i, j))
        assert pattern.row(i, n) == bits


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 120))
def test_parts_are_disjoint_and_cover_the_pattern(data: st.DataObject, n: int) -> None:
    pattern = data.draw(patterns(n, per_head=False))
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    count = np.zeros((n, n), int)
    for part in pattern.parts():
        same_residue = i % part.fold == j % part.fold
        inside = part.allows(i // part.fold, j // part.fold)
        count += np.logical_and(np.broadcast_to(inside, (n, n)), same_residue)
    assert np.array_equal(count, np.broadcast_to(pattern.allows(i, j), (n, n)).astype(int))


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Rules with numbers up to several times a sequence of 6 tokens."""
    optional = st.none() | st.integers(-20, 20)
    number = st.integers(1, 20)
    length = draw(number)
    columns = length, draw(st.integers(1, length))
    rows = draw(st.lists(st.sets(st.integers(0, 20)), max_size=8))
    table = draw(number), tuple(tuple(sorted(row)) for row in rows)
    return Rule(
        draw(optional), draw(optional), draw(number), draw(st.none() | st.integers(0, 20)),
        draw(st.none() | number), draw(st.sampled_from([None, columns])),
        draw(st.sampled_from([None, table])),
    )  # fmt: skip


@settings(deadline=None, max_examples=500)
@given(rules())
def test_numbers_beyond_every_position_change_nothing(rule: Rule) -> None:
    end = 6
    bounded = rule.bounded(end)
    for i in range(1 - end, end):
        for j in range(min(end, i + end)):
            assert bool(bounded.allows(i, j)) == bool(rule.allows(i, j)), (bounded, i, j)
    values = [v for v in (bounded.lo, bounded.hi, bounded.step, bounded.sinks, bounded.block) if v]
    assert all(abs(v) <= end for v in [*values, *(bounded.columns or ())])
    size, rows = bounded.table or (1, ())
    assert size <= end
    assert all(k * size < end for row in rows for k in row)


@settings(deadline=None, max_examples=1000)
@given(st.lists(rules(), max_size=4), st.integers(0, 50))
def test_pairs_of_any_rules_equal_the_count(union: list[Rule], n: int) -> None:
    seen = sum(bool(any_allows(union, i, j)) for i in range(n) for j in range(n))
    assert union_pairs(union, n) == seen


def test_parts_hold_no_number_larger_than_a_position() -> None:
    assert Window(FARTHEST).parts() == Window(1 << 70).parts() == Dense().parts()
    assert Dense().limited(1 << 32).parts() == Dense().parts()
    assert Dilated(1 << 40).parts() == Window(1).parts()
    assert Columns(1 << 40, 1).parts() == ()
    assert Window(FARTHEST - 1).parts() != Dense().parts()


@settings(deadline=None, max_examples=60)
@given(st.data(), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_documents_restart_positions(data: st.DataObject, lengths: list[int]) -> None:
    pattern = data.draw(patterns(max(lengths), per_head=False))
    packed = pattern & Documents(tuple(lengths))
    n = sum(lengths)
    assert packed.pairs(n) == sum(pattern.pairs(length) for length in lengths)
    assert packed.pairs(n) == pairs_by_predicate(packed, n)


@settings(deadline=None, max_examples=80)
@given(st.data(), st.integers(1, 60))
def test_description_reads_back(data: st.DataObject, n: int) -> None:
    pattern = data.draw(patterns(n))
    text = json.dumps(pattern.to_dict())
    assert from_dict(json.loads(text)) == pattern


def test_every_kind_means_what_its_definition_says() -> None:
    n = 24
    cases = {
        Window(3): lambda i, j: 0 <= i - j < 3,
        Dilated(4): lambda i, j: j <= i and (i - j) % 4 == 0,
        Dilated(4, 2): lambda i, j: (i - j) % 4 == 0 and 0 <= (i - j) // 4 < 2,
        Block(5): lambda i, j: j <= i and i // 5 == j // 5,
        Columns(6, 2): lambda i, j: j <= i and j % 6 >= 4,
        SinkWindow(4, 2): lambda i, j: j <= i and (i - j < 4 or j < 2),
        Strided(5, "union"): lambda i, j: j <= i and (i - j < 5 or (i - j) % 5 == 0),
        Fixed(5, 2, "union"): lambda i, j: j <= i and (i // 5 == j // 5 or j % 5 >= 3),
        Window(3, causal=False): lambda i, j: abs(i - j) < 3,
    }
    for pattern, rule in cases.items():
        for i in range(n):
            for j in range(n):
                assert bool(pattern.allows(i, j)) == rule(i, j), (pattern, i, j)


def test_large_counts_are_exact_and_closed() -> None:
    n = 1 << 20
    assert Dense().pairs(n) == n * (n + 1) // 2
    assert Window(8192).pairs(n) == n * 8192 - 8192 * 8191 // 2
    strided = Strided(128, "union")
    assert strided.pairs(n) == Window(128).pairs(n) + Dilated(128).pairs(n) - n
    length = n // 4
    assert Block(length).pairs(n) == 4 * Dense().pairs(length)
    columns = 4 * 1024 * 1025 // 2 + (3 + 2 + 1) * 1024 * length
    assert Columns(length, 1024).pairs(n) == columns
    last = 4 * 1024 * 1025 // 2  # of its own block a query sees columns in the last tokens only
    fixed = Fixed(length, 1024, "union").pairs(n)
    assert fixed == Block(length).pairs(n) + columns - last
    # Two rules that share no period below a million: once counted row by row.
    assert Union((Block(1009), Columns(997, 3))).pairs(n) == 2_180_545_153
    lists = BlockList(1024, tuple((q,) for q in range(128)))
    assert Union((Window(512), lists)).pairs(1 << 17) == 83_788_032


@pytest.mark.parametrize(
    ("raw", "path", "says"),
    [
        ({"type": "Windw", "window": 4}, "type", "allowed"),
        ({"type": "Window", "window": 0}, "window", "at least 1"),
        ({"type": "Window", "window": "4k"}, "window", "integer"),
        ({"type": "Window", "size": 4}, "size", "window"),
        ({"type": "Window"}, "window", "needs"),
        ({"type": "Columns", "length": 4, "columns": 5}, "columns", "at most"),
        ({"type": "Union", "members": [{"type": "Block"}]}, "members[0].length", "needs"),
        ({"type": "BlockList", "block": 8, "rows": [[0], [1, 0]]}, "rows[1]", "ascend"),
        ({"type": "BlockList", "block": 8, "rows": [[1]]}, "rows[0][0]", "after"),
        ({"type": "Strided", "length": 8, "heads": "both"}, "heads", "split"),
        ("SinkWindow", "", "mapping"),
    ],
)
def test_a_bad_description_names_the_field(raw: object, path: str, says: str) -> None:
    with pytest.raises(PatternError, match=says) as found:
        from_dict(raw)
    assert found.value.path == path


@pytest.mark.parametrize(
    ("build", "path", "says"),
    [
        (lambda: Dense(causal=0), "causal", "true or false, found 0"),  # type: ignore[arg-type]
        (lambda: Window(3, causal=np.True_), "causal", "true or false"),  # type: ignore[arg-type]
        (lambda: BlockList(4, ((0,),), causal=1), "causal", "found 1"),  # type: ignore[arg-type]
        (lambda: BlockList(4, (1, 2)), "rows[0]", "a list of block numbers, found 1"),
        (lambda: BlockList(4, 3), "rows", "lists of block numbers, found 3"),
        (lambda: Union((Dense(), 3)), "members[1]", "must be a pattern, found 3"),
        (lambda: Union(()), "members", "at least one"),
        (lambda: PerHead((None,)), "members[0]", "must be a pattern, found None"),
        (lambda: PerHead(Dense()), "members", "must be a list of patterns, found Dense"),
        (lambda: Limited(3, 4), "pattern", "must be a pattern, found 3"),
        (lambda: Limited(Dense(), "abc"), "window", "must be an integer, found 'abc'"),
        (lambda: Limited(Dense(), -1), "window", "at least 1, found -1"),
        (lambda: Limited(Strided(4), 3), "pattern", "a PerHead cannot be inside Limited"),
        (lambda: Limited(Dense() & Documents((3,)), 2), "pattern", "a Documented cannot"),
        (lambda: Documented(Strided, Documents((3,))), "pattern", "must be a pattern"),
        (lambda: Documents(3), "lengths", "must be a list of lengths, found 3"),
        (lambda: Window(4).density(0), "n", "at least 1, found 0"),
    ],
)
def test_what_is_no_pattern_is_refused_as_it_is_made(build: Any, path: str, says: str) -> None:
    with pytest.raises(PatternError, match=says) as refused:
        build()
    assert refused.value.path == path
    assert isinstance(Dense(causal=False).causal, bool)  # caches keep no look-alike


def test_documents_and_heads_are_limited_inside() -> None:
    assert (Dense() & Documents((3, 4))).limited(2) == Dense().limited(2) & Documents((3, 4))
    assert Strided(4).limited(2).for_group(1) == Dilated(4).limited(2)


def test_a_selected_pattern_has_bounds_and_no_rules() -> None:
    pattern = BlockTopK(16, 3)
    with pytest.raises(PatternError, match="BlockList"):
        pattern.rules()
    rows = tuple(tuple(sorted({0, max(0, q - 1), q})) for q in range(7))
    assert BlockList(16, rows).pairs(100) <= pattern.pairs_bound(100)


def test_per_head_interleaves_groups() -> None:
    pattern = PerHead((Window(4), Dilated(2)))
    assert [pattern.for_group(g) for g in range(4)] == [Window(4), Dilated(2)] * 2
    with pytest.raises(PatternError, match="Union"):
        Union((pattern, Window(2)))


def test_equal_block_lists_share_their_rows() -> None:
    """Look-ups in caches compare patterns; equal lists of a million tokens take a millisecond."""
    rows = tuple((0, q) if q else (0,) for q in range(9))
    first = BlockList(16, rows)
    again = BlockList(16, [list(row) for row in rows])  # type: ignore[arg-type]
    restored = pickle.loads(pickle.dumps(again))
    assert first.rows is again.rows is restored.rows
    assert first == again == restored
    assert len({first, again, restored}) == 1
    with pytest.raises(PatternError, match="rows"):
        BlockList(16, ((0,), (0, True)))


def test_documents_are_checked_and_hashable() -> None:
    assert hash(Documents([3, 5])) == hash(Documents((3, 5)))  # type: ignore[arg-type]
    for lengths, path in (((3, 0), "lengths[1]"), ((-1,), "lengths[0]"), ((True,), "lengths[0]")):
        with pytest.raises(PatternError) as refused:
            Documents(lengths)
        assert refused.value.path == path

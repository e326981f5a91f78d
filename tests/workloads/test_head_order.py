"""Ranks that split heads attend evenly wherever any assignment of key/value heads lets them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels.pattern import Dense, Pattern, PerHead, Window
from msa_workloads.heads import EVEN, HeadSplit, busiest

LENGTH = 1024


def least(areas: list[int], ranks: int) -> float:
    """Busiest rank over the mean of the best assignment, by trying all of them."""
    size = len(areas) // ranks

    def best(left: frozenset[int]) -> int:
        if not left:
            return 0
        first = min(left)
        return min(
            max(sum(areas[n] for n in (first, *others)), best(left - {first, *others}))
            for others in itertools.combinations(sorted(left - {first}), size - 1)
        )

    return best(frozenset(range(len(areas)))) * ranks / sum(areas)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (9, 3), (10, 5)]),
    windows=st.lists(st.integers(1, LENGTH), min_size=1, max_size=5),
)
def test_an_even_order_is_found_where_there_is_one(shape: tuple[int, int], windows: list[int]):
    kv_heads, ranks = shape
    members: list[Pattern] = [Window(window) for window in windows]
    pattern = PerHead(tuple(members))
    split = HeadSplit(2 * kv_heads, kv_heads, ranks)
    order = split.order(pattern, LENGTH)
    assert sorted(order) == list(range(kv_heads))
    found, plain = split.balance(pattern, LENGTH, order), split.balance(pattern, LENGTH)
    possible = least([pattern.for_group(g).pairs(LENGTH) for g in range(kv_heads)], ranks)
    assert possible - 1e-9 <= found <= plain
    if possible <= EVEN:
        assert found <= EVEN + 1e-9
    if plain <= EVEN:
        assert order == tuple(range(kv_heads))


def test_the_most_and_the_least_come_together():
    pattern = PerHead((Dense(), Window(420), Window(180), Window(4)))
    split = HeadSplit(16, 8, 4)
    assert split.balance(pattern, LENGTH) > 1.4
    order = split.order(pattern, LENGTH)
    assert split.balance(pattern, LENGTH, order) <= EVEN
    ranks = [split.pattern(pattern, rank, order) for rank in range(4)]
    assert sorted(ranks, key=str) == sorted(
        [PerHead((Dense(), Window(4))), PerHead((Window(420), Window(180)))] * 2, key=str
    )
    # Over four Ulysses ranks of one tensor rank it is even, over four tensor ranks it is not.
    assert busiest(16, 8, 1, 4, pattern, LENGTH) <= EVEN
    assert busiest(16, 8, 4, 1, pattern, LENGTH) == split.balance(pattern, LENGTH)


def test_a_large_search_ends():
    members = tuple(Window(3 * n * n + 7) for n in range(1, 18))
    split = HeadSplit(64, 64, 16)
    order = split.order(PerHead(members), LENGTH)
    assert sorted(order) == list(range(64))
    assert split.balance(PerHead(members), LENGTH, order) <= 1.2


@pytest.mark.parametrize("degree", [1, 2, 8])
def test_one_group_a_rank_cannot_be_even(degree: int):
    dense, window = Dense().pairs(8192), Window(512).pairs(8192)
    pattern = PerHead((Window(512), Dense()))
    split = HeadSplit(32, 8, degree)
    wanted = 2 * dense / (dense + window) if degree == 8 else 1.0
    assert split.balance(pattern, 8192, split.order(pattern, 8192)) == pytest.approx(wanted)

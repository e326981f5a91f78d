"""Ranks that split heads attend evenly wherever any assignment of key/value heads lets them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels.pattern import Dense, Pattern, PerHead, Window
from msa_workloads.dealing import EVEN
from msa_workloads.heads import (
    HeadSplit,
    busiest,
    report_heads,
    stored,
    stored_order,
    stored_orders,
)

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


def many(*windows: int) -> PerHead:
    return PerHead(tuple(Window(window) for window in windows))


@pytest.mark.parametrize(
    ("pattern", "kv_heads", "tensor", "shares"),
    [
        (many(4, 180, 420, 1024), 8, 4, 1),  # pairs of the longest and the shortest
        (many(4, 180, 420, 1024), 16, 8, 1),
        (many(1024, 1024, 1024, 1024, 9, 9, 9, 9), 8, 2, 1),
        (many(1024, 1024, 1024, 1024, 9, 9, 9, 9), 8, 2, 2),
        (many(1024, 1024, 9, 9), 4, 2, 1),
        (many(*range(8, 1024, 32)), 32, 4, 1),
        (many(*range(8, 1024, 32)), 32, 4, 2),
        (many(*(4 * n * n for n in range(1, 17))), 16, 4, 1),
        (PerHead((Dense(), Window(420), Window(180), Window(4))), 8, 4, 1),
    ],
)
def test_tensor_ranks_are_even_in_the_order_that_is_stored(
    pattern: PerHead, kv_heads: int, tensor: int, shares: int
):
    split = 4 * kv_heads, kv_heads, tensor, shares
    order = stored_order(*split, pattern, LENGTH)
    assert order is not None and sorted(order) == list(range(kv_heads))
    assert busiest(*split, pattern, LENGTH) > 1.2
    assert busiest(*split, stored(pattern, order), LENGTH) <= EVEN
    # What is even for some ranks is so for a divisor of them: the run may go on there.
    for fewer in (n for n in range(1, tensor) if tensor % n == 0):
        here = HeadSplit(4 * kv_heads, kv_heads, fewer)
        assert here.balance(stored(pattern, order), LENGTH) <= EVEN + 1e-9


@settings(deadline=None, max_examples=80)
@given(
    shape=st.sampled_from([(4, 2, 1), (6, 3, 1), (8, 2, 1), (8, 4, 1), (8, 2, 2), (9, 3, 1)]),
    windows=st.lists(st.integers(1, LENGTH), min_size=1, max_size=9),
)
def test_a_stored_order_is_never_worse_and_even_where_one_is(
    shape: tuple[int, int, int], windows: list[int]
):
    kv_heads, tensor, shares = shape
    pattern, split = many(*windows), (2 * kv_heads, kv_heads, tensor, shares)
    plain = busiest(*split, pattern, LENGTH)
    order = stored_order(*split, pattern, LENGTH)
    if plain <= EVEN:
        assert order is None
    found = busiest(*split, stored(pattern, order), LENGTH)
    areas = [pattern.for_group(group).pairs(LENGTH) for group in range(kv_heads)]
    possible = least(areas, tensor * shares)
    assert possible - 1e-9 <= found <= plain
    if possible <= EVEN:
        assert found <= EVEN + 1e-9
    if order is not None:
        assert sorted(order) == list(range(kv_heads))
        assert sorted(map(str, stored(pattern, order).members)) == sorted(  # type: ignore[attr-defined]
            str(pattern.for_group(group)) for group in range(kv_heads)
        )


def test_an_order_serves_finer_degrees_too_where_it_can():
    pattern = many(1024, 1024, 1024, 1024, 9, 9, 9, 9)
    order = stored_order(16, 8, 2, 1, pattern, LENGTH)
    assert HeadSplit(16, 8, 4).balance(stored(pattern, order), LENGTH) <= EVEN


def test_where_no_order_is_better_it_is_the_models_own():
    pattern = many(4, 180, 420, 1024)
    assert stored_order(32, 8, 1, 1, pattern, LENGTH) is None
    assert stored_order(32, 8, 2, 1, pattern, LENGTH) is None  # even as it is
    assert stored_order(32, 8, 8, 1, pattern, LENGTH) is None  # one head a rank
    assert stored_order(32, 8, 16, 1, pattern, LENGTH) is None  # copies
    assert stored_order(32, 8, 4, 1, Window(9), LENGTH) is None


def test_layers_have_orders_of_their_own_and_the_report_names_them():
    one, other = many(4, 180, 420, 1024), many(1024, 1024, 1024, 1024, 9, 9, 9, 9)
    layers = [one, Dense(), other, one]
    orders = stored_orders(layers, (32, 8), 4, 1, LENGTH)
    assert orders.keys() == {0, 2, 3} and orders[0] == orders[3] != orders[2]
    kinds = report_heads(layers, (32, 8), orders, 4, 1, LENGTH)
    assert [(k["layers"], tuple(k["order"])) for k in kinds] == [
        ([0, 3], orders[0]), ([2], orders[2])
    ]  # fmt: skip
    assert all(kind["balance"] <= EVEN < kind["plain"] for kind in kinds)
    assert report_heads(layers, (32, 8), {}, 1, 1, LENGTH) == []
    (alone,) = report_heads(layers, (32, 8), {0: orders[0]}, 1, 1, LENGTH)
    assert (alone["layers"], alone["balance"]) == ([0], 1.0)


def test_a_large_search_ends():
    members = tuple(Window(3 * n * n + 7) for n in range(1, 18))
    split = HeadSplit(64, 64, 16)
    order = split.order(PerHead(members), LENGTH)
    assert sorted(order) == list(range(64))
    assert split.balance(PerHead(members), LENGTH, order) <= 1.2
    # Nothing is even beside one head that attends to most, and no search says so quickly.
    wide = PerHead((Dense(), *(Window(1 + n % 90) for n in range(95))))
    assert stored_order(96, 96, 2, 1, wide, LENGTH) is not None


@pytest.mark.parametrize("degree", [1, 2, 8])
def test_one_group_a_rank_cannot_be_even(degree: int):
    dense, window = Dense().pairs(8192), Window(512).pairs(8192)
    pattern = PerHead((Window(512), Dense()))
    split = HeadSplit(32, 8, degree)
    wanted = 2 * dense / (dense + window) if degree == 8 else 1.0
    assert split.balance(pattern, 8192, split.order(pattern, 8192)) == pytest.approx(wanted)

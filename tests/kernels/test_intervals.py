"""Intervals say exactly what the predicate of a part says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels import intervals
from msa_kernels.blocks import Runs
from msa_kernels.capabilities import few_intervals
from msa_kernels.pattern import (
    Block,
    BlockList,
    Columns,
    Dense,
    Dilated,
    Pattern,
    SinkWindow,
    Union,
    Window,
)  # fmt: skip
from msa_kernels.testing import placed, seen_pairs


def visible(ends: torch.Tensor, keys: int) -> np.ndarray:
    """Every pair that the ends admit, bool (queries, keys)."""
    table, j = ends.numpy(), np.arange(keys)
    assert table.shape[0] % 2 == 1
    assert (np.diff(table, axis=0) >= 0).all()
    seen = j[None] < table[0][:, None]
    for n in range(1, len(table), 2):
        seen |= (j[None] >= table[n][:, None]) & (j[None] < table[n + 1][:, None])
    return seen


def served(length: int) -> st.SearchStrategy[Pattern]:
    rows = st.lists(
        st.lists(st.integers(0, 11), max_size=5, unique=True).map(lambda r: tuple(sorted(r))),
        min_size=1, max_size=12,
    )  # fmt: skip
    near = st.integers(1, 40)
    leaf = st.one_of(
        st.builds(Dense, st.booleans()), st.builds(Window, near, st.booleans()),
        st.builds(SinkWindow, near, st.integers(0, 30)), st.builds(Block, near),
        st.builds(lambda b, r: BlockList(b, tuple(r), False), st.integers(1, 12), rows),
    )  # fmt: skip
    return st.one_of(leaf, st.lists(leaf, min_size=2, max_size=3).map(lambda m: Union(tuple(m))))


@settings(deadline=None, max_examples=120)
@given(st.data(), placed())
def test_ends_are_the_predicate(data: st.DataObject, place: tuple[Runs, Runs]) -> None:
    queries, keys = place
    pattern = data.draw(served(queries.rows))
    (part,) = pattern.parts()
    assert few_intervals(part) is None
    found = visible(intervals.ends(part, queries, keys, torch.device("cpu")), keys.rows)
    assert (found == seen_pairs(part.allows, queries, keys)).all()


def test_neighbouring_blocks_are_one_interval() -> None:
    (part,) = BlockList(8, ((0,), (0, 1), (0, 1, 2))).parts()
    runs = Runs.whole(24)
    assert intervals.ends(part, runs, runs, torch.device("cpu")).shape == (3, 24)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (Columns(8, 2), "not columns"),
        (Union((Block(128), Dilated(3))), "not dilated"),
        (BlockList(1, tuple(tuple(range(0, q, 2)) for q in range(1024))), "at most 256 intervals"),
    ],
)
def test_what_is_not_a_few_intervals_is_named(pattern: Pattern, reason: str) -> None:
    assert any(reason in (few_intervals(part) or "") for part in pattern.parts())

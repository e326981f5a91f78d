"""A part made of bands is computed by calls on slices, exactly, and anything else is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels import engine
from msa_kernels.bands import MOST, Band, bands
from msa_kernels.blocks import Runs
from msa_kernels.pattern import Columns, Dense, Dilated, Pattern, SinkWindow, Window
from msa_kernels.plan import plan
from msa_kernels.testing import DenseBands, assert_close
from msa_kernels.tiled import TorchTiles


def calls(pattern: Pattern, queries: Runs, keys: Runs) -> tuple[Band, ...] | str:
    (part,) = plan(pattern, queries, keys)
    return bands(part)


def test_a_rank_with_the_ends_of_a_sequence():
    # Zigzag over two ranks: chunks 0 and 3 of 100 tokens, all keys in order.
    queries = Runs.of([(0, 100, 0, 0), (100, 100, 300, 0)], 200)
    assert calls(Dense(), queries, Runs.whole(400)) == (
        Band((0, 100), (0, 100), True, None), Band((100, 200), (0, 400), True, None),
    )  # fmt: skip


def test_a_window_needs_no_more_keys_than_its_reach():
    queries = Runs.whole(100, 300)
    assert calls(Window(64), queries, Runs.whole(400)) == (Band((0, 100), (237, 400), True, 64),)


def test_queries_that_see_all_keys_need_no_mask():
    assert calls(Dense(), Runs.whole(50, 200), Runs.whole(200)) == (
        Band((0, 50), (0, 200), False, None),
    )
    assert calls(Dense(causal=False), Runs.whole(50), Runs.whole(200)) == (
        Band((0, 50), (0, 200), False, None),
    )


def test_rows_without_keys_are_in_no_call():
    queries = Runs.of([(0, 10, 0, 0), (10, 10, 0, 1)], 20)
    assert calls(Window(4), queries, Runs.whole(10)) == (Band((0, 10), (0, 10), True, 4),)


def test_keys_out_of_order_are_refused():
    keys = Runs.of([(0, 100, 100, 0), (100, 100, 0, 0)], 200)
    reason = calls(Dense(), Runs.whole(100, 100), keys)
    assert reason == "needs the keys of each stretch of queries in one stretch of rows, in order"
    # Its far end is cut by the window: a rectangle with a diagonal corner is no band.
    assert "end where" in str(calls(Window(150), Runs.whole(100, 150), Runs.whole(150)))


@pytest.mark.parametrize("pattern", [Columns(8, 2), SinkWindow(8, 2)])
def test_other_rules_are_refused(pattern: Pattern):
    for part in plan(pattern, Runs.whole(64), Runs.whole(64)):
        if part.part.rules[0].hi is None:
            assert isinstance(bands(part), str)


def test_many_stretches_are_refused():
    runs = Runs.documents([3] * (MOST + 1))
    assert "at most 8 stretches" in str(calls(Dense(), runs, runs))


@st.composite
def places(draw: st.DrawFn) -> tuple[Pattern, Runs, Runs]:
    """Stretches of a sequence as a rank might hold them: some queries, some or all keys."""
    n = draw(st.integers(1, 90))
    cuts = sorted(draw(st.sets(st.integers(1, n), max_size=5)) | {0, n})
    pieces = list(itertools.pairwise(cuts))
    kept = draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    mine = [p for p, keep in zip(pieces, kept, strict=True) if keep] or pieces[:1]
    begin = draw(st.integers(0, n - 1))

    def runs(some: list[tuple[int, int]]) -> Runs:
        length = np.array([b - a for a, b in some])
        at = np.cumsum(length) - length
        table = [(int(r), b - a, a, 0) for r, (a, b) in zip(at, some, strict=True)]
        return Runs.of(table, int(length.sum()))

    keys = draw(st.sampled_from([[(0, n)], [(begin, n)], mine]))
    pattern = draw(st.sampled_from([
        Dense(), Dense(causal=False), Window(1), Window(7), Window(33), Dilated(2), Dilated(3, 4),
    ]))  # fmt: skip
    return pattern, runs(mine), runs(keys)


@settings(deadline=None, max_examples=150)
@given(places())
def test_bands_compute_what_tiles_compute(place: tuple[Pattern, Runs, Runs]):
    pattern, queries, keys = place
    if any(isinstance(bands(part), str) for part in plan(pattern, queries, keys)):
        return
    make = torch.Generator().manual_seed(queries.rows)
    q, dout = (torch.randn(1, queries.rows, 4, 8, generator=make) for _ in range(2))
    k, v = (torch.randn(1, keys.rows, 2, 8, generator=make) for _ in range(2))
    wanted = engine.forward(TorchTiles(), q, k, v, pattern, queries, keys, 0.3)
    found = engine.forward(DenseBands(), q, k, v, pattern, queries, keys, 0.3)
    assert_close("out", found[0], wanted[0])
    assert_close("lse", found[1], wanted[1])
    out, lse = wanted
    delta = (dout * out).sum(-1).transpose(1, 2)
    inputs = (q, k, v, out, dout, lse, delta, pattern, queries, keys, 0.3)
    for name, some, exact in zip(
        ("dq", "dk", "dv"), engine.backward(DenseBands(), *inputs),
        engine.backward(TorchTiles(), *inputs), strict=True,
    ):  # fmt: skip
        # One key alone has a gradient of zero: no measure for an error.
        torch.testing.assert_close(some, exact, atol=1e-5, rtol=1e-5, msg=name)

"""Plans move exactly the keys that the predicate needs and the rank does not own."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels.pattern import Dense, Dilated, Pattern, PerHead, SinkWindow, Strided, Window
from msa_kernels.rules import Rule
from msa_workloads.context.commplan import comm_plan, owned, plan_bytes
from msa_workloads.context.intervals import Bounds, Line, in_documents, union
from msa_workloads.context.layout import Layout, LayoutError, contiguous, residues, zigzag
from msa_workloads.context.reach import keys_seen, modulus, queries_seeing

sys.path.insert(0, str(Path(__file__).parent))
from context_cases import LAYOUTS, PATTERNS, lengths, seen


def needed(pattern: Pattern, layout: Layout, documents: tuple[int, ...]) -> dict:
    """Tokens per (receiver, owner), from the predicate on all pairs."""
    allowed = seen(pattern, documents, layout.padded)
    owner = np.empty(layout.padded, np.int64)
    for rank in range(layout.ranks):
        owner[layout.tokens_of(rank)] = rank
    out = {}
    for receiver in range(layout.ranks):
        need = allowed[layout.tokens_of(receiver)].any(0)
        for sender in range(layout.ranks):
            mine = np.flatnonzero(need & (owner == sender))
            out[receiver, sender] = [] if sender == receiver else mine.tolist()
    return out


@given(
    pattern=st.sampled_from(sorted(PATTERNS)),
    layout=st.sampled_from(sorted(LAYOUTS)),
    ranks=st.integers(1, 8),
    tokens=st.integers(24, 88),
    cuts=st.lists(st.integers(1, 87), max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_plans_equal_brute_force(pattern, layout, ranks, tokens, cuts):
    documents, rule = lengths(tokens, cuts), PATTERNS[pattern]
    where = LAYOUTS[layout](tokens, ranks)
    plan = comm_plan(rule, where, documents)
    expected = needed(rule, where, documents)
    for (receiver, sender), wanted in expected.items():
        assert plan.tokens[receiver, sender] == len(wanted)
        listed = [t for a, b in plan.ranges(receiver, sender) for t in range(a, b)]
        assert listed == wanted
    for rank in range(ranks):
        incoming, counts = plan.incoming(rank)
        assert incoming.tolist() == [t for s in range(ranks) for t in expected[rank, s]]
        assert counts.sum() == len(incoming)
        outgoing, counts = plan.outgoing(rank)
        assert outgoing.tolist() == [t for r in range(ranks) for t in expected[r, rank]]
        assert counts.sum() == len(outgoing)


@given(
    pattern=st.sampled_from(sorted(PATTERNS)),
    stride=st.integers(1, 5),
    keys=st.lists(st.tuples(st.integers(0, 79), st.integers(1, 6)), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 79), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_queries_that_see_keys_equal_brute_force(pattern, stride, keys, cuts):
    documents, rules = lengths(80, cuts), PATTERNS[pattern].rules()
    docs, line = Bounds.of(documents), Line(modulus(rules, stride), 80)
    first = np.array([k for k, _ in keys])
    count = np.minimum(np.array([n for _, n in keys]), (79 - first) // stride + 1)
    stretches = in_documents(np.zeros_like(first), first, count, stride, docs)
    start, stop = queries_seeing(rules, stretches, docs, line)
    found = {int(line.token(p)) for a, b in zip(start, stop, strict=True) for p in range(a, b)}
    tokens = sorted({f + n * stride for f, c in zip(first, count, strict=True) for n in range(c)})
    allowed = seen(PATTERNS[pattern], documents, 80)
    assert found == set(np.flatnonzero(allowed[:, tokens].any(1)).tolist())


def test_bytes_are_those_of_keys_and_values_of_the_heads_that_need_them():
    layout, window = contiguous(64, 4), Window(5)
    one = comm_plan(window, layout, (64,)).tokens
    assert one.tolist() == [[0, 0, 0, 0], [4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 4, 0]]
    assert (plan_bytes(window, 8, 128, 2, layout, (64,)) == one * 2 * 8 * 128 * 2).all()
    split = plan_bytes(PerHead((window, Dense())), 4, 16, 4, layout, (64,))
    dense = comm_plan(Dense(), layout, (64,)).tokens
    assert (split == (one + dense) * 2 * 2 * 16 * 4).all()


def test_the_table_of_the_documentation():
    """Largest number of tokens that a rank receives, 512 tokens over 8 ranks."""

    def most(pattern: Pattern, layout: Layout) -> int:
        return int(comm_plan(pattern, layout, (512,)).tokens.sum(1).max())

    flat, paired, striped = contiguous(512, 8), zigzag(512, 8), residues(512, 8, 8)
    window = [most(Window(33), where) for where in (flat, paired, striped)]
    assert window == [32, 64, 448]
    assert most(Dense(), flat) == 7 * 64
    assert comm_plan(Dense(), paired, (512,)).tokens.sum() == 8 * 0.75 * 7 * 64
    assert most(Dilated(4, 9), flat) == 4 * 8
    assert most(Dilated(4, 9), residues(512, 8, 4, "contiguous")) == 8
    assert most(Dilated(8), striped) == 0
    assert most(SinkWindow(33, 4), flat) == 36
    # Columns of a strided pattern send nothing when the ranks divide the stride.
    columns = Strided(32).for_group(1)
    assert most(columns, flat) == 448 and most(columns, residues(512, 8, 32)) == 0


@pytest.mark.parametrize("pattern", [Window(8192), SinkWindow(8192, 512), Dilated(4, 8192)])
def test_a_million_tokens_over_64_ranks(pattern: Pattern):
    tokens = 1 << 20
    whole = comm_plan(pattern, contiguous(tokens, 64), (tokens,))
    span = {Window: 8191, SinkWindow: 8703, Dilated: 4 * 8191}[type(pattern)]
    assert whole.tokens.sum(1).max() == span
    documents = (1000,) * (tokens // 1000) + (tokens % 1000,)
    packed = comm_plan(pattern, contiguous(tokens, 64), documents)
    assert 0 < packed.tokens.sum(1).max() < 1000


def test_plans_are_remembered_by_their_documents():
    first = comm_plan(Window(3), contiguous(12, 2), (12,))
    assert comm_plan(Window(3), contiguous(12, 2), (12,)) is first
    assert comm_plan(Window(3), contiguous(12, 2), (5, 7)) is not first


def test_what_does_not_fit_is_refused():
    with pytest.raises(LayoutError, match="documents hold 11 tokens, the layout is for 12"):
        comm_plan(Window(3), contiguous(12, 2), (5, 6))
    docs = Bounds.of((12,))
    rules = (Rule(step=2, columns=(4, 1)),)
    with pytest.raises(ValueError, match="both step and columns"):
        keys_seen(rules, owned(contiguous(12, 2), docs), docs, Line(2, 12))


def test_unions_of_intervals():
    start, stop = union(np.array([5, 0, 3, 9]), np.array([6, 2, 5, 12]))
    assert (start.tolist(), stop.tolist()) == ([0, 3, 9], [2, 6, 12])
    assert len(union(np.empty(0, np.int64), np.empty(0, np.int64))[0]) == 0

"""Hypothesis strategies, comparisons and stand-ins for tests of what computes patterns.

Needs hypothesis, which only the ``dev`` extra installs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from msa_kernels.bands import Band, Banded, Gradients
from msa_kernels.blocks import Runs
from msa_kernels.check import largest_error
from msa_kernels.pattern import (
    Block,
    BlockList,
    Columns,
    Dense,
    Dilated,
    Pattern,
    PerHead,
    SinkWindow,
    Union,
    Window,
)  # fmt: skip
from msa_kernels.plan import Request


class DenseBands(Banded):
    """What a library of windowed attention computes, in dense PyTorch and on any device."""

    name = "dense-bands"

    def refuses(self, request: Request) -> str | None:
        return "merges nothing" if request.partial else None

    def band_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scale: float,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        logits = self._logits(q, k, band, scale)
        found = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), _repeated(v, q))
        return found if out is None else out.copy_(found), logits.logsumexp(-1)

    def band_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        dout: torch.Tensor, lse: torch.Tensor, band: Band, scale: float,
        grads: Gradients | None,
    ) -> Gradients:  # fmt: skip
        weights = (self._logits(q, k, band, scale) - lse.unsqueeze(-1)).exp()
        delta = (dout * out).sum(-1).transpose(1, 2).unsqueeze(-1)
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, _repeated(v, q))
        ds = weights * (dp - delta) * scale
        dq = torch.einsum("bhqk,bkhd->bqhd", ds, _repeated(k, q))
        dk = torch.einsum("bhqk,bqhd->bkhd", ds, q)
        dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout)
        heads = (k.shape[2], q.shape[2] // k.shape[2])
        found = dq, dk.unflatten(2, heads).sum(3), dv.unflatten(2, heads).sum(3)
        for given, made in zip(grads or (), found, strict=False):
            given.copy_(made)
        return grads or found

    def _logits(
        self, q: torch.Tensor, k: torch.Tensor, band: Band, scale: float
    ) -> torch.Tensor:  # fmt: skip
        behind = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1])
        distance = behind - torch.arange(k.shape[1])
        seen = distance >= 0 if band.causal else torch.ones_like(distance, dtype=torch.bool)
        if band.window is not None:
            seen = seen & (distance < band.window)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, _repeated(k, q)) * scale
        return logits.masked_fill(~seen, -torch.inf)


def _repeated(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return k.repeat_interleave(q.shape[2] // k.shape[2], 2)


@st.composite
def _block_lists(draw: st.DrawFn, length: int) -> BlockList:
    block = draw(st.integers(1, 24))
    rows = []
    for q in range(-(-length // block)):
        keys = st.lists(st.integers(0, q), max_size=3, unique=True)
        rows.append(tuple(sorted(draw(keys))))
    return BlockList(block, tuple(rows))


@st.composite
def _columns(draw: st.DrawFn) -> Columns:
    length = draw(st.integers(1, 40))
    return Columns(length, draw(st.integers(1, length)))


def leaves(length: int) -> st.SearchStrategy[Pattern]:
    """Patterns of one kind, small enough to have structure within ``length`` tokens."""
    near = st.integers(1, 50)
    return st.one_of(
        st.builds(Dense, st.booleans()),
        st.builds(Window, near, st.booleans()),
        st.builds(Dilated, st.integers(1, 9), st.none() | st.integers(1, 9)),
        st.builds(Block, near),
        _columns(),
        st.builds(SinkWindow, near, st.integers(0, 30)),
        _block_lists(length),
    )


def patterns(length: int, per_head: bool = True) -> st.SearchStrategy[Pattern]:
    """Patterns of every fixed kind for sequences of up to ``length`` tokens."""
    leaf = leaves(length)
    union = st.lists(leaf, min_size=2, max_size=3).map(lambda m: Union(tuple(m)))
    single = st.one_of(leaf, union)
    limited = st.builds(lambda p, w: p.limited(w), single, st.integers(1, 40))
    any_head = st.one_of(single, limited)
    if not per_head:
        return any_head
    several = st.lists(any_head, min_size=2, max_size=3).map(lambda m: PerHead(tuple(m)))
    return st.one_of(any_head, several)


@st.composite
def document_ids(draw: st.DrawFn, batch: int, length: int) -> torch.Tensor:
    """Ids (batch, length): every row cut into documents of its own, some of one token."""
    rows = []
    for _ in range(batch):
        cuts = draw(st.lists(st.integers(1, max(1, length - 1)), max_size=6))
        starts = torch.zeros(length, dtype=torch.int64)
        starts[[c for c in cuts if c < length]] = 1
        rows.append(starts.cumsum(0))
    return torch.stack(rows)


@st.composite
def scattered_runs(draw: st.DrawFn) -> Runs:
    """Runs with gaps between them, at any positions of two documents."""
    runs, at = [], 0
    for _ in range(draw(st.integers(1, 4))):
        at += draw(st.integers(0, 3))
        length = draw(st.integers(1, 30))
        runs.append((at, length, draw(st.integers(0, 60)), draw(st.integers(0, 1))))
        at += length
    return Runs.of(runs, at + draw(st.integers(0, 3)))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Runs, Runs]:
    """Runs of queries and keys: equal or unequal lengths, shifted, packed or scattered."""
    kind = draw(st.sampled_from(["whole", "shifted", "packed", "scattered"]))
    if kind == "whole":
        runs = Runs.whole(draw(st.integers(1, 120)))
        return runs, runs
    if kind == "shifted":
        queries = Runs.whole(draw(st.integers(1, 120)), draw(st.integers(-20, 20)))
        return queries, Runs.whole(draw(st.integers(1, 100)))
    if kind == "packed":
        runs = Runs.documents(draw(st.lists(st.integers(1, 40), min_size=1, max_size=6)))
        return runs, runs
    return draw(scattered_runs()), draw(scattered_runs())


def seen_pairs(allows: Callable[..., Any], queries: Runs, keys: Runs) -> np.ndarray:
    """Every pair that a predicate ``allows(i, j)`` admits between runs, bool (q rows, k rows)."""
    q_position, q_document = queries.token_maps()
    k_position, k_document = keys.token_maps()
    same = (q_document[:, None] == k_document[None]) & (q_document[:, None] >= 0)
    seen = allows(q_position[:, None].astype(np.int64), k_position[None].astype(np.int64))
    return np.logical_and(np.broadcast_to(seen, same.shape), same)


def assert_close(
    name: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5
) -> None:
    """The largest error is at most ``tolerance`` times the largest reference value."""
    error = largest_error(found, wanted)
    assert error <= tolerance, f"{name}: relative error {error:.2e} exceeds {tolerance:.0e}"

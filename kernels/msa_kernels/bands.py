"""Bands: a part as calls that libraries of dense and windowed attention can make.

Those libraries know one mask: causal from the bottom right, with or without a window to the left.
A rank of a context-parallel group, a packed row or a folded part holds several runs of queries and
keys; where every run of queries finds its keys in one stretch of rows that ends where the queries
end, each is one such call, on slices, with nothing to merge.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from msa_kernels.blocks import Runs
from msa_kernels.capabilities import one_band
from msa_kernels.plan import GradDtypes, PartPlan
from msa_kernels.rules import Part, Rule

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MOST = 8
"""Calls of one part: more of them are worth a kernel that takes the whole in one launch."""


@dataclass(frozen=True)
class Band:
    """Queries ``q[0]:q[1]`` on keys ``k[0]:k[1]``, all rows of one call's tensors.

    ``causal``: the last query sees the last key, the one before it the last but one, and so on.
    ``window``: keys that a query sees at most, itself included; None for no limit.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    causal: bool
    window: int | None


def bands(plan: PartPlan) -> tuple[Band, ...] | str:
    """The calls of a part, or in one sentence why it is not made of a few of them."""
    return plan.kept("bands", lambda: _bands(plan.part, plan.queries, plan.keys))


def _bands(part: Part, queries: Runs, keys: Runs) -> tuple[Band, ...] | str:
    if why := one_band(part):
        return why
    rule = part.rules[0]
    if len(queries.begin) > MOST:
        return f"serves at most {MOST} stretches of queries, found {len(queries.begin)}"
    found = []
    for run in range(len(queries.begin)):
        band = _band(rule, queries, run, keys)
        if isinstance(band, str):
            return band
        if band is not None:
            found.append(band)
    return tuple(found)


def _band(rule: Rule, queries: Runs, run: int, keys: Runs) -> Band | str | None:
    """The call of one run of queries; None where it sees no key."""
    begin, length = int(queries.begin[run]), int(queries.length[run])
    first = int(queries.position[run])
    stop = None if rule.lo is None else first + length
    start = 0 if rule.hi is None else first - rule.hi + 1
    at = np.flatnonzero(keys.document == queries.document[run])
    low = np.maximum(keys.position[at], start)
    high = keys.position[at] + keys.length[at]
    high = high if stop is None else np.minimum(high, stop)
    row = keys.begin[at] + low - keys.position[at]
    some = low < high
    low, high, row = low[some], high[some], row[some]
    if not len(low):
        return None
    order = np.argsort(low)
    low, high, row = low[order], high[order], row[order]
    if (low[1:] != high[:-1]).any() or (row[1:] - row[:-1] != high[:-1] - low[:-1]).any():
        return "needs the keys of each stretch of queries in one stretch of rows, in order"
    piece = (int(row[0]), int(row[-1] + high[-1] - low[-1]))
    last, rows = int(high[-1]), (begin, begin + length)
    if last == stop:
        blind = max(0, int(low[0]) - first)  # queries before the first key
        return Band((begin + blind, begin + length), piece, True, rule.hi)
    if stop is None or (rule.hi is None and last <= first + 1):
        return Band(rows, piece, False, None)
    return "needs keys that end where their queries end"


class Banded(ABC):
    """The tile kernel of a library that computes one :class:`Band` at a time.

    Forward results are in the library's dtype, so a part must be the whole softmax: pieces that
    are merged later would be rounded twice.
    """

    forms_delta = True
    rounds = True
    """Gradients leave the library in the dtype of its inputs, whatever dtype is asked for."""

    @abstractmethod
    def band_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scale: float,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Output (B, rows, Hq, D), in ``out`` where given, and LSE (B, Hq, rows) of one band's
        slices."""

    @abstractmethod
    def band_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        dout: torch.Tensor, lse: torch.Tensor, band: Band, scale: float,
        grads: Gradients | None,
    ) -> Gradients:  # fmt: skip
        """dQ, dK and dV of one band's slices, in ``grads`` where given, for the LSE and output of
        the whole softmax."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PartPlan, scale: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        calls = _calls(plan)
        if len(calls) == 1 and _covers(calls[0], q, k):
            out, lse = self.band_forward(q, k, v, calls[0], scale, None)
            return out.to(out_dtype), lse
        make = q.new_empty if _full(calls, q) else q.new_zeros
        out = make((*q.shape[:3], v.shape[3]))
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float32)
        for band in calls:
            _, log = self.band_forward(
                _rows(q, band.q), _rows(k, band.k), _rows(v, band.k), band, scale,
                _rows(out, band.q),
            )  # fmt: skip
            lse[:, :, slice(*band.q)] = log
        return out.to(out_dtype), lse

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor | None, plan: PartPlan,
        scale: float, grad_dtypes: GradDtypes,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        del delta  # these libraries form rowsum(dout * out) themselves
        calls = _calls(plan)
        if len(calls) == 1 and _covers(calls[0], q, k):
            found = self.band_backward(q, k, v, out, dout, lse, calls[0], scale, None)
            dq, dk, dv = found
            return dq.to(grad_dtypes[0]), dk.to(grad_dtypes[1]), dv.to(grad_dtypes[1])
        dq = (q.new_empty if _full(calls, q) else q.new_zeros)(q.shape)
        # The widest stretch of keys is written in place; what narrower ones share with it is
        # added, rounded once more.
        calls = sorted(calls, key=lambda band: band.k[0] - band.k[1])
        make = k.new_empty if calls and calls[0].k == (0, k.shape[1]) else k.new_zeros
        dk, dv = make(k.shape), make(v.shape)
        written: list[tuple[int, int]] = []
        for band in calls:
            fresh = all(band.k[1] <= a or band.k[0] >= b for a, b in written)
            some_dk, some_dv = _rows(dk, band.k), _rows(dv, band.k)
            if not fresh:
                some_dk, some_dv = torch.empty_like(some_dk), torch.empty_like(some_dv)
            self.band_backward(
                _rows(q, band.q), _rows(k, band.k), _rows(v, band.k), _rows(out, band.q),
                _rows(dout, band.q), lse[:, :, slice(*band.q)].contiguous(), band, scale,
                (_rows(dq, band.q), some_dk, some_dv),
            )  # fmt: skip
            if not fresh:
                _rows(dk, band.k).add_(some_dk)
                _rows(dv, band.k).add_(some_dv)
            written.append(band.k)
        return dq.to(grad_dtypes[0]), dk.to(grad_dtypes[1]), dv.to(grad_dtypes[1])


def _calls(plan: PartPlan) -> tuple[Band, ...]:
    found = bands(plan)
    assert not isinstance(found, str), found
    return found


def _full(calls: tuple[Band, ...], q: torch.Tensor) -> bool:
    return sum(band.q[1] - band.q[0] for band in calls) == q.shape[1]


def _covers(band: Band, q: torch.Tensor, k: torch.Tensor) -> bool:
    return band.q == (0, q.shape[1]) and band.k == (0, k.shape[1])


def _rows(tensor: torch.Tensor, some: tuple[int, int]) -> torch.Tensor:
    return tensor[:, slice(*some)]

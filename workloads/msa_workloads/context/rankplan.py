"""Rank plans: what one rank computes, and in which order, around an exchange.

Queries that see only keys of their own rank are computed while the others' keys arrive, straight
into the result. The rest either wait and see all their keys in one pass (*fused*: nothing to
merge; *whole* when all of the rank's queries do), or are computed twice, on local and on remote
keys, and merged exactly (*split*: more of the exchange is hidden). Everything here is host
arithmetic on the layout, the documents and the pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from msa_kernels.blocks import Runs
from msa_kernels.pattern import Pattern
from msa_kernels.rules import Rule
from numpy.typing import NDArray

from msa_workloads.context.commplan import CommPlan
from msa_workloads.context.exchange import Method, copy
from msa_workloads.context.intervals import Bounds, Ints, in_documents
from msa_workloads.context.reach import keys_seen, queries_seeing

Fuse = Literal["auto", "always", "never", "whole"]

MAX_SLICES = 4
"""Stretches of rows that are computed one by one, as views; more are gathered into one copy."""
MAX_PIECES = 16
"""Stretches of keys that are copied one by one, each as fast as memory is; more go by an index."""
FREE_SHARE = 0.5
"""With ``fuse="auto"`` queries wait for all their keys when at least this share of the rank's
rows needs no remote key: computing those hides the exchange already."""


@dataclass(frozen=True)
class InClass(Pattern):
    """``pattern`` between tokens of one residue class modulo ``stride``, in class coordinates."""

    kind: ClassVar[str] = "InClass"
    pattern: Pattern
    stride: int

    def rules(self) -> tuple[Rule, ...]:
        folded = (rule.folded(self.stride) for rule in self.pattern.rules() if not rule.empty)
        return tuple(rule for rule in folded if rule is not None and not rule.empty)


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a rank's tensors: stretches, in order."""

    slices: tuple[tuple[int, int], ...]
    array: Ints = field(init=False, repr=False)
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        pieces = [np.arange(a, b) for a, b in self.slices]
        object.__setattr__(self, "array", np.concatenate([np.empty(0, np.int64), *pieces]))

    @classmethod
    def where(cls, mask: NDArray[np.bool_]) -> Rows:
        return cls.listed(np.flatnonzero(mask))

    @classmethod
    def listed(cls, rows: Ints) -> Rows:
        """Rows in any order."""
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        first = rows[np.concatenate([[0], breaks])] if len(rows) else rows
        last = rows[np.concatenate([breaks - 1, [len(rows) - 1]])] if len(rows) else rows
        return cls(tuple((int(a), int(b) + 1) for a, b in zip(first, last, strict=True)))

    def one_by_one(self) -> tuple[Rows, ...]:
        """As stretches of their own where there are few enough of them."""
        if len(self.slices) > MAX_SLICES:
            return (self,)
        return tuple(Rows((piece,)) for piece in self.slices)

    def take(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """A view where the rows are one stretch, else a copy."""
        if len(self.slices) == 1:
            begin, end = self.slices[0]
            return tensor.narrow(dim, begin, end - begin)
        return tensor.index_select(dim, self._index(tensor.device))

    def put(self, tensor: torch.Tensor, values: torch.Tensor, dim: int = 1) -> None:
        if len(self.slices) == 1:
            self.take(tensor, dim).copy_(values)
        else:
            tensor.index_copy_(dim, self._index(tensor.device), values.to(tensor.dtype))

    def add(self, tensor: torch.Tensor, values: torch.Tensor, dim: int = 1) -> None:
        if len(self.slices) == 1:
            self.take(tensor, dim).add_(values)
        else:
            tensor.index_add_(dim, self._index(tensor.device), values.to(tensor.dtype))

    def _index(self, device: torch.device) -> torch.Tensor:
        if device not in self._kept:
            self._kept[device] = torch.from_numpy(self.array).to(device)
        return self._kept[device]


@dataclass(frozen=True)
class Piece:
    """A stretch of a pass's keys: its place among them, and which rows it is, of the rank's own or
    of those that the stage brings."""

    at: slice
    remote: bool
    rows: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Pass:
    """One call of the engine: some of the rank's queries on local keys, remote keys or both.

    Keys are rows ``local`` of the rank's own, then those of the stage ``remote``; ``order``
    rearranges them to make long runs of scattered ones.
    """

    rows: Rows
    queries: Runs
    local: tuple[int, int]
    remote: int | None
    keys: Runs
    order: Rows | None = None

    @functools.cached_property
    def by_index(self) -> bool:
        """Keys are rearranged, and in too many stretches to copy them one by one."""
        return self.order is not None and len(self.order.slices) > MAX_PIECES

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """In the order of the pass, or of ``local`` and ``remote`` where that is by index."""
        begin, end = self.local
        here, at, found = end - begin, 0, []
        order = None if self.by_index else self.order
        for first, last in ((0, self.keys.rows),) if order is None else order.slices:
            for low, high, remote in (
                (first, min(last, here), False), (max(first, here), last, True),
            ):  # fmt: skip
                if low < high:
                    shift = -here if remote else begin
                    place = slice(at, at + high - low)
                    found.append(Piece(place, remote, (low + shift, high + shift)))
                    at = place.stop
        return tuple(found)

    def gather(
        self, k: torch.Tensor, v: torch.Tensor, remote: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pass's keys and values (B, rows, heads, D) in its order, from the rank's own and
        those that arrived, (B, received, 2, heads, D)."""
        made = k.new_empty((2, k.shape[0], self.keys.rows, *k.shape[2:]))
        for piece in self.pieces:
            rows, place = slice(*piece.rows), made[:, :, piece.at]
            if piece.remote:
                copy(place, remote[:, rows].movedim(2, 0))
            else:
                place[0].copy_(k[:, rows])
                place[1].copy_(v[:, rows])
        if self.by_index:
            assert self.order is not None
            made = self.order.take(made, 2)
        return made[0], made[1]

    def parts(self, grad: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Stretches of a gradient of the pass's keys (B, rows, ...), and whose rows they are."""
        if self.by_index:
            assert self.order is not None
            arranged, grad = grad, torch.empty_like(grad)
            self.order.put(grad, arranged)
        for piece in self.pieces:
            yield piece, grad[:, piece.at]


@dataclass(frozen=True, eq=False)
class Stage:
    """One exchange: rows of this rank's keys to send, by receiver, and rows to receive."""

    send_rows: Ints
    send: tuple[int, ...]
    receive: tuple[int, ...]
    happens: bool
    """Any two ranks exchange anything in this stage; the same on every rank."""

    @property
    def received(self) -> int:
        return sum(self.receive)

    @functools.cached_property
    def sent(self) -> Rows:
        """``send_rows``, all receivers' together."""
        return Rows.listed(self.send_rows)

    @functools.cached_property
    def given_back(self) -> tuple[tuple[int, Rows], ...]:
        """Of every receiver whose gradients come back: their place among the rows that do, and
        the rows of this rank."""
        ends = np.cumsum(self.send)
        spans = ((int(end) - n, n) for end, n in zip(ends, self.send, strict=True) if n)
        return tuple((a, Rows.listed(self.send_rows[a : a + n])) for a, n in spans)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank does for the key/value heads of one pattern."""

    pattern: Pattern
    """In the coordinates of the runs: of the residue class where the layout keeps to one."""
    stages: tuple[Stage, ...]
    early: Pass | None
    """All rows on local keys. Rows that wait for all their keys are in none of its runs: their
    result is empty, and a late pass puts the whole one in its place."""
    late: tuple[Pass, ...]
    """Wait for a stage."""
    split: bool
    """Late passes are on remote keys only and are merged with the early one."""
    most_received: int
    """Tokens that the busiest receiver of all ranks receives."""


def rank_plan(pattern: Pattern, plan: CommPlan, rank: int, method: Method, fuse: Fuse) -> RankPlan:
    """The plan of one rank for one head's ``pattern``, whose exchange is ``plan``."""
    builder = _Builder(pattern, plan, rank)
    stages, tokens = builder.stages(method)
    most = int(plan.tokens.sum(1).max())
    if not any(len(t) for t in tokens):
        return RankPlan(builder.inner, stages, builder.early(), (), False, most)
    if plan.layout.stride > 1 and not builder.in_class and method != "ring":
        late = builder.sorted(tokens[0])
        return RankPlan(builder.inner, stages, None, (late,), False, most)
    if fuse == "whole" and method != "ring":
        late = builder.fused(Rows(((0, len(builder.own)),)), tokens[0])
        return RankPlan(builder.inner, stages, None, (late,), False, most)
    bound = [builder.bound(some) for some in tokens]
    waits = np.logical_or.reduce(bound)
    fused = fuse == "always" or (fuse == "auto" and waits.mean() <= 1 - FREE_SHARE)
    if fused and method != "ring":
        late = tuple(builder.fused(rows, tokens[0]) for rows in Rows.where(waits).one_by_one())
        early = None if waits.all() else builder.early(~waits)
        return RankPlan(builder.inner, stages, early, late, False, most)
    late = tuple(
        builder.remote(mask, stage, some)
        for stage, (mask, some) in enumerate(zip(bound, tokens, strict=True))
        if len(some)
    )
    return RankPlan(builder.inner, stages, builder.early(), late, True, most)


class _Builder:
    def __init__(self, pattern: Pattern, plan: CommPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.rules = pattern.rules()
        self.docs: Bounds = plan.docs
        self.own = plan.layout.tokens_of(rank)
        self.own_at = plan.line.at(self.own)
        stride = plan.layout.stride
        self.in_class = stride > 1 and all(
            rule.step % stride == 0 and rule.folded(stride) is not None
            for rule in self.rules
            if not rule.empty
        )
        self.inner = InClass(pattern, stride) if self.in_class else pattern

    def place(self, tokens: Ints, only: NDArray[np.bool_] | None = None) -> Runs:
        """Where rows that hold these tokens sit; padding is in no run, nor are rows not in
        ``only``."""
        document, position = self.docs.at(tokens)
        if only is not None:
            document = np.where(only, document, -1)
        if self.in_class:
            position = position // self.plan.layout.stride
        new = np.ones(len(tokens), bool)
        new[1:] = (np.diff(document) != 0) | (np.diff(position) != 1)
        begin = np.flatnonzero(new)
        length = np.diff(begin, append=len(tokens))
        real = document[begin] >= 0
        begin, length = begin[real], length[real]
        return Runs(begin, length, position[begin], document[begin], len(tokens))

    def stages(self, method: Method) -> tuple[tuple[Stage, ...], list[Ints]]:
        """Exchanges, and the tokens that each brings. Ring stages that move nothing are kept out
        on every rank alike."""
        incoming, receive = self.plan.incoming(self.rank)
        outgoing, send = self.plan.outgoing(self.rank)
        rows = self.plan.layout.inverse[outgoing] - self.rank * self.plan.layout.rows
        ranks = self.plan.layout.ranks
        if method != "ring":
            stage = Stage(rows, tuple(send.tolist()), tuple(receive.tolist()), self.plan.moves)
            return (stage,), [incoming]
        sender, receiver = np.repeat(np.arange(ranks), receive), np.repeat(np.arange(ranks), send)
        stages, tokens = [], []
        everyone = np.arange(ranks)
        for step in range(1, ranks):
            if not self.plan.tokens[everyone, everyone - step].any():
                continue
            source, target = (self.rank - step) % ranks, (self.rank + step) % ranks
            gets, gives = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
            gets[source], gives[target] = receive[source], send[target]
            stages.append(
                Stage(rows[receiver == target], tuple(gives.tolist()), tuple(gets.tolist()), True)
            )
            tokens.append(incoming[sender == source])
        return tuple(stages), tokens

    def bound(self, tokens: Ints) -> NDArray[np.bool_]:
        """Own rows whose query sees any of the tokens."""
        keys = in_documents(*_progressions(tokens), 1, self.docs)
        return self._own(*queries_seeing(self.rules, keys, self.docs, self.plan.line))

    def early(self, free: NDArray[np.bool_] | None = None) -> Pass:
        """All rows on all local keys; only ``free`` ones are in a run."""
        runs, rows = self.place(self.own), len(self.own)
        queries = runs if free is None else self.place(self.own, free)
        return Pass(Rows(((0, rows),)), queries, (0, rows), None, runs)

    def fused(self, rows: Rows, tokens: Ints) -> Pass:
        """``rows`` on the local keys that they see and on the remote ``tokens``."""
        stride = self.plan.layout.stride
        mine = self.own[rows.array]
        queries = in_documents(*_progressions(mine, stride), stride, self.docs)
        seen = np.flatnonzero(
            self._own(*keys_seen(self.rules, queries, self.docs, self.plan.line))
        )
        local = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
        keys = np.concatenate([self.own[slice(*local)], tokens])
        placed = self.place(keys)
        order = np.argsort(keys, kind="stable")
        arranged = self.place(keys[order])
        if len(arranged.begin) >= len(placed.begin):
            return Pass(rows, self.place(mine), local, 0, placed)
        return Pass(rows, self.place(mine), local, 0, arranged, Rows.listed(order))

    def remote(self, mask: NDArray[np.bool_], stage: int, tokens: Ints) -> Pass:
        """The stretch of rows that holds ``mask`` on the remote ``tokens`` alone."""
        inside = np.flatnonzero(mask)
        begin, end = int(inside[0]), int(inside[-1]) + 1
        queries = self.place(self.own[begin:end])
        return Pass(Rows(((begin, end),)), queries, (0, 0), stage, self.place(tokens))

    def sorted(self, tokens: Ints) -> Pass:
        """All rows on all keys, in the order of the sequence: few runs, where a residue layout
        has scattered neighbours over ranks."""
        keys = np.concatenate([self.own, tokens])
        order = np.argsort(keys, kind="stable")
        rows = len(self.own)
        return Pass(
            Rows(((0, rows),)), self.place(self.own), (0, rows), 0, self.place(keys[order]),
            Rows.listed(order),
        )  # fmt: skip

    def _own(self, start: Ints, stop: Ints) -> NDArray[np.bool_]:
        """Own rows inside the intervals of the line."""
        at = np.searchsorted(start, self.own_at, "right") - 1
        return (at >= 0) & (self.own_at < stop[at]) if len(start) else np.zeros(len(at), bool)


def _progressions(tokens: Ints, stride: int = 1) -> tuple[Ints, Ints, Ints]:
    """Tags (0), first tokens and counts of maximal progressions, in order."""
    new = np.ones(len(tokens), bool)
    new[1:] = np.diff(tokens) != stride
    begin = np.flatnonzero(new)
    return np.zeros_like(begin), tokens[begin], np.diff(begin, append=len(tokens))

"""Rank plans: what one rank computes, and in which order, around an exchange.

Queries that see only keys of their own rank are computed while the others' keys arrive, straight
into the result. The rest either wait and see all their keys in one pass (*fused*: nothing to
merge), or are computed twice, on local and on remote keys, and merged exactly (*split*: more of
the exchange is hidden). Everything here is host arithmetic on the layout, the documents and the
pattern.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from msa_kernels.blocks import Runs
from msa_kernels.pattern import Pattern
from msa_kernels.rules import Rule
from numpy.typing import NDArray

from msa_workloads.context.commplan import CommPlan
from msa_workloads.context.exchange import Method
from msa_workloads.context.intervals import Bounds, Ints, in_documents
from msa_workloads.context.reach import keys_seen, queries_seeing

Fuse = Literal["auto", "always", "never"]

MAX_SLICES = 4
"""Stretches of rows that are computed one by one, as views; more are gathered into one copy."""
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
    """Some rows of a rank's tensors, ascending."""

    slices: tuple[tuple[int, int], ...]
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def where(cls, mask: NDArray[np.bool_]) -> Rows:
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        return cls(tuple((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)))

    def __len__(self) -> int:
        return sum(end - begin for begin, end in self.slices)

    @property
    def array(self) -> Ints:
        return np.concatenate([np.arange(a, b) for a, b in self.slices])

    def one_by_one(self) -> tuple[Rows, ...]:
        """As stretches of their own where there are few enough of them."""
        if not self.slices:
            return ()
        if len(self.slices) > MAX_SLICES:
            return (self,)
        return tuple(Rows((piece,)) for piece in self.slices)

    def part(self, begin: int, end: int) -> Rows:
        """Rows ``begin`` to ``end`` of these rows."""
        mask = np.zeros(self.slices[-1][1], bool)
        mask[self.array[begin:end]] = True
        return Rows.where(mask)

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
    order: Ints | None = None


@dataclass(frozen=True, eq=False)
class Stage:
    """One exchange: rows of this rank's keys to send, by receiver, and rows to receive."""

    send_rows: Ints
    send: tuple[int, ...]
    receive: tuple[int, ...]
    happens: bool
    """Any two ranks exchange anything in this stage; the same on every rank."""
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def received(self) -> int:
        return sum(self.receive)

    def index(self, device: torch.device) -> torch.Tensor:
        """``send_rows`` on a device."""
        if device not in self._kept:
            self._kept[device] = torch.from_numpy(self.send_rows).to(device)
        return self._kept[device]


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank does for the key/value heads of one pattern."""

    pattern: Pattern
    """In the coordinates of the runs: of the residue class where the layout keeps to one."""
    stages: tuple[Stage, ...]
    early: tuple[Pass, ...]
    """Need no remote key; each is the whole attention of its rows."""
    late: tuple[Pass, ...]
    """Wait for a stage. With ``merged`` None each is the whole attention of its rows."""
    merged: Rows | None
    """Rows whose partial results are merged: of ``partial``, then of ``late``."""
    partial: Pass | None
    most_received: int
    """Tokens that the busiest receiver of all ranks receives."""


def rank_plan(
    pattern: Pattern, plan: CommPlan, rank: int, method: Method, fuse: Fuse
) -> RankPlan:
    """The plan of one rank for one head's ``pattern``, whose exchange is ``plan``."""
    builder = _Builder(pattern, plan, rank)
    stages, tokens = builder.stages(method)
    most = int(plan.tokens.sum(1).max())
    everything = Rows(((0, len(builder.own)),))
    if not any(len(t) for t in tokens):
        whole = builder.make(everything, None, None)
        return RankPlan(builder.inner, stages, (whole,), (), None, None, most)
    if plan.layout.stride > 1 and not builder.in_class and method != "ring":
        late = builder.sorted(everything, tokens[0])
        return RankPlan(builder.inner, stages, (), (late,), None, None, most)
    bound = [builder.bound(some) for some in tokens]
    waits = np.logical_or.reduce(bound)
    early = tuple(builder.make(rows, None, None) for rows in Rows.where(~waits).one_by_one())
    fused = fuse == "always" or (fuse == "auto" and waits.mean() <= 1 - FREE_SHARE)
    if fused and method != "ring":
        late = tuple(
            builder.make(rows, 0, tokens[0]) for rows in Rows.where(waits).one_by_one()
        )
        return RankPlan(builder.inner, stages, early, late, None, None, most)
    merged = Rows.where(waits)
    partial = builder.make(merged, None, None)
    late = []
    for stage, (mask, some) in enumerate(zip(bound, tokens, strict=True)):
        if len(some):
            inside = np.flatnonzero(mask[merged.array])
            rows = Rows(((int(inside[0]), int(inside[-1]) + 1),))
            at = merged.part(*rows.slices[0])
            queries = builder.place(builder.own[at.array])
            late.append(Pass(rows, queries, (0, 0), stage, builder.place(some)))
    return RankPlan(builder.inner, stages, early, tuple(late), merged, partial, most)


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

    def place(self, tokens: Ints) -> Runs:
        """Where rows that hold these tokens sit; padding is in no run."""
        document, position = self.docs.at(tokens)
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

    def make(self, rows: Rows, remote: int | None, tokens: Ints | None) -> Pass:
        """A pass of ``rows`` on the local keys that they see and on the remote ``tokens``."""
        stride = self.plan.layout.stride
        mine = self.own[rows.array]
        queries = in_documents(*_progressions(mine, stride), stride, self.docs)
        seen = np.flatnonzero(
            self._own(*keys_seen(self.rules, queries, self.docs, self.plan.line))
        )
        local = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
        if not len(seen) and tokens is None:
            local = (0, min(1, len(self.own)))
        keys = self.own[slice(*local)]
        if tokens is not None:
            keys = np.concatenate([keys, tokens])
        return Pass(rows, self.place(mine), local, remote, self.place(keys))

    def sorted(self, rows: Rows, tokens: Ints) -> Pass:
        """All rows on all keys, in the order of the sequence: few runs, where a residue layout
        has scattered neighbours over ranks."""
        keys = np.concatenate([self.own, tokens])
        order = np.argsort(keys, kind="stable")
        return Pass(
            rows, self.place(self.own), (0, len(self.own)), 0, self.place(keys[order]), order
        )

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

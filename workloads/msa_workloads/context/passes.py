"""Passes: forward and backward of one rank around an exchange, on the engine of the kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from msa_kernels import engine
from msa_kernels.engine import HeadGroup, accumulator
from msa_kernels.fused import merge
from msa_kernels.pattern import Pattern
from msa_kernels.plan import TileKernel
from torch import Tensor

from msa_workloads.context.exchange import Method, Pending, copy, exchange
from msa_workloads.context.rankplan import Pass, RankPlan, Rows, Stage

_handles = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Call:
    """Everything but tensors that one call of the attention needs."""

    groups: tuple[tuple[HeadGroup, RankPlan], ...]
    group: dist.ProcessGroup | None
    kernel: TileKernel
    method: Method
    keep: bool
    """Received keys are kept for backward."""
    returned: torch.dtype
    """dtype in which gradients of keys and values travel."""
    kind: Pattern
    """The pattern of the layer over all heads, by which bytes are counted."""
    area: Callable[[], int]
    """Pairs that this rank's queries attend, times the query heads that do: for FLOP counts."""
    handle: int = field(default_factory=lambda: next(_handles))

    def kept_size(self, k: Tensor) -> int:
        """Elements of the received keys and values that are kept for backward."""
        each = 2 * k.shape[0] * k.shape[3]
        received = sum(
            stage.received * len(group.members)
            for group, plan in self.groups
            for stage in plan.stages
            if stage.happens
        )
        return each * received if self.keep else 0


class _Keys:
    """The keys of one head group: this rank's own, and those that its stages bring."""

    def __init__(self, call: Call, group: HeadGroup, plan: RankPlan, k: Tensor, v: Tensor) -> None:
        self.call, self.plan = call, plan
        whole = len(call.groups) == 1
        self.k, self.v = (k, v) if whole else (group.keys(k), group.keys(v))
        self.arrived: dict[int, Tensor] = {}
        self._pending: dict[int, Pending] = {}
        self._next = 0

    def start(self) -> None:
        """Start the next stage's exchange, if any is left."""
        stages = self.plan.stages
        while self._next < len(stages) and not stages[self._next].happens:
            self._next += 1
        if self._next < len(stages):
            stage = stages[self._next]
            rows = torch.stack([stage.sent.take(self.k), stage.sent.take(self.v)], 2)
            rows = rows.transpose(0, 1)
            self._pending[self._next] = self._send(rows.contiguous(), stage, "keys")
            self._next += 1

    def stage(self, number: int) -> Tensor:
        """Rows (received, B, 2, heads, D) of a stage; the one after it is started first."""
        if number not in self.arrived:
            while self._next <= number + 1 and self._next < len(self.plan.stages):
                self.start()
            self.arrived[number] = self._pending.pop(number).wait()
        return self.arrived[number]

    def finish(self) -> None:
        """Wait for what this rank sends although it needs nothing itself."""
        while True:
            for number in sorted(self._pending):
                self._pending.pop(number).wait()
            before = self._next
            self.start()
            if before == self._next and not self._pending:
                return

    def of(self, some: Pass) -> tuple[Tensor, Tensor]:
        """Keys and values of one pass."""
        begin, end = some.local
        if some.remote is None:
            return self.k[:, begin:end], self.v[:, begin:end]
        rows = self.stage(some.remote).transpose(0, 1)
        if end == begin and some.order is None:
            return rows[:, :, 0], rows[:, :, 1]
        return some.gather(self.k, self.v, rows)

    def give_back(self, number: int, grads: Tensor) -> tuple[Stage, Pending]:
        """Start the way back of a stage's gradients, rows (received, B, 2, heads, D)."""
        stage = self.plan.stages[number]
        back = Stage(stage.send_rows, stage.receive, stage.send, stage.happens)
        return stage, self._send(grads.to(self.call.returned), back, "gradients", 1 + number)

    def _send(self, rows: Tensor, stage: Stage, purpose: str, tag: int = 0) -> Pending:
        assert self.call.group is not None
        return exchange(
            rows, stage.send, stage.receive, self.call.group, method=self.call.method,
            purpose=purpose, tag=tag, kind=self.call.kind,
        )  # fmt: skip


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output like q, LSE (B, Hq, rows), and the received rows kept for backward, flat."""
    whole = len(call.groups) == 1
    work = [
        _Forward(call, plan, q if whole else group.queries(q), _Keys(call, group, plan, k, v))
        for group, plan in call.groups
    ]
    for some in work:
        some.keys.start()
    for some in work:
        some.early(scale)
    for some in work:
        some.late(scale)
    kept = [r.reshape(-1) for some in work for r in some.keys.arrived.values() if call.keep]
    remains = kept[0] if len(kept) == 1 else torch.cat([k.new_empty(0), *kept])
    if whole:
        return *work[0].result(), remains
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulator(q.dtype))
    for (group, _), some in zip(call.groups, work, strict=True):
        found, log = some.result()
        group.put_queries(out, found)
        lse[:, group.query_heads(lse.device)] = log
    return out, lse, remains


class _Forward:
    """The forward passes of one head group."""

    def __init__(self, call: Call, plan: RankPlan, q: Tensor, keys: _Keys) -> None:
        self.call, self.plan, self.q, self.keys = call, plan, q, keys
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def early(self, scale: float) -> None:
        if self.plan.early is not None:
            self.out, self.lse = self._run(self.plan.early, scale)

    def late(self, scale: float) -> None:
        for one in self.plan.late:
            found, log = self._run(one, scale)
            if self.out is None or self.lse is None:
                self.out = found.new_empty(self.q.shape)
                self.lse = log.new_empty((*log.shape[:2], self.q.shape[1]))
            whole = one.rows.slices == ((0, self.q.shape[1]),)
            if self.plan.split:
                before = one.rows.take(self.out), one.rows.take(self.lse, 2)
                last = whole and one is self.plan.late[-1]
                found, log = merge(
                    (before, (found, log)), self.q.dtype if last else self.out.dtype
                )
            if whole:
                self.out, self.lse = found, log
            else:
                one.rows.put(self.out, found)
                one.rows.put(self.lse, log, 2)
            if one.remote is not None and one.remote != self.plan.late[-1].remote:
                self.keys.arrived.pop(one.remote, None)
        self.keys.finish()

    def result(self) -> tuple[Tensor, Tensor]:
        assert self.out is not None and self.lse is not None
        return self.out.to(self.q.dtype), self.lse

    def _run(self, one: Pass, scale: float) -> tuple[Tensor, Tensor]:
        """In the accumulator's dtype while a merge follows."""
        k, v = self.keys.of(one)
        dtype = accumulator(self.q.dtype) if self.plan.split else self.q.dtype
        return engine.forward(
            self.call.kernel, one.rows.take(self.q), k, v, self.plan.pattern, one.queries,
            one.keys, scale, dtype,
        )  # fmt: skip


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
    delta: Tensor | None, kept: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV of this rank's rows in the dtype of q; ``out``, ``lse`` and ``delta`` are
    those of the whole softmax, ``delta`` None for a kernel that forms it."""
    if len(call.groups) == 1:
        group, plan = call.groups[0]
        keys = _Keys(call, group, plan, k, v)
        return _Backward(call, plan, keys, (q, out, dout, lse, delta), scale).run(kept)
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    for group, plan in call.groups:
        keys, heads = _Keys(call, group, plan, k, v), group.query_heads(lse.device)
        some_q, some_out, some_dout = (group.queries(t) for t in (q, out, dout))
        some_delta = None if delta is None else delta[:, heads]
        inputs = (some_q, some_out, some_dout, lse[:, heads], some_delta)
        work = _Backward(call, plan, keys, inputs, scale)
        some_dq, some_dk, some_dv = work.run(kept[: work.kept_size])
        kept = kept[work.kept_size :]
        group.put_queries(dq, some_dq)
        group.put_keys(dk, some_dk)
        group.put_keys(dv, some_dv)
    return dq, dk, dv


class _Backward:
    """The backward passes of one head group, and the return of the travelled gradients.

    With kept keys the remote ones come first and their gradients travel under the local pass;
    otherwise the keys travel again under the local pass.
    """

    def __init__(
        self, call: Call, plan: RankPlan, keys: _Keys,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], scale: float,
    ) -> None:  # fmt: skip
        self.call, self.plan, self.keys = call, plan, keys
        self.inputs, self.scale = inputs, scale
        self.dtype = inputs[0].dtype
        moves = any(stage.happens for stage in plan.stages)
        self.work = accumulator(self.dtype) if plan.late or moves else self.dtype
        # What a kernel has rounded gains nothing from a wider dtype.
        rounded = getattr(call.kernel, "rounds", False) and not plan.split
        self.pieces = self.dtype if rounded else self.work
        rows = keys.k.shape[1]
        # Nothing is added to a query's gradient where one pass has all of its keys.
        self.dq = _Sum(inputs[0].shape[1], self.pieces if plan.split else self.dtype)
        self.dk, self.dv = _Sum(rows, self.pieces), _Sum(rows, self.pieces)
        self.returning: list[tuple[Stage, Pending]] = []

    def _shape(self, stage: Stage) -> tuple[int, ...]:
        return (stage.received, self.keys.k.shape[0], 2, *self.keys.k.shape[2:])

    @property
    def kept_size(self) -> int:
        if not self.call.keep:
            return 0
        return sum(math.prod(self._shape(s)) for s in self.plan.stages if s.happens)

    def run(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.call.keep:
            for number, stage in enumerate(self.plan.stages):
                if stage.happens and stage.received:
                    self.keys.arrived[number] = kept.view(self._shape(stage))
            self._remote()
            self._early()
        else:
            self.keys.start()
            self._early()
            self._remote()
        while self.returning:
            self._collect_first()
        q, k, v = self.inputs[0], self.keys.k, self.keys.v
        sums = zip((self.dq, self.dk, self.dv), (q, k, v), strict=True)
        dq, dk, dv = (s.total(like).to(self.dtype) for s, like in sums)
        return dq, dk, dv

    def _early(self) -> None:
        if self.plan.early is not None:
            self._add(self.plan.early, None)

    def _remote(self) -> None:
        """Stage by stage; each stage's gradients leave as soon as they are whole."""
        for number, stage in enumerate(self.plan.stages):
            if not stage.happens:
                continue
            if not self.call.keep:
                # Also where this rank needs nothing: the others meet it in this exchange.
                self.keys.stage(number)
            passes = [one for one in self.plan.late if one.remote == number]
            # A pass is on all rows of its stage: one alone has none to be added to.
            make = self.keys.k.new_empty if len(passes) == 1 else self.keys.k.new_zeros
            grads = make(self._shape(stage), dtype=self.pieces)
            for one in passes:
                self._add(one, grads, alone=len(passes) == 1)
            self.keys.arrived.pop(number, None)
            self.returning.append(self.keys.give_back(number, grads))
            del grads
            # Of a ring's stages one is on its way back at a time; own sums are there by then.
            if not self.call.keep and len(self.returning) > 1:
                self._collect_first()

    def _add(self, one: Pass, remote: Tensor | None, alone: bool = False) -> None:
        """Add one pass's gradients to the sums, and to ``remote`` (received, B, 2, heads, D), of
        which it is the first and only summand where it is ``alone``."""
        q, out, dout, lse, delta = self.inputs
        rows = one.rows
        k, v = self.keys.of(one)
        dq, dk, dv = engine.backward(
            self.call.kernel, rows.take(q), k, v, rows.take(out), rows.take(dout),
            rows.take(lse, 2), None if delta is None else rows.take(delta, 2), self.plan.pattern,
            one.queries, one.keys, self.scale, self.pieces, self.dq.dtype,
        )  # fmt: skip
        self.dq.add(rows, dq)
        for n, (total, grad) in enumerate(((self.dk, dk), (self.dv, dv))):
            for piece, part in one.parts(grad):
                if not piece.remote:
                    total.add(Rows((piece.rows,)), part)
                    continue
                assert remote is not None
                place = remote[slice(*piece.rows), :, n].transpose(0, 1)
                copy(place, part) if alone else place.add_(part)

    def _collect_first(self) -> None:
        """Add what other ranks found for this rank's keys, one rank after the other: a sum whose
        order does not depend on arrival. Sums of several ranks are wide."""
        stage, pending = self.returning.pop(0)
        rows = pending.wait()
        wide = self.work if len(stage.given_back) > 1 else self.pieces
        for n, total in enumerate((self.dk, self.dv)):
            held = total.total(self.keys.k, wide)
            for at, mine in stage.given_back:
                some = rows[at : at + len(mine.array), :, n].transpose(0, 1)
                mine.add(held, some)


class _Sum:
    """A sum over rows that starts as its first summand where that covers all of them, and as the
    first ones side by side where they do together."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.rows, self.dtype = rows, dtype
        self._held: Tensor | None = None
        self._waiting: list[tuple[Rows, Tensor]] = []

    def add(self, rows: Rows, values: Tensor) -> None:
        if self._held is not None:
            rows.add(self._held, values)
        elif rows.slices == ((0, self.rows),):
            self._held = values.to(self.dtype)
            self._place(self._held, Rows.add)
        else:
            self._waiting.append((rows, values))

    def total(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The sum, of the shape of ``like``: zeros where nothing was added. In ``dtype`` from
        then on, where given."""
        self.dtype = dtype or self.dtype
        if self._held is None:
            tiled = self._tiled()
            self._held = (like.new_empty if tiled else like.new_zeros)(
                like.shape, dtype=self.dtype
            )
            self._place(self._held, Rows.put if tiled else Rows.add)
        self._held = self._held.to(self.dtype)
        return self._held

    def _tiled(self) -> bool:
        """What waits covers every row once."""
        slices = sorted(piece for rows, _ in self._waiting for piece in rows.slices)
        ends = [0, *(end for _, end in slices)]
        return [begin for begin, _ in slices] == ends[:-1] and ends[-1] == self.rows

    def _place(self, held: Tensor, how: Callable[[Rows, Tensor, Tensor], None]) -> None:
        for some, before in self._waiting:
            how(some, held, before)
        self._waiting.clear()

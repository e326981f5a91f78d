"""Passes: forward and backward of one rank around an exchange, on the engine of the kernels."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from msa_kernels import engine
from msa_kernels.engine import HeadGroup, accumulator
from msa_kernels.merge import merge
from msa_kernels.plan import TileKernel
from torch import Tensor

from msa_workloads.context.exchange import Method, Pending, exchange
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
    handle: int = field(default_factory=lambda: next(_handles))


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
            index = stage.index(self.k.device)
            rows = torch.stack(
                [self.k.index_select(1, index), self.v.index_select(1, index)], 2
            ).transpose(0, 1)
            self._pending[self._next] = self._send(rows.contiguous(), stage, "keys")
            self._next += 1

    def stage(self, number: int) -> Tensor:
        """Rows (received, B, 2, heads, D) of a stage; the one after it is started first."""
        if number not in self.arrived:
            if number in self._pending and self.call.method == "ring":
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
        if end == begin:
            return rows[:, :, 0], rows[:, :, 1]
        k = torch.cat([self.k[:, begin:end], rows[:, :, 0]], 1)
        v = torch.cat([self.v[:, begin:end], rows[:, :, 1]], 1)
        if some.order is not None:
            order = torch.from_numpy(some.order).to(k.device)
            k, v = k.index_select(1, order), v.index_select(1, order)
        return k, v

    def give_back(self, number: int, grads: Tensor) -> tuple[Stage, Pending]:
        """Start the way back of a stage's gradients, rows (received, B, 2, heads, D)."""
        stage = self.plan.stages[number]
        back = Stage(stage.send_rows, stage.receive, stage.send, stage.happens)
        return stage, self._send(grads.to(self.call.returned), back, "gradients", 1 + number)

    def _send(self, rows: Tensor, stage: Stage, purpose: str, tag: int = 0) -> Pending:
        assert self.call.group is not None
        return exchange(
            rows, stage.send, stage.receive, self.call.group, method=self.call.method,
            purpose=purpose, tag=tag,
        )  # fmt: skip


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output like q, LSE (B, Hq, rows), and the received rows kept for backward, flat."""
    batch, rows, q_heads, _ = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((batch, q_heads, rows), dtype=accumulator(q.dtype))
    keys = [_Keys(call, group, plan, k, v) for group, plan in call.groups]
    for some in keys:
        some.start()
    partials: list[list[Tensor] | None] = []
    results: list[tuple[Tensor, Tensor]] = []
    queries = []
    for (group, plan), mine in zip(call.groups, keys, strict=True):
        if len(call.groups) == 1:
            some_q, results_of = q, (out, lse)
        else:
            some_q = group.queries(q)
            results_of = (torch.empty_like(some_q), lse.new_empty(batch, some_q.shape[2], rows))
        queries.append(some_q)
        results.append(results_of)
        for one in plan.early:
            _whole(call, plan, one, some_q, mine, scale, *results_of)
        if plan.partial is None:
            partials.append(None)
        else:
            partials.append(list(_run(call, plan, plan.partial, some_q, mine, scale, None)))
    for (group, plan), mine, some_q, results_of, partial in zip(
        call.groups, keys, queries, results, partials, strict=True
    ):
        for one in plan.late:
            if partial is None:
                _whole(call, plan, one, some_q, mine, scale, *results_of)
                continue
            assert plan.merged is not None
            waiting = plan.merged.take(some_q)
            found = _run(call, plan, one, waiting, mine, scale, None)
            before = one.rows.take(partial[0]), one.rows.take(partial[1], 2)
            total, log = merge((before, found))
            one.rows.put(partial[0], total)
            one.rows.put(partial[1], log, 2)
            if not call.keep and one.remote is not None:
                mine.arrived.pop(one.remote, None)
        if partial is not None and plan.merged is not None:
            plan.merged.put(results_of[0], partial[0])
            plan.merged.put(results_of[1], partial[1], 2)
        mine.finish()
        if len(call.groups) > 1:
            group.put_queries(out, results_of[0])
            lse[:, group.query_heads(lse.device)] = results_of[1]
    kept = [rows.reshape(-1) for mine in keys for rows in mine.arrived.values() if call.keep]
    return out, lse, torch.cat(kept) if kept else k.new_empty(0)


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dout: Tensor,
    kept: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV of this rank's rows in the dtype of q; ``lse`` and ``delta`` are global."""
    work = accumulator(q.dtype)
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    at = 0
    for group, plan in call.groups:
        keys = _Keys(call, group, plan, k, v)
        if call.keep:
            for number, stage in enumerate(plan.stages):
                if stage.happens and stage.received:
                    shape = (stage.received, q.shape[0], 2, *keys.k.shape[2:])
                    size = math.prod(shape)
                    keys.arrived[number] = kept[at : at + size].view(shape)
                    at += size
        else:
            keys.start()
        whole = len(call.groups) == 1
        some_q, some_dout = (q, dout) if whole else (group.queries(q), group.queries(dout))
        heads = slice(None) if whole else group.query_heads(lse.device)
        inputs = some_q, some_dout, lse[:, heads], delta[:, heads]
        dq = torch.zeros_like(some_q, dtype=work, memory_format=torch.contiguous_format)
        dkv = torch.zeros(
            (2, *keys.k.shape), dtype=work, device=k.device
        )  # fmt: skip
        local = [*plan.early, *([plan.partial] if plan.partial is not None else [])]
        remote = _Remote(call, keys, plan, q.shape[0], work)
        if call.keep:
            remote.run(inputs, dq, dkv, scale)
        for one in local:
            _gradients(call, plan, one, inputs, keys, scale, dq, dkv, None)
        if not call.keep:
            remote.run(inputs, dq, dkv, scale)
        remote.collect(dkv)
        if whole:
            return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)
        group.put_queries(grads[0], dq.to(q.dtype))
        group.put_keys(grads[1], dkv[0].to(k.dtype))
        group.put_keys(grads[2], dkv[1].to(v.dtype))
    return grads[0], grads[1], grads[2]


class _Remote:
    """The passes on remote keys in backward, and the return of those keys' gradients."""

    def __init__(
        self, call: Call, keys: _Keys, plan: RankPlan, batch: int, work: torch.dtype
    ) -> None:
        self.call, self.keys, self.plan, self.batch, self.work = call, keys, plan, batch, work
        self.returning: list[tuple[Stage, Pending]] = []

    def run(self, inputs: tuple[Tensor, ...], dq: Tensor, dkv: Tensor, scale: float) -> None:
        """All passes, stage by stage; each stage's gradients leave as soon as they are whole."""
        for number, stage in enumerate(self.plan.stages):
            if not stage.happens:
                continue
            shape = (stage.received, self.batch, 2, *self.keys.k.shape[2:])
            grads = torch.zeros(shape, dtype=self.work, device=dq.device)
            if not self.call.keep:
                # Also where this rank needs nothing: the others meet it in this exchange.
                self.keys.stage(number)
            for one in self.plan.late:
                if one.remote == number:
                    _gradients(
                        self.call, self.plan, one, inputs, self.keys, scale, dq, dkv, grads
                    )
            self.keys.arrived.pop(number, None)
            self.returning.append(self.keys.give_back(number, grads))

    def collect(self, dkv: Tensor) -> None:
        """Add what other ranks found for this rank's keys, one rank after the other: a sum whose
        order does not depend on arrival."""
        for stage, pending in self.returning:
            rows = pending.wait().to(self.work).permute(2, 1, 0, 3, 4)
            index, at = stage.index(dkv.device), 0
            for count in stage.send:
                if count:
                    some = slice(at, at + count)
                    dkv.index_add_(2, index[some], rows[:, :, some])
                at += count


def _run(
    call: Call, plan: RankPlan, one: Pass, q: Tensor, keys: _Keys, scale: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and LSE of one pass, in the accumulator's dtype when ``dtype`` is None."""
    k, v = keys.of(one)
    return engine.forward(
        call.kernel, one.rows.take(q), k, v, plan.pattern, one.queries, one.keys, scale,
        dtype or accumulator(q.dtype),
    )  # fmt: skip


def _whole(
    call: Call, plan: RankPlan, one: Pass, q: Tensor, keys: _Keys, scale: float, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """A pass that is the whole attention of its rows, into the result."""
    found, log = _run(call, plan, one, q, keys, scale, q.dtype)
    one.rows.put(out, found)
    one.rows.put(lse, log, 2)


def _gradients(
    call: Call, plan: RankPlan, one: Pass, inputs: tuple[Tensor, ...], keys: _Keys, scale: float,
    dq: Tensor, dkv: Tensor, remote: Tensor | None,
) -> None:  # fmt: skip
    """Add one pass's gradients to ``dq``, to ``dkv`` (2, B, rows, heads, D) of the local keys,
    and to ``remote`` (received, B, 2, heads, D)."""
    rows = one.rows
    if one.remote is not None and plan.merged is not None:
        rows = _inside(plan.merged, one.rows)
    q, dout, lse, delta = inputs
    k, v = keys.of(one)
    some_dq, dk, dv = engine.backward(
        call.kernel, rows.take(q), k, v, rows.take(dout), rows.take(lse, 2), rows.take(delta, 2),
        plan.pattern, one.queries, one.keys, scale, dq.dtype,
    )  # fmt: skip
    rows.add(dq, some_dq)
    if one.order is not None:
        order = torch.from_numpy(one.order).to(dk.device)
        dk = torch.empty_like(dk).index_copy_(1, order, dk)
        dv = torch.empty_like(dv).index_copy_(1, order, dv)
    begin, end = one.local
    here = end - begin
    for n, grad in enumerate((dk, dv)):
        if here:
            dkv[n, :, begin:end] += grad[:, :here]
        if remote is not None:
            remote[:, :, n] += grad[:, here:].transpose(0, 1)


def _inside(merged: Rows, part: Rows) -> Rows:
    """Rows of the tensors that are rows ``part`` of the merged ones."""
    return merged.part(*part.slices[0])

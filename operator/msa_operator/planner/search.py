"""The search: every split of the run that a model, a length and machines admit, and the best.

Candidates are enumerated, not guessed: for each machine type and number of accelerators, each
tensor and context degree, each way to divide the data ranks into shards and replicas. For each,
the first rung of the memory ladder that fits is taken. What does not fit says by how much.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from msa_kernels.pattern import Dense, Pattern
from msa_workloads.runspec import MemorySpec, MeshSpec

from msa_operator.planner import comm, flops, timing
from msa_operator.planner.checks import check
from msa_operator.planner.context import ContextChoice, Heads, choose
from msa_operator.planner.degrees import (
    PlanError,
    Refusal,
    context_degrees,
    divisors,
    tensor_degrees,
)
from msa_operator.planner.hardware import GIB, MIB, Machine
from msa_operator.planner.memory import (
    GPU_RESERVE,
    HOST_SHARE,
    RankMemory,
    rank_memory,
)
from msa_operator.planner.request import Plan, Rejected, Request, degrees, place
from msa_operator.planner.runtime import Runtime

MICRO_TOKENS = 16_384
"""Local tokens of a micro-batch beyond which a larger one no longer feeds the device better."""

CLOSE = 0.97
"""Plans within 3 % of the fastest estimate count as equally fast; the simplest of them wins."""

SHOWN = 64
"""Most rejected alternatives that a plan carries."""


def plan(request: Request, runtime: Runtime) -> Plan:
    """The best plan that ``runtime`` can run; pure, and deterministic.

    Raises :class:`PlanError` when there is none; it names the fields to change.
    """
    notes = check(request, runtime)
    found: list[Plan] = []
    rejected: dict[tuple, tuple[float, Rejected]] = {}
    for machine in request.machines:
        pairs = flops.layer_pairs(
            request.shape, request.pattern, request.dense_layers, request.length
        )
        for mesh in _meshes(request, runtime, machine):
            result = _evaluate(request, runtime, machine, mesh, pairs)
            if isinstance(result, Plan):
                found.append(result)
                continue
            rank, reason = result
            key = (machine.name, mesh.world_size, mesh.tensor, mesh.context)
            if key not in rejected or rank < rejected[key][0]:
                rejected[key] = rank, reason
    reasons = [reason for _, reason in sorted(rejected.values(), key=lambda r: r[0])]
    if not found:
        raise PlanError(_why_none(request, runtime, reasons), tuple(map(str, reasons[:SHOWN])))
    best = min(found, key=_preference(found))
    slower = _alternatives(best, found)
    here = [r for r in reasons if r.label.endswith(best.label.split(" on ")[1])]
    others = [r for r in reasons if r not in here]
    every = (*slower, *here, *others)[:SHOWN]
    return replace(best, rejected=every, notes=(*notes, *best.notes))


def _worlds(request: Request, machine: Machine) -> Iterator[int]:
    """Numbers of ranks: CPU workers as given, parts of one machine, or whole machines."""
    if request.workers is not None:
        yield request.workers
        return
    if request.fixed:
        least = most = MeshSpec(
            tensor=request.tensor or 1, context=request.context or 1,
            data_shard=request.data_shard or 1, data_replicate=request.data_replicate or 1,
        ).world_size  # fmt: skip
    else:
        least, most = request.least, request.most
    inside = range(1, machine.count + 1) if machine.shared else divisors(machine.count)
    yield from (n for n in inside if least <= n <= most)
    if machine.shared:
        return
    for nodes in range(2, most // machine.count + 1):
        if nodes * machine.count >= least and (request.fixed or _smooth(nodes)):
            yield nodes * machine.count


def _smooth(n: int) -> bool:
    """Has no prime factor above 3: other node counts divide few batches."""
    for p in (2, 3):
        while n % p == 0:
            n //= p
    return n == 1


def _meshes(request: Request, runtime: Runtime, machine: Machine) -> Iterator[MeshSpec]:
    for world in _worlds(request, machine):
        if request.workers is not None:
            domain = world
        else:
            domain = world if request.fixed else min(world, machine.domain)
        tensors = [
            t for t in tensor_degrees(request.shape, domain)
            if t <= runtime.tensor and request.tensor in (None, t)
        ]  # fmt: skip
        if request.fixed:
            tensors = [request.tensor or 1]
        most = runtime.most_context(request.pattern)
        contexts = [c for c in context_degrees(request.length, world) if c <= most]
        if request.fixed or request.context is not None:
            contexts = [request.context or 1]
        for tensor, context in itertools.product(tensors, contexts):
            if world % (tensor * context):
                continue
            data = world // (tensor * context)
            for shard in divisors(data):
                wanted = request.data_shard or (1 if request.fixed else None)
                copies = request.data_replicate or (1 if request.fixed else None)
                if wanted not in (None, shard) or copies not in (None, data // shard):
                    continue
                yield MeshSpec(
                    tensor=tensor, context=context, data_shard=shard,
                    data_replicate=data // shard,
                )  # fmt: skip


def _evaluate(
    request: Request, runtime: Runtime, machine: Machine, mesh: MeshSpec, pairs: float
) -> Plan | tuple[float, Rejected]:
    """A plan, or how far off this mesh is (sorts the reasons) and why."""
    cpu = machine.accelerator is None
    machines = 1 if cpu else -(-mesh.world_size // machine.count)
    label = f"{degrees(mesh)} on {place(machine, machines, mesh)}"
    data = mesh.data_ranks
    sequences = request.sequences or data
    if sequences % data:
        reason = f"{sequences} sequences a step do not divide over {data} data ranks"
        return 1e30 + data, Rejected(label, reason)
    usable, host = _usable(machine, mesh)
    width = 2 if request.precision == "bf16" else 4
    shared = _context(request, mesh, width)
    share = sequences // data
    # The last rung is the smallest for all but models of a layer or two: look there first.
    ladder = runtime.ladder(cpu=cpu)
    least = _rank(request, mesh, ladder[-1], 1, _ring(shared, request, mesh))
    if least.total > usable:
        every = (_rank(request, mesh, rung, 1, _ring(shared, request, mesh)) for rung in ladder)
        least = min(every, key=lambda rank: rank.total)
    if least.total > usable:
        unit = "worker" if cpu else "GPU"
        need, have = least.total / GIB, usable / GIB
        return need / have, Rejected(label, f"{need:.1f} GiB per {unit}, {have:.1f} usable")
    for memory in ladder:
        for micro, how in itertools.product(
            _micro_batches(request, mesh, share, cpu),
            dict.fromkeys((shared, _ring(shared, request, mesh))),
        ):
            rank = _rank(request, mesh, memory, micro, how)
            if rank.total > usable or rank.host > host:
                continue
            tokens = micro * -(-request.length // mesh.context)
            accumulation = share // micro
            step = flops.step_flops(
                request.shape, pairs, request.length, sequences,
                recompute=memory.checkpointing == "full",
            )  # fmt: skip
            moved = comm.step_bytes(
                request.shape, mesh, tokens=tokens, micro_batches=accumulation, halo=how.halo,
                micro_batch=micro, width=width, recompute=memory.checkpointing == "full",
            )  # fmt: skip
            dense = request.length * (request.length + 1) / 2
            return Plan(
                machine=machine,
                machines=machines,
                mesh=mesh,
                micro_batch=micro,
                accumulation=accumulation,
                memory=memory,
                context=how,
                rank=rank,
                usable=usable,
                flops=step,
                density=pairs / (request.shape.layers * dense),
                step_tokens=sequences * request.length,
                step_seconds=timing.step_seconds(
                    machine, mesh, step, moved, precision=request.precision
                ),
            )
    reason = f"{least.host / GIB:.1f} GiB offloaded per GPU, {host / GIB:.1f} there"
    return 1.0, Rejected(label, reason)


def _rank(
    request: Request, mesh: MeshSpec, memory: MemorySpec, micro_batch: int,
    shared: ContextChoice,
) -> RankMemory:  # fmt: skip
    width = 2 if request.precision == "bf16" else 4
    kv = 2 * request.shape.kv_size / mesh.tensor * (width + 4)
    return rank_memory(
        request.shape,
        mesh,
        memory,
        tokens=micro_batch * -(-request.length // mesh.context),
        precision=request.precision,
        exchange=shared.held * micro_batch * kv,
        cpu=request.workers is not None,
    )


def _usable(machine: Machine, mesh: MeshSpec) -> tuple[float, float]:
    """Bytes that one rank may use on its device, and of the host for offloading."""
    host = machine.allocatable_memory_mib * MIB
    if machine.accelerator is None:
        return machine.memory_mib * MIB * HOST_SHARE / mesh.world_size, 0.0
    ranks = min(mesh.world_size, machine.count)
    return machine.accelerator.memory_mib * MIB - GPU_RESERVE, host * 0.9 / ranks


def _micro_batches(request: Request, mesh: MeshSpec, share: int, cpu: bool) -> list[int]:
    """Micro-batches in sequences, the largest sensible first; on CPUs one sequence at a time."""
    local = request.length // mesh.context
    most = 1 if cpu else max(1, MICRO_TOKENS // local)
    return [m for m in reversed(divisors(share)) if m <= most]


def _context(request: Request, mesh: MeshSpec, width: int) -> ContextChoice:
    """How the context ranks of a mesh share a sequence."""
    shape = request.shape
    weights: dict[Pattern, int] = {}
    for head in range(shape.kv_heads):
        pattern = request.pattern.for_group(head)
        weights[pattern] = weights.get(pattern, 0) + shape.layers - len(request.dense_layers)
        weights[Dense()] = weights.get(Dense(), 0) + len(request.dense_layers)
    heads = Heads(shape.heads // mesh.tensor, max(1, shape.kv_heads // mesh.tensor))
    used = tuple((pattern, count) for pattern, count in weights.items() if count)
    return choose(used, request.length, mesh.context, heads, width)


def _ring(
    shared: ContextChoice, request: Request, mesh: MeshSpec
) -> ContextChoice:  # fmt: skip
    """The same with keys that come one rank at a time, where that holds fewer at once."""
    two = 2.0 * -(-request.length // mesh.context)
    if shared.held <= two:
        return shared
    spec = replace(shared.spec, method="ring")
    why = f"ring: all keys at once would be {shared.held:,.0f} tokens, two ranks' are {two:,.0f}"
    return replace(shared, spec=spec, held=two, reasons=(*shared.reasons, why))


def _preference(found: list[Plan]):
    """Sorts plans: clearly faster first, then the simpler and cheaper."""
    speeds = [p.tokens_per_second for p in found]
    fastest = max((s for s in speeds if s is not None), default=0.0)

    def key(p: Plan) -> tuple:
        speed = p.tokens_per_second
        close = speed is None or speed >= CLOSE * fastest
        price = p.machine.dollars_per_hour
        return (
            not close,
            0.0 if close or speed is None else -speed,
            -p.mesh.world_size if speed is None else 0,
            float("inf") if price is None else price * p.machines,
            p.mesh.world_size,
            p.mesh.tensor,
            p.mesh.context,
            p.mesh.data_replicate,
            p.machine.name,
        )

    return key


def _alternatives(best: Plan, found: list[Plan]) -> list[Rejected]:
    """The fastest plan of every other tensor and context degree, with what it would give."""
    fastest: dict[tuple[int, int], Plan] = {}
    for p in sorted(found, key=lambda p: -(p.tokens_per_second or 0)):
        fastest.setdefault((p.mesh.tensor, p.mesh.context), p)
    out = []
    for key, p in fastest.items():
        if key == (best.mesh.tensor, best.mesh.context):
            continue
        if p.tokens_per_second is None or best.tokens_per_second is None:
            reason = "works too; fewer data ranks, more communication"
        else:
            ratio = p.tokens_per_second / best.tokens_per_second
            reason = f"{p.tokens_per_second:,.0f} tokens/s, {ratio:.0%} of the plan's"
            if ratio >= CLOSE:
                reason += ": as fast within the estimate, and less simple"
        out.append(Rejected(p.label, reason))
    return out


def _why_none(request: Request, runtime: Runtime, reasons: list[Rejected]) -> tuple[Refusal, ...]:
    if not reasons:
        counts = ", ".join(f"{m.name} has {m.count}" for m in request.machines)
        here = [m.count for m in request.machines if m.shared]
        return (
            Refusal(
                "parallelism" if request.fixed else "hardware.accelerators",
                f"no number from {request.least} to {request.most} fits: {counts}",
                "part of one machine, or whole machines, that the given degrees divide",
                f"{{min: 1, max: {here[0]}}}" if here and not request.fixed else "",
            ),
        )
    smallest = reasons[0]
    if request.workers is not None:
        fields, advice = "hardware.workers", "fewer workers, or a smaller sequence.length or model"
    else:
        fields = "hardware.accelerators"
        advice = "more accelerators or ones with more memory, or a smaller sequence.length"
    if "do not divide" in smallest.reason:
        fields = "sequence.globalBatchTokens"
        sizes = request.workers or request.least
        advice = f"a multiple of length x data ranks, such as {request.length * sizes}"
    limited = "" if runtime.tensor > 1 else " without tensor parallelism"
    return (Refusal(fields, f"nothing fits{limited}; closest: {smallest}", advice),)

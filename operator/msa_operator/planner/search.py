"""The search: every split of the run that a model, a length and machines admit, and the best.

Candidates are enumerated, not guessed: for each machine type and number of accelerators, each
tensor and context degree, each way to divide the data ranks into shards and replicas. For each,
the first rung of the memory ladder that fits is taken. What does not fit says by how much.
"""

from __future__ import annotations

from dataclasses import replace

from msa_workloads.heads import EVEN
from msa_workloads.runspec import MeshSpec

from msa_operator.planner import backends
from msa_operator.planner.checks import check
from msa_operator.planner.degrees import PlanError, Refusal
from msa_operator.planner.fitting import Candidate, Fitting, Misfit, usable_bytes
from msa_operator.planner.hardware import GIB, Machine
from msa_operator.planner.request import Plan, Rejected, Request, degrees, place
from msa_operator.planner.runtime import Runtime
from msa_operator.planner.splits import Split, shape_of, splits

CLOSE = 0.97
"""Plans within 3 % of the fastest estimate count as equally fast; the simplest of them wins."""

SHOWN = 64
"""Most rejected alternatives that a plan carries."""


def plan(request: Request, runtime: Runtime) -> Plan:
    """The best plan that ``runtime`` can run; pure, and deterministic.

    Raises :class:`PlanError` when there is none; it names the fields to change.
    """
    notes = check(request, runtime)
    request, unfit = backends.on_fit_machines(request)
    fitting = Fitting(request, runtime)
    found, misfits = _search(fitting, runtime)
    if not found:
        reasons = [_reason(misfit, request) for misfit in misfits[:SHOWN]]
        raise PlanError(_why_none(request, runtime, reasons), tuple(map(str, reasons)))
    best = min(found, key=_preference(found))
    chosen = _plan(fitting, best)
    slower = _alternatives(best, found)
    there = _placed(best.machine, best.mesh)
    here, others = [], []
    for misfit in misfits:
        placed = _placed(misfit.machine, misfit.mesh)
        (here if placed == there else others).append(misfit)
    room = max(0, SHOWN - len(slower))
    shown = (_reason(misfit, request) for misfit in (*here, *others)[:room])
    every = (*unfit, *slower, *shown)[:SHOWN]
    return replace(chosen, rejected=every, notes=(*notes, *_uneven(fitting, best), *chosen.notes))


def _search(fitting: Fitting, runtime: Runtime) -> tuple[list[Candidate], list[Misfit]]:
    """What runs, in the order of the splits, and what does not, the closest first.

    Splits are looked at from the fastest that they can be, so that those which cannot come near
    need not be timed: left out are only meshes that would be neither within :data:`CLOSE` of the
    fastest nor the fastest of their degrees.
    """
    request = fitting.request
    known: dict[tuple, tuple[Split, ...]] = {}
    order: list[tuple[float, Machine, Split]] = []
    for machine in request.machines:
        shape = shape_of(machine)
        if shape not in known:
            known[shape] = splits(request, runtime, machine)
        bounds = {s.ranks: fitting.bound(machine, s.ranks) for s in known[shape]}
        order += [(bounds[split.ranks], machine, split) for split in known[shape]]
    fastest = 0.0
    of_degrees: dict[tuple[int, int], float] = {}
    found: list[tuple[int, list[Candidate]]] = []
    misfits: list[tuple[float, int, Misfit]] = []
    for n in sorted(range(len(order)), key=lambda n: -order[n][0]):
        _, machine, split = order[n]
        skip = min(CLOSE * fastest, of_degrees.get(split.degrees, 0.0))
        candidates, misfit = fitting.split(machine, split, skip)
        if misfit is not None:
            misfits.append((misfit.excess, n, misfit))
        if candidates:
            found.append((n, candidates))
            speed = max(c.speed or 0.0 for c in candidates)
            fastest = max(fastest, speed)
            of_degrees[split.degrees] = max(speed, of_degrees.get(split.degrees, 0.0))
    found.sort(key=lambda pair: pair[0])
    misfits.sort(key=lambda triple: triple[:2])
    return [c for _, some in found for c in some], [misfit for *_, misfit in misfits]


def _plan(fitting: Fitting, best: Candidate) -> Plan:
    request, setting, mesh = fitting.request, best.setting, best.mesh
    sequences = fitting.sequences(mesh)
    dense = request.length * (request.length + 1) / 2
    return Plan(
        machine=best.machine,
        machines=_machines(best.machine, mesh.world_size),
        mesh=mesh,
        micro_batch=setting.micro,
        accumulation=sequences // mesh.data_ranks // setting.micro,
        memory=setting.memory,
        context=setting.how,
        backend=request.backend,
        rank=setting.rank,
        usable=usable_bytes(best.machine, mesh.world_size)[0],
        flops=fitting.work(mesh, setting.memory),
        density=fitting.pairs / (request.shape.layers * dense),
        step_tokens=sequences * request.length,
        step_seconds=best.seconds,
    )


def _machines(machine: Machine, world: int) -> int:
    return 1 if machine.accelerator is None else -(-world // machine.count)


def _placed(machine: Machine, mesh: MeshSpec) -> str:
    return place(machine, _machines(machine, mesh.world_size), mesh)


def _reason(misfit: Misfit, request: Request) -> Rejected:
    mesh, machine = misfit.mesh, misfit.machine
    need, have = misfit.need / GIB, misfit.have / GIB
    if misfit.problem == "batch":
        sequences, data = request.sequences, mesh.data_ranks
        reason = f"{sequences} sequences a step do not divide over {data} data ranks"
    elif misfit.problem == "memory":
        unit = "worker" if machine.accelerator is None else "GPU"
        reason = f"{need:.1f} GiB per {unit}, {have:.1f} usable"
    else:
        reason = f"{need:.1f} GiB offloaded per GPU, {have:.1f} there"
    return Rejected(f"{degrees(mesh)} on {_placed(machine, mesh)}", reason)


def _uneven(fitting: Fitting, best: Candidate) -> tuple[str, ...]:
    tensor, shares = best.mesh.tensor, best.setting.how.spec.heads
    order, here, plain = fitting.stored(tensor, shares)
    told: tuple[str, ...] = ()
    if order is not None:
        numbers = " ".join(map(str, order))
        since = (
            "the run keeps the order of its checkpoint" if fitting.request.goes_on
            else "a run that resumes keeps the order that it started with"
        )  # fmt: skip
        told = (
            f"key/value heads are stored as {numbers} of the model's, in checkpoints too: in such "
            f"layers the busiest rank attends {here:.2f} x the mean, {plain:.2f} in the model's "
            f"order; {since}",
        )
    busiest = fitting.busiest(tensor, shares)
    if busiest <= EVEN:
        return told
    who, what = "tensor ranks", "tensor degree"
    if shares > 1 and busiest > fitting.busiest(tensor, 1):
        who, what = "ranks that exchange heads", "number of them (context.heads)"
    return (
        *told,
        f"{who} attend unevenly: the busiest {busiest:.2f} x the mean, because its key/value "
        f"heads are of the patterns that see most; a smaller {what} is more even",
    )


def _preference(found: list[Candidate]):
    """Sorts candidates: clearly faster first, then the simpler and cheaper."""
    fastest = max((c.speed for c in found if c.speed is not None), default=0.0)

    def key(c: Candidate) -> tuple:
        speed, mesh = c.speed, c.mesh
        close = speed is None or speed >= CLOSE * fastest
        if not close and speed is not None:
            return True, -speed
        price, world = c.machine.dollars_per_hour, mesh.world_size
        return (
            False,
            -world if speed is None else 0,
            float("inf") if price is None else price * _machines(c.machine, world),
            world,
            mesh.tensor,
            mesh.context,
            mesh.data_replicate,
            c.machine.name,
        )

    return key


def _alternatives(best: Candidate, found: list[Candidate]) -> list[Rejected]:
    """The fastest of every other tensor and context degree, with what it would give."""
    fastest: dict[tuple[int, int], Candidate] = {}
    for c in sorted(found, key=lambda c: -(c.speed or 0)):
        fastest.setdefault((c.mesh.tensor, c.mesh.context), c)
    out = []
    for key, c in fastest.items():
        if key == (best.mesh.tensor, best.mesh.context):
            continue
        if c.speed is None or best.speed is None:
            reason = "works too; fewer data ranks, more communication"
        else:
            ratio = c.speed / best.speed
            reason = f"{c.speed:,.0f} tokens/s, {ratio:.0%} of the plan's"
            if ratio >= CLOSE:
                reason += ": as fast within the estimate, and less simple"
        out.append(Rejected(f"{degrees(c.mesh)} on {_placed(c.machine, c.mesh)}", reason))
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

"""What one mesh needs and how fast it is: the first memory setting that fits a machine.

Memory and bytes moved do not depend on the machine, so they are worked out once for all of them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from msa_kernels.pattern import Dense, Pattern, PerHead
from msa_workloads.heads import Order, busiest, stored, stored_order
from msa_workloads.runspec import ContextSpec, MemorySpec, MeshSpec

from msa_operator.planner import backends, comm, flops, timing
from msa_operator.planner.context import ContextChoice, Heads, choose, price_layouts
from msa_operator.planner.degrees import divisors
from msa_operator.planner.exchange import NONE, ROUNDED, Exchange, Ranks, Weights, held
from msa_operator.planner.hardware import MIB, Machine
from msa_operator.planner.memory import (
    GPU_RESERVE,
    HOST_SHARE,
    Needs,
    RankMemory,
    needs,
    partial_bytes,
)
from msa_operator.planner.request import Request
from msa_operator.planner.runtime import Runtime
from msa_operator.planner.splits import Split

ONE_RANK = MeshSpec()

MICRO_TOKENS = 16_384
"""Local tokens of a micro-batch beyond which a larger one no longer feeds the device better."""


@dataclass(slots=True)
class Setting:
    """One way to run a mesh, and what it takes on each rank; bytes moved are filled in later."""

    memory: MemorySpec
    micro: int
    how: ContextChoice
    rank: RankMemory
    total: float
    moved: comm.StepBytes | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh on a machine with the setting that it would run with; ``seconds`` of one step."""

    machine: Machine
    mesh: MeshSpec
    setting: Setting
    seconds: float | None
    speed: float | None
    """Tokens per second."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """How far off a mesh is: ``excess`` sorts, the numbers are GiB where the batch divides."""

    excess: float
    machine: Machine
    mesh: MeshSpec
    problem: str
    need: float
    have: float


class Fitting:
    """Meshes of one request against machines; everything is computed at most once."""

    def __init__(self, request: Request, runtime: Runtime) -> None:
        self.request = request
        self.width = 2 if request.precision == "bf16" else 4
        self.cpu = request.workers is not None
        self.ladder = runtime.ladder(cpu=self.cpu)
        self.pairs = flops.layer_pairs(
            request.shape, request.pattern, request.dense_layers, request.length
        )
        self._shared: dict[tuple[int, int], tuple[ContextChoice, ContextChoice]] = {}
        self._settings: dict[MeshSpec, tuple[list[Setting], Iterator[Setting]]] = {}
        self._least: dict[MeshSpec, tuple[Setting, Setting | None]] = {}
        self._work: dict[tuple[int, str], flops.StepFlops] = {}
        self._micro: dict[tuple[int, int], list[int]] = {}
        self._busiest: dict[tuple[int, int], float] = {}
        self._rates: dict[str, float] = {}
        self._needs: dict[tuple[int, int], Needs] = {}
        """By tensor degree and identity of the ladder's rung."""
        self._exchanges: dict[tuple[int, int, ContextSpec, bool], Exchange] = {}

    def split(
        self, machine: Machine, split: Split, skip: float
    ) -> tuple[list[Candidate], Misfit | None]:
        """What runs of a split on a machine, fewest shards first, and the closest of what does
        not.

        No more is found out about meshes that run at no more than ``skip`` tokens per second.
        """
        first = split.meshes[0]
        if (self.request.sequences or split.data) % split.data:
            return [], Misfit(1e30 + split.data, machine, first, "batch", 0.0, 0.0)
        world = first.world_size
        usable, host = usable_bytes(machine, world)
        bound = self.bound(machine, world)
        found: list[Candidate] = []
        misfit = None
        # More shards need less: what follows the first mesh that is too large is larger still.
        for mesh in reversed(split.meshes):
            least = self._smallest(mesh, usable)
            if least.total > usable:
                if misfit is None:
                    excess = least.total / usable
                    misfit = Misfit(excess, machine, mesh, "memory", least.total, usable)
                break
            if bound < skip and least.rank.host <= host:
                continue
            for setting in self._all(mesh):
                if setting.total <= usable and setting.rank.host <= host:
                    found.append(self._timed(machine, mesh, setting))
                    break
            else:
                misfit = Misfit(1.0, machine, mesh, "host", least.rank.host, host)
        return found[::-1], misfit

    def bound(self, machine: Machine, world: int) -> float:
        """Tokens per second that so many ranks cannot exceed: nothing but the model's work."""
        if machine.name not in self._rates:
            sequences = 1
            work = flops.step_flops(self.request.shape, self.pairs, self.request.length, sequences)
            none = comm.StepBytes(0.0, 0.0, 0.0)
            seconds = timing.step_seconds(
                machine, ONE_RANK, work, none, precision=self.request.precision,
                attention=backends.SPEED.get(self.request.backend),
            )  # fmt: skip
            self._rates[machine.name] = self.request.length / seconds if seconds else math.inf
        return self._rates[machine.name] * world * (1 + 1e-9)

    def sequences(self, mesh: MeshSpec) -> int:
        """Sequences of one step over all ranks."""
        return self.request.sequences or mesh.data_ranks

    def work(self, mesh: MeshSpec, memory: MemorySpec) -> flops.StepFlops:
        """FLOPs of one step."""
        key = self.sequences(mesh), memory.checkpointing
        if key not in self._work:
            self._work[key] = flops.step_flops(
                self.request.shape, self.pairs, self.request.length, key[0], checkpointing=key[1]
            )
        return self._work[key]

    def busiest(self, tensor: int, shares: int) -> float:
        """Attended pairs of the busiest of the ranks that split heads over the mean, all layers
        together: ``tensor`` ranks, each with ``shares`` ranks that exchange heads. Heads are in
        the order in which the run stores them."""
        request, shape = self.request, self.request.shape
        if tensor * shares == 1 or not isinstance(request.pattern, PerHead):
            return 1.0
        if (tensor, shares) not in self._busiest:
            pattern = flops.within(request.shape, request.pattern)
            sparse = shape.layers - len(request.dense_layers)
            pairs = sparse * flops.head_pairs(pattern, request.length, shape.kv_heads)
            share = pairs / self.pairs if self.pairs else 0.0
            over = self.stored(tensor, shares)[1]
            self._busiest[tensor, shares] = 1 + (over - 1) * share
        return self._busiest[tensor, shares]

    def stored(self, tensor: int, shares: int) -> tuple[Order | None, float, float]:
        """The order in which layers of the pattern store their heads (None: the model's), and the
        busiest rank over the mean in that order and in the model's. It is what these ranks would
        begin with, or what the run that goes on has."""
        if not isinstance(self.request.pattern, PerHead):
            return None, 1.0, 1.0
        shape, length = self.request.shape, self.request.length
        split = shape.heads, shape.kv_heads, tensor, shares
        pattern = flops.within(shape, self.request.pattern)
        order = self.request.order
        if not self.request.goes_on:
            order = stored_order(*split, pattern, length)
        here = busiest(*split, stored(pattern, order), length)
        return order, here, busiest(*split, pattern, length)

    def _timed(self, machine: Machine, mesh: MeshSpec, setting: Setting) -> Candidate:
        sequences = self.sequences(mesh)
        if setting.moved is None:
            setting.moved = comm.step_bytes(
                self.request.shape, mesh,
                tokens=setting.micro * -(-self.request.length // mesh.context),
                micro_batches=sequences // mesh.data_ranks // setting.micro,
                halo=setting.how.halo, micro_batch=setting.micro, width=self.width,
                recompute=setting.memory.checkpointing != "none",
            )  # fmt: skip
        seconds = timing.step_seconds(
            machine, mesh, self.work(mesh, setting.memory), setting.moved,
            precision=self.request.precision,
            busiest=self.busiest(mesh.tensor, setting.how.spec.heads),
            attention=backends.SPEED.get(self.request.backend),
        )  # fmt: skip
        speed = None if seconds is None else sequences * self.request.length / seconds
        return Candidate(machine, mesh, setting, seconds, speed)

    def _smallest(self, mesh: MeshSpec, usable: float) -> Setting:
        """The smallest setting; the last one if that fits, as it does but for tiny models."""
        ring = self._ways(mesh)[1]
        if mesh not in self._least:
            self._least[mesh] = self._setting(mesh, self.ladder[-1], 1, ring), None
        last, least = self._least[mesh]
        if last.total <= usable:
            return last
        if least is None:
            every = [self._setting(mesh, rung, 1, ring) for rung in self.ladder]
            least = min(every, key=lambda setting: setting.total)
            self._least[mesh] = last, least
        return least

    def _all(self, mesh: MeshSpec) -> Iterator[Setting]:
        """Settings in the order of preference, made as they are asked for."""
        if mesh not in self._settings:
            self._settings[mesh] = [], self._make(mesh)
        known, more = self._settings[mesh]
        yield from known
        for setting in more:
            known.append(setting)
            yield setting

    def _make(self, mesh: MeshSpec) -> Iterator[Setting]:
        ways = dict.fromkeys(self._ways(mesh))
        micros = self._micro_batches(self.sequences(mesh) // mesh.data_ranks, mesh.context)
        for memory, micro, how in itertools.product(self.ladder, micros, ways):
            yield self._setting(mesh, memory, micro, how)

    def _setting(
        self, mesh: MeshSpec, memory: MemorySpec, micro: int, how: ContextChoice
    ) -> Setting:
        shape, precision = self.request.shape, self.request.precision
        key = mesh.tensor, id(memory)
        if key not in self._needs:
            self._needs[key] = needs(
                shape, mesh.tensor, memory, precision, cpu=self.cpu,
                backward=self._backward(),
            )  # fmt: skip
        rank = self._needs[key].rank(
            mesh.data_shard * mesh.context, mesh.world_size > 1 or precision == "bf16",
            micro * -(-self.request.length // mesh.context),
            self._exchange(mesh, how, micro > 1).times(micro),
            accumulates=self.sequences(mesh) // mesh.data_ranks > micro,
        )  # fmt: skip
        return Setting(memory, micro, how, rank, rank.total)

    def _micro_batches(self, share: int, context: int) -> list[int]:
        """Micro-batches in sequences, the largest sensible first; on CPUs one at a time."""
        key = share, context
        if key not in self._micro:
            local = self.request.length // context
            most = 1 if self.cpu else max(1, MICRO_TOKENS // local)
            self._micro[key] = [m for m in reversed(divisors(share)) if m <= most]
        return self._micro[key]

    def _ways(self, mesh: MeshSpec) -> tuple[ContextChoice, ContextChoice]:
        """How context ranks share a sequence: at its best, and with the fewest keys at once."""
        key = mesh.tensor, mesh.context
        if key not in self._shared:
            shared = self._context(mesh)
            self._shared[key] = shared, self._ring(shared, mesh.context)
        return self._shared[key]

    def _context(self, mesh: MeshSpec) -> ContextChoice:
        request, shape = self.request, self.request.shape
        heads = Heads(shape.heads // mesh.tensor, max(1, shape.kv_heads // mesh.tensor))
        return choose(self._weights(), request.length, mesh.context, heads, self.width)

    def _kinds(self) -> tuple[tuple[Weights, int], ...]:
        """Kinds of layers: their key/value heads by pattern, and how many layers there are."""
        shape = self.request.shape
        pattern = flops.within(shape, self.request.pattern)
        sparse = Counter(pattern.for_group(head) for head in range(shape.kv_heads))
        whole, dense = flops.within(shape, Dense()), len(self.request.dense_layers)
        kinds = ((sparse, shape.layers - dense), (Counter({whole: shape.kv_heads}), dense))
        return tuple((tuple(heads.items()), layers) for heads, layers in kinds if layers)

    def _backward(self) -> float:
        """Bytes that attention holds in backward for each number of a layer's queries, beside its
        gradients: what the backend needs, and the gradients of the parts of a pattern."""
        apart = 0.0
        for heads, _ in self._kinds():
            total = sum(count for _, count in heads)
            each = (count / total * partial_bytes(self.request.shape, p) for p, count in heads)
            apart = max(apart, *each)
        return apart + backends.BACKWARD_BYTES.get(self.request.backend, 0)

    def _weights(self) -> Weights:
        """Key/value heads of all layers by pattern."""
        weights: Counter[Pattern] = Counter()
        for heads, layers in self._kinds():
            for pattern, count in heads:
                weights[pattern] += count * layers
        return tuple(weights.items())

    def _exchange(self, mesh: MeshSpec, how: ContextChoice, batched: bool) -> Exchange:
        if mesh.context == 1:
            return NONE
        key = mesh.tensor, mesh.context, how.spec, batched
        if key not in self._exchanges:
            shape, length, weights = self.request.shape, self.request.length, self._weights()
            outer = price_layouts(weights, length, mesh.context // how.spec.heads)[0].name
            self._exchanges[key] = held(
                Ranks(length, mesh.context, how.spec, outer, weights), self._kinds(),
                (shape.heads // mesh.tensor, max(1, shape.kv_heads // mesh.tensor)),
                shape.head_size, self.width, eager=self.cpu,
                merges=backends.merges(self.request), rounds=self.request.backend in ROUNDED,
                batched=batched,
            )  # fmt: skip
        return self._exchanges[key]

    def _ring(self, shared: ContextChoice, context: int) -> ContextChoice:
        """The same with keys that come one rank at a time, where that holds fewer at once."""
        two = 2.0 * -(-self.request.length * shared.spec.heads // context)
        if shared.held <= two or not backends.merges(self.request):
            return shared
        spec = replace(shared.spec, method="ring")
        why = (
            f"ring: all keys at once would be {shared.held:,.0f} tokens, two ranks' are {two:,.0f}"
        )
        return replace(shared, spec=spec, held=two, reasons=(*shared.reasons, why))


def usable_bytes(machine: Machine, world: int) -> tuple[float, float]:
    """Bytes that one of ``world`` ranks may use on its device, and of the host to offload to."""
    if machine.accelerator is None:
        return machine.memory_mib * MIB * HOST_SHARE / world, 0.0
    host = machine.allocatable_memory_mib * MIB * 0.9 / min(world, machine.count)
    return machine.accelerator.memory_mib * MIB - GPU_RESERVE, host

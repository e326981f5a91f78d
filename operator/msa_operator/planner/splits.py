"""Every split of a run over ranks that a model, a length and a machine admit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from msa_workloads.runspec import MeshSpec

from msa_operator.planner import backends
from msa_operator.planner.degrees import context_degrees, divisors, tensor_degrees
from msa_operator.planner.hardware import Machine
from msa_operator.planner.request import Request
from msa_operator.planner.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Split:
    """A number of ranks with its tensor and context degree; ``meshes`` divide the data ranks."""

    ranks: int
    degrees: tuple[int, int]
    """Tensor and context."""
    data: int
    meshes: tuple[MeshSpec, ...]
    """By ascending number of shards; at least one."""


def splits(request: Request, runtime: Runtime, machine: Machine) -> tuple[Split, ...]:
    """All splits over machines of this type, fewest ranks first."""
    return tuple(_splits(request, runtime, machine))


def shape_of(machine: Machine) -> tuple[int, int, bool, bool]:
    """What of a machine decides its splits; machines that agree in it have the same ones."""
    return machine.count, machine.domain, machine.shared, machine.accelerator is None


def _splits(request: Request, runtime: Runtime, machine: Machine) -> Iterator[Split]:
    most = runtime.most_context(request.pattern) if backends.splits_sequences(request) else 1
    for world in _worlds(request, machine):
        if request.workers is not None or request.fixed:
            domain = world
        else:
            domain = min(world, machine.domain)
        tensors = [
            t for t in tensor_degrees(request.shape, domain)
            if t <= runtime.tensor and request.tensor in (None, t)
        ]  # fmt: skip
        if request.fixed:
            tensors = [request.tensor or 1]
        contexts = [c for c in context_degrees(request.length, world) if c <= most]
        if request.fixed or request.context is not None:
            contexts = [request.context or 1]
        for tensor, context in itertools.product(tensors, contexts):
            if world % (tensor * context):
                continue
            data = world // (tensor * context)
            if meshes := tuple(_meshes(request, tensor, context, data)):
                yield Split(world, (tensor, context), data, meshes)


def _meshes(request: Request, tensor: int, context: int, data: int) -> Iterator[MeshSpec]:
    wanted = request.data_shard or (1 if request.fixed else None)
    copies = request.data_replicate or (1 if request.fixed else None)
    for shard in divisors(data):
        if wanted in (None, shard) and copies in (None, data // shard):
            yield MeshSpec(
                tensor=tensor, context=context, data_shard=shard, data_replicate=data // shard
            )


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

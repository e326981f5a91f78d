"""Bytes that ranks exchange in one step, and the time that they take where nothing hides them.

A first, deliberately simple model: a bandwidth per tier (inside an NVLink domain, over the
network), no latency, and one rule of overlap per kind of parallelism. What context ranks receive
is that of the layout that :mod:`~msa_operator.planner.context` expects.
"""

from __future__ import annotations

from dataclasses import dataclass

from msa_workloads.runspec import MeshSpec

from msa_operator.planner.hardware import Machine
from msa_operator.planner.modelspec import ModelShape

LINK_EFFICIENCY = 0.8
"""Of a link's nominal bandwidth that large collectives reach."""

DEFAULT_NETWORK_GBPS = 25.0
"""Assumed between machines whose network is not described, in 10^9 bits per second."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one rank receives in one step, by cause."""

    data: float
    tensor: float
    context: float


def bandwidth(machine: Machine, ranks: int, members: int = 1) -> float:
    """Bytes per second into one rank, in a group of neighbouring ``ranks``.

    ``members`` of the group share a machine and want the same bytes, as in gathering parameters:
    these cross the network once and spread over the fast links inside.
    """
    gpu = machine.accelerator
    inside = gpu.link_gbps / 2 * 1e9 * LINK_EFFICIENCY if gpu is not None else 0.0
    if inside and ranks <= machine.domain:
        return inside
    total = (machine.network_gbps or DEFAULT_NETWORK_GBPS) / 8 * 1e9 * LINK_EFFICIENCY
    share = total * min(members, machine.count) / max(1, machine.count)
    return min(share, inside) if inside else share


def step_bytes(
    shape: ModelShape, mesh: MeshSpec, *, tokens: int, micro_batches: int, halo: float,
    micro_batch: int, width: int, recompute: bool,
) -> StepBytes:  # fmt: skip
    """Bytes received by one rank in a step of ``micro_batches``, ``tokens`` local tokens each.

    ``halo`` is :attr:`~msa_operator.planner.context.ContextChoice.halo`. Parameters are gathered
    for forward and for backward of every micro-batch, and gradients reduced in each, in fp32.
    """
    shards = mesh.data_shard * mesh.context
    local = shape.parameters / mesh.tensor
    data = local * (shards - 1) / shards * (2 * width + 4) * micro_batches
    data += 2 * 4 * local / shards * (mesh.data_replicate - 1) / mesh.data_replicate
    passes = 3 if recompute else 2
    part = (mesh.tensor - 1) / mesh.tensor
    tensor = 4 * passes * shape.layers * tokens * shape.hidden * width * part * micro_batches
    # Keys and values once forward, once more in backward, and their gradients in fp32.
    kv = 2 * max(shape.kv_size / mesh.tensor, shape.head_size) * halo * micro_batch
    context = shape.layers * kv * (2 * width + 4) * micro_batches
    return StepBytes(data=data, tensor=tensor, context=context)

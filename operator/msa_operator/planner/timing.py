"""Seconds of a step: work over the device's speed, plus the communication that nothing hides."""

from __future__ import annotations

from msa_workloads.runspec import MeshSpec

from msa_operator.planner.comm import StepBytes, bandwidth
from msa_operator.planner.flops import StepFlops
from msa_operator.planner.hardware import Machine

MATRIX_EFFICIENCY = 0.38
"""Of the peak that a training step's matrix products reach; docs/planner.md has the runs."""

ATTENTION_EFFICIENCY = 0.50
"""Of the peak, forward and backward of flash attention at long lengths."""

FP32_SPEED = 1 / 15
"""fp32 without tensor cores, against bf16 with them (A100: 19.5 of 312, H100: 67 of 989)."""

HIDDEN = 0.8
"""Part of a step's computation behind which gathering parameters can hide."""


def step_seconds(
    machine: Machine, mesh: MeshSpec, work: StepFlops, moved: StepBytes, *, precision: str,
    busiest: float = 1.0, attention: float | None = 1.0,
) -> float | None:  # fmt: skip
    """Estimated seconds of one step, or None where the device's speed is not known.

    ``busiest`` is how much more than the mean the busiest tensor rank attends, ``attention`` how
    fast that is against :data:`ATTENTION_EFFICIENCY`; None where nobody knows.
    """
    gpu = machine.accelerator
    if gpu is None or not gpu.peak_tflops or attention is None:
        return None
    peak = gpu.peak_tflops * 1e12 * (1.0 if precision == "bf16" else FP32_SPEED)
    world = mesh.world_size
    matrices = (work.matrices + work.recompute_matrices) / (peak * MATRIX_EFFICIENCY) / world
    attended = (work.attention + work.recompute_attention) / (peak * ATTENTION_EFFICIENCY) / world
    attended *= busiest / attention
    compute = matrices + attended

    inner = mesh.tensor * mesh.context
    here = min(machine.count, world) // mesh.tensor
    data = moved.data / bandwidth(machine, inner * mesh.data_shard, max(1, here))
    tensor = moved.tensor / bandwidth(machine, mesh.tensor, min(mesh.tensor, machine.count))
    context = moved.context / bandwidth(machine, inner)
    exposed = max(0.0, data - HIDDEN * compute) + tensor + max(0.0, context - attended)
    return compute + exposed

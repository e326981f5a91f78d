"""What the planner is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from msa_kernels.capabilities import AUTO
from msa_kernels.pattern import Pattern
from msa_workloads.heads import Order
from msa_workloads.runspec import MemorySpec, MeshSpec

from msa_operator.planner.context import ONE, ContextChoice
from msa_operator.planner.flops import StepFlops
from msa_operator.planner.hardware import Machine
from msa_operator.planner.memory import RankMemory
from msa_operator.planner.modelspec import ModelShape


@dataclass(frozen=True, kw_only=True)
class Request:
    """Inputs of a plan. ``workers`` is set for CPU jobs, ``least`` and ``most`` for GPU jobs."""

    shape: ModelShape
    pattern: Pattern
    length: int
    machines: tuple[Machine, ...]
    global_batch_tokens: int | None = None
    """A multiple of ``length``; None lets every data rank read one sequence a step."""
    dense_layers: tuple[int, ...] = ()
    backend: str = AUTO
    """Of attention, one of :data:`msa_kernels.capabilities.NAMES`."""
    precision: str = "bf16"
    workers: int | None = None
    least: int = 1
    most: int = 8
    tensor: int | None = None
    context: int | None = None
    data_shard: int | None = None
    data_replicate: int | None = None
    fixed: bool = False
    """Degrees that are None are 1 rather than chosen."""
    goes_on: bool = False
    """The run has a checkpoint, so that the order of its heads is not for the plan to choose."""
    order: Order | None = None
    """With ``goes_on``: the order in which layers of the pattern store their heads in it; None is
    the model's."""

    @property
    def sequences(self) -> int | None:
        """Sequences of one step over all ranks, where the job says."""
        return (
            None if self.global_batch_tokens is None else self.global_batch_tokens // self.length
        )


@dataclass(frozen=True)
class Rejected:
    """An alternative that was considered, and why it is not the plan."""

    label: str
    reason: str

    def __str__(self) -> str:
        return f"{self.label}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one run is laid out. Memory in bytes, times in seconds, estimates all."""

    machine: Machine
    machines: int
    mesh: MeshSpec
    micro_batch: int
    accumulation: int
    memory: MemorySpec
    rank: RankMemory
    usable: float
    """Bytes of one rank's device (or share of the host) that the run may use."""
    flops: StepFlops
    density: float
    """Attended pairs over those of dense causal attention, over all layers."""
    step_tokens: int
    step_seconds: float | None
    """None where nothing is known about the device's speed."""
    context: ContextChoice = ONE
    """How context ranks share a sequence."""
    backend: str = AUTO
    """Of attention, as asked for."""
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step_seconds is None else self.step_tokens / self.step_seconds

    @property
    def label(self) -> str:
        return f"{degrees(self.mesh)} on {place(self.machine, self.machines, self.mesh)}"


def degrees(mesh: MeshSpec) -> str:
    """``tp2 cp4 fsdp8 dp2``; degrees of 1 are left out."""
    named = (
        ("tp", mesh.tensor), ("cp", mesh.context), ("fsdp", mesh.data_shard),
        ("dp", mesh.data_replicate),
    )  # fmt: skip
    return " ".join(f"{name}{n}" for name, n in named if n > 1) or "one rank"


def place(machine: Machine, machines: int, mesh: MeshSpec) -> str:
    """``8 x p5.48xlarge``, ``4 of 8 GPUs of p5.48xlarge``, ``this machine``."""
    ranks = mesh.world_size
    if machine.accelerator is None:
        return f"{ranks} CPU worker{'s' * (ranks > 1)} of {machine.name}"
    if ranks < machine.count * machines:
        return f"{ranks} of {machine.count} GPUs of {machine.name}"
    if machine.shared:
        return machine.name
    return f"{machines} x {machine.name}"

"""HardwareProfile: an administrator's description of a machine that the catalogue lacks."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from msa_operator.api import values
from msa_operator.api.schema import Choice, Int, Map, Model, Number, Rule, Text

INSTANCE_TYPE = Text(63, r"^[a-z0-9][a-z0-9.-]*$", "lower case, digits, '-' and '.'", shortest=1)


class Accelerator(Model):
    name: Annotated[str, Text(63, shortest=1)]
    """As printed by the vendor's tool, such as H100."""
    count: Annotated[int, Int(1, 1024)]
    memory_mib: Annotated[int, Int(1024, 1 << 24)] = Field(alias="memoryMiB")
    """Of one accelerator, as its driver reports it."""
    peak_tflops: Annotated[float, Number(0, 1e6, above=True)]
    """Dense bf16 matrix products, without sparsity."""
    memory_gbps: Annotated[float, Number(0, 1e6, above=True)] = Field(alias="memoryGBps")
    """Memory bandwidth in 10^9 bytes per second."""
    link_gbps: Annotated[float, Number(0, 1e6)] = Field(default=0.0, alias="linkGBps")
    """Between accelerators, both directions together, 10^9 bytes per second; 0: PCIe only."""
    domain: Annotated[int | None, Int(1, 1024)] = None
    """Accelerators that reach each other over these links; default: all of the machine's."""


class MachineNetwork(Model):
    efa: Annotated[int, Int(0, 128)] = 0
    """EFA interfaces."""
    gbps: Annotated[float, Number(0, 1e6)] = 0.0
    """Total network bandwidth in 10^9 bits per second."""
    rdma: Annotated[str, Choice(("None", "GPUDirect"))] = "None"


class ProfileSpec(Model):
    instance_type: Annotated[str, INSTANCE_TYPE]
    """Value of the node label node.kubernetes.io/instance-type; jobs name it."""
    accelerator: Accelerator
    cpus: Annotated[int, Int(1, 1 << 16)]
    memory_mib: Annotated[int, Int(1024, 1 << 30)] = Field(alias="memoryMiB")
    allocatable_memory_mib: Annotated[int | None, Int(1024, 1 << 30)] = Field(
        default=None, alias="allocatableMemoryMiB"
    )
    """What pods may request; default: 0.925 of memory, less 2 GiB."""
    network: MachineNetwork = Field(default_factory=MachineNetwork)
    dollars_per_hour: Annotated[float | None, Number(0, 1e6)] = None
    node_labels: Annotated[dict[str, str], Map(64, 63)] = Field(default_factory=dict)

    rules: ClassVar = (
        Rule(
            "!has(self.accelerator.domain) || self.accelerator.domain <= self.accelerator.count",
            "domain must be at most the machine's count",
            lambda p: p.accelerator.domain is None or p.accelerator.domain <= p.accelerator.count,
            "accelerator.domain",
            lambda p: f"found {p.accelerator.domain} with count {p.accelerator.count}",
            lambda p: str(p.accelerator.count),
        ),
        Rule(
            "!has(self.allocatableMemoryMiB) || self.allocatableMemoryMiB <= self.memoryMiB",
            "allocatableMemoryMiB must be at most memoryMiB",
            lambda p: p.allocatable_memory_mib is None or p.allocatable_memory_mib <= p.memory_mib,
            "allocatableMemoryMiB",
            lambda p: f"found {p.allocatable_memory_mib} with memoryMiB {p.memory_mib}",
            lambda p: str(p.memory_mib * 925 // 1000),
        ),
    )


class ProfileMetadata(Model):
    model_config = Model.model_config | {"extra": "allow"}

    name: Annotated[
        str,
        Text(253, values.SUBDOMAIN, "lower case, digits, '-' and '.'", shortest=1),
    ]  # fmt: skip


class HardwareProfile(Model):
    api_version: Annotated[str, Choice(("flashmsa.dev/v1alpha1",))]
    kind: Annotated[str, Choice(("HardwareProfile",))]
    metadata: ProfileMetadata
    spec: ProfileSpec

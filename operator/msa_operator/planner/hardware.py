"""Machines that a plan can be made for: a catalogue of EC2 types, and any machine described.

Device memory, vCPUs, memory, EFA interfaces and network cards are what DescribeInstanceTypes
reports (2026-08). Bandwidth is the instance's own figure, never a sum over network cards: the
cards of p6-b200 add up to half of it and those of g6e.48xlarge to four times. Prices are us-east-1
on demand of 2026-07-20. Peaks are dense bf16 from the vendors' data sheets.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

MIB = 1 << 20
GIB = 1 << 30


class MachineError(ValueError):
    """A machine that no plan can be made for; the message says why and names the nearest."""


@dataclass(frozen=True)
class Accelerator:
    """One GPU. Memory in MiB as its driver reports it, bandwidths in 10^9 bytes per second."""

    name: str
    memory_mib: int
    peak_tflops: float
    memory_gbps: float
    link_gbps: float = 0.0
    """NVLink, both directions together; 0 where GPUs meet over PCIe only."""
    capability: tuple[int, int] | None = None
    """Compute capability; None where nobody says."""


@dataclass(frozen=True)
class Machine:
    """One node. ``domain`` is how many of its accelerators share fast links: 1 over PCIe."""

    name: str
    accelerator: Accelerator | None
    count: int
    cpus: int
    memory_mib: int
    domain: int = 1
    efa: int = 0
    network_cards: int = 1
    network_gbps: float = 0.0
    gpudirect: bool = False
    max_pods: int | None = None
    dollars_per_hour: float | None = None
    allocatable_mib: int | None = None
    """What pods may request, where an administrator states it."""
    shared: bool = False
    """A machine in use by its owner (a laptop, this host) rather than a node to be filled."""

    @property
    def allocatable_memory_mib(self) -> int:
        """Memory that pods on this node can request.

        Karpenter sets aside 7.5 % for the hypervisor; the kubelet then keeps 255 MiB and 11 MiB
        for each pod it may hold, and evicts below 100 MiB.
        """
        if self.allocatable_mib is not None:
            return self.allocatable_mib
        pods = 110 if self.max_pods is None else self.max_pods
        return int(self.memory_mib * 0.925) - (255 + 11 * pods) - 100


V100 = Accelerator("V100", 32_768, 125.0, 900.0, 300.0, capability=(7, 0))
A100_40 = Accelerator("A100-40G", 40_960, 312.0, 1555.0, 600.0, capability=(8, 0))
A100_80 = Accelerator("A100-80G", 81_920, 312.0, 2039.0, 600.0, capability=(8, 0))
H100 = Accelerator("H100", 81_920, 989.0, 3350.0, 900.0, capability=(9, 0))
H200 = Accelerator("H200", 144_384, 989.0, 4800.0, 900.0, capability=(9, 0))
B200 = Accelerator("B200", 183_359, 2250.0, 8000.0, 1800.0, capability=(10, 0))
B300 = Accelerator("B300", 275_040, 2250.0, 8000.0, 1800.0, capability=(10, 3))
GB200 = Accelerator("GB200", 189_471, 2500.0, 8000.0, 1800.0, capability=(10, 0))
A10G = Accelerator("A10G", 22_888, 70.0, 600.0, capability=(8, 6))
L4 = Accelerator("L4", 22_888, 121.0, 300.0, capability=(8, 9))
L40S = Accelerator("L40S", 45_776, 362.0, 864.0, capability=(8, 9))

ACCELERATORS = {
    a.name: a for a in (V100, A100_40, A100_80, H100, H200, B200, B300, GB200, A10G, L4, L40S)
}


def _p(
    name: str, gpu: Accelerator, count: int, cpus: int, gib: int, efa: int, cards: int,
    gbps: float, pods: int | None, price: float | None, *, gpudirect: bool = True,
) -> Machine:  # fmt: skip
    return Machine(
        name, gpu, count, cpus, gib * 1024, domain=count, efa=efa, network_cards=cards,
        network_gbps=gbps, gpudirect=gpudirect, max_pods=pods, dollars_per_hour=price,
    )  # fmt: skip


def _g(
    name: str, gpu: Accelerator, count: int, cpus: int, gib: int, cards: int, gbps: float,
    price: float, *, efa: int | None = None, pods: int | None = None,
) -> Machine:  # fmt: skip
    return Machine(
        name, gpu, count, cpus, gib * 1024, efa=cards if efa is None else efa,
        network_cards=cards, network_gbps=gbps, max_pods=pods, dollars_per_hour=price,
    )  # fmt: skip


_MACHINES = (
    _p("p3dn.24xlarge", V100, 8, 96, 768, 1, 1, 100, None, 31.212, gpudirect=False),
    _p("p4d.24xlarge", A100_40, 8, 96, 1152, 4, 4, 400, 737, 21.958),
    _p("p4de.24xlarge", A100_80, 8, 96, 1152, 4, 4, 400, 737, 27.447),
    _p("p5.4xlarge", H100, 1, 16, 256, 1, 1, 100, 118, 6.88, gpudirect=False),
    _p("p5.48xlarge", H100, 8, 192, 2048, 32, 32, 3200, 100, 55.04),
    _p("p5e.48xlarge", H200, 8, 192, 2048, 32, 32, 3200, 100, None),
    _p("p5en.48xlarge", H200, 8, 192, 2048, 16, 16, 3200, 198, 63.296),
    _p("p6-b200.48xlarge", B200, 8, 192, 2048, 8, 8, 3200, 198, 113.933),
    # 17 cards, of which card 0 carries ordinary traffic only.
    _p("p6-b300.48xlarge", B300, 8, 192, 4096, 16, 17, 6400, 198, 142.416),
    # Four GPUs of an NVLink domain of 36 or 72 that spans machines; here the machine's part.
    _p("p6e-gb200.36xlarge", GB200, 4, 144, 960, 4, 17, 1600, None, None),
    _g("g5.8xlarge", A10G, 1, 32, 128, 1, 25, 2.448),
    _g("g5.12xlarge", A10G, 4, 48, 192, 1, 40, 5.672),
    _g("g5.16xlarge", A10G, 1, 64, 256, 1, 25, 4.096),
    _g("g5.24xlarge", A10G, 4, 96, 384, 1, 50, 8.144),
    _g("g5.48xlarge", A10G, 8, 192, 768, 1, 100, 16.288),
    _g("g6.8xlarge", L4, 1, 32, 128, 1, 25, 2.014),
    _g("g6.12xlarge", L4, 4, 48, 192, 1, 40, 4.602),
    _g("g6.16xlarge", L4, 1, 64, 256, 1, 25, 3.397),
    _g("g6.24xlarge", L4, 4, 96, 384, 1, 50, 6.675),
    _g("g6.48xlarge", L4, 8, 192, 768, 1, 100, 13.350),
    _g("g6e.8xlarge", L40S, 1, 32, 256, 1, 25, 4.529),
    _g("g6e.12xlarge", L40S, 4, 48, 384, 1, 100, 10.493),
    _g("g6e.16xlarge", L40S, 1, 64, 512, 1, 35, 7.577),
    _g("g6e.24xlarge", L40S, 4, 96, 768, 2, 200, 15.066),
    _g("g6e.48xlarge", L40S, 8, 192, 1536, 4, 400, 30.131, pods=492),
)
CATALOGUE = {machine.name: machine for machine in _MACHINES}

DEFAULT_TYPES = (
    "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge",
    "p6-b200.48xlarge", "p6-b300.48xlarge",
)  # fmt: skip
"""Types a job that names none may get: those with fast links inside and RDMA between machines."""


def machine(name: str, known: dict[str, Machine] | None = None) -> Machine:
    """The machine of that name, of ``known`` (profiles) or the catalogue.

    A SageMaker type (``ml.p5.48xlarge``) is its EC2 type. Raises :class:`MachineError` for a
    fraction of a GPU and for a name that is not known.
    """
    every = CATALOGUE | (known or {})
    plain = name.removeprefix("ml.")
    if plain in every:
        return every[plain]
    if plain.split(".")[0] in ("g6f", "gr6f"):
        raise MachineError(
            f"{name}: fractional GPU not supported (the type has a part of an L4); "
            "nearest: g6.8xlarge"
        )
    near = difflib.get_close_matches(plain, every, n=1)
    nearest = f"; nearest: {near[0]}" if near else ""
    raise MachineError(
        f"{name}: not in the catalogue ({', '.join(sorted(every))}); describe other machines in a "
        f"HardwareProfile{nearest}"
    )


def memory_request_mib(node: Machine, daemonsets_mib: int = 0) -> int:
    """The most memory, in MiB, that one worker pod can request on this node."""
    return max(0, node.allocatable_memory_mib - daemonsets_mib)


def check_memory_request(node: Machine, requested_mib: float, daemonsets_mib: int = 0) -> None:
    """Raise :class:`MachineError` when a pod with this request can never be scheduled."""
    most = memory_request_mib(node, daemonsets_mib)
    if requested_mib > most:
        raise MachineError(
            f"{requested_mib:.0f}Mi of memory never fits {node.name}: {most}Mi of its "
            f"{node.memory_mib}Mi can be requested; nearest: {most}Mi"
        )


def of_model(name: str) -> list[Accelerator]:
    """Those of the catalogue that are this GPU, however its driver prints the name."""
    words = name.replace("-", " ").split()
    return [a for a in ACCELERATORS.values() if a.name.split("-")[0] in words]


def local(
    *, cpus: int, memory_mib: int, gpus: tuple[tuple[str, int], ...] = (), linked: bool = False
) -> Machine:
    """This host as a machine: ``gpus`` are (name, MiB) as its driver prints them.

    Peaks come from the catalogue's GPU of the same model; a GPU that it lacks has none, and its
    plans carry no time estimate. Raises :class:`MachineError` when the GPUs are not all alike.
    """
    if not gpus:
        return Machine("this machine", None, 0, cpus, memory_mib, shared=True)
    if len(set(gpus)) > 1:
        names = ", ".join(sorted({f"{name} ({mib} MiB)" for name, mib in gpus}))
        raise MachineError(f"this machine's GPUs differ ({names}): a plan needs equal ones")
    name, memory = gpus[0]
    like = max(
        of_model(name),
        key=lambda a: -abs(a.memory_mib - memory),
        default=Accelerator(name, memory, 0.0, 0.0),
    )
    gpu = replace(like, name=name, memory_mib=memory)
    domain = len(gpus) if linked else 1
    return Machine("this machine", gpu, len(gpus), cpus, memory_mib, domain=domain, shared=True)

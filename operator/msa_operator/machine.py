"""This machine, as the planner sees it: cores, memory and GPUs, found without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from msa_operator.planner.hardware import MIB, Machine, local

SMI_SECONDS = 20
"""nvidia-smi takes seconds where drivers are loaded on demand; longer means that it hangs."""


def this_machine() -> Machine:
    """Cores and memory that this process may use, and the GPUs that its driver shows.

    Raises :class:`~msa_operator.planner.hardware.MachineError` for GPUs that are not all alike.
    """
    gpus = nvidia_gpus()
    return local(cpus=cores(), memory_mib=memory_bytes() // MIB, gpus=gpus, linked=_linked(gpus))


def cores() -> int:
    """Cores of this process's affinity, limited by its control group's CPU quota."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    quota = _cgroup_cpus()
    return max(1, min(count, quota) if quota else count)


def memory_bytes() -> int:
    """Memory of the machine, or of this process's control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int(Path("/sys/fs/cgroup", name).read_text())
        except (OSError, ValueError):
            continue
        total = min(total, limit)
    return total


def nvidia_gpus() -> tuple[tuple[str, int], ...]:
    """(name, MiB) of each GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves."""
    lines = _smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    gpus = []
    for line in lines:
        name, _, memory = line.rpartition(",")
        if name and memory.strip().isdecimal():
            gpus.append((name.strip(), int(memory)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [v.strip() for v in visible.split(",") if v.strip() not in ("", "-1")]
        if all(n.isdecimal() for n in names):
            return tuple(gpus[int(n)] for n in names if int(n) < len(gpus))
        return tuple(gpus[: len(names)])
    return tuple(gpus)


def _linked(gpus: tuple[tuple[str, int], ...]) -> bool:
    """Whether the GPUs reach each other by NVLink."""
    return len(gpus) > 1 and any("GB/s" in line for line in _smi("nvlink", "--status"))


def _smi(*arguments: str) -> list[str]:
    path = shutil.which("nvidia-smi")
    if path is None:
        return []
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _cgroup_cpus() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) // int(period) if quota != "max" else 0
    except (OSError, ValueError):
        pass
    try:
        quota = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return quota // period if quota > 0 else 0
    except (OSError, ValueError):
        return 0

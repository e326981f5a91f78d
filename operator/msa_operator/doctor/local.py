"""This machine: can it train, and with what? Nothing heavy is imported into this process."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from msa_operator import extra, machine
from msa_operator.doctor.finding import Finding, failed, ok, unknown, warning
from msa_operator.planner.hardware import GIB, MIB

CHECK_S = 600.0
"""For the check of the kernels: a cold cache of compiled kernels takes minutes on a slow disk."""
DISK_LOW = 10 * GIB
"""Bytes; a checkpoint of a model of 1B parameters with its optimizer takes 12 GB."""
DISK_LEAST = 1 * GIB
MEMORY_LEAST = 4 * GIB
"""Bytes; a driver, one worker and Ray's own processes take about 3 GiB."""
SHM_LEAST = 1 * GIB
"""Bytes; Docker gives 64 MiB unless told, and NCCL and data loaders then fail in odd ways."""
FILES_LEAST = 4096
"""Open files; Ray opens some for each worker and each connection."""

Run = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]


def run(argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end. Raises :class:`subprocess.TimeoutExpired` or :class:`OSError`."""
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)


def findings(folder: Path, run: Run = run) -> list[Finding]:
    """Everything about this machine; ``folder`` is where runs would be written."""
    return [
        python(),
        *packages(),
        memory(),
        disk(folder),
        shared_memory(),
        open_files(),
        *kernels(machine.nvidia_gpus(), run),
    ]


def python() -> Finding:
    version = platform.python_version()
    system = f"{platform.system()} {platform.machine()}"
    return ok("Python", f"{version} on {system}")


def packages(names: Sequence[str] = ("torch", "triton", "ray", "transformers")) -> list[Finding]:
    """What training needs, by what is installed; what an import would say comes later."""
    found = [ok(extra.DISTRIBUTION, metadata.version(extra.DISTRIBUTION))]
    for name in names:
        if name == "triton" and platform.system() != "Linux":
            continue
        try:
            found.append(ok(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(
                failed(
                    name, "not installed: this machine plans, and cannot train", extra.command()
                )
            )
    return found


def memory() -> Finding:
    total, cores = machine.memory_bytes(), machine.cores()
    text = f"{total / GIB:.1f} GiB, {cores} cores"
    if total < MEMORY_LEAST:
        least = f"{MEMORY_LEAST // GIB} GiB"
        return warning("memory", text, f"a local run wants {least}: set hardware.workers to 1")
    return ok("memory", text)


def disk(folder: Path) -> Finding:
    """Free space where runs are written, and whether they can be."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    text = f"{free / GIB:.1f} GiB free in {there}"
    elsewhere = "give another folder with msa run --output-dir"
    if not os.access(there, os.W_OK):
        return failed("disk", f"{there} cannot be written", elsewhere)
    if free < DISK_LEAST:
        return failed("disk", text, f"free some space, or {elsewhere}")
    if free < DISK_LOW:
        return warning("disk", text, f"large checkpoints will not fit: {elsewhere}")
    return ok("disk", text)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    if not folder.exists():
        return ok("shared memory", "this system has no /dev/shm and needs none")
    size = shutil.disk_usage(folder).total
    if size < SHM_LEAST:
        return warning(
            "shared memory",
            f"{size // MIB} MiB in {folder}",
            "start the container with --shm-size=8g, or mount a memory volume there",
        )
    return ok("shared memory", f"{size / GIB:.1f} GiB in {folder}")


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < FILES_LEAST:
        most = "unlimited" if hard == unlimited else hard
        want = FILES_LEAST if hard == unlimited else min(hard, 65536)
        return warning("open files", f"{soft}, at most {most}", f"ulimit -n {want}")
    return ok("open files", "unlimited" if soft == unlimited else str(soft))


def kernels(gpus: Sequence[tuple[str, int]], run: Run = run) -> list[Finding]:
    """GPUs as the driver and as PyTorch see them, and whether attention computes what it should.

    ``gpus`` are (name, MiB) by the driver. The check runs in a process of its own: a broken
    installation may end it in any way.
    """
    if importlib.util.find_spec("torch") is None:
        return [unknown("kernels", "PyTorch is not installed", extra.command())]
    backends = ("triton", "torch") if gpus else ("torch",)
    argv = [sys.executable, "-m", "msa_kernels.check", "--output=json"]
    argv += [f"--backend={name}" for name in backends]
    again = f"run it by hand: {' '.join(['python', *argv[1:]])}"
    try:
        done = run(argv, CHECK_S)
    except subprocess.TimeoutExpired:
        return [failed("kernels", f"the check did not end within {CHECK_S:.0f} s", again)]
    except OSError as error:
        return [failed("kernels", f"the check cannot be started: {error}", again)]
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1]
        return [
            failed("kernels", f"the check broke: {last}", f"{extra.command()} again, or {again}")
        ]
    return [_gpus(gpus, found), _attention(found, again)]


def _gpus(gpus: Sequence[tuple[str, int]], found: dict[str, Any]) -> Finding:
    seen = found["machine"]["gpus"]
    torch = found["machine"]["torch"]
    if gpus and not seen:
        return failed(
            "GPU",
            f"the driver shows {len(gpus)} x {gpus[0][0]}, PyTorch {torch} sees none",
            "install the PyTorch of this driver's CUDA (nvidia-smi shows the newest it can run)",
        )
    if not seen:
        return ok("GPU", "none: runs use the CPU (hardware.device: cpu)")
    if len(seen) < len(gpus):
        return warning(
            "GPU",
            f"PyTorch sees {len(seen)} of {len(gpus)}",
            "look at CUDA_VISIBLE_DEVICES, and for a broken GPU in nvidia-smi",
        )
    first = seen[0]
    return ok(
        "GPU",
        f"{len(seen)} x {first['name']}, {first['memory_gib']} GiB, "
        f"capability {first['capability']}",
    )


def _attention(found: dict[str, Any], again: str) -> Finding:
    ran = [r for r in found["results"] if r["errors"]]
    wrong = sorted({f"{r['backend']} on {r['case']}" for r in ran if not r["ok"]})
    where = found["device"]
    if wrong:
        return failed(
            "kernels",
            f"wrong on {where}: {', '.join(wrong[:3])}",
            f"do not train with this installation; {again}",
        )
    names = sorted({r["backend"] for r in ran})
    if where.startswith("cuda") and "triton" not in names:
        why = next((r["refused"] for r in found["results"] if r["backend"] == "triton"), "")
        return warning(
            "kernels",
            f"the GPU kernels do not run here: {why}",
            "runs fall back on PyTorch's own attention and are slow",
        )
    return ok(
        "kernels", f"{len(ran)} cases agree with the reference on {where} ({', '.join(names)})"
    )

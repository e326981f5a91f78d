"""The attention backend that a job names: what it serves of the job, and what it costs.

What each backend serves is :mod:`msa_kernels.capabilities`, which the kernels read too. ``auto``
serves everything that a plan admits, and is counted as the project's own kernels, which are there
on every GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from msa_kernels.capabilities import AUTO, LIMITS, NAMES, refuses, refuses_pattern, unfit
from msa_kernels.pattern import Dense, Pattern

from msa_operator.planner.degrees import Refusal
from msa_operator.planner.hardware import Machine
from msa_operator.planner.request import Rejected, Request
from msa_operator.planner.runtime import is_learned

FIELD = "attention.backend"

SPEED = {
    AUTO: 1.0, "triton": 1.0, "fa4": 1.15, "cudnn": 1.14, "triton-fp8": 1.08,
    "triton-fused": 1.05, "sdpa": 1.04, "flex": 0.72,
}  # fmt: skip
"""Of forward and backward on an H200, dense at 131,072 tokens (sdpa: 32,768), against ``triton``
in the same run: docs/kernels.md. A backend that is not here has not been measured on GPUs."""

BACKWARD_BYTES = {"triton-fused": 4, "fa4": 6, "cudnn": 6, "flex": 2, "sdpa": 8}
"""That backward holds for each number of the queries beside what ``triton`` does, an fp32 sum of
dQ among them: what the same runs held."""


def refusals(request: Request) -> list[Refusal]:
    """Why the backend cannot compute the job, whatever the degrees, with those that can."""
    why = _why(request, request.backend)
    if why is None:
        return []
    works = [name for name in NAMES if _why(request, name) is None]
    family = request.backend.split("-")[0]
    return [Refusal(
        FIELD, f"found {request.backend}{why}", ", ".join(works),
        family if family in works else AUTO,
    )]  # fmt: skip


def _why(request: Request, name: str) -> str | None:
    """What follows the backend's name where it does not serve the job."""
    if name == AUTO:
        return None
    shape = request.shape
    said = refuses(
        name,
        device="cpu" if request.workers is not None else "cuda",
        dtype="bfloat16" if request.precision == "bf16" else "float32",
        head_dim=shape.head_size, rows=request.length, training=True,
    )  # fmt: skip
    if said is not None:
        return f": it {said}"
    for pattern in _patterns(request):
        own = shape.sliding_window
        found = pattern if own is None else pattern.limited(own)
        if said := refuses_pattern(name, found, shape.kv_heads):
            within = "" if own is None else f" within the model's own window of {own}"
            return f" for {pattern.kind}{within}: it {said}"
    if LIMITS[name].whole_calls and (request.context or 1) > 1:
        return f" with context {request.context}: it computes whole sequences"
    each = [_unfit(name, machine) for machine in request.machines]
    return f": it {each[0]}" if each and all(each) else None


def _patterns(request: Request) -> Iterator[Pattern]:
    """Of the layers; without those whose keys are selected at run time."""
    if len(request.dense_layers) < request.shape.layers and not is_learned(request.pattern):
        yield request.pattern
    if request.dense_layers:
        yield Dense()


def _unfit(name: str, machine: Machine) -> str | None:
    gpu = machine.accelerator
    if gpu is None or gpu.capability is None:
        return None
    why = unfit(name, gpu.capability)
    found = ".".join(map(str, gpu.capability))
    return why and f"{why}; {gpu.name} ({machine.name}) has {found}"


def on_fit_machines(request: Request) -> tuple[Request, tuple[Rejected, ...]]:
    """The request on those machines whose GPUs run the backend, and why not on the others."""
    if request.backend == AUTO:
        return request, ()
    each = [(machine, _unfit(request.backend, machine)) for machine in request.machines]
    fit = tuple(machine for machine, why in each if why is None)
    rejected = tuple(
        Rejected(machine.name, f"{FIELD} {request.backend} {why}") for machine, why in each if why
    )
    return replace(request, machines=fit), rejected


def notes(request: Request) -> Iterator[str]:
    """What the plan cannot know, or a user may not: for the plan."""
    name = request.backend
    if name == AUTO:
        return
    limits = LIMITS[name]
    if limits.package:
        yield f"{FIELD} {name} needs the package {limits.package} where the workers run"
    if limits.one_document:
        few = "" if limits.whole_calls else " (over context ranks, a few)"
        yield (
            f"{FIELD} {name} computes sequences of one document{few}: one that packs more, or is "
            "padded, ends the run; auto computes it on another backend"
        )
    if not limits.exact:
        yield (
            f"{FIELD} {name} rounds its forward to e4m3: results are about 5 % off on normal "
            "inputs, more where scores are large (docs/kernels.md)"
        )
    if request.workers is None and name not in SPEED:
        yield f"{FIELD} {name} is slow on GPUs, and how slow has not been measured: no estimate"


def splits_sequences(request: Request) -> bool:
    """Whether context ranks can each compute a part of a sequence."""
    return request.backend == AUTO or not LIMITS[request.backend].whole_calls


def merges(request: Request) -> bool:
    """Whether context ranks can compute the keys of one rank after another, as in a ring."""
    return request.backend == AUTO or LIMITS[request.backend].merges_passes

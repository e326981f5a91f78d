"""Checks that come before any search: what no choice of degrees could mend, and what to note."""

from __future__ import annotations

from msa_kernels.pattern import Pattern, PerHead, SinkWindow, Window
from msa_workloads import heads

from msa_operator.planner import backends
from msa_operator.planner.degrees import (
    PlanError,
    Refusal,
    context_refusal,
    tensor_refusal,
    ulysses_degrees,
)
from msa_operator.planner.request import Request
from msa_operator.planner.runtime import Runtime, is_learned


def check(request: Request, runtime: Runtime) -> tuple[str, ...]:
    """Notes for the plan; raises :class:`PlanError` with every refusal at once."""
    refusals = [
        *_attention(request, runtime), *backends.refusals(request),
        *_supported(request, runtime), *_degrees(request),
    ]  # fmt: skip
    if refusals:
        raise PlanError(tuple(refusals))
    return (*_notes(request), *backends.notes(request))


def _attention(request: Request, runtime: Runtime) -> list[Refusal]:
    out = []
    layers = request.shape.layers
    for n, layer in enumerate(request.dense_layers):
        if layer >= layers:
            out.append(Refusal(
                f"attention.denseLayers[{n}]", f"found {layer}, the model has {layers} layers",
                f"0 to {layers - 1}", str(layers - 1),
            ))  # fmt: skip
    if isinstance(request.pattern, PerHead):
        members, groups = len(request.pattern.members), request.shape.kv_heads
        if members > groups:
            out.append(Refusal(
                "attention.pattern.members",
                f"found {members} patterns for {groups} key/value heads",
                f"at most {groups}: the others would never be used",
            ))  # fmt: skip
    if is_learned(request.pattern) and not runtime.learned_patterns:
        out.append(Refusal(
            "attention.pattern.type", "found BlockTopK, which this version cannot train",
            "every other type", "BlockList",
        ))  # fmt: skip
    return out


def _supported(request: Request, runtime: Runtime) -> list[Refusal]:
    """Degrees that the job asks for and the workers do not have: said before anything else."""
    out = []
    for field, value, limit in (
        ("tensor", request.tensor, runtime.tensor),
        ("context", request.context, runtime.most_context(request.pattern)),
    ):
        if value is not None and value > limit:
            out.append(Refusal(
                f"parallelism.{field}", f"found {value}, which this version's workers cannot run",
                f"{limit}; split over dataShard or dataReplicate instead", str(limit),
            ))  # fmt: skip
    return out


def _degrees(request: Request) -> list[Refusal]:
    out = []
    shape = request.shape
    if request.tensor is not None:
        if request.fixed:
            # Forced: fast links are not required, heads and an MLP that split still are.
            allowed = heads.tensor_degrees(shape.heads, shape.kv_heads, shape.intermediate)
            if request.tensor not in allowed:
                out.append(Refusal(
                    "parallelism.tensor",
                    f"found {request.tensor} for {shape.heads} query and {shape.kv_heads} "
                    "key/value heads",
                    ", ".join(map(str, allowed)), str(heads.nearest(request.tensor, allowed)),
                ))  # fmt: skip
        elif request.workers is not None:
            where = f"{request.workers} CPU workers"
            out.append(tensor_refusal(shape, request.workers, request.tensor, where))
        else:
            found = [
                tensor_refusal(shape, m.domain, request.tensor, m.name) for m in request.machines
            ]
            if found and all(found):
                out.append(found[0])
    if request.context is not None:
        refusal = context_refusal(request.length, request.context)
        if refusal is not None:
            out.append(refusal)
    return [r for r in out if r is not None]


def _notes(request: Request) -> list[str]:
    notes = []
    shape, length = request.shape, request.length
    if length > shape.positions:
        notes.append(
            f"length {length} is beyond the {shape.positions} positions that the model's config "
            "names; they are extended as its rope settings say"
        )
    if _covers(request.pattern, length):
        notes.append(f"the window covers all {length} tokens: this is dense attention")
    if request.fixed and request.tensor and request.machines:
        for machine in request.machines:
            if request.tensor > machine.domain and machine.accelerator is not None:
                notes.append(
                    f"tensor {request.tensor} reaches beyond the {machine.domain} linked "
                    f"accelerators of {machine.name}: it will be slow"
                )
    if request.context and request.context > 1:
        degrees = ", ".join(map(str, ulysses_degrees(shape)))
        notes.append(f"heads can be exchanged for sequence (Ulysses) at degrees {degrees}")
    return notes


def _covers(pattern: Pattern, length: int) -> bool:
    return isinstance(pattern, Window | SinkWindow) and pattern.window >= length

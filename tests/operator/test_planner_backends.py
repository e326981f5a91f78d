"""A backend that the job names: refused where it cannot serve, counted where it can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msa_kernels.capabilities import NAMES
from msa_kernels.pattern import BlockTopK, Dense, Dilated, Pattern, SinkWindow, Union, Window
from msa_operator.cli.submit import plan_lines
from msa_operator.planner import backends
from msa_operator.planner.degrees import PlanError, Refusal
from msa_operator.planner.exchange import NONE
from msa_operator.planner.explain import to_dict
from msa_operator.planner.fitting import Fitting
from msa_operator.planner.hardware import ACCELERATORS, Accelerator, local, machine
from msa_operator.planner.memory import needs, token_bytes
from msa_operator.planner.modelspec import model_shape
from msa_operator.planner.presets import PRESETS
from msa_operator.planner.request import Request
from msa_operator.planner.runtime import EVERYTHING
from msa_operator.planner.search import plan
from msa_workloads.runspec import MemorySpec, MeshSpec

LLAMA = model_shape(PRESETS["llama-3-8b"])
P4D, P5, G6E = (machine(n) for n in ("p4d.24xlarge", "p5.48xlarge", "g6e.48xlarge"))
HOST = local(cpus=4, memory_mib=32_000)


SINKS = SinkWindow(8192, 512)


def request(backend: str, pattern: Pattern = SINKS, **fields: Any) -> Request:
    start: dict[str, Any] = {
        "shape": LLAMA, "length": 32_768, "global_batch_tokens": 64 * 32_768, "machines": (P5,),
        "least": 8, "most": 16,
    }  # fmt: skip
    return Request(pattern=pattern, backend=backend, **{**start, **fields})


CPU = {"shape": model_shape(PRESETS["tiny-llama"]), "machines": (HOST,), "workers": 2,
       "precision": "fp32", "length": 4096, "global_batch_tokens": 8192}  # fmt: skip


def refused(asked: Request) -> Refusal:
    with pytest.raises(PlanError) as caught:
        plan(asked, EVERYTHING)
    (refusal,) = caught.value.refusals
    assert refusal.field == "attention.backend"
    assert refusal.nearest in refusal.allowed.split(", ")
    return refusal


@pytest.mark.parametrize(
    ("asked", "found", "allowed", "nearest"),
    [
        (request("sdpa"), "sdpa for SinkWindow: it serves Dense only",
         "auto, cudnn, triton, flex, torch, triton-fused, triton-fp8", "auto"),
        (request("sdpa", Dense(), context=2), "sdpa with context 2: it computes whole sequences",
         "auto, fa4, cudnn, triton, torch, triton-fused, triton-fp8", "auto"),
        (request("fa4", Union((Window(64), Dilated(4)))), "fa4 for Union: it rounds its output",
         "auto, triton, flex, torch, triton-fused, triton-fp8", "auto"),
        (request("fa4", Window(64), dense_layers=(0,), precision="fp32"),
         "fa4: it serves bfloat16 and float16, not float32",
         "auto, triton, flex, torch, triton-fused", "auto"),
        (request("sdpa", Window(64), shape=replace(LLAMA, sliding_window=4096)),
         "sdpa for Window within the model's own window of 4096: ",
         "auto, fa4, cudnn, triton, flex, torch, triton-fused, triton-fp8", "auto"),
        (request("triton-fp8", shape=replace(LLAMA, head_size=256)),
         "triton-fp8: it serves head sizes up to 128, not 256",
         "auto, cudnn, triton, flex, torch, triton-fused", "triton"),
        (request("triton-fp8", machines=(P4D,)), "triton-fp8: it needs compute capability 8.9 or "
         "newer; A100-40G (p4d.24xlarge) has 8.0", "auto, triton, flex, torch, triton-fused",
         "triton"),
        (request("flex", length=1 << 19, global_batch_tokens=1 << 25), "capped at 262144 rows, "
         "found 524288", "auto, cudnn, triton, torch, triton-fused, triton-fp8", "auto"),
        (request("triton", **CPU), "triton: it needs a GPU", "auto, torch", "auto"),
        (request("flex", Dense(), **CPU), "flex: it has no gradient on a CPU",
         "auto, sdpa, torch", "auto"),
    ],
    ids=lambda value: value.backend if isinstance(value, Request) else "",
)  # fmt: skip
def test_what_a_backend_does_not_serve_is_refused_before_anything_starts(
    asked: Request, found: str, allowed: str, nearest: str
):
    refusal = refused(asked)
    assert found in refusal.found
    assert (refusal.allowed, refusal.nearest) == (allowed, nearest)


@pytest.mark.parametrize("name", NAMES)
def test_every_backend_is_planned_for_what_it_serves(name: str):
    dense = request(name, Dense())
    found = plan(dense, EVERYTHING)
    assert found.backend == to_dict(found)["attentionBackend"] == name
    assert found.mesh.context == 1 or backends.splits_sequences(dense)
    told = ("attention", f"backend {name}") in plan_lines(to_dict(found))
    assert told == (name != "auto"), "what msa submit prints"
    assert (found.step_seconds is None) == (name == "torch")
    assert any("no estimate" in note for note in found.notes) == (name == "torch")
    assert any(note.startswith("attention.backend") for note in found.notes) == (
        name in ("fa4", "cudnn", "sdpa", "torch", "triton-fp8")
    )
    cpu = request(name, Dense(), **CPU)
    if name in ("auto", "torch", "sdpa"):
        assert plan(cpu, EVERYTHING).backend == name


def test_gpus_that_do_not_run_it_are_left_out_and_named():
    every = request("triton-fp8", machines=(P4D, G6E, P5))
    found = plan(every, EVERYTHING)
    assert found.machine != P4D
    first = found.rejected[0]
    assert first.label == P4D.name
    assert "8.9 or newer; A100-40G (p4d.24xlarge) has 8.0" in first.reason
    # Nobody knows what a GPU of another maker's name can do: the workers find out.
    assert P5.accelerator is not None
    other = replace(P5, accelerator=replace(P5.accelerator, name="X1", capability=None))
    assert plan(request("triton-fp8", machines=(other,)), EVERYTHING).machine == other
    assert all(gpu.capability is not None for gpu in ACCELERATORS.values())
    gpus = (("NVIDIA H200", 143_771),) * 8
    here = local(cpus=64, memory_mib=1 << 20, gpus=gpus, linked=True)
    assert isinstance(here.accelerator, Accelerator) and here.accelerator.capability == (9, 0)


def test_a_fused_backward_holds_four_bytes_for_each_number_of_the_queries():
    sums = backends.BACKWARD_BYTES["triton-fused"]
    plain, fused = (token_bytes(LLAMA, 2, 2, True, held) for held in (0, sums))
    assert fused == replace(plain, apart=plain.apart + 4 * LLAMA.query_size / 2)

    def peak(held: float, **memory: Any) -> float:
        spec = MemorySpec(checkpointing="full", loss_chunk=4096, **memory)
        rank = needs(LLAMA, 1, spec, "bf16", cpu=False, backward=held).rank(8, True, 1 << 20, NONE)
        return rank.total

    # It is a moment of its own: seen where the MLP runs in tiles, and not where it is whole.
    assert peak(0) == peak(sums)
    assert peak(0, mlp_chunk=16_384) < peak(sums, mlp_chunk=16_384)
    long = {"length": 1 << 21, "global_batch_tokens": 1 << 21, "machines": (P5,), "context": 8,
            "least": 8, "most": 8}  # fmt: skip
    sizes = {
        name: plan(request(name, Window(8192), **long), EVERYTHING).rank.total
        for name in ("auto", "triton", "triton-fused", "fa4")
    }
    assert sizes["auto"] == sizes["triton"] < sizes["triton-fused"] < sizes["fa4"]


def test_a_faster_backend_is_estimated_as_faster():
    seconds = {
        name: plan(request(name, Window(8192), tensor=1, context=1), EVERYTHING).step_seconds
        for name in ("auto", "triton", "triton-fused", "fa4", "flex")
    }
    assert seconds["auto"] == seconds["triton"]
    order = sorted(seconds.keys() - {"auto"}, key=lambda name: seconds[name] or 0.0)
    assert order == ["fa4", "triton-fused", "triton", "flex"]


def test_a_ring_is_no_way_out_for_what_merges_no_passes():
    """It computes the keys of one rank after another."""
    ways = {
        name: Fitting(request(name, Dense()), EVERYTHING)._ways(MeshSpec(context=4))
        for name in ("auto", "triton", "triton-fused", "triton-fp8", "fa4", "cudnn")
    }
    methods = {name: tuple(way.spec.method for way in both) for name, both in ways.items()}
    rings = {name for name, found in methods.items() if found == ("all_to_all", "ring")}
    assert rings == {"auto", "triton", "triton-fused"}
    assert methods["triton-fp8"] == methods["fa4"] == ("all_to_all", "all_to_all")


def test_learned_patterns_are_left_to_what_serves_them():
    found = plan(request("triton", BlockTopK(128, 16)), EVERYTHING)
    assert found.backend == "triton"

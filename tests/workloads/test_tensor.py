"""Tensor ranks, alone and with every other axis, give the loss and gradients of one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msa_workloads.runspec import MemorySpec, RunSpec

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks
from mesh_cases import Case, alone, errors_of, step

TOLERANCE = 1e-5
"""Of the largest value of the single process, in fp32."""


class Saving(Case):
    """With the switches that save memory."""

    def spec(self) -> RunSpec:
        memory = MemorySpec(
            checkpointing="selective", keep_projections=1, checkpoint_layers=2,
            offload_checkpoints=True, offload_optimizer=True, mlp_chunk=16, loss_chunk=13,
        )  # fmt: skip
        return replace(super().spec(), memory=memory)


CASES: dict[int, list[Case]] = {
    2: [
        Saving((1, 1, 1, 2), "qwen3", "sinks", micro_batch=2),
        Case((1, 1, 1, 2), "llama", "union", dense_layers=(1,), loss_chunk=13),
        Case((1, 1, 1, 2), "qwen3", "per head", checkpointing="full", micro_batch=2),
        Case((1, 1, 1, 2), "mistral", "sinks", length=96, micro_batch=4),
    ],
    4: [
        # Two key/value heads on four ranks: each is copied to two of them.
        Case((1, 1, 1, 4), "llama", "per head", loss_chunk=50),
        Case((1, 1, 1, 4), "qwen3", "window", packing="masked rank"),
        Case((1, 1, 1, 4), "qwen2", "dense", checkpointing="full"),
        Case((1, 2, 1, 2), "qwen3", "dilated", micro_batch=2),
        Saving((1, 1, 2, 2), "llama", "per head"),
        Case((2, 1, 1, 2), "llama", "columns", loss_chunk=9),
        Case((1, 1, 2, 2), "llama", "per head", dense_layers=(0,), layout="zigzag"),
        Case((1, 1, 2, 2), "qwen3", "sinks", layout="balanced", packing="masked rank"),
    ],
    8: [
        Case((1, 2, 2, 2), "llama", "union", loss_chunk=20),
        Case((2, 1, 2, 2), "qwen3", "per head", layout="zigzag", checkpointing="full"),
        Case((2, 2, 1, 2), "llama", "listed", packing="masked rank"),
        Case((1, 1, 4, 2), "qwen3", "dilated", layout="residues", method="ring"),
        Case((1, 1, 4, 2), "llama", "window", heads=2),
        Case((1, 1, 2, 4), "qwen2", "per head", loss_chunk=7),
        Case((2, 1, 1, 4), "qwen3", "dense", micro_batch=2),
    ],
}  # fmt: skip


def named(cases: list[Case]) -> list[tuple[float, str]]:
    """Cases by their text: classes of this file cannot travel between processes."""
    return [(error, repr(case)) for error, case in errors_of(cases)]


def on_two() -> list[tuple[float, str]]:
    return named(CASES[2])


def on_four() -> list[tuple[float, str]]:
    return named(CASES[4])


def on_eight() -> list[tuple[float, str]]:
    return named(CASES[8])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "run"), [(2, on_two), (4, on_four), (8, on_eight)])
def test_any_mesh_with_tensor_ranks_gives_what_one_process_gives(ranks: int, run):
    found = on_forks(run, ranks)[0]
    assert [case for _, case in found] == list(map(repr, CASES[ranks]))
    for error, case in found:
        assert error <= TOLERANCE, case


class Bf16(Case):
    """Computed in bf16, with fp32 weights and sums."""

    def spec(self) -> RunSpec:
        spec = super().spec()
        return replace(spec, training=replace(spec.training, precision="bf16"))


def in_bf16() -> list[tuple[float, float]]:
    """Loss and gradient norm in bf16 over those of one process in fp32."""
    cases = [
        Bf16((1, 1, 2, 2), "qwen3", "sinks", loss_chunk=20),
        Bf16((1, 2, 1, 2), "llama", "per head", checkpointing="full"),
    ]
    found = []
    for case in cases:
        ours, wanted = step(case), alone(case.reference)
        found.append((ours["loss"] / wanted["loss"], ours["norm"] / wanted["norm"]))
    return found


@pytest.mark.slow
def test_bf16_differs_by_its_rounding_only():
    for loss, norm in on_forks(in_bf16, 4)[0]:
        assert loss == pytest.approx(1, rel=0.01)
        assert norm == pytest.approx(1, rel=0.03)

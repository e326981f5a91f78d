"""A run saved on one mesh goes on, on any other, as if nothing had happened."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from msa_workloads.runspec import MeshSpec, RunSpec

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks

HALF, WHOLE = 20, 40
FIRST = ({"context": 2, "data_shard": 2}, 1)
"""Mesh and accumulation of the run that is resumed; every step has two sequences."""
OTHERS = {
    "tensor and data": ({"tensor": 2, "data_replicate": 2}, 1),
    "one process": ({}, 2),
    "three context ranks": ({"context": 3}, 2),
}


def train_all(specs: list[str], saved: list[str]) -> list[dict[str, Any]]:
    """Runs one after the other in one process group; each starts with a copy of what the run
    before it had saved at half its way, or from nothing where ``saved`` is empty."""
    from msa_workloads.progress import Silent
    from msa_workloads.train import run

    dist.init_process_group("gloo")
    outcomes = []
    for text, folder in zip(specs, saved, strict=True):
        spec = RunSpec.from_json(text)
        if folder and dist.get_rank() == 0:
            half = f"step-{HALF:08d}"
            shutil.copytree(Path(folder) / half, Path(spec.checkpoint.uri) / half)
        dist.barrier()
        outcomes.append(run(spec, Silent()))
    return outcomes


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(make_spec: Callable[..., RunSpec]):
    def spec(name: str, mesh: dict[str, int], accumulation: int) -> RunSpec:
        made = make_spec(
            name,
            mesh=mesh,
            sequence={"length": 95, "micro_batch": 1, "accumulation": accumulation},
            training={"max_steps": WHOLE, "evaluate_sequences": 2},
            checkpoint={"every_steps": HALF},
            attention={
                "pattern": {"type": "PerHead", "members": [
                    {"type": "SinkWindow", "window": 32, "sinks": 4},
                    {"type": "Dilated", "rate": 2},
                ]},
                "dense_layers": (1,),
            },
        )  # fmt: skip
        config = {**made.model.config, "model_type": "qwen3", "tie_word_embeddings": True}
        return replace(made, model=replace(made.model, config={**config, "head_dim": 8}))

    first = spec("first", *FIRST)
    others = {name: spec(name.replace(" ", "-"), *split) for name, split in OTHERS.items()}
    groups: dict[int, list[str]] = {}
    for name, other in others.items():
        groups.setdefault(other.mesh.world_size, []).append(name)
    assert first.mesh.world_size == 4
    outcomes: dict[str, dict[str, Any]] = {}
    for ranks in sorted(groups, reverse=True):
        starts = [("first", first, "")] if ranks == 4 else []
        jobs = starts + [(name, others[name], first.checkpoint.uri) for name in groups[ranks]]
        found = on_forks(
            train_all, ranks, [s.to_json() for _, s, _ in jobs], [f for _, _, f in jobs]
        )[0]
        outcomes |= dict(zip((name for name, _, _ in jobs), found, strict=True))

    reported = outcomes["three context ranks"]["context"]
    assert reported["ranks"] == 3 and len(reported["kinds"]) == 2
    assert all(kind["keys"]["most"] >= kind["needed"]["most"] > 0 for kind in reported["kinds"])
    assert outcomes["one process"]["context"] is None
    whole = outcomes.pop("first")
    assert outcomes.keys() == OTHERS.keys()
    for name, outcome in outcomes.items():
        assert outcome["resumed_from_step"] == HALF, name
        for mine, theirs in zip(outcome["history"], whole["history"], strict=True):
            assert (mine["samples"], mine["digest"]) == (theirs["samples"], theirs["digest"])
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4), (name, mine["step"])
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
        held, expected = outcome["held_out"], whole["held_out"]
        assert held["predicted"] == expected["predicted"]
        assert held["nats_per_token"] == pytest.approx(expected["nats_per_token"], abs=1e-4)


def test_every_mesh_reads_the_same_samples_in_the_same_order():
    from msa_workloads.data import Loader

    class Numbers:
        def sample(self, k: int) -> int:
            return k

    for first in (0, 24):
        steps = {}
        for ranks, micro, accumulation in [(1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2), (8, 1, 1)]:
            dealt = [
                Loader(Numbers(), rank, ranks, micro, accumulation)  # type: ignore[arg-type]
                for rank in range(ranks)
            ]
            read = [k for loader in dealt for group in loader.indices(first) for k in group]
            steps[ranks, micro] = sorted(read)
            assert {loader.per_step for loader in dealt} == {8}
        assert all(step == list(range(first, first + 8)) for step in steps.values())
    assert MeshSpec(context=3, tensor=2).data_ranks == 1

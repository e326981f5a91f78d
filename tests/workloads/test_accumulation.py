"""Between the micro-batches of a step a rank holds its shard of the gradients, and no more."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from msa_workloads.model import build_model
from msa_workloads.parallel.fsdp import accumulate
from msa_workloads.parallel.mesh import build_mesh, join_world

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks
from mesh_cases import VOCABULARY, Case, Synthetic


def halfway(parameters: str) -> list[float]:
    """Elements of gradients over those of this rank's weights, before the last micro-batch of a
    step and after it; whole ones that are not reduced yet are nobody's gradient."""
    from msa_workloads.data import Loader

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    spec = Case((1, 2, 1, 1), model="qwen3").spec()
    spec = replace(
        spec, training=replace(spec.training, precision="bf16"),
        memory=replace(spec.memory, parameters=parameters),  # type: ignore[arg-type]
    )  # fmt: skip
    mesh = build_mesh(spec.mesh, join_world("cpu"))
    model = build_model(spec, VOCABULARY, mesh, mesh.device)
    own = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    batches = Loader(Synthetic(64, "whole"), dist.get_rank(), 2, 1, 2).step(0).batches  # type: ignore
    found = []
    for number, batch in enumerate(batches):
        accumulate(model, number == len(batches) - 1)
        (model(batch) / 100).backward()
        grads = [p.grad.to_local().numel() for p in model.parameters() if p.grad is not None]  # type: ignore
        found.append(sum(grads) / own)
    return found


def both() -> list[list[float]]:
    return [halfway("fp32"), halfway("bf16")]


def test_gradients_of_fp32_weights_are_shards_after_every_micro_batch():
    for masters, narrow in on_forks(both, 2):
        assert masters == [1.0, 1.0]
        # Shards of bf16 weights would add up in bf16: the sum stays whole, in fp32, to the end.
        assert narrow == [0.0, 1.0]

"""Between the micro-batches of a step a rank holds its shard of the gradients, and no more."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msa_workloads.evaluate import move
from msa_workloads.model import build_model
from msa_workloads.parallel import fsdp
from msa_workloads.parallel.fsdp import accumulate
from msa_workloads.parallel.mesh import build_mesh, join_world

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks
from mesh_cases import VOCABULARY, Case, Synthetic


def halfway(
    parameters: str, mesh_sizes: tuple[int, int, int, int], device: str = "cpu"
) -> dict[str, Any]:
    """Of a step of three micro-batches: elements of gradients over those of this rank's weights
    after each, bytes of fp32 sums likewise, and the gradients, which are also found from a whole
    sum in fp32."""
    from msa_workloads.data import Loader

    spec = Case(mesh_sizes, model="qwen3").spec()
    spec = replace(
        spec, training=replace(spec.training, precision="bf16"),
        memory=replace(spec.memory, parameters=parameters),  # type: ignore[arg-type]
    )  # fmt: skip
    mesh = build_mesh(spec.mesh, join_world(device))
    model = build_model(spec, VOCABULARY, mesh, mesh.device)
    own = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    read = Loader(Synthetic(64, "whole"), dist.get_rank(), 2, 1, 3).step(0)  # type: ignore
    batches = [move(batch, mesh.device) for batch in read.batches]
    found: dict[str, Any] = {"gradients": [], "sums": []}
    for _ in range(2):  # nothing of a step is left for the next one
        model.zero_grad()
        for number, batch in enumerate(batches):
            accumulate(model, number == len(batches) - 1)
            (model(batch) / 100).backward()
            grads = [p.grad.to_local().numel() for p in model.parameters() if p.grad is not None]  # type: ignore
            sums = [t.nbytes for one in fsdp._sums.values() for t in one.held.values()]
            found["gradients"].append(sum(grads) / own)
            found["sums"].append(sum(sums) / own)
    found["mine"] = [p.grad.full_tensor().float().cpu() for p in model.parameters()]  # type: ignore
    model.zero_grad()
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)  # type: ignore[operator]
        (model(batch) / 100).backward()
    found["whole"] = [p.grad.full_tensor().float().cpu() for p in model.parameters()]  # type: ignore
    fsdp._sums.clear()
    return found


def every(device: str) -> list[dict[str, Any]]:
    shards, replicas = (1, 2, 1, 1), (2, 1, 1, 1)
    given = [("fp32", shards), ("bf16", shards), ("bf16", replicas)]
    return [halfway(parameters, mesh, device) for parameters, mesh in given]


def test_between_micro_batches_gradients_are_shards_that_add_up_in_fp32():
    check(on_forks(every, 2, "cpu"))


def check(ranks: list[list[dict[str, Any]]]) -> None:
    for masters, narrow, copies in ranks:
        assert masters["gradients"] == [1.0] * 6 and masters["sums"] == [0.0] * 6
        assert narrow["gradients"] == [1.0] * 6
        # Padding of what two ranks share is a little more than its numbers.
        assert narrow["sums"] == pytest.approx([4.0, 4.0, 0.0] * 2, rel=0.01)
        # Over replicas FSDP holds that sum.
        assert copies["gradients"] == [0.0, 0.0, 1.0] * 2 and copies["sums"] == [0.0] * 6
        for found in (masters, narrow, copies):
            for mine, whole in zip(found["mine"], found["whole"], strict=True):
                # Rounded once, like a whole sum: another order of adding up changes few of them.
                assert torch.allclose(
                    mine, whole, rtol=2**-8, atol=1e-6 * float(whole.abs().max())
                )
                assert found is masters or (mine == whole).float().mean() > 0.97

"""Peak memory of training steps beside what the planner expects, and tensor ranks on NCCL.

    torchrun --nproc-per-node 2 benchmarks/training/memory.py [--output FILE]

Models have the width of Llama 3 8B and few layers; each case is two optimizer steps on random
tokens. Before them, a tiny fp32 model is split over the ranks and its loss and gradients are
compared with the whole model's on one of them.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import GIB, RandomTokens, Shape
from msa_kernels.pattern import from_dict
from msa_operator.planner.context import price_layouts
from msa_operator.planner.exchange import NONE, Exchange, Ranks, held
from msa_operator.planner.memory import rank_memory
from msa_operator.planner.modelspec import model_shape
from msa_workloads.context.run import context_split
from msa_workloads.data import Loader
from msa_workloads.evaluate import move
from msa_workloads.model import build_model, effective_patterns
from msa_workloads.optimizer import build_optimizer, clip_gradients
from msa_workloads.parallel.mesh import Mesh, build_mesh, check_supported, join_world
from msa_workloads.runspec import (
    AttentionSpec,
    CheckpointSpec,
    ContextSpec,
    DataSpec,
    MemorySpec,
    MeshSpec,
    ModelSpec,
    RunSpec,
    SequenceSpec,
    TrainingSpec,
)
from torch.distributed.tensor import DTensor

CHUNK, TILE = 4096, 16_384
FULL = MemorySpec(checkpointing="full", loss_chunk=CHUNK)
MEMORIES = {
    "chunked loss": MemorySpec(loss_chunk=CHUNK),
    "selective": replace(FULL, checkpointing="selective"),
    "full": FULL,
    "tiles": replace(FULL, mlp_chunk=TILE),
    "offload": replace(FULL, mlp_chunk=TILE, offload_checkpoints=True),
    "all offloaded": replace(
        FULL, mlp_chunk=TILE, offload_checkpoints=True, offload_optimizer=True
    ),
}
FSDP, TENSOR, CONTEXT = MeshSpec(data_shard=2), MeshSpec(tensor=2), MeshSpec(context=2)
CASES = [
    (FSDP, "chunked loss", 4, 16_384), (TENSOR, "chunked loss", 4, 16_384),
    (FSDP, "selective", 4, 65_536), (TENSOR, "selective", 4, 65_536),
    (FSDP, "full", 4, 65_536), (TENSOR, "full", 4, 65_536), (CONTEXT, "full", 4, 131_072),
    (FSDP, "tiles", 4, 65_536), (TENSOR, "tiles", 4, 131_072),
    (FSDP, "offload", 8, 131_072), (TENSOR, "offload", 8, 262_144),
    (CONTEXT, "all offloaded", 8, 262_144),
]  # fmt: skip


def spec_of(config: dict[str, Any], mesh: MeshSpec, length: int, **more: Any) -> RunSpec:
    return RunSpec(
        name="memory", model=ModelSpec(config=config), data=DataSpec(source="random"),
        sequence=SequenceSpec(length=length),
        attention=AttentionSpec(pattern={"type": "Window", "window": 4096}),
        training=TrainingSpec(max_steps=2, **more), checkpoint=CheckpointSpec(uri="none"),
        output="none", device="gpu" if torch.cuda.is_available() else "cpu", mesh=mesh,
    )  # fmt: skip


def prepare(spec: RunSpec, mesh: Mesh | None, world: Any) -> tuple[Any, Any]:
    """The model and its batch on this rank."""
    check_supported(spec)
    vocabulary = spec.model.config["vocab_size"]
    model = build_model(spec, vocabulary, mesh, world.device, make_on=world.device)
    stream: Any = RandomTokens(spec.sequence.length, vocabulary)
    if mesh is None:
        return model, move(Loader(stream, 0, 1, 1, 1).step(0).batches[0], world.device)
    layers = effective_patterns(spec, model)
    split, _ = context_split(spec, layers, model.heads, stream, mesh)
    loader = Loader(stream, mesh.data_rank, mesh.data_ranks, 1, 1, split)
    return model, move(loader.step(0).batches[0], world.device)


def exact(world: Any) -> dict[str, float]:
    """Largest errors of a tiny model over tensor ranks, relative to the largest value."""
    config = {
        **Shape(hidden=256, inner=512, heads=8, kv_heads=2, layers=2, vocabulary=1001).config(512),
        "model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32,
    }  # fmt: skip
    spec = spec_of(config, MeshSpec(tensor=world.size), 509, precision="fp32")
    model, batch = prepare(spec, build_mesh(spec.mesh, world), world)
    whole, _ = prepare(replace(spec, mesh=MeshSpec()), None, world)
    loss, wanted = model(batch), whole(batch)
    loss.backward()
    wanted.backward()
    errors = {"loss": float((loss - wanted).abs() / wanted)}
    for (name, part), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        grad = part.grad.full_tensor() if isinstance(part.grad, DTensor) else part.grad
        errors[name] = float((grad - full.grad).abs().max() / full.grad.abs().max())
    return errors


def exchanged(spec: RunSpec, config: dict[str, Any]) -> Exchange:
    """What the planner counts for attention over the context ranks of a run."""
    if spec.mesh.context == 1:
        return NONE
    shape, length = model_shape(config), spec.sequence.length
    weights = ((from_dict(spec.attention.pattern), shape.kv_heads),)
    layout = price_layouts(weights, length, spec.mesh.context)[0].name
    return held(
        Ranks(length, spec.mesh.context, ContextSpec(), layout, weights),
        ((weights, shape.layers),), (shape.heads, shape.kv_heads), shape.head_size, 2,
    )  # fmt: skip


def measure(
    mesh_spec: MeshSpec, name: str, layers: int, length: int, world: Any
) -> dict[str, Any]:
    config = Shape(layers=layers).config(length)
    spec = replace(
        spec_of(config, mesh_spec, length, precision="bf16"), memory=MEMORIES[name]
    )  # fmt: skip
    mesh = build_mesh(mesh_spec, world)
    model, batch = prepare(spec, mesh, world)
    optimizer = build_optimizer(model, spec.training, spec.memory)
    losses, begun = [], time.perf_counter()
    for n in range(2):
        if n == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
        loss = model(batch) / length
        loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    torch.cuda.synchronize()
    row = {
        "mesh": asdict(mesh_spec), "memory": name, "layers": layers, "length": length,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "expected_gib": rank_memory(
            model_shape(config), mesh_spec, spec.memory, tokens=length // mesh_spec.context,
            precision="bf16", exchange=exchanged(spec, config),
        ).total / GIB,
        "seconds": time.perf_counter() - begun, "losses": losses,
    }  # fmt: skip
    del model, optimizer, batch
    gc.collect()
    torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    world = join_world("gpu")
    errors = exact(world)
    rows: list[dict[str, Any]] = []
    if dist.get_rank() == 0:
        print("tensor ranks, worst error", max(errors.items(), key=lambda e: e[1]), flush=True)
    for case in CASES:
        try:
            row = measure(*case, world)
        except torch.OutOfMemoryError as error:
            row = {"case": str(case), "error": str(error)[:200]}
        rows.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            if chosen.output:
                result = {
                    "card": torch.cuda.get_device_name(), "ranks": world.size,
                    "torch": torch.__version__, "date": datetime.date.today().isoformat(),
                    "tensor_errors": errors, "rows": rows,
                }  # fmt: skip
                chosen.output.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

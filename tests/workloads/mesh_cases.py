"""Steps on any mesh against one process: what the tests of invariance share."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msa_workloads.context.run import context_split
from msa_workloads.data import IGNORE, Loader, Sample
from msa_workloads.evaluate import move
from msa_workloads.model import LanguageModel, build_model, effective_patterns
from msa_workloads.optimizer import clip_gradients
from msa_workloads.parallel.collective import sum_over_ranks
from msa_workloads.parallel.mesh import Mesh, build_mesh, join_world
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
from msa_workloads.weights import in_model_order
from torch.distributed.tensor import DTensor

VOCABULARY = 52
SAMPLES = 4
"""Sequences of a step; every mesh here has a divisor of them as data ranks."""

WINDOW = {"type": "Window", "window": 9}
DILATED = {"type": "Dilated", "rate": 4}
PATTERNS: dict[str, dict[str, Any]] = {
    "dense": {"type": "Dense"},
    "window": WINDOW,
    "dilated": DILATED,
    "dilated window": {"type": "Dilated", "rate": 3, "window": 4},
    "block": {"type": "Block", "length": 7},
    "columns": {"type": "Columns", "length": 6, "columns": 2},
    "sinks": {"type": "SinkWindow", "window": 7, "sinks": 3},
    "union": {"type": "Union", "members": [WINDOW, DILATED]},
    "per head": {"type": "PerHead", "members": [DILATED, {"type": "Dense"}]},
    "listed": {"type": "BlockList", "block": 16, "rows": [[0], [0, 1], [0, 2], [1, 3], [0, 4],
                                                           [5], [0, 2, 6]]},
}  # fmt: skip
PACKINGS = ("whole", "odd documents", "masked rank")


@dataclass(frozen=True)
class Case:
    """One step on one mesh; degrees in the mesh's order."""

    mesh: tuple[int, int, int, int] = (1, 1, 1, 1)
    model: str = "llama"
    pattern: str = "dense"
    dense_layers: tuple[int, ...] = ()
    layout: str = "auto"
    method: str = "all_to_all"
    heads: int = 1
    length: int = 93
    packing: str = "odd documents"
    micro_batch: int = 1
    loss_chunk: int = 0
    checkpointing: str = "none"
    device: str = "cpu"

    @property
    def ranks(self) -> int:
        return int(np.prod(self.mesh))

    @property
    def reference(self) -> Case:
        """The same step on one process, whole."""
        return Case(
            model=self.model, pattern=self.pattern, dense_layers=self.dense_layers,
            length=self.length, packing=self.packing, micro_batch=SAMPLES, device=self.device,
        )  # fmt: skip

    def spec(self) -> RunSpec:
        replicate, shard, context, tensor = self.mesh
        return RunSpec(
            name="case",
            model=ModelSpec(config={
                "model_type": self.model, "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
                "tie_word_embeddings": self.model == "qwen3",
            }),
            data=DataSpec(source="none"),
            sequence=SequenceSpec(
                length=self.length, micro_batch=self.micro_batch,
                accumulation=SAMPLES // (self.micro_batch * replicate * shard),
            ),
            attention=AttentionSpec(
                pattern=PATTERNS[self.pattern], dense_layers=self.dense_layers
            ),
            training=TrainingSpec(max_steps=1, precision="fp32"),
            checkpoint=CheckpointSpec(uri="none"),
            output="none",
            mesh=MeshSpec(
                data_replicate=replicate, data_shard=shard, context=context, tensor=tensor
            ),
            context=ContextSpec(
                layout=self.layout, method=self.method, heads=self.heads  # type: ignore[arg-type]
            ),
            memory=MemorySpec(
                loss_chunk=self.loss_chunk,
                checkpointing=self.checkpointing,  # type: ignore[arg-type]
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class Synthetic:
    """A stream of packed sequences of random tokens; sample ``k`` depends on ``k`` alone."""

    length: int
    packing: str

    def sample(self, k: int) -> Sample:
        random = np.random.default_rng(k)
        tokens = random.integers(0, VOCABULARY, self.length)
        labels = np.append(tokens[1:], IGNORE)
        ends = np.array([self.length])
        if self.packing == "odd documents":
            ends = np.unique(np.append(random.integers(1, self.length, 3), self.length))
        documents = np.searchsorted(ends, np.arange(self.length), side="right").astype(np.int32)
        labels[ends - 1] = IGNORE
        if self.packing == "masked rank":
            labels[self.length // 5 :] = IGNORE
        starts = np.concatenate(([0], ends[:-1]))
        return Sample(k, tokens, labels, np.arange(self.length) - starts[documents], documents)


def prepare(case: Case) -> tuple[Mesh, LanguageModel, Loader]:
    """What a run makes before its first step."""
    spec = case.spec()
    mesh = _mesh(spec.mesh, spec.context.heads, case.device)
    model = build_model(spec, VOCABULARY, mesh if case.ranks > 1 else None, mesh.device)
    stream: Any = Synthetic(case.length, case.packing)
    split, _ = context_split(
        spec, effective_patterns(spec, model), model.heads, stream, mesh, orders=model.head_orders
    )
    loader = Loader(
        stream, mesh.data_rank, mesh.data_ranks, case.micro_batch, spec.sequence.accumulation,
        split,
    )  # fmt: skip
    return mesh, model, loader


@functools.cache
def _mesh(spec: MeshSpec, heads: int, device: str) -> Mesh:
    """One for all cases of a process: every process group of gloo keeps its threads until the end,
    and thirty meshes on eight ranks were five hundred threads a rank."""
    return build_mesh(spec, join_world(device), heads=heads)


def step(case: Case) -> dict[str, Any]:
    """Loss, gradients and their norm of one step, whole, in plain tensors, heads in the model's
    order; collective."""
    from msa_workloads.train import train_step

    mesh, model, loader = prepare(case)
    read = loader.step(0)
    valid, samples = sum_over_ranks(
        read.valid if mesh.owns_tokens else 0,
        len(read.samples) if mesh.owns_samples else 0,
        device=mesh.device,
    )
    loss = train_step(model, read, int(valid), mesh)
    grads = _gradients(model)
    norm = clip_gradients(model, 1e-3)
    clipped = _gradients(model)
    return {
        "loss": loss, "grads": grads, "norm": norm, "clipped": clipped, "valid": valid,
        "samples": samples, "orders": dict(model.head_orders),
    }  # fmt: skip


def _gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {
        name: in_model_order(name, whole(parameter.grad), model.head_orders)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def alone(case: Case) -> dict[str, Any]:
    """The same step of one process, by the same model without a mesh."""
    spec = case.spec()
    device = torch.device("cpu" if case.device == "cpu" else "cuda:0")
    model = build_model(spec, VOCABULARY, None, device)
    stream: Any = Synthetic(case.length, case.packing)
    read = Loader(stream, 0, 1, SAMPLES, 1).step(0)
    loss = model(move(read.batches[0], device)) / read.valid
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = float(torch.stack([g.double().norm() for g in grads.values()]).norm())
    clipped = {n: g * min(1.0, 1e-3 / norm) for n, g in grads.items()}
    return {
        "loss": float(loss), "grads": grads, "norm": norm, "clipped": clipped,
        "valid": read.valid, "samples": SAMPLES,
    }  # fmt: skip


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def worst_error(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Largest error of loss, norm and any gradient, relative to the largest reference value."""
    assert found["valid"] == wanted["valid"] and found["samples"] == wanted["samples"]
    assert found["grads"].keys() == wanted["grads"].keys()
    errors = [abs(found[n] - wanted[n]) / abs(wanted[n]) for n in ("loss", "norm")]
    for kind in ("grads", "clipped"):
        for name, full in wanted[kind].items():
            difference = (found[kind][name] - full).abs().max()
            errors.append(float(difference / full.abs().max()))
    return max(errors)


def errors_of(cases: list[Case]) -> list[tuple[float, Case]]:
    """The worst error of every case; on rank 0, which alone computes the references."""
    references: dict[Case, dict[str, Any]] = {}
    torch.use_deterministic_algorithms(all(case.device == "cpu" for case in cases))
    found = []
    for case in cases:
        result = step(case)
        if dist.get_rank() == 0:
            if case.reference not in references:
                references[case.reference] = alone(case.reference)
            found.append((worst_error(result, references[case.reference]), case))
    return found

"""AdamW with decoupled weight decay, a cosine schedule after a warm-up, and clipping.

The learning rate is a function of the step alone, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from msa_workloads.parallel.matmul import scaled_
from msa_workloads.parallel.states import RestingAdamW, local
from msa_workloads.runspec import MemorySpec, TrainingSpec


def build_optimizer(
    model: nn.Module, training: TrainingSpec, memory: MemorySpec | None = None
) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors (norms and biases) do not.

    ``memory`` says in which dtype states rest between steps, and whether on the host; None is a
    :class:`MemorySpec` of defaults.
    """
    memory = memory or MemorySpec()
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (training.beta1, training.beta2)
    dtype = torch.bfloat16 if memory.optimizer_states == "bf16" else torch.float32
    if memory.offload_optimizer or any(p.dtype != dtype for p in trained):
        groups = [group for group in groups if group["params"]]
        return RestingAdamW(
            groups, lr=training.learning_rate, betas=betas, dtype=dtype,
            on_host=memory.offload_optimizer,
        )  # fmt: skip
    # One pass over memory where there is a kernel for it; the same update everywhere.
    fused = all(p.is_cuda for p in trained)
    return torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=betas, foreach=not fused, fused=fused
    )


def learning_rate(step: int, training: TrainingSpec) -> float:
    """The rate of ``step``, counted from 1.

    It rises linearly to ``learning_rate`` at step ``warmup_steps``, then falls along a half cosine
    to ``min_learning_rate_ratio`` of it at ``max_steps``, and stays there.
    """
    if step <= training.warmup_steps:
        return training.learning_rate * step / training.warmup_steps
    span = max(1, training.max_steps - training.warmup_steps)
    done = min(1.0, (step - training.warmup_steps) / span)
    low = training.min_learning_rate_ratio
    return training.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set every group's rate."""
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale gradients so that their global norm is at most ``limit``; returns the norm before.

    The norm runs over all ranks' shards. It and the factor are fp32 for bf16 gradients too: a
    rounded factor would bias all of them alike. A ``limit`` of 0 only measures.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = _norm(grads)
    if limit > 0:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            scaled_(local(grad), factor)
    return float(norm)


@torch.no_grad()
def _norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Norm over all of ``grads`` and all ranks, a scalar of fp32 at least."""
    if not grads:
        return torch.zeros(())
    norms = []
    for grad in grads:
        wide = torch.promote_types(grad.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(grad, dtype=wide))
    total = torch.linalg.vector_norm(torch.stack(norms))
    return total.full_tensor() if isinstance(total, DTensor) else total

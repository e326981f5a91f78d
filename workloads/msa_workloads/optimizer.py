"""AdamW with decoupled weight decay, a cosine schedule after a warm-up, and clipping.

The learning rate is a function of the step alone, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from msa_workloads.runspec import TrainingSpec


def build_optimizer(model: nn.Module, training: TrainingSpec) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors (norms and biases) do not."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        foreach=True,
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

    The norm runs over all ranks' shards. A ``limit`` of 0 only measures.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit if limit > 0 else math.inf)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return float(norm)

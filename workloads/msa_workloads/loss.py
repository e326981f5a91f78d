"""The loss: cross-entropy summed over tokens, divided once by the valid tokens of all ranks.

A mean of means weighs a token by the company it keeps; a sum over one global count does not
depend on how a step is split into micro-batches and ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from msa_workloads.data import IGNORE


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats per token, fp32, of ``labels``'s shape; 0 where ignored.

    ``logits`` are (..., vocabulary).
    """
    flat = F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return flat.view_as(labels)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of :func:`token_losses`, a scalar; 0 with zero gradients when no label is valid."""
    return token_losses(logits, labels).sum()


def chunked_linear_loss(
    hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor, chunk: int
) -> torch.Tensor:
    """:func:`summed_loss` of ``head(hidden)`` without ever holding all logits.

    ``hidden`` is (batch, sequence, size). At most ``chunk`` tokens' logits exist at a time; each
    chunk is computed again in backward.
    """
    flat_hidden, flat_labels = hidden.flatten(0, -2), labels.flatten()
    total = flat_hidden.new_zeros((), dtype=torch.float32)

    def part(piece: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return summed_loss(head(piece), targets)

    for piece, targets in zip(flat_hidden.split(chunk), flat_labels.split(chunk), strict=True):
        total = total + checkpoint(part, piece, targets, use_reentrant=False)
    return total


def divisor(valid_tokens: int) -> float:
    """What a step's summed loss is divided by: its valid tokens, or 1 when there are none."""
    return float(max(valid_tokens, 1))

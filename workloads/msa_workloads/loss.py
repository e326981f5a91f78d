"""The loss: cross-entropy summed over tokens, divided once by the valid tokens of all ranks.

A mean of means weighs a token by the company it keeps; a sum over one global count does not
depend on how a step is split into micro-batches and ranks.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from msa_workloads.data import IGNORE
from msa_workloads.parallel import elementwise
from msa_workloads.parallel.matmul import Sum, scaled_


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats per token, fp32, of ``labels``'s shape; 0 where ignored.

    ``logits`` are (..., vocabulary); those in fp64 give fp64.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = F.cross_entropy(
        wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return flat.view_as(labels)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of :func:`token_losses`, a scalar; 0 with zero gradients when no label is valid."""
    return token_losses(logits, labels).sum()


def chunked_linear_loss(
    hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor, chunk: int, kernel: str = "auto"
) -> torch.Tensor:
    """:func:`summed_loss` of ``head(hidden)`` without ever holding all logits.

    ``hidden`` is (batch, sequence, size), ``head`` a linear layer. At most ``chunk`` tokens'
    logits exist at a time, and they are computed once: where a gradient will be asked for, it is
    made in forward from the logits at hand. The head's gradient is added up over chunks in fp32
    (fp64 for fp64). ``kernel`` is "auto", which takes this package's own kernel for the
    cross-entropy on GPUs, or "torch".
    """
    weight, bias = head.weight, getattr(head, "bias", None)
    return _LinearLoss.apply(
        hidden.flatten(0, -2), weight, bias, labels.flatten(), chunk, torch.is_grad_enabled(),
        kernel,
    )  # fmt: skip


@torch.no_grad()
def chunked_token_losses(
    hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor, chunk: int
) -> torch.Tensor:
    """:func:`token_losses` of ``head(hidden)``, ``chunk`` tokens at a time; without gradients."""
    weight: Any = head.weight
    bias = getattr(head, "bias", None)
    pieces = zip(hidden.flatten(0, -2).split(chunk), labels.flatten().split(chunk), strict=True)
    found = [token_losses(F.linear(rows, weight, bias), y) for rows, y in pieces]
    return torch.cat(found).view_as(labels)


def liger_linear_loss(hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """:func:`chunked_linear_loss` by Liger's kernels, which choose the chunks; GPUs only."""
    from liger_kernel.transformers.fused_linear_cross_entropy import (  # type: ignore
        LigerFusedLinearCrossEntropyLoss,
    )

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE, reduction="sum", accum_dtype=torch.float32
    )
    return loss(head.weight, hidden.flatten(0, -2), labels.flatten(), getattr(head, "bias", None))


class _LinearLoss(torch.autograd.Function):
    """The loss, with the gradients of everything made in forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        labels: torch.Tensor, chunk: int, backward: bool, kernel: str,
    ) -> torch.Tensor:  # fmt: skip
        backward = backward and any(ctx.needs_input_grad)
        step = _own_step if kernel == "auto" and _has_own(hidden) else _torch_step
        tiles = [slice(at, at + chunk) for at in range(0, len(hidden), chunk)]
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        dhidden = torch.empty_like(hidden) if backward else None
        dweight = Sum(weight, len(tiles)) if backward else None
        dbias = Sum(bias, len(tiles)) if backward and bias is not None else None
        for tile in tiles:
            rows = hidden[tile]
            logits = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
            loss, dlogits = step(logits, labels[tile], backward)
            del logits
            total += loss
            if dhidden is not None and dweight is not None:
                torch.mm(dlogits, weight, out=dhidden[tile])
                dweight.add_product(dlogits, rows)
                if dbias is not None:
                    dbias.add_rows(dlogits)
            del dlogits
        ctx.grads = dhidden, dweight, dbias
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> Any:  # type: ignore[override]
        (dhidden, dweight, dbias), ctx.grads = ctx.grads, None
        dbias = None if dbias is None else dbias.scaled(scale)
        return scaled_(dhidden, scale), dweight.scaled(scale), dbias, *(None,) * 4


def _has_own(hidden: torch.Tensor) -> bool:
    """Whether the kernel of :mod:`msa_workloads.cross_entropy` serves such tensors here."""
    return (
        hidden.is_cuda
        and hidden.dtype != torch.float64
        and importlib.util.find_spec("triton") is not None
    )


def _own_step(
    logits: torch.Tensor, labels: torch.Tensor, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss, and the gradient for the logits, in their memory."""
    from msa_workloads.cross_entropy import cross_entropy_

    return cross_entropy_(logits, labels, IGNORE, backward).sum(), logits


def _torch_step(
    logits: torch.Tensor, labels: torch.Tensor, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in new memory: a step that wrote its gradient over the logits was compiled into
    one that read the label's logit afterwards."""
    losses, gradient = _summed, _gradient
    if elementwise.wants(logits.device):
        losses, gradient = elementwise.compiled(_summed), elementwise.compiled(_gradient)
    loss, lse = losses(logits, labels)
    return loss, gradient(logits, labels, lse) if backward else logits


def _summed(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy of logits (tokens, vocabulary), and their log-sum-exp (tokens, 1)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = (labels != IGNORE)[:, None]
    lse = torch.logsumexp(wide, 1, keepdim=True)
    picked = wide.gather(1, torch.where(valid, labels[:, None], 0))
    return torch.where(valid, lse - picked, 0).sum(), lse


def _gradient(logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Gradient of :func:`_summed` for its logits, in their dtype."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    share = torch.exp(logits.to(lse.dtype) - lse)
    gradient = share - (columns == labels[:, None]).to(lse.dtype)
    return torch.where((labels != IGNORE)[:, None], gradient, 0).to(logits.dtype)


def divisor(valid_tokens: int) -> float:
    """What a step's summed loss is divided by: its valid tokens, or 1 when there are none."""
    return float(max(valid_tokens, 1))

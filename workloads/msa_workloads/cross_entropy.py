"""Cross-entropy of logits in one launch, its gradient written over them; for GPUs with Triton.

A program reads a row twice and writes it once; the second reading finds most of the row in cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 32768
WARPS = 32
"""Two programs fill a multiprocessor: more would evict rows between their two readings."""


def cross_entropy_(
    logits: torch.Tensor, labels: torch.Tensor, ignore: int, backward: bool
) -> torch.Tensor:
    """Nats per token (tokens,), fp32, 0 where the label is ``ignore``, NaN (and a gradient of NaN)
    where it is another that the vocabulary does not have.

    ``logits`` are (tokens, vocabulary), contiguous in the vocabulary. With ``backward`` they
    become the gradient of the summed result, in their own dtype.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _rows[(len(logits),)](
        logits, labels, losses, logits.stride(0), logits.shape[1], ignore, backward,
        min(BLOCK, triton.next_power_of_2(logits.shape[1])), num_warps=WARPS,  # type: ignore
    )  # fmt: skip
    return losses


@triton.jit
def _rows(
    logits, labels, losses, stride, VOCABULARY: tl.constexpr, IGNORE: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    valid = label != IGNORE
    known = (label >= 0) & (label < VOCABULARY)
    picked = tl.load(logits + tl.where(known, label, 0)).to(tl.float32)
    highest = float("-inf")
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, VOCABULARY, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    lse = highest + tl.log(tl.sum(total, 0))
    lse = tl.where(known, lse, float("nan"))
    tl.store(losses + row, tl.where(valid, lse - picked, 0.0))
    if BACKWARD:
        # Every thread has read the label's logit before any thread writes over it.
        tl.debug_barrier()
        for begin in range(0, VOCABULARY, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            inside = at < VOCABULARY
            x = tl.load(logits + at, mask=inside).to(tl.float32)
            gradient = tl.exp(x - lse) - tl.where(at == label, 1.0, 0.0)
            gradient = tl.where(valid, gradient, 0.0)
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=inside)

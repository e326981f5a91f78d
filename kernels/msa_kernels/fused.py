"""Row-wise steps around the tile kernels, in one pass over memory where the GPU has Triton.

The same functions in plain PyTorch (:mod:`msa_kernels.merge`) make several passes and temporaries
of the size of the output, which is what a long sequence cannot afford.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch

from msa_kernels.merge import Partial
from msa_kernels.merge import merge as merge_in_torch


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _fusable(*tensors: torch.Tensor) -> bool:
    return _has_triton() and all(
        t.is_cuda and t.dtype != torch.float64 and t.stride(-1) == 1 for t in tensors
    )


def row_delta(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """rowsum(dout * out) - dlse, (B, H, S) in fp32 (fp64 for fp64 inputs).

    dout and out (B, S, H, D); dlse (B, H, S) or None.
    """
    if _fusable(dout, out):
        from msa_kernels.triton import stats

        return stats.delta(out, dout, dlse)
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    delta = torch.einsum("bshd,bshd->bhs", dout.to(dtype), out.to(dtype))
    return delta if dlse is None else delta - dlse.to(dtype)


def merge(partials: Sequence[Partial], dtype: torch.dtype) -> Partial:
    """:func:`msa_kernels.merge.merge` with the output in ``dtype``; not differentiable here."""
    if len(partials) == 1:
        return partials[0][0].to(dtype), partials[0][1]
    if not _fusable(*(out for out, _ in partials)):
        return merge_in_torch(partials, dtype)
    from msa_kernels.triton import stats

    merged = partials[0]
    for number, partial in enumerate(partials[1:], 2):
        last = number == len(partials)
        merged = stats.merge(merged, partial, dtype if last else torch.float32)
    return merged[0].to(dtype), merged[1]


def add(grads: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Sum of partial gradients in their own dtype, rounded once to ``dtype``."""
    total = grads[0]
    for number, grad in enumerate(grads[1:], 2):
        last = number == len(grads)
        out = torch.empty(grad.shape, dtype=dtype, device=grad.device) if last else None
        total = torch.add(total, grad, out=out)
    return total.to(dtype)

"""Exact merge of partial attention outputs over disjoint sets of keys, in fp32.

Parts of a pattern, hops of a ring and splits of a long cache all meet here. The merge is
associative and commutative up to rounding, and the empty partial (output 0, LSE -inf) is its
identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Partial = tuple[torch.Tensor, torch.Tensor]


def merge(partials: Sequence[Partial], dtype: torch.dtype | None = None) -> Partial:
    """The attention over the union of the partials' keys, which must not overlap.

    Each partial is an output (B, S, H, D) and its natural-log LSE (B, H, S). With M the largest
    LSE of a row (0 where all are -inf) and w = exp(LSE - M): out = sum(w * out) / sum(w) and
    LSE = M + ln(sum(w)); 0 and -inf where every partial is empty. Never ``ln(1 + exp(b - a))``,
    which overflows, nor a sigmoid form, which is NaN when a side is -inf.

    Sums in fp32 (fp64 for fp64 partials); returns the output in ``dtype`` (that of the sums when
    None). Differentiable.
    """
    if not partials:
        raise ValueError("merge needs at least one partial")
    logs = [lse for _, lse in partials]
    largest = torch.stack(logs).amax(0).detach()
    finite = torch.where(largest == -math.inf, 0.0, largest)
    weights = [torch.exp(lse - finite) for lse in logs]
    total = _sum(weights)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    out = _sum(
        [o.to(w.dtype) * _per_row(w / safe) for (o, _), w in zip(partials, weights, strict=True)]
    )
    lse = torch.where(empty, -math.inf, finite + torch.log(safe))
    return out if dtype is None else out.to(dtype), lse


def _per_row(lse: torch.Tensor) -> torch.Tensor:
    """(B, H, S) as a factor of (B, S, H, D)."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total

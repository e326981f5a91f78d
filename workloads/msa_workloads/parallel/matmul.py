"""Sums of matrix products that are too long for bf16: added up in fp32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 1 << 24
"""Elements that are wide at a time where narrow ones are scaled."""


class Sum:
    """Gradient of a parameter as a sum of ``terms`` products, in the parameter's shape and dtype.

    One term is computed in the parameter's dtype directly. Several are added up in fp32 (fp64 for
    fp64), which on GPUs costs no pass of its own: the product adds to its output.
    """

    def __init__(self, parameter: Tensor, terms: int) -> None:
        self._like = parameter
        self._terms = terms
        self._sum: Tensor | None = None

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``: (rows, n) and (rows, m) to (n, m)."""
        if self._terms == 1:
            self._sum = left.t() @ right
        elif self._sum is None and not _widens(left):
            self._sum = _wide(left.t() @ right)
        elif self._sum is None:
            self._sum = torch.mm(left.t(), right, out_dtype=torch.float32)
        elif _widens(left):
            torch.addmm(self._sum, left.t(), right, out_dtype=torch.float32, out=self._sum)
        else:
            self._sum.add_(left.t() @ right)

    def add_rows(self, rows: Tensor) -> None:
        """Add the sum over rows: (rows, n) to (n,)."""
        total = rows.sum(0, dtype=_wide(rows[:0]).dtype)
        self._sum = total if self._sum is None else self._sum.add_(total)

    def scaled(self, factor: Tensor) -> Tensor:
        """The sum times a scalar tensor, in the parameter's dtype; the sum is used up."""
        assert self._sum is not None
        return scaled_(self._sum, factor).to(self._like.dtype)

    @property
    def total(self) -> Tensor:
        """The sum in the parameter's dtype."""
        assert self._sum is not None
        return self._sum.to(self._like.dtype)


def scaled_(tensor: Tensor, factor: Tensor) -> Tensor:
    """A tensor times a scalar tensor, in its memory, multiplied in fp32 at least.

    A product in bf16 would round the factor first, which biases all entries alike.
    """
    if tensor.dtype.itemsize >= 4:
        return tensor.mul_(factor)
    for piece in tensor.view(-1).split(PIECE) if tensor.is_contiguous() else (tensor,):
        piece.copy_(piece.float().mul_(factor))
    return tensor


def _widens(tensor: Tensor) -> bool:
    """Whether a product of such tensors can be added to fp32 in one step."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()

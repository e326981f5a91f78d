"""Linear maps between ranks that autograd passes through: the gradient of one is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


def linear(tensor: Tensor, forth: Map, back: Map) -> Tensor:
    """``forth(tensor)``, whose gradient is ``back`` of its result's gradient.

    Of all ranks' tensors together ``back`` is the adjoint of ``forth``. Ranks call in one order.
    """
    return _Linear.apply(tensor, forth, back)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forth: Map, back: Map) -> Tensor:
        ctx.back = back
        return forth(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.back(grad), None, None

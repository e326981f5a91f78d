"""What the copy engine of Hopper is told about tensors, and the widths of tiles."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton


def tile(tensor: torch.Tensor, rows: int) -> Any:
    """TMA descriptor of (B, S, H, D) in tiles of one batch row, ``rows`` tokens and one head.

    Head sizes below the kernel's width are filled with zeros by the copy engine.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()),
        [1, rows, 1, width(tensor.shape[-1])], layouts()[0],
    )  # fmt: skip


def line(tensor: torch.Tensor, rows: int) -> Any:
    """TMA descriptor of statistics (B, H, padded S) in lines of ``rows``."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows], layouts()[1]
    )


def sums(dq: torch.Tensor) -> Any:
    """TMA descriptor of the fp32 dQ (B, S, H, D) in tiles of 64 rows and 64 columns."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(
        dq, list(dq.shape), list(dq.stride()), [1, 64, 1, 64], layouts()[2]
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def layouts() -> tuple[Any, Any, Any]:
    """Of tiles in 16 bits, of statistics, and of tiles in fp32."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return (
        NVMMASharedLayout(128, 16, 4), NVMMASharedLayout(0, 32, 3), NVMMASharedLayout(128, 32, 4)
    )  # fmt: skip


def width(head_dim: int) -> int:
    return max(64, triton.next_power_of_2(head_dim))

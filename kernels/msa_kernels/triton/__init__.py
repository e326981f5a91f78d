"""Flash-MSA's own GPU kernels, in Triton and, for Hopper, in Gluon."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msa_kernels.plan import TileKernel


def kernel() -> TileKernel:
    """The kernels as one implementation; Triton is imported here and not before."""
    from msa_kernels.triton.launch import TritonKernel

    return TritonKernel()

"""Flash-MSA's own GPU kernels, in Triton and, for Hopper, in Gluon."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msa_kernels.plan import TileKernel


def kernel(fused: bool = False) -> TileKernel:
    """The kernels as one implementation; Triton is imported here and not before.

    ``fused``: with the backward of one pass, whose dQ differs in its last bits between runs."""
    from msa_kernels.triton.launch import TritonKernel

    return TritonKernel(fused=fused)

"""Flash-MSA's own GPU kernels, in Triton and, for Hopper, in Gluon."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msa_kernels.plan import TileKernel


def kernel(fused: bool = False, fp8: bool = False) -> TileKernel:
    """The kernels as one implementation; Triton is imported here and not before.

    ``fused``: with the backward of one pass, whose dQ differs in its last bits between runs.
    ``fp8``: with a forward in e4m3."""
    if fp8:
        from msa_kernels.triton.launch_fp8 import Fp8Kernel

        return Fp8Kernel()
    from msa_kernels.triton.launch import TritonKernel

    return TritonKernel(fused=fused)

"""The project's kernels with a forward in e4m3, as a :class:`msa_kernels.plan.TileKernel`.

Scores and outputs are products of values rounded to three bits of mantissa, summed in fp32: see
docs/kernels.md for what that costs. Backward is the one of :class:`TritonKernel`, in the inputs'
own dtype, on the output and LSE of this forward.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from msa_kernels.backend import is_hopper
from msa_kernels.plan import PartPlan, Request
from msa_kernels.triton import fp8_forward, launch, tma
from msa_kernels.triton.fp8 import TILE, quantised
from msa_kernels.triton.launch import TritonKernel
from msa_kernels.triton.lists import device_lists
from msa_kernels.triton.tables import SMALLEST, Tile

MAX_HEAD_DIM = 128
LEAST_CAPABILITY = (8, 9)
HOPPER = {"BLOCK_N": TILE, "STAGES": 4}
"""Keys of a tile and how many tiles are in flight."""
PLAIN = Tile(128, 64, 8, 2)


class Fp8Kernel(TritonKernel):
    """Forward in e4m3, backward in the inputs' dtype."""

    def __init__(self, hopper: bool | None = None) -> None:
        """``hopper`` False keeps to the plain kernels; None decides by the device."""
        super().__init__(hopper)
        self.name = "triton-fp8"

    def refuses(self, request: Request) -> str | None:
        if request.dtype not in (torch.bfloat16, torch.float16):
            return f"is for bfloat16 and float16, not {request.dtype}; nearest: backend='triton'"
        if request.head_dim > MAX_HEAD_DIM:
            return (
                f"head size {request.head_dim}, at most {MAX_HEAD_DIM}; nearest: backend='triton'"
            )
        if request.partial:
            return (
                "rounds by the keys of a pass, and pieces of a softmax that are merged would be "
                "rounded apart; nearest: backend='triton'"
            )
        if torch.version.hip is not None and request.device.type == "cuda":
            return "its e4m3 is NVIDIA's; nearest: backend='triton'"
        capability = _capability(request.device)
        if capability is not None and capability < LEAST_CAPABILITY:
            return (
                "needs compute capability 8.9 or newer for e4m3, this device has "
                f"{capability[0]}.{capability[1]}; nearest: backend='triton'"
            )
        return super().refuses(request)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PartPlan, scale: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        batch, q_rows, q_heads, head_dim = q.shape
        kv_heads = k.shape[2]
        out = torch.empty((batch, q_rows, q_heads, head_dim), dtype=out_dtype, device=q.device)
        lse = torch.empty((batch, q_heads, q_rows), dtype=torch.float32, device=q.device)
        hopper = self._hopper is not False and not launch.INTERPRETED and is_hopper(q.device)
        width = tma.width(head_dim)
        plain = SMALLEST if launch.INTERPRETED else PLAIN
        tiles = (TILE, TILE) if hopper else plain[:2]
        q, k, v = (launch._unit_stride(t) for t in (q, k, v))
        made = quantised(q, k, v, width, in_fragments=hopper)
        lists = device_lists(plan, *tiles, q.device)
        common, constants = launch._arguments(plan, q, k, tiles)
        walk = (lists.pointers, lists.middles, lists.index, lists.order)
        rest = (
            made.q_scale, made.k_scale, made.v_scale, out, lse, *walk, *common, q_heads, kv_heads,
            lists.tiles, *out.stride()[:3], head_dim, scale * math.log2(math.e),
        )  # fmt: skip
        grid = (lists.tiles * q_heads * batch,)
        if hopper:
            from msa_kernels.triton import hopper_fp8

            hopper_fp8.forward_kernel[grid](
                _tile(made.q, 64, width), _tile(made.k, TILE, width), _tile(made.v, width, TILE),
                *rest, HEAD_DIM=width, **HOPPER, **constants, num_warps=4,
            )  # fmt: skip
        else:
            fp8_forward.forward_kernel[grid](
                made.q, made.k, made.v, *rest, HEAD_DIM=width, BLOCK_M=tiles[0], BLOCK_N=tiles[1],
                TILE=TILE, **constants, num_warps=plain.warps, num_stages=plain.stages,
            )  # fmt: skip
        return out, lse.add_(made.shift, alpha=scale)


def _tile(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    """TMA descriptor of (B, H, rows, columns) in tiles of one head."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, columns], layout(columns)
    )


@functools.lru_cache(maxsize=2)
def layout(columns: int) -> Any:
    """Of tiles in 8 bits: swizzled over as many bytes as a row has, up to 128."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(min(columns, 128), 8, 4)


@functools.lru_cache(maxsize=8)
def _capability(device: torch.device) -> tuple[int, int] | None:
    """None where there is none to ask."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)

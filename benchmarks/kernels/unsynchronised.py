"""A kernel that reads a tile before its copy has arrived: what ConSan must stop."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = 64


@gluon.jit
def early_kernel(source, out, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    tile = gl.allocate_shared_memory(source.dtype, [ROWS, ROWS], source.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    mbarrier.expect(arrived, source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, [0, 0], arrived, tile)
    value = tile.load(LAYOUT)  # before the wait that should come first
    mbarrier.wait(arrived, 0)
    mbarrier.invalidate(arrived)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(out + rows[:, None] * ROWS + columns[None, :], value)


def read_too_early() -> None:
    import torch

    source = torch.randn(ROWS, ROWS, device="cuda", dtype=torch.float16)
    shared = gl.NVMMASharedLayout(128, 16, 2)
    layout = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    described = TensorDescriptor(source, [ROWS, ROWS], [ROWS, 1], [ROWS, ROWS], shared)
    early_kernel[(1,)](described, torch.empty_like(source), ROWS, layout, num_warps=4)
    torch.cuda.synchronize()

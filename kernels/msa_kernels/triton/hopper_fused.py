"""Backward attention for Hopper in one pass: dK and dV as in the pass of their own, dQ added up.

Written in Gluon; its plain twin is :mod:`msa_kernels.triton.backward` with ``FUSED``. A program
owns 128 keys and walks the queries that see them. Five products for each tile where two passes
need seven; the price is that programs add to dQ in fp32 in whatever order they come, so that its
last bits differ between runs.

Each of two consumer warpgroups holds dK and dV of 64 keys. dQ of a tile needs the gradients of its
scores with all 128: the warpgroups exchange them through shared memory, and each forms half of
dQ, 64 of its rows or 64 of its columns, which a warp beside them hands to the copy engine to be
added. Registers of a thread at head size 128: dK and dV 64 each, scores and dP 32 each, in whose
place comes dQ, 32. Bytes of shared memory: K and V 64 Ki, Q and dO 64 Ki in two stages,
gradients of scores 32 Ki in two, dQ 32 Ki.
Tuples of arguments are those of :mod:`msa_kernels.triton.hopper_forward`.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from msa_kernels.triton.hopper_dkv import dkv_produce, key_item, key_step, row_stat
from msa_kernels.triton.hopper_dq import LOG2E
from msa_kernels.triton.hopper_forward import barriers, flat, lists_of, store_tile
from msa_kernels.triton.predicate import seen, token

# Triton's own functions do not offer this one; one that lacks it fails as this module is read.
_ADD = ir.DESCRIPTOR_REDUCE_KIND.ADD


@builtin
def add_tile(descriptor: Any, place: Any, tile: Any, _semantic: Any = None) -> None:
    """Add a tile of shared memory to a tensor, by the copy engine; done after ``store_wait``."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(_ADD, descriptor.handle, place, tile.handle)


@gluon.jit
def _consume(
    smem, bars, walk, mask, outputs, HALF: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FLAGS: gl.constexpr,
    RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr, SIMPLE: gl.constexpr,
):  # fmt: skip
    """Scores are held transposed: keys down, queries across."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    SUM: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)

    q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, ds_smem, dq_smem = smem
    k_full, q_full, q_free, do_full, do_free, ds_full, dq_full, dq_free = bars
    pointers, middles, index, order, tiles, kv_heads = walk
    q_pos, q_doc, k_pos, k_doc, values, table, table_q, table_k = mask[:8]
    q_rows, k_rows, q_start, k_start = mask[8:]
    dk, dv, stride_b, stride_s, stride_h, head_dim, scale = outputs
    dtype: gl.constexpr = q_smem.dtype
    qk_scale = scale * LOG2E
    zero = gl.full([64, BLOCK_M], 0.0, gl.float32, S_LAYOUT)
    no_dq = gl.full([64, 64], 0.0, gl.float32, DQ_LAYOUT)
    dq_tile = dq_smem.index(HALF)._reinterpret(gl.float32, [64, 64], SUM)

    count = 0
    batch, kv_head, k_tile, begin, middle, end = key_item(walk)
    first_row = k_tile * 128 + 64 * HALF
    dk_acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
    dv_acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
    if begin < end:
        mbarrier.wait(k_full.index(HALF), 0)
        mbarrier.wait(k_full.index(1 - HALF), 0)
        for masked in gl.static_range(2):
            if masked == 0:
                first = 0
                last = (middle - begin) * GROUP
            else:
                first = (middle - begin) * GROUP
                last = (end - begin) * GROUP
            for n in range(first, last):
                stage = count % STAGES
                phase = (count // STAGES) & 1
                # Always 0, which the compiler cannot know: it would keep the addresses of every
                # operand in registers through the loop, and there are none left.
                none = n >> 31
                k = flat(k_smem.index(HALF + none), 64, HEAD_DIM)
                v = flat(v_smem.index(HALF + none), 64, HEAD_DIM)
                other_k = flat(k_smem.index(1 - HALF + none), 64, HEAD_DIM)
                mbarrier.wait(q_full.index(stage), phase)
                q = flat(q_smem.index(stage), BLOCK_M, HEAD_DIM)
                s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(do_full.index(stage), phase)
                do = flat(do_smem.index(stage), BLOCK_M, HEAD_DIM)
                dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                lse_row = row_stat(lse_smem.index(stage), BLOCK_M, COLUMN)
                p = gl.exp2(s * qk_scale - lse_row[None, :])
                if masked == 0:
                    keys = first_row + gl.arange(0, 64, layout=ROW)
                    j, key_document = token(keys, k_rows, k_start, k_pos, k_doc, -1, SIMPLE)
                    entry, _ = key_step(n, begin, middle, end, GROUP, True)
                    q_row = gl.load(index + entry) * BLOCK_M
                    columns = gl.arange(0, BLOCK_M, layout=COLUMN)
                    ok = seen(
                        j, k_start + k_rows, key_document, columns, q_row, q_rows, q_start, q_pos,
                        q_doc, k_start + first_row, values, table, table_q, table_k, FLAGS, RULES,
                        MINUS, LOOKUP, False, SIMPLE,
                    )  # fmt: skip
                    p = gl.where(ok, p, 0.0)
                p_low = gl.convert_layout(p.to(dtype), P_LAYOUT)
                dv_acc = warpgroup_mma(p_low, do, dv_acc, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[dp])
                delta_row = row_stat(delta_smem.index(stage), BLOCK_M, COLUMN)
                ds = (p * (dp - delta_row[None, :])).to(dtype)
                # Two in turn: a warpgroup that stores here has seen the other's last gradients,
                # and so knows that the other is done with those of the turn before.
                turn = 2 * (count & 1)
                own = ds_smem.index(turn + HALF)
                own.store(ds)
                fence_async_shared()
                mbarrier.arrive(ds_full.index(turn + HALF), count=1)
                dq = warpgroup_mma(
                    _across(own, HALF, BLOCK_M), _half(k, HALF, HEAD_DIM), no_dq, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                mbarrier.wait(ds_full.index(turn + 1 - HALF), (count // 2) & 1)
                other = ds_smem.index(turn + 1 - HALF)
                dq = warpgroup_mma(
                    _across(other, HALF, BLOCK_M), _half(other_k, HALF, HEAD_DIM), dq,
                    is_async=True,
                )  # fmt: skip
                ds = gl.convert_layout(ds, P_LAYOUT)
                dk_acc = warpgroup_mma(ds, q, dk_acc, is_async=True)
                dv_acc, p_low, dq = warpgroup_mma_wait(1, deps=[dv_acc, p_low, dq])
                mbarrier.wait(dq_free.index(HALF), (count & 1) ^ 1)
                dq_tile.store(dq)
                fence_async_shared()
                # Says too that dO may go: the writer passes it on, at one barrier less here.
                mbarrier.arrive(dq_full.index(HALF), count=1)
                dk_acc, ds = warpgroup_mma_wait(0, deps=[dk_acc, ds])
                mbarrier.arrive(q_free.index(stage), count=1)
                count += 1
    o_rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, O_LAYOUT))
    store_tile(dk, o_rows, k_rows, batch, kv_head, stride_b, stride_s, stride_h, head_dim,
               dk_acc * scale, O_LAYOUT, HEAD_DIM)  # fmt: skip
    store_tile(dv, o_rows, k_rows, batch, kv_head, stride_b, stride_s, stride_h, head_dim,
               dv_acc, O_LAYOUT, HEAD_DIM)  # fmt: skip


@gluon.jit
def _write(
    dq_desc, dq_smem, bars, walk, GROUP: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Add each tile of dQ to the whole, as its halves come; then dO of the tile is done with."""
    do_free, ds_full, dq_full, dq_free = bars
    pointers, middles, index, order, tiles, kv_heads = walk
    batch, kv_head, k_tile, begin, middle, end = key_item(walk)
    for n in range((end - begin) * GROUP):
        entry, member = key_step(n, begin, middle, end, GROUP, True)
        row = gl.load(index + entry) * BLOCK_M
        head = kv_head * GROUP + member
        for half in gl.static_range(2):
            mbarrier.wait(dq_full.index(half), n & 1)
            if BLOCK_M == 128:
                add_tile(dq_desc, [batch, row + 64 * half, head, 0], dq_smem.index(half))
            else:
                add_tile(dq_desc, [batch, row, head, 64 * half], dq_smem.index(half))
        mbarrier.arrive(do_free.index(n % STAGES), count=1)
        for half in gl.static_range(2):
            tma.store_wait(1 - half)
            mbarrier.arrive(dq_free.index(half), count=1)


@gluon.jit
def _across(ds, HALF: gl.constexpr, BLOCK_M: gl.constexpr):
    """Score gradients (64 keys, queries) as (64 queries, 64 keys): this warpgroup's queries."""
    if BLOCK_M == 128:
        ds = ds.slice(64 * HALF, 64, dim=1)
    return ds.permute((1, 0))


@gluon.jit
def _half(k, HALF: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The columns of (64 keys, head size) that this warpgroup's half of dQ has."""
    if HEAD_DIM == 128:
        k = k.slice(64 * HALF, 64, dim=1)
    return k


@gluon.jit(do_not_specialize=["q_rows", "k_rows", "q_start", "k_start", "tiles"])
def fused_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, dk, dv, pointers, middles,
    index, order, q_pos, q_doc, k_pos, k_doc, rule_values, table, table_q, table_k, q_rows, k_rows,
    q_start, k_start, kv_heads, tiles, stride_b, stride_s, stride_h, head_dim, scale,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FLAGS: gl.constexpr,
    RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr, SIMPLE: gl.constexpr,
    GROUP: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Tiles of (64 queries, 128 keys) for head size 128, (128, 128) for 64; a program per (tile,
    key/value head, batch row). dQ (B, Sq, Hq, D) is fp32, 0 before and left without the scale; dk
    and dv share their strides."""
    dtype: gl.constexpr = q_desc.dtype
    gl.static_assert(BLOCK_M * HEAD_DIM == 64 * 128)
    smem = (
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 64, 1, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 64, 1, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BLOCK_M], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BLOCK_M], lse_desc.layout),
        gl.allocate_shared_memory(dtype, [4, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.float32, [2, 1, 64, 1, 64], dq_desc.layout),
    )
    bars = (
        barriers(2, 1), barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1),
        barriers(STAGES, 1), barriers(4, 1), barriers(2, 1), barriers(2, 1),
    )  # fmt: skip
    own = (gl.program_id(0) // tiles) % kv_heads * PER_HEAD
    pointers, middles, order = lists_of(own, pointers, middles, order, tiles)
    rule_values += own * (RULES + MINUS) * 8
    table += own * table_q * table_k
    walk = (pointers, middles, index, order, tiles, kv_heads)
    mask = (
        q_pos, q_doc, k_pos, k_doc, rule_values, table, table_q, table_k, q_rows, k_rows, q_start,
        k_start,
    )  # fmt: skip
    outputs = (dk, dv, stride_b, stride_s, stride_h, head_dim, scale)
    gl.warp_specialize(
        [
            (_consume, (
                smem, bars, walk, mask, outputs, 0, GROUP, HEAD_DIM, BLOCK_M, STAGES, FLAGS,
                RULES, MINUS, LOOKUP, SIMPLE,
            )),
            (_consume, (
                smem, bars, walk, mask, outputs, 1, GROUP, HEAD_DIM, BLOCK_M, STAGES, FLAGS,
                RULES, MINUS, LOOKUP, SIMPLE,
            )),
            (dkv_produce, (
                (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc), smem[:6], bars[:5], walk,
                GROUP, HEAD_DIM, BLOCK_M, STAGES, True, 2,
            )),
            (_write, (dq_desc, smem[7], bars[4:], walk, GROUP, BLOCK_M, STAGES)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip

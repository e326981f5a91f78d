"""The pass of backward attention for dK and dV, for Hopper: over the transposed lists, no atomics.

Written in Gluon; :mod:`msa_kernels.triton.backward` is its plain twin. A producer warp loads tiles
of queries by TMA; two consumer warpgroups own 64 keys each. Above a head size of 128 the registers
of a warpgroup hold one of the two sums: both own the same 64 keys, one their dV, the other their
dK. :mod:`msa_kernels.triton.hopper_dq` says what the LSE is,
:mod:`msa_kernels.triton.hopper_forward` what the tuples of arguments are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from msa_kernels.triton.hopper_dq import LOG2E
from msa_kernels.triton.hopper_forward import (
    barriers,
    flat,
    lists_of,
    row_at,
    share,
    store_tile,
)
from msa_kernels.triton.predicate import seen, token


@gluon.jit
def row_stat(smem, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """A (1, 1, rows) fp32 tile of shared memory as a row vector."""
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return smem._reinterpret(gl.float32, [ROWS], line).load(LAYOUT)


@gluon.jit
def key_item(walk):
    """This program's (batch, key/value head, key tile, list begin, middle, end); tiles fastest."""
    pointers, middles, index, order, tiles, kv_heads = walk
    batch, kv_head, _, place, _ = share(tiles, 1, kv_heads, 1)
    tile, begin, middle, end = row_at(walk, place)
    return batch, kv_head, tile, begin, middle, end


@gluon.jit
def key_step(n, begin, middle, end, GROUP: gl.constexpr, BY_HEAD: gl.constexpr):
    """Entry of the list, and query head of the group, that are the n-th of a program's tiles.

    All heads of an entry after one another, or, ``BY_HEAD``, all entries of a head: then fewer
    tiles of dQ are in flight on the whole card, and their sums stay in its L2 cache. Partial tiles
    come first in either order."""
    if BY_HEAD:
        partial = (middle - begin) * GROUP
        full = n >= partial
        n = gl.where(full, n - partial, n)
        length = gl.maximum(gl.where(full, end - middle, middle - begin), 1)
        return gl.where(full, middle, begin) + n % length, n // length
    else:
        return begin + n // GROUP, n % GROUP


@gluon.jit
def dkv_produce(
    descs, smem, bars, walk, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, BY_HEAD: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """``HALVES`` of 64 keys are a tile."""
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descs
    q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem = smem
    k_full, q_full, q_free, do_full, do_free = bars
    pointers, middles, index, order, tiles, kv_heads = walk
    count = 0
    batch, kv_head, k_tile, begin, middle, end = key_item(walk)
    if begin < end:
        for half in gl.static_range(HALVES):
            at = [batch, 64 * (k_tile * HALVES + half), kv_head, 0]
            mbarrier.expect(k_full.index(half), 2 * 64 * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(k_desc, at, k_full.index(half), k_smem.index(half))
            tma.async_copy_global_to_shared(v_desc, at, k_full.index(half), v_smem.index(half))
        for n in range((end - begin) * GROUP):
            entry, member = key_step(n, begin, middle, end, GROUP, BY_HEAD)
            row = gl.load(index + entry) * BLOCK_M
            head = kv_head * GROUP + member
            stage = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(q_free.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4)
            tma.async_copy_global_to_shared(
                q_desc, [batch, row, head, 0], q_full.index(stage), q_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                lse_desc, [batch, head, row], q_full.index(stage), lse_smem.index(stage)
            )
            mbarrier.wait(do_free.index(stage), phase ^ 1)
            mbarrier.expect(do_full.index(stage), BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4)
            tma.async_copy_global_to_shared(
                delta_desc, [batch, head, row], do_full.index(stage), delta_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                do_desc, [batch, row, head, 0], do_full.index(stage), do_smem.index(stage)
            )
            count += 1


@gluon.jit
def _seeing(
    first_row, q_row, mask, BLOCK_M: gl.constexpr, FLAGS: gl.constexpr, RULES: gl.constexpr,
    MINUS: gl.constexpr, LOOKUP: gl.constexpr, SIMPLE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Which of 64 keys (down) are seen by which queries of the tile at ``q_row`` (across)."""
    q_pos, q_doc, k_pos, k_doc, values, table, table_q, table_k = mask[:8]
    q_rows, k_rows, q_start, k_start = mask[8:]
    keys = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    j, key_document = token(keys, k_rows, k_start, k_pos, k_doc, -1, SIMPLE)
    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))
    return seen(
        j, k_start + k_rows, key_document, columns, q_row, q_rows, q_start, q_pos, q_doc,
        k_start + first_row, values, table, table_q, table_k, FLAGS, RULES, MINUS, LOOKUP, False,
        SIMPLE,
    )  # fmt: skip


@gluon.jit
def _consume(
    smem, bars, walk, mask, outputs, NUMBER: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    FLAGS: gl.constexpr, RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr,
    SIMPLE: gl.constexpr,
):  # fmt: skip
    """dK and dV of the ``NUMBER``-th half of a tile's keys; of a tile that is one half, its dV (0)
    or its dK (1), for which probabilities are made twice. Scores are held transposed: keys down,
    queries across."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    HALF: gl.constexpr = NUMBER % HALVES
    OF_KEYS: gl.constexpr = HALVES == 2 or NUMBER == 1
    OF_VALUES: gl.constexpr = HALVES == 2 or NUMBER == 0

    q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem = smem
    k_full, q_full, q_free, do_full, do_free = bars
    pointers, middles, index, order, tiles, kv_heads = walk
    q_rows, k_rows, q_start, k_start = mask[8:]
    dk, dv, stride_b, stride_s, stride_h, head_dim, scale = outputs
    dtype: gl.constexpr = q_smem.dtype
    qk_scale = scale * LOG2E
    zero = gl.full([64, BLOCK_M], 0.0, gl.float32, S_LAYOUT)
    k = flat(k_smem.index(HALF), 64, HEAD_DIM)
    v = flat(v_smem.index(HALF), 64, HEAD_DIM)

    count = 0
    batch, kv_head, k_tile, begin, middle, end = key_item(walk)
    first_row = 64 * (k_tile * HALVES + HALF)
    dk_acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
    dv_acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
    if begin < end:
        mbarrier.wait(k_full.index(HALF), 0)
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
                mbarrier.wait(q_full.index(stage), phase)
                q = flat(q_smem.index(stage), BLOCK_M, HEAD_DIM)
                s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                lse_row = row_stat(lse_smem.index(stage), BLOCK_M, COLUMN)
                mbarrier.wait(do_full.index(stage), phase)
                do = flat(do_smem.index(stage), BLOCK_M, HEAD_DIM)
                if OF_KEYS:
                    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(1, deps=[s])
                else:
                    s = warpgroup_mma_wait(0, deps=[s])
                    mbarrier.arrive(q_free.index(stage), count=1)
                p = gl.exp2(s * qk_scale - lse_row[None, :])
                if masked == 0:
                    entry, _ = key_step(n, begin, middle, end, GROUP, False)
                    ok = _seeing(
                        first_row, gl.load(index + entry) * BLOCK_M, mask, BLOCK_M, FLAGS, RULES,
                        MINUS, LOOKUP, SIMPLE, S_LAYOUT,
                    )  # fmt: skip
                    p = gl.where(ok, p, 0.0)
                if OF_VALUES:
                    p_low = gl.convert_layout(p.to(dtype), P_LAYOUT)
                    dv_acc = warpgroup_mma(p_low, do, dv_acc, is_async=True)
                if OF_KEYS:
                    if OF_VALUES:  # delta is read before or after the wait as it was measured
                        dp = warpgroup_mma_wait(1, deps=[dp])
                        delta_row = row_stat(delta_smem.index(stage), BLOCK_M, COLUMN)
                    else:
                        delta_row = row_stat(delta_smem.index(stage), BLOCK_M, COLUMN)
                        dp = warpgroup_mma_wait(0, deps=[dp])
                        mbarrier.arrive(do_free.index(stage), count=1)
                    ds = gl.convert_layout((p * (dp - delta_row[None, :])).to(dtype), P_LAYOUT)
                    dk_acc = warpgroup_mma(ds, q, dk_acc, is_async=True)
                if OF_VALUES:
                    dv_acc, p_low = warpgroup_mma_wait(1 if OF_KEYS else 0, deps=[dv_acc, p_low])
                    mbarrier.arrive(do_free.index(stage), count=1)
                if OF_KEYS:
                    dk_acc, ds = warpgroup_mma_wait(0, deps=[dk_acc, ds])
                    mbarrier.arrive(q_free.index(stage), count=1)
                count += 1
    o_rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, O_LAYOUT))
    if OF_KEYS:
        store_tile(dk, o_rows, k_rows, batch, kv_head, stride_b, stride_s, stride_h, head_dim,
                   dk_acc * scale, O_LAYOUT, HEAD_DIM)  # fmt: skip
    if OF_VALUES:
        store_tile(dv, o_rows, k_rows, batch, kv_head, stride_b, stride_s, stride_h, head_dim,
                   dv_acc, O_LAYOUT, HEAD_DIM)  # fmt: skip


@gluon.jit(do_not_specialize=["q_rows", "k_rows", "q_start", "k_start", "tiles"])
def dkv_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dk, dv, pointers, middles, index, order,
    q_pos, q_doc, k_pos, k_doc, rule_values, table, table_q, table_k, q_rows, k_rows, q_start,
    k_start, kv_heads, tiles, stride_b, stride_s, stride_h, head_dim, scale,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FLAGS: gl.constexpr,
    RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr, SIMPLE: gl.constexpr,
    GROUP: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Tiles of (BLOCK_M queries, 128 keys; 64 above a head size of 128); a program per (tile,
    key/value head, batch row); dk and dv share their strides."""
    dtype: gl.constexpr = q_desc.dtype
    HALVES: gl.constexpr = 2 if HEAD_DIM <= 128 else 1
    smem = (
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [HALVES, 1, 64, 1, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [HALVES, 1, 64, 1, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BLOCK_M], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BLOCK_M], lse_desc.layout),
    )
    bars = (
        barriers(HALVES, 1), barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1),
        barriers(STAGES, 2),
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
                smem, bars, walk, mask, outputs, 0, GROUP, HEAD_DIM, BLOCK_M, STAGES, HALVES,
                FLAGS, RULES, MINUS, LOOKUP, SIMPLE,
            )),
            (_consume, (
                smem, bars, walk, mask, outputs, 1, GROUP, HEAD_DIM, BLOCK_M, STAGES, HALVES,
                FLAGS, RULES, MINUS, LOOKUP, SIMPLE,
            )),
            (dkv_produce, (
                (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc), smem, bars, walk, GROUP,
                HEAD_DIM, BLOCK_M, STAGES, False, HALVES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

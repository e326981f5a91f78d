"""The pass of backward attention for dQ, for Hopper: no atomics.

Written in Gluon; :mod:`msa_kernels.triton.backward` is its plain twin, and
:mod:`msa_kernels.triton.hopper_dkv` the other pass. Both recompute the probabilities from the LSE,
which may be that of a larger whole (other parts, other ranks); it is given in base 2, with +inf
for rows that saw no key and rows padded to whole tiles. A producer warp loads by TMA; two consumer
warpgroups own 64 rows of the output each.
Tuples of arguments are those of :mod:`msa_kernels.triton.hopper_forward`.
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

from msa_kernels.triton.hopper_forward import (
    barriers,
    flat,
    lists_of,
    row_at,
    share,
    store_tile,
    visible,
)
from msa_kernels.triton.predicate import token

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _dq_produce(
    descs, smem, bars, walk, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, do_desc, k_desc, v_desc = descs
    q_smem, do_smem, k_smem, v_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    pointers, middles, index, order, tiles, each, q_heads, kv_heads = walk
    count = 0
    rows = 0
    batch, kv_head, member, start, stop = share(tiles, each, kv_heads, GROUP)
    head = kv_head * GROUP + member
    for place in range(start, stop):
        q_tile, begin, middle, end = row_at(walk, place)
        if begin < end:
            for half in gl.static_range(2):
                at = [batch, q_tile * 128 + 64 * half, head, 0]
                full = q_full.index(half)
                mbarrier.wait(q_free.index(half), (rows & 1) ^ 1)
                mbarrier.expect(full, 2 * 64 * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(q_desc, at, full, q_smem.index(half))
                tma.async_copy_global_to_shared(do_desc, at, full, do_smem.index(half))
            tile = gl.load(index + begin)
            for n in range(begin, end):
                after = gl.load(index + gl.minimum(n + 1, end - 1))
                stage = count % STAGES
                phase = (count // STAGES) & 1
                at = [batch, tile * BLOCK_N, kv_head, 0]
                full = k_full.index(stage)
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                mbarrier.expect(full, BLOCK_N * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(k_desc, at, full, k_smem.index(stage))
                full = v_full.index(stage)
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(full, BLOCK_N * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(v_desc, at, full, v_smem.index(stage))
                tile = after
                count += 1
            rows += 1


@gluon.jit
def _dq_consume(
    smem, bars, walk, mask, outputs, HALF: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FLAGS: gl.constexpr,
    RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr, SIMPLE: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)

    q_smem, do_smem, k_smem, v_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    pointers, middles, index, order, tiles, each, q_heads, kv_heads = walk
    q_pos, q_doc, k_pos, k_doc, values, table, table_q, table_k = mask[:8]
    q_rows, k_rows, q_start, k_start = mask[8:]
    dq, lse, delta, stat_rows, stride_b, stride_s, stride_h, head_dim, scale = outputs
    dtype: gl.constexpr = q_smem.dtype
    qk_scale = scale * LOG2E
    zero = gl.full([64, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    q = flat(q_smem.index(HALF), 64, HEAD_DIM)
    do = flat(do_smem.index(HALF), 64, HEAD_DIM)

    count = 0
    rows = 0
    batch, kv_head, member, start, stop = share(tiles, each, kv_heads, GROUP)
    head = kv_head * GROUP + member
    line = (batch * q_heads + head).to(gl.int64) * stat_rows
    for place in range(start, stop):
        q_tile, begin, middle, end = row_at(walk, place)
        first_row = q_tile * 128 + 64 * HALF
        acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
        if begin < end:
            queries = first_row + gl.arange(0, 64, layout=ROW)
            i, document = token(queries, q_rows, q_start, q_pos, q_doc, -2, SIMPLE)
            lse_row = gl.load(lse + line + queries)
            delta_row = gl.load(delta + line + queries)
            mbarrier.wait(q_full.index(HALF), rows & 1)
            for masked in gl.static_range(2):
                if masked == 0:
                    first = begin
                    last = middle
                else:
                    first = middle
                    last = end
                for n in range(first, last):
                    stage = count % STAGES
                    phase = (count // STAGES) & 1
                    mbarrier.wait(k_full.index(stage), phase)
                    k = flat(k_smem.index(stage), BLOCK_N, HEAD_DIM)
                    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
                    mbarrier.wait(v_full.index(stage), phase)
                    v = flat(v_smem.index(stage), BLOCK_N, HEAD_DIM)
                    dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(1, deps=[s])
                    p = gl.exp2(s * qk_scale - lse_row[:, None])
                    if masked == 0:
                        ok = visible(
                            i, document, q_start + first_row, gl.load(index + n) * BLOCK_N, mask,
                            BLOCK_N, FLAGS, RULES, MINUS, LOOKUP, SIMPLE, S_LAYOUT,
                        )  # fmt: skip
                        p = gl.where(ok, p, 0.0)
                    dp = warpgroup_mma_wait(0, deps=[dp])
                    mbarrier.arrive(v_free.index(stage), count=1)
                    mbarrier.arrive(q_free.index(HALF), count=1, pred=n == end - 1)
                    ds = gl.convert_layout((p * (dp - delta_row[:, None])).to(dtype), DS_LAYOUT)
                    acc = warpgroup_mma(ds, k, acc, is_async=True)
                    acc, ds = warpgroup_mma_wait(0, deps=[acc, ds])
                    mbarrier.arrive(k_free.index(stage), count=1)
                    count += 1
            rows += 1
        o_rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, O_LAYOUT))
        store_tile(dq, o_rows, q_rows, batch, head, stride_b, stride_s, stride_h, head_dim,
                   acc * scale, O_LAYOUT, HEAD_DIM)  # fmt: skip


@gluon.jit(do_not_specialize=["q_rows", "k_rows", "q_start", "k_start", "tiles", "each"])
def dq_kernel(
    q_desc, do_desc, k_desc, v_desc, dq, lse, delta, pointers, middles, index, order, q_pos, q_doc,
    k_pos, k_doc, rule_values, table, table_q, table_k, q_rows, k_rows, q_start, k_start, q_heads,
    kv_heads, tiles, each, stat_rows, stride_b, stride_s, stride_h, head_dim, scale,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FLAGS: gl.constexpr,
    RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr, SIMPLE: gl.constexpr,
    GROUP: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Tiles of (128 queries, BLOCK_N keys); a program for ``each`` rows of a query head."""
    dtype: gl.constexpr = q_desc.dtype
    smem = (
        gl.allocate_shared_memory(dtype, [2, 1, 64, 1, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 64, 1, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], v_desc.layout),
    )
    bars = (
        barriers(2, 1), barriers(2, 1), barriers(STAGES, 1), barriers(STAGES, 2),
        barriers(STAGES, 1), barriers(STAGES, 2),
    )  # fmt: skip
    own = share(tiles, each, kv_heads, GROUP)[1] * PER_HEAD
    pointers, middles, order = lists_of(own, pointers, middles, order, tiles)
    rule_values += own * (RULES + MINUS) * 8
    table += own * table_q * table_k
    walk = (pointers, middles, index, order, tiles, each, q_heads, kv_heads)
    mask = (
        q_pos, q_doc, k_pos, k_doc, rule_values, table, table_q, table_k, q_rows, k_rows, q_start,
        k_start,
    )  # fmt: skip
    outputs = (dq, lse, delta, stat_rows, stride_b, stride_s, stride_h, head_dim, scale)
    gl.warp_specialize(
        [
            (_dq_consume, (
                smem, bars, walk, mask, outputs, 0, GROUP, HEAD_DIM, BLOCK_N, STAGES, FLAGS,
                RULES, MINUS, LOOKUP, SIMPLE,
            )),
            (_dq_consume, (
                smem, bars, walk, mask, outputs, 1, GROUP, HEAD_DIM, BLOCK_N, STAGES, FLAGS,
                RULES, MINUS, LOOKUP, SIMPLE,
            )),
            (_dq_produce, (
                (q_desc, do_desc, k_desc, v_desc), smem, bars, walk, GROUP, HEAD_DIM, BLOCK_N,
                STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

"""Forward attention in e4m3 for Hopper, of a producer warp and two consumer warpgroups as in
:mod:`msa_kernels.triton.hopper_forward`, on the copies of :mod:`msa_kernels.triton.fp8`.

:mod:`msa_kernels.triton.fp8_forward` is the plain twin. Both products read operands whose inner
dimension is contiguous, as 8-bit tensor cores require: K as it is, V transposed. The registers in
which a product leaves scores are those in which the next one takes probabilities, but for the
order of keys within every 16: the copy of V has its keys in that order, so that probabilities stay
where they are. They live within one turn of the loop, whose end forms the next scores together
with the output: carried over it, 8-bit values would be taken apart and packed again.

Tensor cores add 8-bit products up in fewer bits than fp32 has: every tile of keys is summed on
its own and then added to an fp32 accumulator. Left to the tensor cores, averages of 32,768 values
around 1 come out 39 % too small on an H200, those of 131,072 67 %.
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
    lists_of,
    row_at,
    share,
    store_tile,
    visible,
)
from msa_kernels.triton.predicate import token

PEAK = gl.constexpr(8.0)
"""Probabilities are multiplied by 2 to this power: the largest is 256, and e4m3 holds 448."""


@gluon.jit
def matrix(smem, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A (1, 1, rows, columns) tile seen as (rows, columns): the same bytes."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128 if COLUMNS >= 128 else 64, 8, 2)
    return smem._reinterpret(smem.dtype, [ROWS, COLUMNS], layout)


@gluon.jit
def _produce(
    descs, smem, bars, walk, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem = smem
    q_full, k_full, k_free, v_full, v_free = bars
    index = walk[2]
    tiles = walk[4]
    kv_heads = walk[6]
    count = 0
    batch, kv_head, member, place, _ = share(tiles, 1, kv_heads, GROUP)
    head = kv_head * GROUP + member
    q_tile, begin, middle, end = row_at(walk, place)
    if begin < end:
        for half in gl.static_range(2):
            mbarrier.expect(q_full.index(half), 64 * HEAD_DIM)
            tma.async_copy_global_to_shared(
                q_desc, [batch, head, q_tile * 128 + 64 * half, 0], q_full.index(half),
                q_smem.index(half),
            )  # fmt: skip
        tile = gl.load(index + begin)
        for n in range(begin, end):
            after = gl.load(index + gl.minimum(n + 1, end - 1))
            stage = count % STAGES
            phase = (count // STAGES) & 1
            row = tile * BLOCK_N
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), BLOCK_N * HEAD_DIM)
            tma.async_copy_global_to_shared(
                k_desc, [batch, kv_head, row, 0], k_full.index(stage), k_smem.index(stage)
            )
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), BLOCK_N * HEAD_DIM)
            tma.async_copy_global_to_shared(
                v_desc, [batch, kv_head, 0, row], v_full.index(stage), v_smem.index(stage)
            )
            tile = after
            count += 1


@gluon.jit
def _softmax(s, m, total, factor, P_LAYOUT: gl.constexpr):
    """Probabilities of raw scores ``s`` times ``factor`` (base 2) against the running maximum, as
    the left operand of the next product; the factor for older ones."""
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    # Rows that have seen no key yet: exponents against 0, so that -inf - -inf never happens.
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - shift)
    p = gl.exp2(s * factor - (shift - PEAK)[:, None])
    total = total * alpha + gl.sum(p, 1)
    # Keys 16 h + 8 b + 2 c + e of a thread become the columns 16 h + 4 c + 2 b + e.
    p = p.reshape([p.shape[0], p.shape[1] // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    p = gl.convert_layout(p.reshape([p.shape[0], p.shape[1] * 16]), P_LAYOUT)
    return p.to(gl.float8e4nv), m_new, total, alpha


@gluon.jit
def _consume(
    smem, bars, walk, mask, scales, outputs, HALF: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FLAGS: gl.constexpr,
    RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr, SIMPLE: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)

    q_smem, k_smem, v_smem = smem
    q_full, k_full, k_free, v_full, v_free = bars
    index = walk[2]
    tiles = walk[4]
    q_heads = walk[5]
    kv_heads = walk[6]
    q_pos, q_doc = mask[:2]
    q_rows, k_rows, q_start, k_start = mask[8:]
    q_scale, k_scale, v_scale = scales
    out, lse, stride_ob, stride_os, stride_oh, head_dim, qk_scale = outputs
    zero = gl.full([64, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    nothing = gl.full([64, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
    q = matrix(q_smem.index(HALF), 64, HEAD_DIM)

    count = 0
    batch, kv_head, member, place, _ = share(tiles, 1, kv_heads, GROUP)
    head = kv_head * GROUP + member
    q_tile, begin, middle, end = row_at(walk, place)
    first_row = q_tile * 128 + 64 * HALF
    rows = first_row + gl.arange(0, 64, layout=ROW)
    m = gl.full([64], float("-inf"), gl.float32, ROW)
    total = gl.full([64], 0.0, gl.float32, ROW)
    acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)

    if begin < end:
        i, document = token(rows, q_rows, q_start, q_pos, q_doc, -2, SIMPLE)
        k_scale += (batch * kv_heads + kv_head) * ((k_rows + BLOCK_N - 1) // BLOCK_N)
        to_base_2 = qk_scale * gl.load(q_scale + (batch * q_heads + head) * tiles + q_tile)
        # Numbers and scales of tiles are read before the tile that needs them.
        tile = gl.load(index + begin)
        after = gl.load(index + gl.minimum(begin + 1, end - 1))
        factor = to_base_2 * gl.load(k_scale + tile)
        mbarrier.wait(q_full.index(HALF), 0)
        mbarrier.wait(k_full.index(0), 0)
        k = matrix(k_smem.index(0), BLOCK_N, HEAD_DIM)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(0), count=1)
        for masked in gl.static_range(2):
            if masked == 0:
                first = begin
                last = gl.minimum(middle, end - 1)
            else:
                first = middle
                last = end - 1
            for n in range(first, last):
                stage = count % STAGES
                ahead = (count + 1) % STAGES
                of_keys = gl.load(k_scale + after)
                later = gl.load(index + gl.minimum(n + 2, end - 1))
                if masked == 0:
                    ok = visible(
                        i, document, q_start + first_row, tile * BLOCK_N, mask, BLOCK_N, FLAGS,
                        RULES, MINUS, LOOKUP, SIMPLE, S_LAYOUT,
                    )  # fmt: skip
                    s = gl.where(ok, s, float("-inf"))
                p, m, total, alpha = _softmax(s, m, total, factor, P_LAYOUT)
                mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
                v = matrix(v_smem.index(stage), HEAD_DIM, BLOCK_N)
                some = warpgroup_mma(p, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(k_full.index(ahead), ((count + 1) // STAGES) & 1)
                k = matrix(k_smem.index(ahead), BLOCK_N, HEAD_DIM)
                s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
                some = warpgroup_mma_wait(1, deps=[some])
                mbarrier.arrive(v_free.index(stage), count=1)
                acc = acc * gl.convert_layout(alpha, O_ROW)[:, None] + some
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(k_free.index(ahead), count=1)
                factor = to_base_2 * of_keys
                tile = after
                after = later
                count += 1

        if middle == end:
            ok = visible(
                i, document, q_start + first_row, tile * BLOCK_N, mask, BLOCK_N, FLAGS, RULES,
                MINUS, LOOKUP, SIMPLE, S_LAYOUT,
            )  # fmt: skip
            s = gl.where(ok, s, float("-inf"))
        p, m, total, alpha = _softmax(s, m, total, factor, P_LAYOUT)
        acc = acc * gl.convert_layout(alpha, O_ROW)[:, None]
        mbarrier.wait(v_full.index(count % STAGES), (count // STAGES) & 1)
        v = matrix(v_smem.index(count % STAGES), HEAD_DIM, BLOCK_N)
        some = warpgroup_mma(p, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
        some = warpgroup_mma_wait(0, deps=[some])
        acc += some

    seen = total != 0.0  # not a number is seen, and shows
    weight = gl.where(seen, 1.0 / gl.where(seen, total, 1.0), 0.0)
    channels = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, O_LAYOUT))
    of_values = gl.load(v_scale + (batch * kv_heads + kv_head) * HEAD_DIM + channels)
    acc = acc * gl.convert_layout(weight, O_ROW)[:, None] * of_values[None, :]
    natural = (m + gl.log2(gl.where(seen, total, 1.0)) - PEAK) * 0.6931471805599453
    natural = gl.where(seen, natural, float("-inf"))
    line = (batch * q_heads + head).to(gl.int64) * q_rows
    gl.store(lse + line + rows, natural, mask=rows < q_rows)
    o_rows = first_row + gl.arange(0, 64, layout=O_ROW)
    store_tile(out, o_rows, q_rows, batch, head, stride_ob, stride_os, stride_oh, head_dim,
               acc, O_LAYOUT, HEAD_DIM)  # fmt: skip


@gluon.jit(do_not_specialize=["q_rows", "k_rows", "q_start", "k_start", "tiles"])
def forward_kernel(
    q_desc, k_desc, v_desc, q_scale, k_scale, v_scale, out, lse, pointers, middles, index, order,
    q_pos, q_doc, k_pos, k_doc, rule_values, table, table_q, table_k, q_rows, k_rows, q_start,
    k_start, q_heads, kv_heads, tiles, stride_ob, stride_os, stride_oh, head_dim, qk_scale,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FLAGS: gl.constexpr,
    RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr, SIMPLE: gl.constexpr,
    GROUP: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Tiles of (128 queries, BLOCK_N keys); a program per (tile, query head, batch row).

    q (B, Hq, Sq, D) and k (B, Hkv, Sk, D) in tiles of rows, v (B, Hkv, D, Sk) in tiles of columns,
    all e4m3; scales as of :class:`msa_kernels.triton.fp8.Quantised`.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HEAD_DIM, BLOCK_N], v_desc.layout)
    smem = (q_smem, k_smem, v_smem)
    bars = (
        barriers(2, 1), barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1),
        barriers(STAGES, 2),
    )  # fmt: skip
    own = share(tiles, 1, kv_heads, GROUP)[1] * PER_HEAD
    pointers, middles, order = lists_of(own, pointers, middles, order, tiles)
    rule_values += own * (RULES + MINUS) * 8
    table += own * table_q * table_k
    walk = (pointers, middles, index, order, tiles, q_heads, kv_heads)
    mask = (
        q_pos, q_doc, k_pos, k_doc, rule_values, table, table_q, table_k, q_rows, k_rows, q_start,
        k_start,
    )  # fmt: skip
    scales = (q_scale, k_scale, v_scale)
    outputs = (out, lse, stride_ob, stride_os, stride_oh, head_dim, qk_scale)
    gl.warp_specialize(
        [
            (_consume, (
                smem, bars, walk, mask, scales, outputs, 0, GROUP, HEAD_DIM, BLOCK_N, STAGES,
                FLAGS, RULES, MINUS, LOOKUP, SIMPLE,
            )),
            (_consume, (
                smem, bars, walk, mask, scales, outputs, 1, GROUP, HEAD_DIM, BLOCK_N, STAGES,
                FLAGS, RULES, MINUS, LOOKUP, SIMPLE,
            )),
            (_produce, (
                (q_desc, k_desc, v_desc), smem, bars, walk, GROUP, HEAD_DIM, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

"""Forward attention for Hopper: a producer warp loads by TMA, two consumer warpgroups compute.

Written in Gluon (``triton.experimental.gluon``); :mod:`msa_kernels.triton.forward` is its plain
twin. Each consumer warpgroup owns 64 query rows. While the tensor cores multiply the previous
probabilities with V, the warpgroup turns the next scores into probabilities. Partial tiles come
first in every list, so that the long loop over full tiles carries no mask. A program takes several
neighbouring rows of a list where they are short: the producer loads the next one's tiles while the
last one ends.

Arguments that travel together are tuples:
``mask`` = (q_pos, q_doc, k_pos, k_doc, rule_values, table, table_q, table_k, q_rows, k_rows,
q_start, k_start); ``walk`` = (pointers, middles, index, order, tiles, each, q_heads, kv_heads).
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

from msa_kernels.triton.predicate import seen, token


@gluon.jit
def flat(smem, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """A (1, rows, 1, head size) tile seen as (rows, head size): the same bytes."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return smem._reinterpret(smem.dtype, [ROWS, HEAD_DIM], layout)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(bars.index(n), count=ARRIVALS)
    return bars


@gluon.jit
def lists_of(own, pointers, middles, order, tiles):
    """The lists of a key/value head, where every head has its own."""
    return pointers + own * (tiles + 1), middles + own * tiles, order + own * tiles


@gluon.jit
def share(tiles, each, kv_heads, GROUP: gl.constexpr):
    """What this program does: (batch row, key/value head, member of its group, and the first and
    last of its places in the order of rows).

    Heads of a group are fastest, then rows: neighbours in time read the same keys.
    """
    item = gl.program_id(0)
    shares = (tiles + each - 1) // each
    start = (item // GROUP) % shares * each
    rest = item // GROUP // shares
    return rest // kv_heads, rest % kv_heads, item % GROUP, start, gl.minimum(start + each, tiles)


@gluon.jit
def row_at(walk, place):
    """The row at a place in the order: (tile, list begin, middle, end)."""
    pointers, middles, index, order = walk[:4]
    tile = gl.load(order + place)
    begin = gl.load(pointers + tile)
    end = gl.load(pointers + tile + 1)
    return tile, begin, gl.load(middles + tile), end


@gluon.jit
def visible(
    i, document, i_first, k_row, mask, BLOCK_N: gl.constexpr, FLAGS: gl.constexpr,
    RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr, SIMPLE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Which of the queries (down) see which keys of the tile at ``k_row`` (across)."""
    q_pos, q_doc, k_pos, k_doc, values, table, table_q, table_k = mask[:8]
    q_rows, k_rows, q_start, k_start = mask[8:]
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    return seen(
        i, q_start + q_rows, document, columns, k_row, k_rows, k_start, k_pos, k_doc, i_first,
        values, table, table_q, table_k, FLAGS, RULES, MINUS, LOOKUP, True, SIMPLE,
    )  # fmt: skip


@gluon.jit
def _produce(
    descs, smem, bars, walk, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem = smem
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
                mbarrier.wait(q_free.index(half), (rows & 1) ^ 1)
                mbarrier.expect(q_full.index(half), 64 * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(
                    q_desc, [batch, q_tile * 128 + 64 * half, head, 0], q_full.index(half),
                    q_smem.index(half),
                )  # fmt: skip
            tile = gl.load(index + begin)
            for n in range(begin, end):
                after = gl.load(index + gl.minimum(n + 1, end - 1))
                stage = count % STAGES
                phase = (count // STAGES) & 1
                row = tile * BLOCK_N
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(
                    k_desc, [batch, row, kv_head, 0], k_full.index(stage), k_smem.index(stage)
                )
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), BLOCK_N * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(
                    v_desc, [batch, row, kv_head, 0], v_full.index(stage), v_smem.index(stage)
                )
                tile = after
                count += 1
            rows += 1


@gluon.jit
def _softmax(s, m, total, qk_scale):
    """Probabilities of raw scores ``s`` against the running maximum; the factor for older ones."""
    m_new = gl.maximum(m, gl.max(s, 1))
    # Rows that have seen no key yet: exponents against 0, so that -inf - -inf never happens.
    shift = gl.where(m_new == float("-inf"), 0.0, m_new) * qk_scale
    alpha = gl.exp2(m * qk_scale - shift)
    p = gl.exp2(s * qk_scale - shift[:, None])
    total = total * alpha + gl.sum(p, 1)
    return p, m_new, total, alpha


@gluon.jit
def _consume(
    smem, bars, walk, mask, outputs, HALF: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    FLAGS: gl.constexpr, RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr,
    SIMPLE: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)

    q_smem, k_smem, v_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    pointers, middles, index, order, tiles, each, q_heads, kv_heads = walk
    q_pos, q_doc = mask[:2]
    q_rows, k_rows, q_start, k_start = mask[8:]
    out, lse, stride_ob, stride_os, stride_oh, head_dim, qk_scale = outputs
    dtype: gl.constexpr = q_smem.dtype
    zero = gl.full([64, BLOCK_N], 0.0, gl.float32, S_LAYOUT)

    count = 0
    rows = 0
    batch, kv_head, member, start, stop = share(tiles, each, kv_heads, GROUP)
    head = kv_head * GROUP + member
    for place in range(start, stop):
        # The producer has read these, so that they are near. Handed on from the row before they
        # would be earlier still, but Triton 3.6 and 3.7 then lose one of them (loop-aware CSE).
        q_tile, begin, middle, end = row_at(walk, place)
        first_row = q_tile * 128 + 64 * HALF
        queries = first_row + gl.arange(0, 64, layout=ROW)
        m = gl.full([64], float("-inf"), gl.float32, ROW)
        total = gl.full([64], 0.0, gl.float32, ROW)
        acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)

        if begin < end:
            i, document = token(queries, q_rows, q_start, q_pos, q_doc, -2, SIMPLE)
            q = flat(q_smem.index(HALF), 64, HEAD_DIM)
            tile = gl.load(index + begin)
            mbarrier.wait(q_full.index(HALF), rows & 1)
            stage = count % STAGES
            mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
            k = flat(k_smem.index(stage), BLOCK_N, HEAD_DIM)
            s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_free.index(stage), count=1)
            mbarrier.arrive(q_free.index(HALF), count=1, pred=begin == end - 1)
            ok = visible(
                i, document, q_start + first_row, tile * BLOCK_N, mask, BLOCK_N, FLAGS, RULES,
                MINUS, LOOKUP, SIMPLE, S_LAYOUT,
            )  # fmt: skip
            s = gl.where(ok, s, float("-inf"))
            p, m, total, alpha = _softmax(s, m, total, qk_scale)
            count += 1

            for masked in gl.static_range(2):
                if masked == 0:
                    first = begin + 1
                    last = middle
                else:
                    first = gl.maximum(begin + 1, middle)
                    last = end
                for n in range(first, last):
                    stage = count % STAGES
                    old = (count - 1) % STAGES
                    mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
                    k = flat(k_smem.index(stage), BLOCK_N, HEAD_DIM)
                    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
                    # Fp32 until here: halves of a register that a loop hands on are taken apart.
                    p_low = gl.convert_layout(p.to(dtype), P_LAYOUT)
                    mbarrier.wait(v_full.index(old), ((count - 1) // STAGES) & 1)
                    v = flat(v_smem.index(old), BLOCK_N, HEAD_DIM)
                    acc = warpgroup_mma(p_low, v, acc, is_async=True)
                    s = warpgroup_mma_wait(1, deps=[s])
                    mbarrier.arrive(k_free.index(stage), count=1)
                    mbarrier.arrive(q_free.index(HALF), count=1, pred=n == end - 1)
                    if masked == 0:
                        ok = visible(
                            i, document, q_start + first_row, gl.load(index + n) * BLOCK_N, mask,
                            BLOCK_N, FLAGS, RULES, MINUS, LOOKUP, SIMPLE, S_LAYOUT,
                        )  # fmt: skip
                        s = gl.where(ok, s, float("-inf"))
                    p, m, total, alpha = _softmax(s, m, total, qk_scale)
                    # Named until the product that reads its registers has finished.
                    acc, p_low = warpgroup_mma_wait(0, deps=[acc, p_low])
                    mbarrier.arrive(v_free.index(old), count=1)
                    acc = acc * gl.convert_layout(alpha, O_ROW)[:, None]
                    count += 1

            old = (count - 1) % STAGES
            mbarrier.wait(v_full.index(old), ((count - 1) // STAGES) & 1)
            v = flat(v_smem.index(old), BLOCK_N, HEAD_DIM)
            p_low = gl.convert_layout(p.to(dtype), P_LAYOUT)
            acc = warpgroup_mma(p_low, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(old), count=1)
            rows += 1

        seen = total != 0.0  # not a number is seen, and shows
        scale = gl.where(seen, 1.0 / gl.where(seen, total, 1.0), 0.0)
        acc = acc * gl.convert_layout(scale, O_ROW)[:, None]
        natural = (m * qk_scale + gl.log2(gl.where(seen, total, 1.0))) * 0.6931471805599453
        natural = gl.where(seen, natural, float("-inf"))
        line = (batch * q_heads + head).to(gl.int64) * q_rows
        gl.store(lse + line + queries, natural, mask=queries < q_rows)
        o_rows = first_row + gl.arange(0, 64, layout=O_ROW)
        store_tile(out, o_rows, q_rows, batch, head, stride_ob, stride_os, stride_oh, head_dim,
                   acc, O_LAYOUT, HEAD_DIM)  # fmt: skip


@gluon.jit
def store_tile(
    out, rows, row_count, batch, head, stride_b, stride_s, stride_h, head_dim, value,
    LAYOUT: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    base = out + batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    offset = rows.to(gl.int64)[:, None] * stride_s + columns[None, :]
    inside = (rows < row_count)[:, None] & (columns < head_dim)[None, :]
    gl.store(base + offset, value.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["q_rows", "k_rows", "q_start", "k_start", "tiles", "each"])
def forward_kernel(
    q_desc, k_desc, v_desc, out, lse, pointers, middles, index, order, q_pos, q_doc, k_pos, k_doc,
    rule_values, table, table_q, table_k, q_rows, k_rows, q_start, k_start, q_heads, kv_heads,
    tiles, each, stride_ob, stride_os, stride_oh, head_dim, qk_scale,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    FLAGS: gl.constexpr, RULES: gl.constexpr, MINUS: gl.constexpr, LOOKUP: gl.constexpr,
    SIMPLE: gl.constexpr, GROUP: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Tiles of (128 queries, BLOCK_N keys); a program for ``each`` rows of a query head."""
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], v_desc.layout)
    smem = (q_smem, k_smem, v_smem)
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
    outputs = (out, lse, stride_ob, stride_os, stride_oh, head_dim, qk_scale)
    gl.warp_specialize(
        [
            (_consume, (
                smem, bars, walk, mask, outputs, 0, GROUP, HEAD_DIM, BLOCK_N, STAGES,
                FLAGS, RULES, MINUS, LOOKUP, SIMPLE,
            )),
            (_consume, (
                smem, bars, walk, mask, outputs, 1, GROUP, HEAD_DIM, BLOCK_N, STAGES,
                FLAGS, RULES, MINUS, LOOKUP, SIMPLE,
            )),
            (_produce, (
                (q_desc, k_desc, v_desc), smem, bars, walk, GROUP, HEAD_DIM, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

"""Forward attention over tile lists in plain Triton: any GPU that Triton serves."""

from __future__ import annotations

import triton
import triton.language as tl

from msa_kernels.triton.predicate import FAR, seen, token


@triton.jit
def _tiles(
    acc, m, total, q, k_base, v_base, stride_ks, stride_vs, index, first, last, i, i_first,
    document, k_pos,
    k_doc, rule_values, table, table_q, table_k, k_rows, k_start, head_dim, qk_scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, FLAGS: tl.constexpr,
    RULES: tl.constexpr, MINUS: tl.constexpr, LOOKUP: tl.constexpr, SIMPLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, HEAD_DIM)
    for n in range(first, last):
        k_row = tl.load(index + n) * BLOCK_N
        columns = k_row + tl.arange(0, BLOCK_N)
        rows = columns.to(tl.int64)
        inside = (columns < k_rows)[:, None] & (d < head_dim)[None, :]
        k = tl.load(k_base + rows[:, None] * stride_ks + d[None, :], mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
        if MASKED:
            ok = seen(
                i, FAR, document, tl.arange(0, BLOCK_N), k_row, k_rows, k_start, k_pos, k_doc,
                i_first, rule_values, table, table_q, table_k, FLAGS, RULES, MINUS, LOOKUP, True,
                SIMPLE,
            )  # fmt: skip
            s = tl.where(ok, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # Rows that have seen no key yet: exponents against 0, so that -inf - -inf never happens.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - shift)
        p = tl.exp2(s - shift[:, None])
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(v_base + rows[:, None] * stride_vs + d[None, :], mask=inside, other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=["q_rows", "k_rows", "q_start", "k_start", "q_tiles"])
def forward_kernel(
    q, k, v, out, lse, pointers, middles, index, order, q_pos, q_doc, k_pos, k_doc, rule_values,
    table,
    table_q, table_k, q_rows, k_rows, q_start, k_start, q_heads, kv_heads, q_tiles,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_ob, stride_os, stride_oh, head_dim, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FLAGS: tl.constexpr,
    RULES: tl.constexpr, MINUS: tl.constexpr, LOOKUP: tl.constexpr, SIMPLE: tl.constexpr,
    GROUP: tl.constexpr, PER_HEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (batch, key/value head, query tile, head of the group), heads fastest:
    neighbours in time read the same keys. Strides are in elements; ``qk_scale`` is in base 2."""
    pid = tl.program_id(0)
    rest = pid // GROUP // q_tiles
    kv_head = (rest % kv_heads).to(tl.int64)
    own = kv_head * PER_HEAD
    pointers += own * (q_tiles + 1)
    middles += own * q_tiles
    rule_values += own * (RULES + MINUS) * 8
    table += own * table_q * table_k
    tile = tl.load(order + own * q_tiles + (pid // GROUP) % q_tiles)
    batch = (rest // kv_heads).to(tl.int64)
    head = kv_head * GROUP + pid % GROUP

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    inside = (rows < q_rows)[:, None] & (d < head_dim)[None, :]
    q_at = q + batch * stride_qb + head * stride_qh
    q_tile = tl.load(
        q_at + rows.to(tl.int64)[:, None] * stride_qs + d[None, :], mask=inside, other=0.0
    )
    k_base = k + batch * stride_kb + kv_head * stride_kh
    v_base = v + batch * stride_vb + kv_head * stride_vh
    i, document = token(rows, q_rows, q_start, q_pos, q_doc, -2, SIMPLE)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    begin = tl.load(pointers + tile)
    middle = tl.load(middles + tile)
    end = tl.load(pointers + tile + 1)
    acc, m, total = _tiles(
        acc, m, total, q_tile, k_base, v_base, stride_ks, stride_vs, index, begin, middle, i,
        q_start + tile * BLOCK_M, document, k_pos, k_doc, rule_values, table, table_q, table_k,
        k_rows, k_start, head_dim,
        qk_scale, True, HEAD_DIM, BLOCK_N, FLAGS, RULES, MINUS, LOOKUP, SIMPLE, PRECISION,
    )  # fmt: skip
    acc, m, total = _tiles(
        acc, m, total, q_tile, k_base, v_base, stride_ks, stride_vs, index, middle, end, i,
        q_start + tile * BLOCK_M, document, k_pos, k_doc, rule_values, table, table_q, table_k,
        k_rows, k_start, head_dim,
        qk_scale, False, HEAD_DIM, BLOCK_N, FLAGS, RULES, MINUS, LOOKUP, SIMPLE, PRECISION,
    )  # fmt: skip

    seen = total != 0.0  # not a number is seen, and shows
    total = tl.where(seen, total, 1.0)
    acc = tl.where(seen[:, None], acc / total[:, None], 0.0)
    natural = tl.where(seen, (m + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + (batch * q_heads + head) * q_rows + rows, natural, mask=rows < q_rows)
    o_at = out + batch * stride_ob + head * stride_oh
    tl.store(
        o_at + rows.to(tl.int64)[:, None] * stride_os + d[None, :],
        acc.to(out.dtype.element_ty), mask=inside,
    )  # fmt: skip

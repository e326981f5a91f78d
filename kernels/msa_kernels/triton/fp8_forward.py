"""Forward attention in e4m3 in plain Triton, on the copies of :mod:`msa_kernels.triton.fp8`.

:mod:`msa_kernels.triton.forward` says how lists are walked; here scores are multiplied by the
scales of their tiles, and each tile's products with V are added to the fp32 accumulator on their
own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from msa_kernels.triton.fp8 import to_e4m3
from msa_kernels.triton.predicate import FAR, seen, token

PEAK = tl.constexpr(8.0)
"""Probabilities are multiplied by 2 to this power: the largest is 256, and e4m3 holds 448."""


@triton.jit
def _tiles(
    acc, m, total, q, k_base, v_base, k_scale, padded, index, first, last, i, i_first, document,
    k_pos, k_doc, rule_values, table, table_q, table_k, k_rows, k_start, qk_scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr,
    FLAGS: tl.constexpr, RULES: tl.constexpr, MINUS: tl.constexpr, LOOKUP: tl.constexpr,
    SIMPLE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, HEAD_DIM)
    for n in range(first, last):
        k_row = tl.load(index + n) * BLOCK_N
        columns = k_row + tl.arange(0, BLOCK_N)
        rows = columns.to(tl.int64)
        k = tl.load(
            k_base + rows[:, None] * HEAD_DIM + d[None, :], mask=(columns < k_rows)[:, None],
            other=0.0,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k)) * (qk_scale * tl.load(k_scale + k_row // TILE))
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
        p = tl.exp2(s - (shift - PEAK)[:, None])
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(v_base + d[:, None] * padded + rows[None, :])
        some = tl.dot(to_e4m3(p), tl.trans(v), max_num_imprecise_acc=BLOCK_N)
        acc = acc * alpha[:, None] + some
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=["q_rows", "k_rows", "q_start", "k_start", "q_tiles"])
def forward_kernel(
    q, k, v, q_scale, k_scale, v_scale, out, lse, pointers, middles, index, order, q_pos, q_doc,
    k_pos, k_doc, rule_values, table, table_q, table_k, q_rows, k_rows, q_start, k_start, q_heads,
    kv_heads, q_tiles, stride_ob, stride_os, stride_oh, head_dim, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr,
    FLAGS: tl.constexpr, RULES: tl.constexpr, MINUS: tl.constexpr, LOOKUP: tl.constexpr,
    SIMPLE: tl.constexpr, GROUP: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """One program per (batch, key/value head, query tile, head of the group). BLOCK_M and BLOCK_N
    divide TILE, the rows that share a scale; ``qk_scale`` is in base 2."""
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
    line = batch * q_heads + head
    kv_line = batch * kv_heads + kv_head

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    q_tile = tl.load(
        q + (line * q_rows + rows)[:, None] * HEAD_DIM + d[None, :], mask=(rows < q_rows)[:, None],
        other=0.0,
    )  # fmt: skip
    qk_scale *= tl.load(q_scale + line * tl.cdiv(q_rows, TILE) + tile * BLOCK_M // TILE)
    padded = tl.cdiv(k_rows, TILE) * TILE
    k_base = k + kv_line * k_rows * HEAD_DIM
    v_base = v + kv_line * HEAD_DIM * padded
    k_scale += kv_line * tl.cdiv(k_rows, TILE)
    i, document = token(rows, q_rows, q_start, q_pos, q_doc, -2, SIMPLE)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    begin = tl.load(pointers + tile)
    middle = tl.load(middles + tile)
    end = tl.load(pointers + tile + 1)
    acc, m, total = _tiles(
        acc, m, total, q_tile, k_base, v_base, k_scale, padded, index, begin, middle, i,
        q_start + tile * BLOCK_M, document, k_pos, k_doc, rule_values, table, table_q, table_k,
        k_rows, k_start, qk_scale, True, HEAD_DIM, BLOCK_N, TILE, FLAGS, RULES, MINUS, LOOKUP,
        SIMPLE,
    )  # fmt: skip
    acc, m, total = _tiles(
        acc, m, total, q_tile, k_base, v_base, k_scale, padded, index, middle, end, i,
        q_start + tile * BLOCK_M, document, k_pos, k_doc, rule_values, table, table_q, table_k,
        k_rows, k_start, qk_scale, False, HEAD_DIM, BLOCK_N, TILE, FLAGS, RULES, MINUS, LOOKUP,
        SIMPLE,
    )  # fmt: skip

    seen = total != 0.0  # not a number is seen, and shows
    total = tl.where(seen, total, 1.0)
    acc = acc * tl.load(v_scale + kv_line * HEAD_DIM + d)[None, :]
    acc = tl.where(seen[:, None], acc / total[:, None], 0.0)
    natural = (m + tl.log2(total) - PEAK) * 0.6931471805599453
    natural = tl.where(seen, natural, float("-inf"))
    tl.store(lse + line * q_rows + rows, natural, mask=rows < q_rows)
    o_at = out + batch * stride_ob + head * stride_oh
    tl.store(
        o_at + rows.to(tl.int64)[:, None] * stride_os + d[None, :],
        acc.to(out.dtype.element_ty), mask=(rows < q_rows)[:, None] & (d < head_dim)[None, :],
    )  # fmt: skip

"""Backward attention over tile lists in plain Triton: a dQ pass and a dK/dV pass, no atomics.

With ``FUSED`` the second pass is the only one: it adds what each of its tiles gives to dQ, in
whatever order programs come. All recompute the probabilities from the LSE, which may be that of a
larger whole (other parts, other ranks); it comes in base 2, with +inf for rows that saw no key,
padded to whole tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from msa_kernels.triton.predicate import FAR, seen, token


@triton.jit
def _dq_tiles(
    acc, q, do, lse_row, delta_row, k_base, v_base, stride_ks, stride_vs, index, first, last, i,
    i_first, document, k_pos, k_doc, rule_values, table, table_q, table_k, k_rows, k_start,
    head_dim, qk_scale,
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
        v = tl.load(v_base + rows[:, None] * stride_vs + d[None, :], mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(s * qk_scale - lse_row[:, None])
        if MASKED:
            ok = seen(
                i, FAR, document, tl.arange(0, BLOCK_N), k_row, k_rows, k_start, k_pos, k_doc,
                i_first, rule_values, table, table_q, table_k, FLAGS, RULES, MINUS, LOOKUP, True,
                SIMPLE,
            )  # fmt: skip
            p = tl.where(ok, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = (p * (dp - delta_row[:, None])).to(k.dtype)
        acc = tl.dot(ds, k, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["q_rows", "k_rows", "q_start", "k_start", "q_tiles", "stat_rows"])
def dq_kernel(
    q, k, v, do, dq, lse, delta, pointers, middles, index, order, q_pos, q_doc, k_pos, k_doc,
    rule_values, table, table_q, table_k, q_rows, k_rows, q_start, k_start, q_heads, kv_heads,
    q_tiles,
    stat_rows, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb,
    stride_vs, stride_vh, stride_db, stride_ds, stride_dh, stride_ob, stride_os, stride_oh,
    head_dim, scale, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FLAGS: tl.constexpr,
    RULES: tl.constexpr, MINUS: tl.constexpr, LOOKUP: tl.constexpr, SIMPLE: tl.constexpr,
    GROUP: tl.constexpr, PER_HEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (batch, key/value head, query tile, head of the group), heads fastest."""
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
    far = rows.to(tl.int64)
    d = tl.arange(0, HEAD_DIM)
    inside = (rows < q_rows)[:, None] & (d < head_dim)[None, :]
    q_at = q + batch * stride_qb + head * stride_qh
    do_at = do + batch * stride_db + head * stride_dh
    q_tile = tl.load(q_at + far[:, None] * stride_qs + d[None, :], mask=inside, other=0.0)
    do_tile = tl.load(do_at + far[:, None] * stride_ds + d[None, :], mask=inside, other=0.0)
    stat = (batch * q_heads + head) * stat_rows + rows
    lse_row = tl.load(lse + stat)
    delta_row = tl.load(delta + stat)
    k_base = k + batch * stride_kb + kv_head * stride_kh
    v_base = v + batch * stride_vb + kv_head * stride_vh
    i, document = token(rows, q_rows, q_start, q_pos, q_doc, -2, SIMPLE)

    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    begin = tl.load(pointers + tile)
    middle = tl.load(middles + tile)
    end = tl.load(pointers + tile + 1)
    acc = _dq_tiles(
        acc, q_tile, do_tile, lse_row, delta_row, k_base, v_base, stride_ks, stride_vs, index,
        begin, middle, i, q_start + tile * BLOCK_M, document, k_pos, k_doc, rule_values, table,
        table_q, table_k, k_rows, k_start,
        head_dim, qk_scale, True, HEAD_DIM, BLOCK_N, FLAGS, RULES, MINUS, LOOKUP, SIMPLE,
        PRECISION,
    )  # fmt: skip
    acc = _dq_tiles(
        acc, q_tile, do_tile, lse_row, delta_row, k_base, v_base, stride_ks, stride_vs, index,
        middle, end, i, q_start + tile * BLOCK_M, document, k_pos, k_doc, rule_values, table,
        table_q, table_k, k_rows, k_start,
        head_dim, qk_scale, False, HEAD_DIM, BLOCK_N, FLAGS, RULES, MINUS, LOOKUP, SIMPLE,
        PRECISION,
    )  # fmt: skip
    o_at = dq + batch * stride_ob + head * stride_oh
    tl.store(
        o_at + far[:, None] * stride_os + d[None, :],
        (acc * scale).to(dq.dtype.element_ty), mask=inside,
    )  # fmt: skip


@triton.jit
def _dkv_tiles(
    dk, dv, k, v, q, do, dq, lse, delta, stride_qs, stride_qh, stride_ds, stride_dh, stride_gs,
    stride_gh, stat_rows, index, begin, first, last, j, j_first, j_end, key_document, q_pos, q_doc,
    rule_values, table, table_q, table_k, q_rows, q_start, head_dim, qk_scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, FLAGS: tl.constexpr,
    RULES: tl.constexpr, MINUS: tl.constexpr, LOOKUP: tl.constexpr, SIMPLE: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Scores are held transposed: keys down, queries across."""
    d = tl.arange(0, HEAD_DIM)
    for n in range(first * GROUP, last * GROUP):
        q_row = tl.load(index + begin + n // GROUP) * BLOCK_M
        rows = q_row + tl.arange(0, BLOCK_M)
        number = n % GROUP
        head = number.to(tl.int64)  # times a stride it passes 2^31
        far = rows.to(tl.int64)
        inside = (rows < q_rows)[:, None] & (d < head_dim)[None, :]
        q_tile = tl.load(
            q + head * stride_qh + far[:, None] * stride_qs + d[None, :], mask=inside, other=0.0
        )
        stat = head * stat_rows + rows
        s = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        p = tl.exp2(s * qk_scale - tl.load(lse + stat)[None, :])
        if MASKED:
            ok = seen(
                j, j_end, key_document, tl.arange(0, BLOCK_M), q_row, q_rows, q_start, q_pos,
                q_doc, j_first, rule_values, table, table_q, table_k, FLAGS, RULES, MINUS, LOOKUP,
                False, SIMPLE,
            )  # fmt: skip
            p = tl.where(ok, p, 0.0)
        do_tile = tl.load(
            do + head * stride_dh + far[:, None] * stride_ds + d[None, :], mask=inside, other=0.0
        )
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
        ds = (p * (dp - tl.load(delta + stat)[None, :])).to(q_tile.dtype)
        dk = tl.dot(ds, q_tile, dk, input_precision=PRECISION)
        if FUSED:
            part = tl.dot(tl.trans(ds), k, input_precision=PRECISION)
            at = dq + head.to(tl.int64) * stride_gh + far[:, None] * stride_gs + d[None, :]
            tl.atomic_add(at, part, mask=inside, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["q_rows", "k_rows", "q_start", "k_start", "k_tiles", "stat_rows"])
def dkv_kernel(
    q, k, v, do, dq, dk, dv, lse, delta, pointers, middles, index, order, q_pos, q_doc, k_pos,
    k_doc, rule_values, table, table_q, table_k, q_rows, k_rows, q_start, k_start, q_heads,
    kv_heads, k_tiles, stat_rows, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks,
    stride_kh, stride_vb, stride_vs, stride_vh, stride_db, stride_ds, stride_dh, stride_gb,
    stride_gs, stride_gh, stride_ob, stride_os, stride_oh, head_dim, scale, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FLAGS: tl.constexpr,
    RULES: tl.constexpr, MINUS: tl.constexpr, LOOKUP: tl.constexpr, SIMPLE: tl.constexpr,
    GROUP: tl.constexpr, PER_HEAD: tl.constexpr, PRECISION: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """One program per (batch, key/value head, key tile); dk and dv share their strides.

    ``dq`` is read with ``FUSED`` alone: (B, Sq, Hq, D) fp32, 0 before and left without the scale.
    """
    pid = tl.program_id(0)
    kv_head = ((pid // k_tiles) % kv_heads).to(tl.int64)
    own = kv_head * PER_HEAD
    pointers += own * (k_tiles + 1)
    middles += own * k_tiles
    rule_values += own * (RULES + MINUS) * 8
    table += own * table_q * table_k
    tile = tl.load(order + own * k_tiles + pid % k_tiles)
    batch = (pid // k_tiles // kv_heads).to(tl.int64)

    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    far = columns.to(tl.int64)
    d = tl.arange(0, HEAD_DIM)
    inside = (columns < k_rows)[:, None] & (d < head_dim)[None, :]
    k_at = k + batch * stride_kb + kv_head * stride_kh
    v_at = v + batch * stride_vb + kv_head * stride_vh
    k_tile = tl.load(k_at + far[:, None] * stride_ks + d[None, :], mask=inside, other=0.0)
    v_tile = tl.load(v_at + far[:, None] * stride_vs + d[None, :], mask=inside, other=0.0)
    j, key_document = token(columns, k_rows, k_start, k_pos, k_doc, -1, SIMPLE)
    q_base = q + batch * stride_qb + kv_head * GROUP * stride_qh
    do_base = do + batch * stride_db + kv_head * GROUP * stride_dh
    dq_base = dq + batch * stride_gb + kv_head * GROUP * stride_gh
    stat = (batch * q_heads + kv_head * GROUP) * stat_rows

    dk_acc = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    begin = tl.load(pointers + tile)
    middle = tl.load(middles + tile)
    end = tl.load(pointers + tile + 1)
    dk_acc, dv_acc = _dkv_tiles(
        dk_acc, dv_acc, k_tile, v_tile, q_base, do_base, dq_base, lse + stat, delta + stat,
        stride_qs, stride_qh, stride_ds, stride_dh, stride_gs, stride_gh, stat_rows, index,
        begin, 0, middle - begin, j, k_start + tile * BLOCK_N, k_start + k_rows, key_document,
        q_pos, q_doc, rule_values, table, table_q, table_k, q_rows, q_start, head_dim, qk_scale,
        True, HEAD_DIM, BLOCK_M, FLAGS, RULES, MINUS, LOOKUP, SIMPLE, GROUP, PRECISION, FUSED,
    )  # fmt: skip
    dk_acc, dv_acc = _dkv_tiles(
        dk_acc, dv_acc, k_tile, v_tile, q_base, do_base, dq_base, lse + stat, delta + stat,
        stride_qs, stride_qh, stride_ds, stride_dh, stride_gs, stride_gh, stat_rows, index,
        begin, middle - begin, end - begin, j, k_start + tile * BLOCK_N, k_start + k_rows,
        key_document, q_pos, q_doc, rule_values, table, table_q, table_k, q_rows, q_start,
        head_dim, qk_scale, False, HEAD_DIM, BLOCK_M, FLAGS, RULES, MINUS, LOOKUP, SIMPLE, GROUP,
        PRECISION, FUSED,
    )  # fmt: skip
    at = batch * stride_ob + kv_head * stride_oh
    offset = at + far[:, None] * stride_os + d[None, :]
    tl.store(dk + offset, (dk_acc * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + offset, dv_acc.to(dv.dtype.element_ty), mask=inside)

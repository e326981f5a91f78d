"""The element predicate of a part, in the kernels' own language.

``encode`` writes a part's rules as a few integers; :func:`allowed` evaluates them on tiles of
query and key positions. Which conditions exist is a compile-time constant, their values are run
time arguments: another window width or another document layout never recompiles a kernel. The
functions here serve the plain kernels and the Gluon ones alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl

from msa_kernels.memo import by_identity
from msa_kernels.rules import FARTHEST, Part, Rule

WIDTH = 8
"""int32 parameters per rule: lo, hi, step, sinks, block, column length, first column, table."""

_LO, _HI, _STEP, _SINKS, _BLOCK, _COLUMNS, _TABLE = (1 << n for n in range(7))

LO, HI, STEP, SINKS, BLOCK, COLUMNS, TABLE = (
    tl.constexpr(f) for f in (_LO, _HI, _STEP, _SINKS, _BLOCK, _COLUMNS, _TABLE)
)


FAR = tl.constexpr(FARTHEST)
"""Positions are smaller, and so is what rules add to them."""


class Predicate(NamedTuple):
    """A part as a kernel takes it. ``flags`` holds 8 bits per rule, exclusions last."""

    flags: int
    rules: int
    minus: int
    params: np.ndarray
    """int32 (rules + minus, 8)."""
    table: np.ndarray
    """uint8 (query blocks, key blocks) membership of the one table rule, or one byte."""
    table_blocks: tuple[int, int]
    """Query and key blocks of the table."""


@by_identity(kept=64)
def encode(part: Part) -> Predicate:
    """``part`` in integers; :func:`msa_kernels.capabilities.few_rules` says of which parts."""
    every = (*part.rules, *part.minus)
    flags = 0
    params = np.zeros((len(every), WIDTH), np.int32)
    table, blocks = np.zeros((1, 1), np.uint8), (1, 1)
    for n, rule in enumerate(every):
        bits, params[n] = _fields(rule)
        flags |= bits << (8 * n)
        if rule.table is not None:
            table = _membership(rule.table[1])
            blocks = table.shape
    return Predicate(flags, len(part.rules), len(part.minus), params, table, blocks)


def _fields(rule: Rule) -> tuple[int, list[int]]:
    length, count = rule.columns or (1, 0)
    values = [
        (rule.lo, _LO), (rule.hi, _HI), (rule.step if rule.step > 1 else None, _STEP),
        (rule.sinks, _SINKS), (rule.block, _BLOCK),
    ]  # fmt: skip
    bits = sum(bit for value, bit in values if value is not None)
    bits |= (_COLUMNS if rule.columns else 0) | (_TABLE if rule.table else 0)
    size = rule.table[0] if rule.table else 1
    return bits, [*((v if v is not None else 0) for v, _ in values), length, length - count, size]


def _membership(rows: tuple[tuple[int, ...], ...]) -> np.ndarray:
    width = 1 + max((row[-1] for row in rows if row), default=0)
    table = np.zeros((max(1, len(rows)), width), np.uint8)
    for q, row in enumerate(rows):
        table[q, list(row)] = 1
    return table


@triton.jit
def token(rows, count, start, positions, documents, ABSENT: tl.constexpr, SIMPLE: tl.constexpr):
    """Position and document of rows; ``ABSENT`` (never equal on both sides) outside the tensor."""
    inside = rows < count
    if SIMPLE:
        position = start + rows
        document = tl.where(inside, 0, ABSENT)
    else:
        position = tl.load(positions + rows, mask=inside, other=0)
        document = tl.load(documents + rows, mask=inside, other=-1)
        document = tl.where(document < 0, ABSENT, document)
    return position, document


@triton.jit
def _rule(
    row, row_end, column, base, count, row_first, column_first, at, table, table_q, table_k,
    FLAGS: tl.constexpr, LOOKUP: tl.constexpr, QUERIES_DOWN: tl.constexpr,
):  # fmt: skip
    BEGINS: tl.constexpr = HI if QUERIES_DOWN else LO
    here = row - base
    if QUERIES_DOWN:
        last = here * 0 + count
    else:
        last = tl.where((row >= 0) & (row < row_end), count, -FAR)
    first = here
    if LO & FLAGS:
        lo = tl.load(at)
        if QUERIES_DOWN:
            last = tl.minimum(last, here - lo + 1)
        else:
            first = here + lo
    if HI & FLAGS:
        hi = tl.load(at + 1)
        if QUERIES_DOWN:
            first = here - hi + 1
        else:
            last = tl.minimum(last, here + hi)
    if BLOCK & FLAGS:
        size = tl.load(at + 4)
        # Division rounds towards zero, and queries may stand before the first key.
        start = tl.where(row < 0, (row + 1) // size - 1, row // size) * size - base
        first = tl.maximum(first, start) if BEGINS & FLAGS else start
        last = tl.minimum(last, start + size)
    if SINKS & FLAGS:
        sinks = tl.load(at + 3)
        if QUERIES_DOWN:
            last = tl.minimum(last, sinks - base)
        else:
            last = tl.where(row < sinks, last, -FAR)
    if (TABLE & FLAGS) and LOOKUP == 1:
        if QUERIES_DOWN:
            i, j = row_first, column_first
        else:
            i, j = column_first, row_first
        last = tl.where(_member(i, j, at, table, table_q, table_k), last, -FAR)
    ok = column < last
    if (BEGINS & FLAGS) or (BLOCK & FLAGS):
        ok = ok & (column >= first)
    if STEP & FLAGS:
        ok = ok & ((here - column) % tl.load(at + 2) == 0)
    if QUERIES_DOWN:
        i, j = row, base + column
    else:
        i, j = base + column, row
    if COLUMNS & FLAGS:
        ok = ok & (j % tl.load(at + 5) >= tl.load(at + 6))
    if (TABLE & FLAGS) and LOOKUP == 2:
        ok = ok & _member(i, j, at, table, table_q, table_k)
    return ok


@triton.jit
def _member(i, j, at, table, table_q, table_k):
    size = tl.load(at + 7)
    q, k = i // size, j // size
    # Division rounds towards zero: queries just before the first key would be in block 0.
    inside = (i >= 0) & (q < table_q) & (k < table_k)
    return tl.load(table + q * table_k + k, mask=inside, other=0) != 0


@triton.jit
def allowed(
    row, row_end, column, base, count, row_first, column_first, rule_values, table, table_q,
    table_k, FLAGS: tl.constexpr, RULES: tl.constexpr, MINUS: tl.constexpr, LOOKUP: tl.constexpr,
    QUERIES_DOWN: tl.constexpr,
):  # fmt: skip
    """Which of a tile's pairs the rules allow: rows down, columns across, one side's positions
    each, queries down or keys down.

    ``row`` (rows, 1) holds positions, below ``row_end`` for rows that there are; those of the
    columns are ``base + column`` with ``column`` (1, columns) below ``count``. What a rule allows
    a row is a stretch of columns wherever that can be: its ends are made once a row, and a pair
    costs one comparison an end. ``row_first`` and ``column_first`` are the tile's first positions.
    ``LOOKUP`` says how block-list membership is decided: 0 by the tile lists alone, 1 once for the
    tile, 2 for every pair.
    """
    ok = _rule(
        row, row_end, column, base, count, row_first, column_first, rule_values, table, table_q,
        table_k, FLAGS & 255, LOOKUP, QUERIES_DOWN,
    )  # fmt: skip
    for n in tl.static_range(1, RULES):
        ok = ok | _rule(
            row, row_end, column, base, count, row_first, column_first, rule_values + 8 * n, table,
            table_q, table_k, (FLAGS >> (8 * n)) & 255, LOOKUP, QUERIES_DOWN,
        )  # fmt: skip
    for n in tl.static_range(RULES, RULES + MINUS):
        cut = _rule(
            row, row_end, column, base, count, row_first, column_first, rule_values + 8 * n, table,
            table_q, table_k, (FLAGS >> (8 * n)) & 255, LOOKUP, QUERIES_DOWN,
        )  # fmt: skip
        ok = ok & (cut == 0)
    return ok


@triton.jit
def seen(
    row, row_end, row_document, column, at, count, start, positions, documents, row_first,
    rule_values, table, table_q, table_k, FLAGS: tl.constexpr, RULES: tl.constexpr,
    MINUS: tl.constexpr, LOOKUP: tl.constexpr, QUERIES_DOWN: tl.constexpr, SIMPLE: tl.constexpr,
):  # fmt: skip
    """Pairs of a tile that attend: rows down, of positions ``row`` and documents
    ``row_document``; across, the tokens ``at + column`` of ``count``, ``column`` counting from 0.

    Where positions are simple, rows that there are have positions below ``row_end``.
    """
    if SIMPLE:
        ok = allowed(
            row[:, None], row_end, column[None, :], start + at, count - at, row_first, start + at,
            rule_values, table, table_q, table_k, FLAGS, RULES, MINUS, LOOKUP, QUERIES_DOWN,
        )  # fmt: skip
    else:
        ABSENT: tl.constexpr = -1 if QUERIES_DOWN else -2
        position, document = token(
            at + column, count, start, positions, documents, ABSENT, SIMPLE
        )  # fmt: skip
        if QUERIES_DOWN:
            document = tl.where(position < 0, ABSENT, document)  # no key is before the first
        ok = allowed(
            row[:, None], FAR, position[None, :], 0, FAR, row_first, start + at, rule_values,
            table, table_q, table_k, FLAGS, RULES, MINUS, LOOKUP, QUERIES_DOWN,
        )  # fmt: skip
        ok = ok & (row_document[:, None] == document[None, :])
    return ok

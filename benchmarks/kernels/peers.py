"""Attention of other libraries, behind one signature: ``make(case) -> attend(q, k, v) -> out``.

Tensors are (B, S, H, D). A peer that cannot run a case raises :class:`NoWay` with the reason.
Building masks and plans is not timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from cases import Case
from msa_kernels.blocks import Runs, TileLists, build
from msa_kernels.merge import merge
from msa_kernels.rules import Part, any_allows

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class NoWay(Exception):
    """The peer cannot run this case."""


def ours(case: Case, backend: str) -> Attend:
    from msa_kernels.attention import msa_attention

    return functools.partial(msa_attention, pattern=case.pattern, backend=backend)


def sdpa(case: Case, name: str) -> Attend:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if case.name != "causal":
        raise NoWay("dense only")
    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[name]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            heads = (t.transpose(1, 2) for t in (q, k, v))
            return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(
                1, 2
            )

    return attend


def flex(case: Case, options: dict | None = None) -> Attend:
    """torch FlexAttention, compiled (Triton); block masks by its constructor from our lists."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    groups = [case.pattern.for_group(g) for g in range(case.kv_heads)]
    distinct = list(dict.fromkeys(groups))
    masks = [_flex_lists(Part(1, p.rules()), case.sequence) for p in distinct]
    ratio = case.q_heads // case.kv_heads
    if len(distinct) == 1:
        stacked = [torch.stack([m])[None] for m in masks[0]]
    else:
        order = [distinct.index(g) for g in groups for _ in range(ratio)]
        stacked = [torch.stack([masks[o][n] for o in order])[None] for n in range(8)]
    rules = distinct[0].rules()
    if any(rule.table is not None for rule in rules):
        rules = tuple(rule for rule in rules if rule.table is None) or None
        if rules is not None:
            if case.name != "fixed":
                raise NoWay("no mask written for this union")

            def allowed(b, h, i, j):
                return (j <= i) & ((i - j < 1024) | ((j // 128) % 8 == 7))
        else:

            def allowed(b, h, i, j):
                return j <= i
    else:

        def allowed(b, h, i, j):
            return any_allows(rules, i, j)

    mask = BlockMask(
        (case.sequence, case.sequence), *stacked, BLOCK_SIZE=(128, 128), mask_mod=allowed
    )
    run = torch.compile(flex_attention, dynamic=False)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = (t.transpose(1, 2) for t in (q, k, v))
        return run(*heads, block_mask=mask, enable_gqa=True, kernel_options=options).transpose(
            1, 2
        )

    return attend


FLEX_TUNED = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_stages": 2, "fwd_num_warps": 8,
              "fwd_USE_TMA": True}  # fmt: skip


def _flex_lists(part: Part, sequence: int) -> list[torch.Tensor]:
    lists = build(part, Runs.whole(sequence), Runs.whole(sequence), 128, 128)
    out = []
    for direction in (lists, lists.transposed):
        for full in (False, True):
            out += _padded(direction.select(full))
    return out


def _padded(lists: TileLists) -> list[torch.Tensor]:
    count = np.diff(lists.ptr).astype(np.int32)
    index = np.zeros((lists.q_tiles, -(-lists.k_rows // lists.block_k)), np.int32)
    owner = np.repeat(np.arange(lists.q_tiles), count)
    index[owner, np.arange(len(owner)) - lists.ptr[owner]] = lists.index
    return [torch.from_numpy(count).cuda(), torch.from_numpy(index).cuda()]


def fa4(case: Case) -> Attend:
    """flash-attn-4 dense kernels: causal and windows; dilation by the reshape anyone would do."""
    from flash_attn.cute import flash_attn_func

    if case.name == "causal":
        return lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0]
    if case.name.startswith("window") and "_g" not in case.name:
        left = case.pattern.window - 1
        return lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=(left, 0))[0]
    raise NoWay("dense kernels take causal and windows only")


def composed(case: Case) -> Attend:
    """flash-attn-4 window and block calls, folded heads, exact merge: the ten-line composition."""
    from flash_attn.cute import flash_attn_func

    def dense(q, k, v, **more):
        return flash_attn_func(q, k, v, causal=True, return_lse=True, **more)

    def folded(q, k, v, rate):
        out, lse = dense(*(_fold(t, rate) for t in (q, k, v)))
        return out.reshape(q.shape), _unfold_rows(lse, rate)

    if case.name == "dilated4":
        return lambda q, k, v: folded(q, k, v, 4)[0]
    if case.name == "strided":

        def strided(q, k, v):
            near = dense(q, k, v, window_size=(127, 0))
            # Columns without the query's own: each folded query sees the folded keys before it.
            qf, kf, vf = (_fold(t, 128) for t in (q, k, v))
            out, lse = dense(qf[:, 1:], kf[:, :-1], vf[:, :-1])
            out = torch.cat([torch.zeros_like(qf[:, :1]), out], 1).reshape(q.shape)
            first = lse.new_full((*lse.shape[:2], 1), float("-inf"))
            lse = _unfold_rows(torch.cat([first, lse], 2), 128)
            return merge((near, (out, lse)), q.dtype)[0]

        return strided
    if case.name == "dilated4_diag":

        def dilated_diag(q, k, v):
            far, far_log = folded(q, k, v, 4)
            block, block_log = _blocks(dense, q, k, v, 128)
            folds = [_fold(t, 4) for t in (q, k, v)]
            both, both_log = _blocks(dense, *folds, 32)
            both, both_log = both.reshape(q.shape), _unfold_rows(both_log, 4)
            # The keys in both parts were counted twice: take one of them away.
            top = torch.maximum(far_log, block_log).detach()
            weight = [torch.exp(log - top) for log in (far_log, block_log, both_log)]
            weight = [w.transpose(1, 2).unsqueeze(-1) for w in weight]
            total = weight[0] + weight[1] - weight[2]
            return ((weight[0] * far + weight[1] * block - weight[2] * both) / total).to(q.dtype)

        return dilated_diag
    raise NoWay("nothing to compose")


def _fold(t: torch.Tensor, rate: int) -> torch.Tensor:
    batch, rows, heads, dim = t.shape
    return t.reshape(batch, rows // rate, rate * heads, dim)


def _unfold_rows(lse: torch.Tensor, rate: int) -> torch.Tensor:
    return lse.unflatten(1, (rate, -1)).permute(0, 2, 3, 1).flatten(2, 3)


def _blocks(dense, q, k, v, size):
    batch, heads = q.shape[0], q.shape[2]
    out, lse = dense(*(t.reshape(-1, size, *t.shape[2:]) for t in (q, k, v)))
    lse = lse.reshape(batch, -1, heads, size).transpose(1, 2).flatten(2, 3)
    return out.reshape(q.shape), lse


def cudnn_flex(case: Case) -> Attend:
    """cudnn-frontend's interval-mask kernels; intervals from the rows of the pattern's rules."""
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    patterns = [case.pattern.for_group(g) for g in range(case.kv_heads)]
    if any(rule.step > 1 for p in patterns for rule in p.rules()):
        raise NoWay("a few key intervals per query")
    distinct = list(dict.fromkeys(patterns))
    made = {p: _intervals(p, case.sequence) for p in distinct}
    width = max(m.shape[0] for m in made.values())
    made = {p: np.pad(m, ((0, width - len(m)), (0, 0)), mode="edge") for p, m in made.items()}
    ratio = case.q_heads // case.kv_heads
    heads = patterns if len(distinct) > 1 else patterns[:1]
    table = np.stack([made[p] for p in heads for _ in range(ratio if len(distinct) > 1 else 1)])
    ends = torch.from_numpy(np.tile(table, (1, 1, case.batch))).int().cuda().contiguous()
    q, k, v = case.tensors()[:3]
    plan = create_mask_plan(ends, q, k, v, build_backward=True)
    return lambda q, k, v: flex_attn_func(q, k, v, mask_plan=plan)


def _intervals(pattern, rows: int) -> np.ndarray:
    """(odd, rows): visible keys as [0, F0) and then [F1, F2), [F3, F4), ..."""
    i = np.arange(rows)
    spans: list[tuple[np.ndarray, np.ndarray]] = []
    for rule in pattern.rules():
        low = np.zeros(rows, int) if rule.hi is None else np.maximum(0, i - rule.hi + 1)
        high = i + 1 - (rule.lo or 0)
        if rule.sinks is not None:
            high = np.minimum(high, rule.sinks)
        if rule.table is None:
            spans.append((low, np.maximum(low, high)))
            continue
        size, table = rule.table
        most = max(len(row) for row in table)
        blocks = np.full((len(table), most), -1)
        for q, row in enumerate(table):
            blocks[q, : len(row)] = row
        for n in range(most):
            block = blocks[i // size, n]
            start = np.where(block < 0, 0, block * size)
            stop = np.where(block < 0, 0, np.minimum((block + 1) * size, high))
            spans.append((start, np.maximum(start, stop)))
    start, stop = (np.stack(side) for side in zip(*spans, strict=True))
    order = np.argsort(start, 0, kind="stable")
    start, stop = np.take_along_axis(start, order, 0), np.take_along_axis(stop, order, 0)
    # Overlaps are cut off the later interval, so that ends ascend.
    reach = np.maximum.accumulate(stop, 0)
    start[1:] = np.maximum(start[1:], reach[:-1])
    stop = np.maximum(stop, start)
    ends = np.empty((2 * len(start) + 1, rows), int)
    ends[0], ends[1::2], ends[2::2] = 0, start, stop
    return ends


PEERS: dict[str, Callable[[Case], Attend]] = {
    "auto": functools.partial(ours, backend="auto"),
    "triton": functools.partial(ours, backend="triton"),
    "triton-fused": functools.partial(ours, backend="triton-fused"),
    "triton-fp8": functools.partial(ours, backend="triton-fp8"),
    "flex": flex,
    "flex-tuned": functools.partial(flex, options=FLEX_TUNED),
    "fa4": fa4,
    "fa4-composed": composed,
    "cudnn-flex": cudnn_flex,
    "sdpa-cudnn": functools.partial(sdpa, name="cudnn"),
    "sdpa-flash": functools.partial(sdpa, name="flash"),
}

"""Plain context parallelism as anyone would write it, on flash-attn-4: what ours is timed against.

Each method takes a rank's q, k, v (B, rows, heads, D) and returns its rows of the output. Without
flash-attn-4 (on a CPU) the attention inside is dense PyTorch, to see that the methods run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    name: str
    layout: str
    """contiguous or zigzag."""
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]


def attend(device: torch.device) -> Attend:
    """Causal attention from the bottom right, with or without a window."""
    if device.type == "cuda":
        from flash_attn.cute.interface import flash_attn_func

        def fast(q: Any, k: Any, v: Any, window: int | None) -> torch.Tensor:
            size = (None, None) if window is None else (window - 1, 0)
            return flash_attn_func(q, k, v, causal=True, window_size=size)[0]

        return fast
    return _dense


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> torch.Tensor:  # fmt: skip
    behind = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1])
    distance = behind - torch.arange(k.shape[1])
    seen = (distance >= 0) & (distance < (window or k.shape[1] + 1))
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2).transpose(1, 2) for t in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen)
    return out.transpose(1, 2)


class _Halo(torch.autograd.Function):
    """The keys and values before this rank's own: the last rows of the rank before it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, halo: int) -> torch.Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        ctx.halo = halo
        before = torch.empty_like(rows[:, :, -halo:])
        _pass(rows[:, :, -halo:].contiguous(), before, rank + 1 < ranks, rank > 0, 1)
        return rows.clone() if rank == 0 else torch.cat([before, rows], 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        lead = ctx.halo if rank else 0
        after = torch.empty_like(grad[:, :, : ctx.halo])
        _pass(grad[:, :, : ctx.halo].contiguous(), after, rank > 0, rank + 1 < ranks, -1)
        mine = grad[:, :, lead:].clone()
        if rank + 1 < ranks:
            mine[:, :, -ctx.halo :] += after
        return mine, None


def _pass(
    send: torch.Tensor, receive: torch.Tensor, sends: bool, receives: bool, step: int
) -> None:  # fmt: skip
    rank = dist.get_rank()
    calls = [dist.P2POp(dist.isend, send, rank + step)] if sends else []
    calls += [dist.P2POp(dist.irecv, receive, rank - step)] if receives else []
    for work in dist.batch_isend_irecv(calls) if calls else []:
        work.wait()


class _Gather(torch.autograd.Function):
    """All keys and values of zigzag chunks, in the order of the sequence."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ranks = dist.get_world_size()
        everyone = [torch.empty_like(rows) for _ in range(ranks)]
        dist.all_gather(everyone, rows.contiguous())
        first, last = zip(*(some.chunk(2, 2) for some in everyone), strict=True)
        return torch.cat([*first, *reversed(last)], 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ranks = dist.get_world_size()
        chunks = grad.chunk(2 * ranks, 2)
        each = [torch.cat([chunks[r], chunks[-1 - r]], 2) for r in range(ranks)]
        if grad.is_cuda:
            mine = torch.empty_like(each[0])
            dist.reduce_scatter(mine, each)
            return mine
        whole = torch.stack(each)
        dist.all_reduce(whole)  # gloo reduces to all only
        return whole[dist.get_rank()]


class _Swap(torch.autograd.Function):
    """Tokens of all ranks for some of the heads, or back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, to_heads: bool) -> torch.Tensor:
        ctx.to_heads = to_heads
        return _swap(rows, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _swap(grad, not ctx.to_heads), None


def _swap(rows: torch.Tensor, to_heads: bool) -> torch.Tensor:
    ranks = dist.get_world_size()
    pieces = torch.stack(rows.chunk(ranks, 2 if to_heads else 1))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return torch.cat(list(received), 1 if to_heads else 2)


def peers(device: torch.device, window: int | None) -> list[Peer]:
    """The methods for a causal pattern, or for a causal window."""
    call = attend(device)

    def halo(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: int | None) -> torch.Tensor:
        assert w is not None
        k, v = _Halo.apply(torch.stack([k, v]), min(-(-(w - 1) // 8) * 8, k.shape[1]))
        return call(q, k, v, w)

    def gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: int | None) -> torch.Tensor:
        k, v = _Gather.apply(torch.stack([k, v]))
        rank, size = dist.get_rank(), q.shape[1] // 2
        chunks = 2 * dist.get_world_size()
        ends = ((rank + 1) * size, (chunks - rank) * size)
        each = zip(q.chunk(2, 1), ends, strict=True)
        return torch.cat([call(some, k[:, :end], v[:, :end], w) for some, end in each], 1)

    def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: int | None) -> torch.Tensor:
        q, k, v = (_Swap.apply(t, True) for t in (q, k, v))
        return _Swap.apply(call(q, k, v, w), False)

    split = Peer("ulysses", "contiguous", ulysses)
    if window is None:
        return [Peer("gather, zigzag", "zigzag", gather), split]
    return [Peer("halo, contiguous", "contiguous", halo), split]

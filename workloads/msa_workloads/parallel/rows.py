"""Moving rows of a sequence between tensor ranks, and reading a rank's own part of a parameter.

Outside attention and MLP each tensor rank holds an equal slice of the rows (tokens) of every
activation. Tensors are plain ones of shape (batch, rows, size); rows of the ranks follow each
other, and the last ranks' may be padding where the rows do not divide.

Functional collectives do the work, so that ``torch.compile`` and recomputation policies see them;
by their operators, whose names outlive those of the functions around them.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from msa_workloads.parallel.adjoint import linear


def gather_rows(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, n, H) of every rank -> (B, ranks * n, H) on all; gradients are summed over the ranks."""
    return linear(mine, partial(_gathered, group=group), partial(_scattered, group=group))


def scatter_rows(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of every rank's (B, rows, H), of which each rank keeps its slice (B, n, H).

    Rows are padded with zeros to a multiple of the ranks first.
    """
    rows = pad_rows(whole, dist.get_world_size(group))
    return linear(rows, partial(_scattered, group=group), partial(_gathered, group=group))


def all_gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's ``mine``, one after the other along dim 0. Without gradients of its own."""
    ranks, name = dist.get_world_size(group), group.group_name
    made = torch.ops._c10d_functional.all_gather_into_tensor(mine.contiguous(), ranks, name)
    return torch.ops._c10d_functional.wait_tensor(made)


def reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice along dim 0 of the sum over ranks. Without gradients of its own."""
    ranks, name = dist.get_world_size(group), group.group_name
    made = torch.ops._c10d_functional.reduce_scatter_tensor(whole.contiguous(), "sum", ranks, name)
    return torch.ops._c10d_functional.wait_tensor(made)


def all_reduce(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks. Without gradients of its own."""
    made = torch.ops._c10d_functional.all_reduce(part.contiguous(), "sum", group.group_name)
    return torch.ops._c10d_functional.wait_tensor(made)


def pad_rows(rows: Tensor, ranks: int, value: float = 0) -> Tensor:
    """``rows`` with dim 1 padded at its end to a multiple of ``ranks``."""
    missing = -rows.shape[1] % ranks
    if not missing:
        return rows
    return F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, missing), value=value)


def check_ids(name: str, ids: Tensor, size: int, allowed: Tensor | bool = False) -> None:
    """RuntimeError for ids outside a vocabulary of ``size``, of which no rank has an entry.

    On a GPU the device ends the process when it comes to it, as where no vocabulary is split.
    """
    known = ((ids >= 0) & (ids < size)) | allowed
    torch._assert_async(known.all(), f"{name}: found one outside the vocabulary, 0 to {size - 1}")


def own_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter that is sharded or replicated over tensor ranks.

    Of a replicated one it is the whole, and the gradients that the ranks find for it, each from
    its own rows or heads, are summed in fp32. A plain tensor is returned as it is.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter.to_local()
    if isinstance(parameter.placements[0], Shard):
        return local
    group = parameter.device_mesh.get_group()
    return linear(local, lambda part: part.view_as(part), partial(_summed, group=group))


def part_bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """First and last index (exclusive) of ``rank``'s part of ``size`` items, as DTensor cuts."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


def _gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks, (batch, rows) = dist.get_world_size(group), mine.shape[:2]
    pieces = all_gather(mine, group)
    if batch == 1:
        return pieces.view(1, ranks * rows, *mine.shape[2:])
    return pieces.unflatten(0, (ranks, batch)).transpose(0, 1).flatten(1, 2)


def _scattered(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks, batch = dist.get_world_size(group), whole.shape[0]
    pieces = whole if batch == 1 else whole.unflatten(1, (ranks, -1)).transpose(0, 1)
    flat = pieces.reshape(ranks * batch, -1, *whole.shape[2:])
    return reduce_scatter(flat, group)


def _summed(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    wide = grad.float() if grad.dtype.itemsize < 4 else grad
    return all_reduce(wide, group).to(grad.dtype)

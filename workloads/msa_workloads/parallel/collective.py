"""Small collectives over all ranks, in which ranks cannot come to disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def on_rank_zero(act: Callable[[], T]) -> T:
    """Result of ``act`` on rank 0, on every rank; its error is raised on every rank alike."""
    box: list = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = act()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


def sum_over_ranks(*values: int | float, device: torch.device) -> list[int | float]:
    """Each value summed over all ranks: exact for integers (modulo 2^64), fp64 for floats."""
    exact = all(isinstance(value, int) for value in values)
    packed = torch.tensor(values, dtype=torch.int64 if exact else torch.float64, device=device)
    dist.all_reduce(packed)
    return packed.tolist()

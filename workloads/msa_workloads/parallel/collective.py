"""Small collectives over all ranks, in which ranks cannot come to disagree."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

log = logging.getLogger(__name__)


def on_rank_zero(act: Callable[[], T]) -> T:
    """Result of ``act`` on rank 0, on every rank; its error is raised on every rank alike.

    An error that cannot travel is a RuntimeError with its type and text, on rank 0 too.
    """
    result: T | None = None
    error: Exception | None = None
    box: list = [None]
    if dist.get_rank() == 0:
        try:
            result = act()
            box[0] = pickle.dumps((result, None))
        except Exception as problem:
            error = _travelling(problem)
            box[0] = pickle.dumps((None, error))
    dist.broadcast_object_list(box, src=0)
    if dist.get_rank() != 0:
        result, error = pickle.loads(box[0])
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _travelling(error: Exception) -> Exception:
    """The error, if it survives its way to another process."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception as problem:
        log.debug("%r cannot travel between ranks: %s", error, problem)
    made = RuntimeError(f"{type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def sum_over_ranks(*values: int | float, device: torch.device) -> list[int | float]:
    """Each value summed over all ranks: exact for integers (modulo 2^64), fp64 for floats."""
    exact = all(isinstance(value, int) for value in values)
    packed = torch.tensor(values, dtype=torch.int64 if exact else torch.float64, device=device)
    dist.all_reduce(packed)
    return packed.tolist()

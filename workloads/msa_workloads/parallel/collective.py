"""Small collectives over all ranks, in which ranks cannot come to disagree."""

from __future__ import annotations

import itertools
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Longest pause between two looks at whether a rank is there yet."""

PATIENCE_SECONDS = 24 * 3600.0
"""Ranks wait so long for what one of them does alone: indexing a corpus or fetching weights takes
longer than any collective may. A rank that is gone is noticed by :mod:`.watch`."""

_numbers = itertools.count()
"""Of the waits of this process: all ranks come to the same ones in the same order."""


def on_rank_zero(act: Callable[[], T]) -> T:
    """Result of ``act`` on rank 0, on every rank; its error is raised on every rank alike.

    It may take longer than a collective's timeout. An error that cannot travel is a RuntimeError
    with its type and text, on rank 0 too.
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
    _wait_for(1 if dist.get_rank() == 0 else 0, 1)
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


def on_all_ranks(mine: T) -> list[T]:
    """What every rank gives, by rank, on all of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def meet() -> None:
    """Return when every rank is here, however much later than the others one of them comes."""
    _wait_for(1, dist.get_world_size())


def _wait_for(here: int, wanted: int) -> None:
    """Count ``here`` of the ``wanted`` arrivals, and wait for the others: in the group's store,
    where nothing times out, and by looks, which hold up nobody else's use of it."""
    if dist.get_world_size() == 1:
        return
    store: Any = dist.distributed_c10d._get_default_store()
    key, pause = f"arrived/{next(_numbers)}", 0.001
    end = time.monotonic() + PATIENCE_SECONDS
    arrived = store.add(key, here)
    while arrived < wanted:
        if time.monotonic() > end:
            raise RuntimeError(f"{wanted - arrived} rank(s) did not come within a day")
        time.sleep(pause)
        pause = min(2 * pause, LOOK_SECONDS)
        arrived = int(store.get(key))


def sum_over_ranks(*values: int | float, device: torch.device) -> list[int | float]:
    """Each value summed over all ranks: exact for integers (modulo 2^64), fp64 for floats."""
    exact = all(isinstance(value, int) for value in values)
    packed = torch.tensor(values, dtype=torch.int64 if exact else torch.float64, device=device)
    dist.all_reduce(packed)
    return packed.tolist()

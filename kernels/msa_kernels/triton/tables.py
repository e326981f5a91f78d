"""Tuning: tile sizes, warps and stages of the plain kernels, from a data file per GPU.

``tuning/sm_*.json`` are made by ``benchmarks/kernels/tune.py``: for each kernel, dtype and padded
head size a few candidates, the fastest measured first, each with the shared memory it takes. The
first that fits the device is used, so that a smaller card of the same capability runs too.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

TABLES = Path(__file__).with_name("tuning")
LEAST = 80
"""The table of this capability serves whatever has none of its own or below."""


class Tile(NamedTuple):
    """What one kernel is compiled with."""

    query: int
    key: int
    warps: int
    stages: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Tile:
        return cls(row["query_tile"], row["key_tile"], row["warps"], row["stages"])


SMALLEST = Tile(32, 32, 4, 1)
"""For Triton's interpreter, where size is time."""


def candidates(capability: int, kernel: str, dtype: torch.dtype, width: int) -> list[dict]:
    """Rows of the table of the nearest capability that is not newer."""
    tables = sorted(int(path.stem.removeprefix("sm_")) for path in TABLES.glob("sm_*.json"))
    nearest = max((t for t in tables if t <= max(capability, LEAST)), default=tables[0])
    kind = "float32" if dtype == torch.float32 else "half"
    return _table(nearest)["plain"][kernel][kind][str(width)]


@functools.lru_cache(maxsize=8)
def _table(capability: int) -> dict[str, Any]:
    return json.loads((TABLES / f"sm_{capability}.json").read_text())


@functools.lru_cache(maxsize=256)
def tile(device: torch.device, kernel: str, dtype: torch.dtype, width: int) -> Tile:
    """The fastest candidate that fits ``device``; raises ValueError where none does.

    ``kernel`` is "forward", "dq" or "dkv", ``width`` the padded head size: 64, 128 or 256.
    """
    limit = shared_memory(device)
    major, minor = torch.cuda.get_device_capability(device) if torch.version.cuda else (0, 0)
    rows = candidates(10 * major + minor, kernel, dtype, width)
    for row in rows:
        if row["shared"] <= limit:
            if row is not rows[0]:
                logger.info("%s of head size %d takes %s: %d bytes of shared memory here", kernel,
                            width, Tile.of(row), limit)  # fmt: skip
            return Tile.of(row)
    least = min(row["shared"] for row in rows)
    raise ValueError(
        f"head size {width} in {dtype} needs at least {least} bytes of shared memory in the "
        f"{kernel} kernel, this device has {limit}; nearest: a head size up to {width // 2}, or "
        "backend='torch'"
    )


@functools.lru_cache(maxsize=64)
def anywhere(kernel: str, dtype: torch.dtype, width: int) -> Tile:
    """For lists that are made where there is no device, for one that is not known."""
    return Tile.of(candidates(LEAST, kernel, dtype, width)[0])


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use on ``device``."""
    found = torch.cuda.get_device_properties(device)
    return getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)

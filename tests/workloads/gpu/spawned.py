"""Ranks as new processes: on a GPU machine imports may start threads, and then nothing forks."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

sys.path.insert(0, str(Path(__file__).parents[1]))
from forked_ranks import free_port, results


def needs(ranks: int) -> None:
    """Skip the test, visibly, where there are fewer GPUs."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")


def on_gpus(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """The function's result on every rank; raises the first error, and ends the other ranks."""
    with tempfile.TemporaryDirectory() as folder:
        given = (function, ranks, free_port(), folder, arguments)
        start_processes(_rank, given, nprocs=ranks, start_method="spawn")
        return results(Path(folder), ranks)


def _rank(
    rank: int, function: Callable[..., Any], ranks: int, port: int, folder: str,
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), RANK=str(rank),
        LOCAL_RANK=str(rank),
    )  # fmt: skip
    result = function(*arguments)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()

"""How Ray workers form their process group.

On a cluster Ray's own way: a TCP store at rank 0. That store listens on every interface of the
machine and believes whoever connects, so the workers of a local run meet through a file in the
run's private folder instead, and gloo is told to use loopback only.
"""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from msa_workloads.parallel.mesh import COLLECTIVE_TIMEOUT, process_group_backend


def torch_config(device: str, folder: Path | None) -> TorchConfig:
    """Ray Train's torch setup: over ``folder`` for a local run, over TCP where it is None."""
    backend = process_group_backend(device)
    timeout = int(COLLECTIVE_TIMEOUT.total_seconds())
    if folder is None:
        return TorchConfig(backend=backend, timeout_s=timeout)
    return LocalTorchConfig(backend=backend, timeout_s=timeout, folder=str(folder))


@dataclass
class LocalTorchConfig(TorchConfig):
    """Workers of one machine that meet in ``folder``."""

    folder: str = ""

    @property
    def backend_cls(self) -> Any:
        return LocalBackend


class LocalBackend(Backend):
    """Forms the process group through a file; every attempt has a file of its own."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        path = f"{backend_config.folder}/rendezvous-{uuid.uuid4().hex}"
        size = len(worker_group)
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, _join, path, backend_config.backend, rank, size
                )
                for rank in range(size)
            ]
        )


def _join(path: str, backend: str, rank: int, size: int) -> None:
    os.environ["LOCAL_RANK"] = str(ray.train.get_context().get_local_rank())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        backend,
        store=dist.FileStore(path, size),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
    )

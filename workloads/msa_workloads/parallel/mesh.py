"""The device mesh and this rank's place in it.

Naming: an "axis" belongs to the mesh, a "dim" to a tensor. Axes are ordered from the slowest link
to the fastest, so that ranks next to each other share a machine: ``dp_replicate``, ``dp_shard``,
``cp``, ``tp``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from msa_workloads.runspec import MeshSpec, RunSpec

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A collective that waits longer has lost a peer; above any step or checkpoint seen so far."""


class MeshAxisName(StrEnum):
    """Names of mesh axes, used in process groups and in error messages alike."""

    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"


class UnsupportedError(ValueError):
    """The RunSpec asks for what this release does not do; the message names what works."""


@dataclass(frozen=True)
class World:
    """This process among all ranks."""

    rank: int
    size: int
    local_rank: int
    device: torch.device


def process_group_backend(device: str) -> str:
    """``cpu:gloo,cuda:nccl`` on GPUs where NCCL is built in, plain gloo otherwise.

    Checkpoints and object broadcasts need a CPU backend beside NCCL, and a build without NCCL
    refuses the pair even for CPU tensors.
    """
    return "cpu:gloo,cuda:nccl" if device == "gpu" and dist.is_nccl_available() else "gloo"


def join_world(device: str) -> World:
    """Join the process group of the environment (torchrun, Ray) or form one of a single rank.

    A group that is initialised already is used as it is.
    """
    if device == "gpu" and not torch.cuda.is_available():
        raise UnsupportedError(
            "device: gpu was asked for, but torch finds no GPU here; use device: cpu, or start "
            "the workers on GPU nodes"
        )
    if not dist.is_initialized():
        backend = process_group_backend(device)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            store = dist.HashStore()
            dist.init_process_group(
                backend, store=store, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
            )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "gpu":
        # Ray narrows CUDA_VISIBLE_DEVICES to the worker's own GPU; torchrun does not.
        place = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    else:
        place = torch.device("cpu")
    return World(dist.get_rank(), dist.get_world_size(), local_rank, place)


def check_supported(spec: RunSpec) -> None:
    """Raise :class:`UnsupportedError` for what a RunSpec can say and this release cannot do."""
    for field, axis in (("context", MeshAxisName.CP), ("tensor", MeshAxisName.TP)):
        degree = getattr(spec.mesh, field)
        if degree != 1:
            raise UnsupportedError(
                f"mesh.{field}: found {degree}, allowed: 1 ({axis} parallelism is not part of "
                "this release; split over data_shard or data_replicate instead)"
            )
    memory = spec.memory
    if memory.checkpointing == "selective":
        raise UnsupportedError(
            "memory.checkpointing: found 'selective', allowed: none, full (which recomputes each "
            "layer whole and saves more)"
        )
    for field in ("offload_checkpoints", "offload_optimizer", "mlp_chunk"):
        if value := getattr(memory, field):
            raise UnsupportedError(
                f"memory.{field}: found {value!r}, allowed: {type(value)()!r} (not part of this "
                "release; memory.checkpointing: full and loss_chunk save memory today)"
            )


def build_mesh(mesh: MeshSpec, world: World) -> DeviceMesh:
    """A ``(dp_replicate, dp_shard)`` mesh; raises when degrees and world size disagree."""
    if mesh.world_size != world.size:
        raise UnsupportedError(
            f"mesh: degrees {mesh.data_replicate} x {mesh.data_shard} x {mesh.context} x "
            f"{mesh.tensor} need {mesh.world_size} ranks, {world.size} were started"
        )
    return init_device_mesh(
        world.device.type,
        (mesh.data_replicate, mesh.data_shard),
        mesh_dim_names=(MeshAxisName.DP_REPLICATE, MeshAxisName.DP_SHARD),
    )

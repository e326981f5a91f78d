"""The device mesh and this rank's place in it.

Naming: an "axis" belongs to the mesh, a "dim" to a tensor. Axes are ordered from the slowest link
to the fastest, so that ranks next to each other share a machine: ``dp_replicate``, ``dp_shard``,
``cp``, ``tp``. Context ranks hold different tokens, so parameters are sharded over them as well:
FSDP sees ``dp_shard`` and ``cp`` as one axis. ``cp`` itself may be factored into ranks that
exchange keys and, inside, ranks that share the heads of one part of the sequence.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import cached_property

import torch
import torch.distributed as dist
from msa_kernels import backend
from msa_kernels.capabilities import AUTO
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from msa_workloads.heads import HeadsError, check_tensor
from msa_workloads.permutation import key
from msa_workloads.runspec import MeshSpec, RunSpec, RunSpecError, check_values

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A collective that waits longer has lost a peer; above any step or checkpoint seen so far."""


class MeshAxisName(StrEnum):
    """Names of mesh axes, used in process groups and in error messages alike."""

    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"


CP_KEYS, CP_HEADS = "cp_keys", "cp_heads"
"""The factors of ``cp``: ranks that exchange keys, and ranks that share heads (Ulysses)."""
FSDP = "dp_shard_cp"
"""``dp_shard`` and ``cp`` as one axis."""


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


@dataclass(frozen=True, eq=False)
class Mesh:
    """The mesh of all ranks, with what is asked of it by name."""

    world: World
    axes: DeviceMesh
    """All four axes."""
    shard: DeviceMesh
    """What FSDP shards over: ``dp_shard`` x ``cp`` as one axis, behind ``dp_replicate`` where
    that is larger than 1."""
    context: DeviceMesh
    """``cp`` as (``cp_keys``, ``cp_heads``)."""

    def __getitem__(self, axis: MeshAxisName | str) -> DeviceMesh:
        return self.axes[str(axis)]

    @property
    def device(self) -> torch.device:
        return self.world.device

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Degree of every axis."""
        return {str(axis): self.axes[str(axis)].size() for axis in MeshAxisName}

    @cached_property
    def at(self) -> dict[str, int]:
        """This rank's number on every axis."""
        return {str(axis): self.axes[str(axis)].get_local_rank() for axis in MeshAxisName}

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.sizes[MeshAxisName.DP_REPLICATE] * self.sizes[MeshAxisName.DP_SHARD]

    @property
    def data_rank(self) -> int:
        """This rank's number among them; context and tensor ranks read the same samples."""
        shards = self.sizes[MeshAxisName.DP_SHARD]
        return self.at[MeshAxisName.DP_REPLICATE] * shards + self.at[MeshAxisName.DP_SHARD]

    @property
    def owns_tokens(self) -> bool:
        """What this rank computes for its tokens counts; on other tensor ranks it is a copy."""
        return self.at[MeshAxisName.TP] == 0

    @property
    def owns_samples(self) -> bool:
        """This rank speaks for its samples: the first of the ranks that read the same ones."""
        return self.owns_tokens and self.at[MeshAxisName.CP] == 0

    def own_seed(self, seed: int) -> int:
        """Of what this rank draws in training: ranks with tokens of their own drop out others."""
        return key(seed, self.data_rank, self.at[MeshAxisName.CP])


def check_supported(spec: RunSpec) -> None:
    """Raise :class:`UnsupportedError` for what a RunSpec can say and no mesh or this release can
    do; before anything starts."""
    try:
        check_values(spec)
        _check_backend(spec.attention.backend)
        check_tensor(spec.model.config, spec.mesh.tensor)
    except RunSpecError as error:
        raise UnsupportedError(str(error)) from None
    except HeadsError as error:
        raise UnsupportedError(f"mesh.tensor: {error}") from None
    # Here, because what they check is built on this module.
    from msa_workloads.context.run import check_context
    from msa_workloads.parallel.activation import check

    check_context(spec)
    check(spec)


def _check_backend(name: str) -> None:
    known = (AUTO, *backend.LOADERS)
    if name not in known:
        raise UnsupportedError(f"attention.backend: found {name!r}, allowed: {', '.join(known)}")


def build_mesh(spec: MeshSpec, world: World, *, heads: int = 1) -> Mesh:
    """The mesh of a run; collective. ``heads`` is the inner factor of ``cp``.

    Raises :class:`UnsupportedError` when degrees and world size disagree.
    """
    if spec.world_size != world.size:
        raise UnsupportedError(
            f"mesh: data_replicate {spec.data_replicate} x data_shard {spec.data_shard} x context "
            f"{spec.context} x tensor {spec.tensor} = {spec.world_size} ranks, {world.size} were "
            "started"
        )
    names = tuple(map(str, MeshAxisName))
    degrees = (spec.data_replicate, spec.data_shard, spec.context, spec.tensor)
    axes = init_device_mesh(world.device.type, degrees, mesh_dim_names=names)
    shard = axes[MeshAxisName.DP_SHARD, MeshAxisName.CP]._flatten(FSDP)
    if spec.data_replicate > 1:
        shard = DeviceMesh._concatenate([axes[MeshAxisName.DP_REPLICATE], shard])
    # By number: torch 2.11 refuses names exactly when they exist.
    context = axes[MeshAxisName.CP]._unflatten(
        0, (spec.context // heads, heads), (CP_KEYS, CP_HEADS)
    )
    return Mesh(world, axes, shard, context)

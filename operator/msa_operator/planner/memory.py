"""Peak memory of one rank, component by component.

Training keeps fp32 master weights, fp32 gradients and two fp32 Adam moments, all sharded (16
bytes a parameter over data-shard and context ranks, a tensor rank's part of them); one layer and
the next, and the embedding with the head, are gathered in the compute precision. Of a layer's
activations either all are kept, or the products that selective recomputation keeps, or its input
alone. The peak is the larger of two moments: the loss, and the backward of one layer.

Tensors are those that the Hugging Face decoder layers keep, recounted for grouped-query attention
and gated MLPs. docs/planner.md compares the result with published runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from msa_workloads.runspec import MemorySpec, MeshSpec

from msa_operator.planner.modelspec import ModelShape

LOGIT_BYTES = 12
"""Per logit at the peak of the loss's backward: the log-softmax kept for it, the gradient of the
negative log-likelihood and that of the log-softmax, fp32 each."""

ALLOCATOR = 1.08
"""Reserved over allocated memory of PyTorch's caching allocator; see docs/planner.md."""

GPU_RESERVE = 2.5 * (1 << 30)
"""Bytes of a GPU that CUDA's context, NCCL's buffers and kernels' workspaces take."""

HOST_SHARE = 0.75
"""Part of a machine's memory that CPU workers may fill when it is somebody's own."""

WORKER_BYTES = 0.9 * (1 << 30)
"""A CPU worker's process before it holds any tensor: Python, torch, Ray."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank; ``host`` is what offloading puts into its share of CPU memory."""

    states: float
    gathered: float
    kept: float
    working: float
    logits: float
    exchange: float
    fixed: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """The peak on the device, allocator included."""
        moving = max(self.working + self.exchange, self.logits)
        return (self.states + self.gathered + self.kept + moving) * ALLOCATOR + self.fixed


def kept_per_token(shape: ModelShape, mesh: MeshSpec, width: int) -> float:
    """Bytes that one layer keeps for backward per token, nothing recomputed.

    ``width`` is 2 for bf16 and 4 for fp32. Norms and the residual are split over tensor ranks by
    sequence, attention and MLP by heads and columns.
    """
    upcast = 4 if width == 2 else width  # the norm computes in fp32 and keeps its input so
    norms = 2 * shape.hidden * (upcast + width)
    inputs = 2 * shape.hidden * width  # of the products: each tensor rank gathers them whole
    attention = width * 2 * (shape.query_size + shape.kv_size)
    if shape.qk_norm:
        attention += (upcast + width) * (shape.query_size + shape.kv_size)
    mlp = width * 4 * shape.intermediate
    return (norms + attention + mlp) / mesh.tensor + inputs


def kept_selective(shape: ModelShape, mesh: MeshSpec, width: int) -> float:
    """Bytes per token and layer when every second matrix product and the attention are kept."""
    products = 2 * shape.query_size + shape.kv_size + shape.intermediate + 2 * shape.hidden
    return width * products / mesh.tensor


def working_per_token(shape: ModelShape, mesh: MeshSpec, width: int) -> float:
    """Bytes per token of gradients that are alive at once in the backward of one layer."""
    gathered = 2 * shape.hidden if mesh.tensor > 1 else 0
    return width * ((3 * shape.intermediate + 2 * shape.hidden) / mesh.tensor + gathered)


def rank_memory(
    shape: ModelShape,
    mesh: MeshSpec,
    memory: MemorySpec,
    *,
    tokens: int,
    precision: str,
    exchange: float = 0.0,
    cpu: bool = False,
) -> RankMemory:
    """Peak memory of one rank that holds ``tokens`` tokens of a micro-batch.

    ``exchange`` is the bytes of keys and values that context parallelism receives for one layer.
    """
    width = 2 if precision == "bf16" else 4
    local = shape.parameters / mesh.tensor
    shards = mesh.data_shard * mesh.context
    wrapped = mesh.world_size > 1 or precision == "bf16"
    states = local / shards * (2.0 if memory.offload_optimizer else 16.0)
    host = local / shards * 14.0 if memory.offload_optimizer else 0.0

    layer = shape.layer_parameters / mesh.tensor
    ends = (shape.parameters - shape.layers * shape.layer_parameters) / mesh.tensor
    # Two layers and the ends gathered; gradients of one layer and of the head before they are
    # reduced, once in compute precision and once in the reduction's fp32.
    gathered = (2 * layer + ends) * width + (layer + ends) * (width + 4) if wrapped else 0.0

    full = kept_per_token(shape, mesh, width) * tokens
    working = working_per_token(shape, mesh, width) * tokens
    residual = width * shape.hidden * tokens / mesh.tensor
    if memory.mlp_chunk:
        part = min(1.0, memory.mlp_chunk / tokens)
        mlp = width * 4 * shape.intermediate * tokens / mesh.tensor
        full -= mlp * (1 - part)
        working -= width * 3 * shape.intermediate * tokens / mesh.tensor * (1 - part)
    if memory.checkpointing == "none":
        kept = shape.layers * full
    elif memory.checkpointing == "selective":
        kept = shape.layers * kept_selective(shape, mesh, width) * tokens
        working += full
    else:
        kept = shape.layers * residual
        working += full
    if memory.offload_checkpoints:
        host += kept
        kept = 2 * residual  # the one in use and the one on its way

    at_once = min(tokens, memory.loss_chunk or tokens)
    logits = at_once * shape.vocabulary / mesh.tensor * LOGIT_BYTES
    return RankMemory(
        states=states,
        gathered=gathered,
        kept=kept,
        working=working,
        logits=logits,
        exchange=exchange,
        fixed=WORKER_BYTES if cpu else 0.0,
        host=host,
    )

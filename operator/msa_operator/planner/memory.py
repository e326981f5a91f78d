"""Peak memory of one rank, component by component, of the steps that the workers run.

Weights, gradients and two Adam moments are sharded over data-shard and context ranks, a tensor
rank's part of them; one layer and the next, and the embedding with the head, are gathered in the
compute precision. Of a layer either all is kept that backward needs, or its input and what
attention returned, or its input alone. The peak is the largest of four moments: the loss, the
backward of the last layer (everything kept, no gradients yet), that of the first (gradients, and
nothing else kept), and the optimizer's update.

On GPUs norms and rotations are compiled and MLPs keep their input only, so that a layer keeps its
residuals, normalised inputs, queries, keys, values and the attention's output. On CPUs it keeps
what the Hugging Face modules keep. docs/planner.md compares the result with measured steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from msa_kernels.pattern import Pattern
from msa_workloads.runspec import MemorySpec, MeshSpec

from msa_operator.planner.exchange import NONE, Exchange
from msa_operator.planner.modelspec import ModelShape
from msa_operator.planner.runtime import is_learned

ALLOCATOR = 1.1
"""What PyTorch's caching allocator cannot use of what it holds; see docs/planner.md."""

GPU_RESERVE = 2.5 * (1 << 30)
"""Bytes of a GPU that CUDA's context, NCCL's buffers and kernels' workspaces take."""

HOST_SHARE = 0.75
"""Part of a machine's memory that CPU workers may fill when it is somebody's own."""

WORKER_BYTES = 0.9 * (1 << 30)
"""A CPU worker's process before it holds any tensor: Python, torch, Ray."""

BUCKET = 256 * 2**20
"""Elements of optimizer states that come from the host at a time; two such buckets are there."""


class RankMemory(NamedTuple):
    """Bytes on one rank; ``host`` is what offloading puts into its share of CPU memory."""

    states: float
    """Weights, gradients and moments, as this rank owns them."""
    gathered: float
    kept: float
    working: float
    logits: float
    exchange: float
    """Of a layer's backward, what context ranks add to it."""
    fixed: float
    host: float = 0.0
    update: float = 0.0
    """What the optimizer's update needs beside the states, when activations are gone."""
    gradients: float = 0.0
    """Of ``states``, what backward has yet to make when it begins."""
    last: float = 0.0
    """Of ``kept``, what is left when backward comes to the first layer."""

    @property
    def total(self) -> float:
        """The peak on the device, allocator included."""
        layer = self.working + self.exchange
        begin = self.states - self.gradients + self.gathered + self.kept + max(layer, self.logits)
        end = self.states + self.gathered + self.last + layer
        return max(begin, end, self.states + self.update) * ALLOCATOR + self.fixed


@dataclass(frozen=True)
class TokenBytes:
    """Bytes per token of one layer on one tensor rank."""

    residual: float
    """The layer's input: this rank's slice of the rows."""
    attention: float
    """What attention returned, with its log-sum-exp."""
    products: float
    """Of the matrix products around attention, their results."""
    kept: float
    """All that backward needs when nothing is computed again, the input included."""
    working: float
    """Gradients, and what the MLP gathers, that are alive at once in the MLP's backward."""
    apart: float
    """Gradients that are alive at once in attention's."""
    tile: float
    """Of the MLP, per token of a tile."""
    logits: float
    """Of the loss, per token of a chunk."""
    hidden: float
    """The gradient of the last hidden states."""


@lru_cache(maxsize=1024)
def token_bytes(
    shape: ModelShape, tensor: int, width: int, fused: bool, backward: float = 0.0
) -> TokenBytes:
    """``width`` is 2 for bf16 and 4 for fp32; ``fused`` as on GPUs. ``backward`` is what attention
    needs there for each number of the queries, beside gradients."""
    hidden, inner = shape.hidden * width, shape.intermediate * width / tensor
    query = shape.query_size * width / tensor
    # Where ranks outnumber the key/value heads, each has a copy of one.
    pair = 2 * max(shape.kv_size / tensor, shape.head_size) * width
    attention = query + 4 * shape.heads / tensor
    split = tensor > 1
    # The inputs of products are gathered whole on every tensor rank; residuals are split.
    residual = hidden / tensor
    normalised = 2 * hidden
    heads = query + pair + (query + pair / 2 if shape.qk_norm else 0)
    if fused:
        kept = 2 * residual + normalised + heads + attention
        # In the MLP's backward its gradients, in the attention's those of its heads, of which the
        # MLP's two inputs have made room.
        working = residual + 2 * hidden
        apart = query + query + pair + backward * query / width
        # Both inner products, the gradient of their outer one, and what the compiled step makes of
        # them before it takes their place.
        tile = 5 * inner
    else:
        upcast = 4 if width == 2 else width  # norms compute in fp32 and keep their input so
        norms = 2 * shape.hidden * upcast / tensor + 2 * residual
        heads_upcast = (query + pair / 2) / width * upcast if shape.qk_norm else 0
        kept = norms + normalised + heads + heads_upcast + attention + 4 * inner
        # Delta is formed from copies of the output and of its gradient in fp32.
        apart = 2 * residual + query + query + pair + (2 * upcast + backward) * query / width
        working = 2 * residual + 3 * inner + (2 * hidden if split else 0)
        tile = 4 * inner
    # Logits of the chunk become their own gradient; over tensor ranks and on CPUs they are
    # widened first, and the exponentials of the log-sum-exp exist beside them.
    vocabulary = shape.vocabulary / tensor
    logits = vocabulary * (width if fused and not split else width + 8)
    return TokenBytes(
        residual=residual,
        attention=attention,
        products=query + pair + hidden,
        kept=kept,
        working=working,
        apart=apart,
        tile=tile,
        logits=logits,
        hidden=hidden / tensor,
    )


def partial_bytes(shape: ModelShape, pattern: Pattern) -> float:
    """For each number of the queries: gradients of the parts of one head's pattern, in fp32, all
    of which are there before they are added up; none of a pattern of one part."""
    parts = 1 if is_learned(pattern) else len(pattern.parts())
    return parts * (4 + 8 * shape.kv_heads / shape.heads) if parts > 1 else 0.0


def local_parameters(shape: ModelShape, tensor: int) -> tuple[float, float]:
    """Parameters of a tensor rank: all, and those of one layer.

    Where ranks outnumber the key/value heads, key and value weights are whole on each.
    """
    copied = 2 * shape.hidden * shape.kv_size if tensor > shape.kv_heads else 0
    layer = (shape.layer_parameters - copied) / tensor + copied
    ends = (shape.parameters - shape.layers * shape.layer_parameters) / tensor
    return shape.layers * layer + ends, layer


class Needs(NamedTuple):
    """What a rank of one tensor degree needs with one memory setting; bytes."""

    parameters: float
    """A tensor rank's, before they are sharded."""
    states: float
    """Per parameter."""
    moved_states: float
    """Per parameter, in host memory."""
    gradients: float
    """Per parameter, included in ``states``."""
    sums: float
    """Per parameter, of gradients over micro-batches where weights are narrower than fp32."""
    gathered: float
    """When parameters are gathered."""
    reduced: float
    """When the gradients of embedding and head are reduced over ranks."""
    head: float
    """The head's gradient while its chunks are added up."""
    kept: float
    """Per token, as everything below."""
    last: float
    working: float
    apart: float
    tile: float
    tile_tokens: int
    """At most; 0 for all at once."""
    logits: float
    logit_tokens: int
    """At most; 0 for all at once."""
    hidden: float
    host: float
    fixed: float
    checkpointing: str

    def rank(
        self, shards: int, wrapped: bool, tokens: int, exchange: Exchange,
        accumulates: bool = False,
    ) -> RankMemory:  # fmt: skip
        """Of a rank with ``tokens`` tokens, whose states ``shards`` ranks share. One that
        ``accumulates`` has gradients from the second micro-batch of a step on."""
        owned = self.parameters / shards
        moved = owned * self.moved_states
        # Eager updates hold two results as long as the weights beside what they read.
        update = min(owned, 2 * BUCKET) * self.moved_states if moved else 8.0 * owned
        tile = min(tokens, self.tile_tokens or tokens)
        apart = self.apart * tokens
        working = max(self.working * tokens + self.tile * tile, apart)
        more = max(0.0, apart + exchange.work - working)
        kept, last = self.kept * tokens, self.last * tokens
        if self.checkpointing == "none":
            kept, last = kept + exchange.layers, last + exchange.layer
        else:
            more += exchange.layer
            kept += exchange.results if self.checkpointing == "selective" else 0.0
        at_once = min(tokens, self.logit_tokens or tokens)
        return RankMemory(
            states=owned * (self.states + (self.sums if accumulates else 0.0)),
            gathered=self.gathered if wrapped else 0.0,
            kept=kept,
            working=working,
            logits=self.logits * at_once + self.hidden * tokens + self.head,
            exchange=more,
            fixed=self.fixed,
            host=moved + self.host * tokens,
            update=max(update, self.reduced) if wrapped else update,
            gradients=0.0 if accumulates else owned * self.gradients,
            last=last,
        )


def needs(
    shape: ModelShape, tensor: int, memory: MemorySpec, precision: str, *, cpu: bool,
    backward: float = 0.0,
) -> Needs:  # fmt: skip
    """Everything about a rank that depends neither on its tokens nor on its data ranks."""
    width = 2 if precision == "bf16" else 4
    each = token_bytes(shape, tensor, width, not cpu, backward)
    local, layer = local_parameters(shape, tensor)
    ends = local - shape.layers * layer
    head = shape.head_parameters / tensor
    weight = 2 if memory.parameters == "bf16" else 4
    moments = 2 * (2 if memory.optimizer_states == "bf16" else 4)

    kept_layer, working, apart = each.kept, each.working, each.apart
    tile, host = each.tile, 0.0
    if cpu and memory.mlp_chunk:
        kept_layer -= each.tile
        working -= 0.75 * each.tile
    elif cpu:
        tile = 0.0
    if memory.checkpointing == "none":
        kept, last = shape.layers * kept_layer, kept_layer
    else:
        working, apart = working + kept_layer, apart + kept_layer
        every = memory.checkpoint_layers
        inputs = on_device = -(-shape.layers // every)
        if memory.offload_checkpoints:
            # The one in use and the one on its way, beside those that never leave.
            on_device = min(inputs, memory.checkpoints_on_device + 2)
            host = max(0, inputs - memory.checkpoints_on_device) * each.residual
        last = min(inputs, every) * each.residual
        kept = max(on_device * each.residual, last)
        if memory.checkpointing == "selective":
            # Of the layer at hand it is among what is computed again.
            kept += (shape.layers - 1) * each.attention
            kept += min(shape.layers, memory.keep_projections) * each.products
    whole = not memory.loss_chunk and not cpu and tensor == 1
    return Needs(
        parameters=local,
        states=2 * weight + (0 if memory.offload_optimizer else moments),
        moved_states=moments if memory.offload_optimizer else 0.0,
        gradients=weight,
        sums=4.0 if weight < 4 else 0.0,
        # Two layers and the ends; the head's gradient until that of the embedding is there too;
        # those of one layer before they are reduced, once more in the reduction's fp32.
        gathered=(2 * layer + ends + head) * width + layer * (width + 4),
        reduced=ends * (width + 4),
        head=head * 4,
        kept=kept,
        last=last,
        working=working,
        apart=apart,
        tile=tile,
        tile_tokens=memory.mlp_chunk,
        # Without chunks the logits, their softmax and its gradient are there in fp32 as well.
        logits=shape.vocabulary * (width + 12.0) if whole else each.logits,
        logit_tokens=memory.loss_chunk,
        hidden=each.hidden,
        host=host,
        fixed=WORKER_BYTES if cpu else 0.0,
        checkpointing=memory.checkpointing,
    )


def rank_memory(
    shape: ModelShape,
    mesh: MeshSpec,
    memory: MemorySpec,
    *,
    tokens: int,
    precision: str,
    exchange: Exchange = NONE,
    accumulates: bool = False,
    cpu: bool = False,
) -> RankMemory:
    """Peak memory of one rank that holds ``tokens`` tokens of a micro-batch.

    ``exchange`` is what attention over context ranks adds, of all sequences of the micro-batch.
    """
    wrapped = mesh.world_size > 1 or precision == "bf16"
    shards = mesh.data_shard * mesh.context
    return needs(shape, mesh.tensor, memory, precision, cpu=cpu).rank(
        shards, wrapped, tokens, exchange, accumulates
    )

"""The model: a Hugging Face causal language model whose attention is Flash-MSA.

Weights depend on the seed and on each module's name only: one rank or many, sharded or not, the
same run starts from the same numbers. The model is built on the meta device and made real layer
by layer, so that no rank ever holds more than one unsharded layer beside its shards.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from msa_kernels import hf
from msa_kernels.pattern import Dense, Pattern, PatternError, from_dict
from torch import nn

from msa_workloads.data import Batch
from msa_workloads.heads import HeadsError, Order, check_members, stored, stored_orders
from msa_workloads.initial import make_real, stored_names
from msa_workloads.loss import (
    chunked_linear_loss,
    chunked_token_losses,
    liger_linear_loss,
    summed_loss,
    token_losses,
)
from msa_workloads.parallel import activation, vocab
from msa_workloads.parallel.fsdp import shard_module, sum_gradients
from msa_workloads.parallel.mesh import Mesh, MeshAxisName, UnsupportedError
from msa_workloads.parallel.tensor import parallelize
from msa_workloads.runspec import AttentionSpec, RunSpec
from msa_workloads.stand_ins import Counted, logits_are_a_product, own_window
from msa_workloads.weights import open_weights, reorder_heads

log = logging.getLogger(__name__)

NOT_TRAINED = {
    "attention_dropout": "attention that drops out is not implemented; use 0",
    "output_router_logits": "the loss that balances experts is not part of a run's; use false",
}
"""Fields of a config that ask for what a run would leave out, and what to do."""


class LanguageModel(nn.Module):
    """A causal language model that returns losses, so that logits need never be whole."""

    def __init__(
        self, model: Any, loss_chunk: int, *, split: bool = False, kernel: str = "auto"
    ) -> None:
        """``split`` says that ``model`` is split over tensor ranks, ``kernel`` who computes the
        chunks of the loss (:class:`~msa_workloads.runspec.MemorySpec`)."""
        super().__init__()
        self.model = model
        self._loss_chunk = loss_chunk
        self._split = split
        self._kernel = kernel
        self._attentions = len(hf.attention_layers(model))
        self.head_orders: Mapping[int, Order] = {}
        """The order in which a layer stores its key/value heads, where it is not the model's."""
        self.activations: activation.Activations | None = None
        if loss_chunk and not split:
            if not logits_are_a_product(model):
                raise UnsupportedError(
                    f"memory.loss_chunk: {type(model).__name__} does more to its logits than one "
                    "product of the last hidden states (a cap or a scale), which the chunked loss "
                    "would leave out; use loss_chunk: 0"
                )
            head = model.get_output_embeddings()
            head.forward = functools.partial(_use_head, head, head.forward)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.model.base_model.layers

    @property
    def heads(self) -> tuple[int, int]:
        """Query and key/value heads of a layer, over all ranks."""
        return _heads(self.model.config)

    def forward(self, batch: Batch, *, per_token: bool = False) -> torch.Tensor:
        """Summed cross-entropy of a batch, a scalar; with ``per_token`` nats of shape (B, S).

        Of a batch that is split over context ranks, the loss of this rank's tokens. Raises
        :class:`UnsupportedError` for a model that does not let attention know of those ranks.
        """
        if batch.attend is None:
            documents = None if batch.whole else batch.documents
            return self._loss(batch, per_token, msa_document_ids=documents)
        asked = Counted(batch.attend)
        loss = self._loss(batch, per_token, msa_attend=asked)
        if asked.calls < self._attentions:
            raise UnsupportedError(
                f"mesh.context: {type(self.model).__name__} does not hand its keywords on to "
                f"attention ({asked.calls} of {self._attentions} layers asked for other ranks' "
                "keys), so its sequences cannot be split; use context: 1"
            )
        return loss

    def _loss(self, batch: Batch, per_token: bool, **extra: Any) -> torch.Tensor:
        extra["use_cache"] = False
        if self._split or self._loss_chunk:
            hidden = self.model.base_model(
                input_ids=batch.tokens, position_ids=batch.positions, **extra
            ).last_hidden_state
            head = self.model.get_output_embeddings()
            if self._split:
                losses = vocab.token_losses if per_token else vocab.summed_loss
                return losses(hidden, head.weight, batch.labels, self._loss_chunk)
            return head(hidden, functools.partial(self._losses, batch.labels, per_token))
        logits = self.model(input_ids=batch.tokens, position_ids=batch.positions, **extra).logits
        return (token_losses if per_token else summed_loss)(logits, batch.labels)

    def _losses(
        self, labels: torch.Tensor, per_token: bool, hidden: torch.Tensor, head: nn.Module
    ) -> torch.Tensor:
        if per_token:
            return chunked_token_losses(hidden, head, labels, self._loss_chunk)
        if self._kernel == "liger":
            return liger_linear_loss(hidden, head, labels)
        return chunked_linear_loss(hidden, head, labels, self._loss_chunk, self._kernel)


def _use_head(
    head: nn.Module, product: Callable[..., Any], hidden: torch.Tensor,
    use: Callable[[torch.Tensor, nn.Module], torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """A head's forward in which something else than its product may use its weights: within, and
    only there, a sharded head is whole."""
    return product(hidden) if use is None else use(hidden, head)


def layer_patterns(
    attention: AttentionSpec, layers: int, kv_heads: int | None = None
) -> list[Pattern]:  # fmt: skip
    """One pattern per layer; raises :class:`UnsupportedError` for a layer that does not exist, and
    for more patterns than ``kv_heads`` where that is known."""
    try:
        pattern = from_dict(attention.pattern)
        check_members(pattern, kv_heads or sys.maxsize)
    except PatternError as error:
        raise UnsupportedError(f"attention.pattern.{error}") from None
    except HeadsError as error:
        raise UnsupportedError(f"attention.pattern.members: {error}") from None
    for layer in attention.dense_layers:
        if not 0 <= layer < layers:
            raise UnsupportedError(
                f"attention.dense_layers: found {layer}, allowed: 0 to {layers - 1} "
                f"(the model has {layers} layers)"
            )
    return [Dense() if n in attention.dense_layers else pattern for n in range(layers)]


def build_model(
    spec: RunSpec, vocabulary: int, mesh: Mesh | None, device: torch.device,
    *, make_on: str = "cpu", orders: Mapping[int, Order] | None = None,
) -> LanguageModel:  # fmt: skip
    """The model of a RunSpec on ``device``, sharded over ``mesh`` when one is given.

    Layers store their heads in ``orders``, those of the run that is resumed; None starts a run,
    whose orders let its tensor ranks attend evenly (:func:`msa_workloads.heads.stored_order`).

    What splits or wraps modules comes first, on meta tensors; then each layer gets its weights,
    of which a tensor rank keeps its part, and is sharded before the next one is made. Random
    weights are drawn on ``make_on``, whose generator decides which ones they are.
    """
    hf.register()
    config = _config(spec, vocabulary)
    dtype = torch.bfloat16 if spec.memory.parameters == "bf16" else torch.float32
    with torch.device("meta"):
        inner = _causal_lm().from_config(config, attn_implementation="msa", dtype=dtype)
    _check_mixing(spec, inner)
    weights = None
    if spec.model.source is not None:
        place = spec.model.source.removeprefix("hf://")
        weights = open_weights(place)
        if weights is None or weights.missing(stored_names(inner)):
            log.info("%s: not safetensors by the modules' names; read whole on every rank", place)
            weights = None
            inner = _causal_lm().from_pretrained(
                place, config=config, dtype=dtype, attn_implementation="msa"
            )
    if orders is None:
        orders = _first_orders(spec, inner)
    layers = config.get_text_config().num_hidden_layers
    patterns = layer_patterns(spec.attention, layers, _heads(config)[1])
    kept = [stored(pattern, orders.get(layer)) for layer, pattern in enumerate(patterns)]
    hf.set_patterns(inner, kept, backend=spec.attention.backend)
    reorder_heads(inner, orders)
    _fix_rotary_length(inner, spec.sequence.length)
    activations = activation.apply(inner, spec.memory, device)
    split = mesh is not None and mesh[MeshAxisName.TP].size() > 1
    if mesh is not None and split:
        parallelize(inner, mesh[MeshAxisName.TP])
    kernel = spec.memory.loss_kernel
    if kernel == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise UnsupportedError(
            "memory.loss_kernel: found 'liger', and the package liger-kernel is not installed "
            "here; install it, or use loss_kernel: auto"
        )
    model = LanguageModel(inner, spec.memory.loss_chunk, split=split, kernel=kernel)
    model.activations = activations
    model.head_orders = orders
    model.train()
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    for layer in model.layers:
        make_real(model, layer, names, spec.training.seed, torch.device(make_on), weights)
        if mesh is not None:
            shard_module(layer, mesh, spec.training.precision)
    head = inner.get_output_embeddings()
    tied = head.weight is inner.get_input_embeddings().weight
    if mesh is not None and spec.memory.loss_chunk and not (split or tied):
        # By itself its gradient travels while those of the layers are computed. It is used once
        # each way, right after another, and stays whole in between.
        make_real(model, head, names, spec.training.seed, torch.device(make_on), weights)
        shard_module(head, mesh, spec.training.precision, reshard=False)
    make_real(model, model, names, spec.training.seed, torch.device(make_on), weights)
    if mesh is not None:
        shard_module(model, mesh, spec.training.precision)
        sum_gradients(model.modules())
    return model.to(device)


def _causal_lm() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _config(spec: RunSpec, vocabulary: int) -> Any:
    from transformers import AutoConfig

    fields = dict(spec.model.config)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise UnsupportedError("model.config.model_type: missing; for example llama")
    fields.setdefault("vocab_size", vocabulary)
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        raise UnsupportedError(f"model.config: {str(error).splitlines()[0]}") from None
    text = config.get_text_config()
    if text.vocab_size < vocabulary:
        raise UnsupportedError(
            f"model.config.vocab_size: found {text.vocab_size}, tokenizer "
            f"{spec.model.tokenizer!r} needs at least {vocabulary}"
        )
    for name, why in NOT_TRAINED.items():
        if found := getattr(text, name, None):
            raise UnsupportedError(f"model.config.{name}: found {found}, and {why}")
    padding = getattr(text, "pad_token_id", None)
    if isinstance(padding, int) and not -text.vocab_size <= padding < text.vocab_size:
        raise UnsupportedError(
            f"model.config.pad_token_id: found {padding}, the vocabulary ends at "
            f"{text.vocab_size - 1}; use an id inside it, or null"
        )
    if getattr(text, "max_position_embeddings", spec.sequence.length) < spec.sequence.length:
        raise UnsupportedError(
            f"sequence.length: found {spec.sequence.length}, the model's "
            f"max_position_embeddings allows at most {text.max_position_embeddings}"
        )
    return config


def _check_mixing(spec: RunSpec, inner: Any) -> None:
    """Refuse a convolution over tokens where they are of several documents or on several ranks."""
    mixing = [
        name for name, module in inner.base_model.named_modules()
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
    ]  # fmt: skip
    if mixing and (spec.data.packing or spec.mesh.context > 1):
        raise UnsupportedError(
            f"model.config.model_type: {mixing[0]} mixes neighbouring tokens outside attention, "
            "across packed documents and not across context ranks; use data.packing: false and "
            "context: 1"
        )


def effective_patterns(spec: RunSpec, model: nn.Module) -> list[Pattern]:
    """The pattern of every layer over all heads, the model's own sliding windows included.

    Heads are in the model's order, however they are stored.
    """
    layers = hf.attention_layers(model)
    windows = [own_window(layer) for layer in layers]
    return [
        pattern.limited(window) if window else pattern
        for pattern, window in zip(
            layer_patterns(spec.attention, len(layers)), windows, strict=True
        )
    ]  # fmt: skip


def _heads(config: Any) -> tuple[int, int]:
    text = config.get_text_config()
    queries = int(text.num_attention_heads)
    return queries, int(getattr(text, "num_key_value_heads", None) or queries)


def _first_orders(spec: RunSpec, inner: Any) -> dict[int, Order]:
    if spec.mesh.tensor == 1:
        return {}
    shares = spec.context.heads if spec.mesh.context > 1 else 1
    try:
        return stored_orders(
            effective_patterns(spec, inner), _heads(inner.config), spec.mesh.tensor, shares,
            spec.sequence.length,
        )  # fmt: skip
    except HeadsError as error:
        raise UnsupportedError(f"mesh.tensor and context.heads: {error}") from None


def _fix_rotary_length(model: nn.Module, length: int) -> None:
    """Rotary embeddings choose their frequencies by the run's sequence length.

    Some scalings (longrope, dynamic) follow the largest position that they are given, which
    differs between ranks that hold different tokens; so they are always given the last one.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if any(name == "longrope" or "dynamic" in (name or "") for name in named):
            module.forward = _with_last_position(module.forward, length)  # type: ignore[method-assign]


def _with_last_position(forward: Callable[..., Any], length: int) -> Callable[..., Any]:
    def extended(x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
        cos, sin = forward(x, torch.cat([position_ids, last], -1), *more, **named)
        return cos[..., :-1, :], sin[..., :-1, :]

    return extended

"""The sizes of a decoder-only transformer, exactly, from its Hugging Face config.

Counted from the modules that transformers builds for these families: every weight matrix, bias
and norm, so that parameter counts are equal to the last one.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# Family -> (bias of q, k and v; norms on q and k) where the config does not say.
FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}

DEFAULT_WINDOW = 4096
"""transformers' own for models with a sliding window whose config does not say how long."""


class ModelError(ValueError):
    """A config from which no sizes follow. ``field`` is the config's field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one model; ``heads`` query heads share ``kv_heads`` key/value heads."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    @cached_property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @cached_property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_size

    @cached_property
    def layer_matrices(self) -> int:
        """Weights of one layer that enter a matrix product with every token."""
        attention = self.hidden * (2 * self.query_size + 2 * self.kv_size)
        return attention + 3 * self.hidden * self.intermediate

    @cached_property
    def layer_parameters(self) -> int:
        extra = 2 * self.hidden
        if self.qkv_bias:
            extra += self.query_size + 2 * self.kv_size
        if self.output_bias:
            extra += self.hidden
        if self.mlp_bias:
            extra += 2 * self.intermediate + self.hidden
        if self.qk_norm:
            extra += 2 * self.head_size
        return self.layer_matrices + extra

    @cached_property
    def embedding_parameters(self) -> int:
        """The input embedding, which is looked up and not multiplied."""
        return self.vocabulary * self.hidden

    @cached_property
    def head_parameters(self) -> int:
        """Weights of the output head as multiplied; tied ones are stored once."""
        return self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        head = 0 if self.tied else self.head_parameters
        return self.layers * self.layer_parameters + self.hidden + self.embedding_parameters + head

    @cached_property
    def multiplied_parameters(self) -> int:
        """P - P_emb of the FLOP formula: what every token is multiplied with, head included."""
        return self.layers * self.layer_parameters + self.hidden + self.head_parameters


def model_shape(config: dict[str, Any]) -> ModelShape:
    """Sizes from a Hugging Face config. Raises :class:`ModelError` for other architectures."""
    family = config.get("model_type")
    if family not in FAMILIES:
        near = difflib.get_close_matches(str(family), FAMILIES, n=1, cutoff=0.4)
        nearest = f"; nearest: {near[0]}" if near else ""
        raise ModelError(
            "model_type", f"found {family!r}, allowed: {', '.join(FAMILIES)}{nearest}"
        )
    bias, norm = FAMILIES[family]
    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            "num_key_value_heads", f"found {kv_heads}, which does not divide {heads} heads"
        )
    if "head_dim" not in config and hidden % heads:
        raise ModelError(
            "hidden_size", f"found {hidden}, not a multiple of {heads} heads, and no head_dim"
        )
    attention_bias = bool(config.get("attention_bias", False))
    windowed = config.get("use_sliding_window", family == "mistral")
    return ModelShape(
        family=family,
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_size(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=_size(config, "head_dim", hidden // heads),
        vocabulary=_size(config, "vocab_size"),
        positions=_size(config, "max_position_embeddings", 1 << 40),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or attention_bias,
        output_bias=attention_bias and family in ("llama", "qwen3"),
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=norm,
        sliding_window=config.get("sliding_window", DEFAULT_WINDOW) if windowed else None,
    )


def _size(config: dict[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        if default is None:
            raise ModelError(field, "is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(field, f"found {value!r}, allowed: an integer of at least 1")
    return value

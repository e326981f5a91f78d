"""Hugging Face models on this attention: ``attn_implementation="msa"``.

:func:`register` adds the name to transformers' attention and mask interfaces;
:func:`set_patterns` gives each layer of a model its pattern. What a model passes along is
implemented or refused, never dropped.

Documents of a packed batch come from the model's keyword ``msa_document_ids`` (B, S) or from
``cu_seq_lens_q`` and ``cu_seq_lens_k``; without them, from ``position_ids`` that restart at 0.
Whoever permutes the sequence over ranks passes ``msa_positions``: then nothing is guessed from
position ids, whose jumps are not documents. Whoever splits the sequence over ranks also passes
``msa_attend``, which then computes what :func:`~msa_kernels.attention.msa_attention` would:
``msa_attend(q, k, v, pattern, scale=..., backend=...)``. transformers' own detection of packed
sequences has no effect here: its result is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from msa_kernels import traced
from msa_kernels.attention import Packing, check_pattern, msa_attention
from msa_kernels.backend import BackendError, check_name
from msa_kernels.pattern import Dense, Pattern, PerHead
from msa_kernels.placement import remember
from msa_kernels.rules import Rule
from msa_kernels.saved import keep, kept, limited
from msa_kernels.traced import check_padding, document_ids, read_mask

NAME = "msa"
"""transformers takes every name that contains "flash" for its own FlashAttention."""
UNSAID = 0
"""The window of a layer that passes none, not even None."""
DENSE = {True: Dense(), False: Dense(causal=False)}

HARMLESS = frozenset({
    "position_ids", "cache_position", "use_cache", "output_hidden_states", "num_items_in_batch",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "msa_document_ids",
    "msa_positions", "msa_attend", "return_dict", "logits_to_keep", "labels",
})  # fmt: skip
"""Keywords that do not change the scores, or that are read here."""

REFUSED = {
    "softcap": "logit soft-capping",
    "s_aux": "learned sinks",
    "sinks": "learned sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "output_attentions": "returning attention weights, which are never formed",
}


@dataclass(frozen=True, eq=False)
class SlidingMask:
    """What the mask interface hands to layers instead of a tensor, where there is something to
    say."""

    window: int | None
    first: int = 0
    """The token of the first key: a sliding cache has let go of those before it."""
    padding: torch.Tensor | None = None
    """A padding mask whose values are not known yet, as a graph is traced."""
    hidden: int = 0
    """The model's window where the mask, as a graph is traced, does not show whether it has it."""


def register() -> None:
    """Make ``attn_implementation="msa"`` known to transformers. Safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def set_patterns(
    model: nn.Module, patterns: Pattern | Sequence[Pattern], backend: str = "auto"
) -> None:
    """Give every attention layer its pattern: one for all, or one per layer in layer order.

    A layer that was never given one computes what its model says, Dense. The model's own sliding
    window still holds: it is intersected with the pattern. Raises ValueError when the model was
    not built with ``attn_implementation="msa"`` or the number of patterns is not that of layers,
    TypeError for what is no pattern, BackendError for a backend or pattern that does not exist
    here. Then no layer has changed.

    The model's config keeps the patterns, and that they need "msa", so that a model which is saved
    is loaded with them; ``backend`` is a choice of this machine and is not kept.
    """
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if chosen != NAME:
        raise ValueError(
            f"the model runs attn_implementation={chosen!r}, which ignores patterns; call "
            f"msa_kernels.hf.register() and then model.set_attn_implementation({NAME!r})"
        )
    check_name(backend)
    layers = attention_layers(model)
    if isinstance(patterns, Pattern | str) or not isinstance(patterns, Sequence):
        check_pattern(patterns)  # type: ignore[arg-type]
        patterns = [patterns] * len(layers)  # type: ignore[list-item]
    if len(patterns) != len(layers):
        raise ValueError(f"{len(patterns)} patterns for {len(layers)} attention layers")
    for pattern in patterns:
        check_pattern(pattern)
    for layer, pattern in zip(layers, patterns, strict=True):
        layer.msa_pattern = pattern  # type: ignore[assignment]
        layer.msa_backend = backend  # type: ignore[assignment]
    keep(layers)
    # Whoever loads the saved model without naming an implementation gets this one, or an error of
    # transformers where it is not registered: any other would attend to everything.
    model.config.attn_implementation = NAME  # type: ignore[union-attr]


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a model, by layer index."""
    found = [
        m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")
    ]  # fmt: skip
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention layers of transformers' kind")
    return sorted(found, key=lambda m: int(m.layer_idx))  # type: ignore[arg-type]


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | SlidingMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = UNSAID,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: heads come as (B, H, S, D), the output is (B, S, H, D)."""
    _refuse_unknown(kwargs)
    if dropout:
        raise BackendError(
            f"attention dropout {dropout} is not implemented; set attention_dropout to 0"
        )
    if isinstance(attention_mask, torch.Tensor):
        raise BackendError(
            f"an attention mask {tuple(attention_mask.shape)} was given; masks are patterns here: "
            "pass no mask, and padding or packing as msa_document_ids"
        )
    pattern = _pattern(module) or DENSE[_causal(module, is_causal)]
    if pattern.causal != _causal(module, is_causal):
        kind = "causal" if _causal(module, is_causal) else "bidirectional"
        raise BackendError(f"the layer is {kind} and its pattern is not: {pattern}")
    hidden = getattr(attention_mask, "hidden", 0)
    if hidden and sliding_window == UNSAID:
        raise BackendError(
            f"a graph that is traced does not show whether this layer has the window of {hidden}; "
            "pass an attention_mask of ones, which leaves the mask legible, or compile the layers"
        )
    windows = [w for w in (sliding_window, getattr(attention_mask, "window", None)) if w]
    if windows:
        pattern = limited(pattern, min(windows))
    first: int = getattr(attention_mask, "first", 0)
    if first and not windows:
        raise BackendError(
            f"the first {first} keys are not in the cache, and the layer has no window that they "
            "lie outside of; use past_key_values=DynamicCache()"
        )
    if first and not _by_distance(pattern):
        # No query sees what a sliding cache has let go of, whatever stands there.
        key, value = (functional.pad(rows, (0, 0, first, 0)) for rows in (key, value))
        first = 0
    rows = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    backend = getattr(module, "msa_backend", "auto")
    padding: torch.Tensor | None = getattr(attention_mask, "padding", None)
    if (attend := kwargs.get("msa_attend")) is not None:
        if padding is not None:
            check_padding(padding)
        return attend(*rows, pattern, scale=scaling, backend=backend), None
    documents = _documents(query, key, first, padding, kwargs)
    out = msa_attention(
        *rows, pattern, scale=scaling, documents=documents,
        align="bottom-right", backend=backend,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out, None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> SlidingMask | None:
    """transformers' mask function: builds nothing, and refuses what the kernels do not know.

    Causal, bidirectional and sliding-window masks pass, and a 2-D padding mask of ones.
    """
    del batch_size
    tracing = torch.compiler.is_compiling()
    if attention_mask is not None and not tracing:
        check_padding(attention_mask)
    if use_vmap:
        raise BackendError("the model adds a mask function of its own, which is not implemented")
    windows: set[int] = set()
    hidden = False
    seen = read_mask(mask_function) if tracing and mask_function is not None else None
    if seen is None:
        _read_mask(mask_function, windows)
    else:
        windows, hidden = set(seen[0]), seen[1]
    if kv_offset + kv_length != q_offset + q_length:
        raise BackendError(
            f"a cache whose last key is not the last token (a static one: keys {int(kv_offset)} "
            f"to {int(kv_offset) + kv_length - 1} for tokens up to {int(q_offset) + q_length - 1})"
            " is not implemented; use transformers' default, or past_key_values=DynamicCache(), "
            "and use_cache=False in training"
        )
    # transformers also asks for masks that no layer of the model uses: those that cannot be are
    # refused where one does.
    window = min(windows, default=None)
    if not tracing:
        return SlidingMask(window, kv_offset) if windows or kv_offset else None
    config = kwargs.get("config")
    if hidden and getattr(config, "attention_chunk_size", None):
        raise BackendError("attention in chunks is not implemented")
    unsaid = getattr(config, "sliding_window", None) or 0 if hidden else 0
    return SlidingMask(window, kv_offset, attention_mask, unsaid)


def _read_mask(function: Callable[..., Any] | None, windows: set[int]) -> None:
    """Take a transformers mask function apart; raises at the first part that is not known."""
    name = getattr(function, "__qualname__", "without a name")
    if function is None or name in ("causal_mask_function", "bidirectional_mask_function"):
        return
    inner = _closure(function)
    match name.split(".")[0]:
        case "and_masks":
            for part in inner["mask_functions"]:
                _read_mask(part, windows)
        case "sliding_window_overlay":
            windows.add(int(inner["sliding_window"]))
        case "remap_positions_for_packed_sequence":
            _read_mask(inner["mask_function"], windows)
        case "packed_sequence_mask_function":
            return  # Documents are decided in attention_forward, from what the caller says.
        case _:
            raise BackendError(
                f"the model's mask {name} is not implemented; known: causal, bidirectional, "
                "sliding window"
            )


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return dict(zip(names, (c.cell_contents for c in function.__closure__ or ()), strict=True))


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name in HARMLESS or value is None or value is False:
            continue
        what = REFUSED.get(name, f"the keyword {name!r} that this model passes to attention")
        raise BackendError(
            f"{what} is not implemented; nearest: attn_implementation='eager' or 'sdpa'"
        )


def _pattern(module: nn.Module) -> Pattern | None:
    """What the layer was given, here or before its model was saved."""
    given: Pattern | None = getattr(module, "msa_pattern", None)
    if given is None and (given := kept(module)) is not None and not torch.compiler.is_compiling():
        module.msa_pattern = given  # type: ignore[assignment]
        # transformers forgets it in reading a config, which may be saved again.
        module.config.attn_implementation = NAME  # type: ignore[union-attr]
    return given


def _causal(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _by_distance(pattern: Pattern) -> bool:
    """Whether it asks only how far apart a query and a key are, not where."""
    members = pattern.members if isinstance(pattern, PerHead) else (pattern,)
    return all(
        rule == Rule(lo=rule.lo, hi=rule.hi, step=rule.step)
        for member in members
        for rule in member.rules()
    )


def _documents(
    query: torch.Tensor,
    key: torch.Tensor,
    first: int,
    padding: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> Packing | None:
    ids = kwargs.get("msa_document_ids")
    q_bounds, k_bounds = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if q_bounds is None and k_bounds is not None:
        raise BackendError("cu_seq_lens_k is given without cu_seq_lens_q; pass both")
    if ids is not None and q_bounds is not None:
        raise BackendError(
            "documents are given twice, by msa_document_ids and cu_seq_lens_q; pass one of them"
        )
    if ids is not None:
        return ids if padding is None else traced.unpadded(ids, padding)
    if q_bounds is not None:
        if padding is not None:
            check_padding(padding)
        return q_bounds, q_bounds if k_bounds is None else k_bounds
    positions = kwargs.get("position_ids")
    permuted = kwargs.get("msa_positions") is not None
    if positions is None or permuted:
        if padding is not None:
            check_padding(padding)
        return None
    cached = first + key.shape[2] - query.shape[2]
    if cached:
        if padding is not None:
            check_padding(padding)
        remember(positions, f"after {cached}", lambda: _goes_on(positions, cached))
        return None
    batch = query.shape[0]
    if torch.compiler.is_compiling():
        ids = traced.traced_document_ids(positions, batch)
        return ids if padding is None else traced.unpadded(ids, padding)
    return remember(positions, f"documents of {batch}", lambda: document_ids(positions, batch))


def _goes_on(positions: torch.Tensor, cached: int) -> None:
    """Refuse position ids that do not follow the ``cached`` keys before them."""
    expected = torch.arange(cached, cached + positions.shape[-1], device=positions.device)
    if bool((positions != expected).any()):
        raise BackendError(
            f"position ids do not go on from the {cached} tokens in the cache: packed documents "
            "with a cache are not implemented; use use_cache=False, or a cache for each document"
        )

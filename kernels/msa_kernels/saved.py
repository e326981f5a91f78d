"""Patterns that the config of a Hugging Face model keeps, so that a saved model has them again.

Under :data:`KEPT` stand the patterns, each once as a job would say it, and which of them the layer
of each index has. Nothing is made up for a layer that has none there: it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from msa_kernels.backend import BackendError
from msa_kernels.encoding import decode
from msa_kernels.pattern import Pattern, PatternError, from_dict

KEPT = "msa_patterns"


def keep(layers: Sequence[nn.Module]) -> None:
    """Describe the patterns of layers in their configs.

    Null stands for a pattern that has no description, and where modules of one index differ.
    """
    for config in {id(layer.config): layer.config for layer in layers}.values():
        found: dict[int, set[Pattern]] = {}
        for layer in layers:
            if layer.config is config:
                index: int = layer.layer_idx  # type: ignore[assignment]
                found.setdefault(index, set()).add(layer.msa_pattern)  # type: ignore[arg-type]
        known: dict[Pattern, int] = {}
        texts: list[dict[str, Any]] = []
        numbers: list[int | None] = [None] * (max(found) + 1)
        for index, patterns in found.items():
            pattern, *others = patterns
            if others:
                continue
            if pattern not in known and (text := _described(pattern)) is not None:
                known[pattern] = len(texts)
                texts.append(text)
            numbers[index] = known.get(pattern)
        setattr(config, KEPT, {"patterns": texts, "layers": numbers})


def _described(pattern: Pattern) -> dict[str, Any] | None:
    try:
        text = pattern.to_dict()
        return text if from_dict(text) == pattern else None
    except PatternError:
        return None  # such as one that holds the documents of a batch


def kept(layer: nn.Module) -> Pattern | None:
    """The pattern that the layer's config keeps for it, None where it keeps none for any layer.

    Raises BackendError where it keeps some, and none for this layer.
    """
    known: dict[str, Any] | None = getattr(getattr(layer, "config", None), KEPT, None)
    if known is None:
        return None
    index: int = layer.layer_idx  # type: ignore[assignment]
    if torch.compiler.is_compiling():
        return getattr(_traced, _hold_read(known, index))
    return _read(known, index)


def _read(known: dict[str, Any], index: int) -> Pattern:
    numbers = known["layers"]
    number = numbers[index] if index < len(numbers) else None
    if number is None:
        raise BackendError(
            f"the model was saved with patterns, and its config ({KEPT}) has none for layer "
            f"{index}: one that holds documents, or a layer that was added since; call "
            "msa_kernels.hf.set_patterns"
        )
    return from_dict(known["patterns"][number])


def limited(pattern: Pattern, window: int) -> Pattern:
    """``pattern.limited(window)``, which a graph can be traced through too."""
    if torch.compiler.is_compiling():
        assert pattern.mark  # The graph is guarded by it: its text is taken for a constant.
        return getattr(_traced, _hold_limited(pattern.encoded(), window))
    return pattern.limited(window)


class _Traced:
    """Patterns that are made while a graph is traced, as attributes: a graph can guard what it
    reads from one, and not what a traced function makes."""


_traced = _Traced()


def _hold(pattern: Pattern) -> str:
    name = "pattern_" + hashlib.sha256(pattern.encoded().encode()).hexdigest()
    setattr(_traced, name, pattern)
    return name


@torch.compiler.assume_constant_result
def _hold_read(known: dict[str, Any], index: int) -> str:
    return _hold(_read(known, index))


@torch.compiler.assume_constant_result
def _hold_limited(text: str, window: int) -> str:
    return _hold(decode(text).limited(window))

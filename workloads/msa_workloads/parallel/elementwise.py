"""Steps between the matrix products, each in one pass over memory where a compiler is at hand.

Eager normalisation keeps fp32 copies of its input and eager rotation four temporaries; compiled,
each reads its inputs once and writes its result once. Results agree to rounding.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROTATION = "apply_rotary_pos_emb"
"""The function by which Hugging Face's model files rotate queries and keys."""
ARGUMENTS = ("q", "k", "cos", "sin", "unsqueeze_dim")
"""What it takes; one that takes anything else is left as it is."""


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile(function)``, made once for each function."""
    return torch.compile(function)


def wants(device: torch.device) -> bool:
    """Whether steps are compiled on ``device``: on GPUs, where they cost memory traffic."""
    return device.type == "cuda"


def fuse(model: nn.Module) -> list[str]:
    """Compile a model's normalisations and its rotation; returns the names of what was compiled.

    The rotation is a function of the model's module in transformers, so it is replaced for every
    model of that kind in this process.
    """
    done = []
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(compiled(kind.forward), module)
            done.append(kind.__name__)
        source = sys.modules.get(kind.__module__)
        rotation = getattr(source, ROTATION, None)
        if rotation is not None and kind.__name__.endswith("Attention"):
            if list(inspect.signature(rotation).parameters) != list(ARGUMENTS):
                continue
            if not hasattr(rotation, "msa_compiled"):
                setattr(source, ROTATION, _by_rows(rotation))
            done.append(f"{kind.__module__}.{ROTATION}")
    return sorted(set(done))


def _by_rows(rotation: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled rotation that works on (B, S, H, D) in memory, as projections and kernels do.

    Heads come and go as (B, H, S, D) views. Compiled on those, results would be laid out by heads,
    and each of them and of their gradients copied by whoever reads it next.
    """
    inner = compiled(rotation)

    @functools.wraps(rotation)
    def rotate(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        if unsqueeze_dim != 1:
            return inner(q, k, cos, sin, unsqueeze_dim)
        q, k = inner(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2)
        return q.transpose(1, 2), k.transpose(1, 2)

    rotate.msa_compiled = True  # type: ignore[attr-defined]
    return rotate

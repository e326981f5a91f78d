"""What a model's own code computes, found in the code and not by the names of its kind.

Some steps are computed by other code than the model's, which then must be the same function: the
model's own is run between parts that stand in for its own. A list of names (of classes, parts or
config fields) is never complete.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")
"""Parts of a gated MLP."""


@torch.no_grad()
def is_gated(mlp: Any) -> bool:
    """Whether an MLP computes ``down_proj(act_fn(gate_proj(x)) * up_proj(x))`` and nothing else.

    Names do not tell: some have the same parts with a norm, a clamp or a scale between them.
    """
    if not all(hasattr(mlp, part) for part in GATED) or _holds(mlp.act_fn):
        return False
    gate, up, down = (torch.randn(2, 5) * 3 for _ in GATED[:3])
    given: list[Tensor] = []

    def project(rows: Tensor) -> Tensor:
        given.append(rows)
        return down

    stand_in = _StandIn(mlp, gate_proj=lambda _: gate, up_proj=lambda _: up, down_proj=project)
    try:
        out = type(mlp).forward(stand_in, torch.randn(2, 5))
        wanted = mlp.act_fn(gate) * up
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # it needs more than its projections
    return out is down and len(given) == 1 and torch.allclose(given[0], wanted)


def _holds(module: Any) -> bool:
    """Whether an activation has parameters of its own, whose gradients tiles would not give."""
    return isinstance(module, nn.Module) and any(True for _ in module.parameters())


class _StandIn:
    """A module as its forward sees it, some of its parts replaced."""

    def __init__(self, module: nn.Module, **parts: Any) -> None:
        vars(self).update(parts)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@torch.no_grad()
def logits_are_a_product(model: Any) -> bool:
    """Whether a causal language model's logits are what its head makes of the last hidden states:
    no cap, no scale, nothing of their own to learn."""
    body, head = model.base_model, model.get_output_embeddings()
    if type(head).forward is not nn.Linear.forward:
        return False
    hidden, product = torch.randn(1, 3, 4), torch.randn(1, 3, 5)
    given: list[Tensor] = []

    def multiply(rows: Tensor) -> Tensor:
        given.append(rows)
        return product

    before = [(module, vars(module).get("forward")) for module in (body, head)]
    body.forward = lambda *_, **__: _Output(hidden)
    head.forward = multiply
    try:
        logits = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
        return bool(torch.equal(given[0], hidden) and torch.equal(logits, product))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # it asks for more than a body and a head
    finally:
        for module, forward in before:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


class _Output:
    """What a body returns: last hidden states, and None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, at: int) -> Tensor:
        return (self.last_hidden_state,)[at]


def own_window(layer: Any) -> int | None:
    """The sliding window that an attention layer's own code asks for.

    Most layers hold theirs; some (Mistral's) read the config's each time, which those of other
    models may have too and not use.
    """
    if hasattr(layer, "sliding_window"):
        return layer.sliding_window or None
    code = inspect.unwrap(type(layer).forward).__code__
    reads = "sliding_window" in (*code.co_consts, *code.co_names)
    return (getattr(layer.config, "sliding_window", None) or None) if reads else None


class Counted:
    """A function that counts its calls: whether a model's own code has used what it was given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.calls = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return self._function(*arguments, **named)

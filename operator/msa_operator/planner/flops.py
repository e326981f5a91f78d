"""Floating-point operations of one optimizer step, attention counted pair by pair.

Per token 6(P - P_emb) for matrix products, forward and backward. Per attended pair and query head
4 d forward (scores and values) and twice that backward; the score product that flash attention's
backward repeats is not counted, as in the usual definition of model FLOPs. Recomputation is
counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from msa_kernels.pattern import (
    BlockTopK,
    Dense,
    Pattern,
    PerHead,
)

from msa_operator.planner.modelspec import ModelShape
from msa_operator.planner.runtime import is_learned


@dataclass(frozen=True)
class StepFlops:
    """Of one step over all ranks."""

    matrices: float
    attention: float
    recompute_matrices: float = 0.0
    recompute_attention: float = 0.0

    @property
    def model(self) -> float:
        """What the mathematics needs, recomputation left out."""
        return self.matrices + self.attention


def head_pairs(pattern: Pattern, length: int, kv_heads: int) -> float:
    """Attended pairs of one sequence and one head, averaged over the key/value heads.

    For :class:`BlockTopK` this is the bound: which blocks are selected is known at run time.
    """
    if isinstance(pattern, PerHead):
        groups = [head_pairs(pattern.for_group(g), length, 1) for g in range(kv_heads)]
        return sum(groups) / kv_heads
    if isinstance(pattern, BlockTopK):
        return pattern.pairs_bound(length)
    return pattern.pairs(length)


def within(shape: ModelShape, pattern: Pattern) -> Pattern:
    """The pattern within the model's own window; without it where keys are selected at run time,
    of which a bound is all that is counted."""
    if shape.sliding_window is None or is_learned(pattern):
        return pattern
    return pattern.limited(shape.sliding_window)


def layer_pairs(
    shape: ModelShape, pattern: Pattern, dense_layers: tuple[int, ...], length: int
) -> float:
    """Attended pairs of one sequence, summed over layers, for one query head of each."""
    dense = within(shape, Dense())
    sparse = (
        head_pairs(within(shape, pattern), length, shape.kv_heads)
        if len(dense_layers) < shape.layers
        else 0
    )
    full = head_pairs(dense, length, shape.kv_heads) if dense_layers else 0
    return (shape.layers - len(dense_layers)) * sparse + len(dense_layers) * full


def step_flops(
    shape: ModelShape,
    pairs: float,
    length: int,
    sequences: int,
    *,
    checkpointing: str = "none",
) -> StepFlops:
    """FLOPs of one step of ``sequences`` sequences.

    ``pairs`` is :func:`layer_pairs`. ``full`` checkpointing runs every layer's forward a second
    time, ``selective`` all of it but attention.
    """
    tokens = float(length) * sequences
    forward = 4.0 * shape.head_size * shape.heads * pairs * sequences
    return StepFlops(
        matrices=6.0 * shape.multiplied_parameters * tokens,
        attention=3.0 * forward,
        recompute_matrices=2.0
        * shape.layers
        * shape.layer_parameters
        * tokens
        * (checkpointing != "none"),
        recompute_attention=forward * (checkpointing == "full"),
    )

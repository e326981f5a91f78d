"""How heads are split over ranks: one rule for tensor parallelism, Ulysses and the planner.

Heads are split by key/value group. A rank gets an equal share of the query heads, and either whole
groups or, where ranks outnumber the key/value heads, a part of one group beside a copy of its
key/value head. Pure Python, so that the control plane refuses what workers would refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msa_kernels.pattern import BlockTopK, Pattern, PerHead

TENSOR_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of a config's ``model_type`` that tensor parallelism splits."""


class HeadsError(ValueError):
    """Heads that cannot be split so; the message lists the valid degrees."""


def valid_degrees(q_heads: int, kv_heads: int) -> list[int]:
    """Numbers of ranks over which the heads split: each divides the query heads, and divides the
    key/value heads or is a multiple of them."""
    return [
        n
        for n in range(1, q_heads + 1)
        if q_heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]


def tensor_degrees(q_heads: int, kv_heads: int, intermediate: int) -> list[int]:
    """Tensor degrees of a model: its heads split, and its MLP into equal parts."""
    return [n for n in valid_degrees(q_heads, kv_heads) if intermediate % n == 0]


def check_tensor(config: Mapping[str, Any], degree: int) -> None:
    """Raise :class:`HeadsError` when a model cannot be split over ``degree`` tensor ranks.

    ``config`` is a Hugging Face config as a mapping; of one that leaves sizes to transformers'
    defaults only what it says is checked.
    """
    if degree == 1:
        return
    family = config.get("model_type")
    if family not in TENSOR_FAMILIES:
        raise HeadsError(
            f"found {degree} for a model of type {family!r}, allowed: 1; tensor parallelism is "
            f"made for {', '.join(TENSOR_FAMILIES)}"
        )
    heads = config.get("num_attention_heads")
    if heads is not None:
        kv_heads = config.get("num_key_value_heads") or heads
        inner = config.get("intermediate_size")
        valid = tensor_degrees(heads, kv_heads, inner or 0)
        if degree not in valid:
            mlp = f", an MLP of {inner}" if inner else ""
            raise HeadsError(
                f"found {degree}, allowed: {', '.join(map(str, valid))} ({heads} query and "
                f"{kv_heads} key/value heads{mlp}); nearest: {nearest(degree, valid)}"
            )
    vocabulary = config.get("vocab_size")
    if vocabulary is not None and -(-vocabulary // degree) * (degree - 1) >= vocabulary:
        raise HeadsError(
            f"found {degree}, a vocabulary of {vocabulary} leaves the last rank without an entry; "
            "use a smaller degree"
        )


def nearest(degree: int, valid: list[int]) -> int:
    """The valid degree closest to ``degree``, the smaller of two."""
    return min(valid, key=lambda n: (abs(n - degree), n))


@dataclass(frozen=True)
class HeadSplit:
    """Heads over ``degree`` ranks; rank ``r`` has the ``r``-th equal share of the query heads.

    Raises :class:`HeadsError` for degrees that do not split them.
    """

    q_heads: int
    kv_heads: int
    degree: int

    def __post_init__(self) -> None:
        valid = valid_degrees(self.q_heads, self.kv_heads)
        if self.degree not in valid:
            raise HeadsError(
                f"{self.q_heads} query heads and {self.kv_heads} key/value heads do not split "
                f"over {self.degree} ranks; valid: {', '.join(map(str, valid))}; "
                f"nearest: {nearest(self.degree, valid)}"
            )

    @property
    def copies(self) -> int:
        """Ranks that hold a copy of one key/value head: 1 while there are heads enough."""
        return max(1, self.degree // self.kv_heads)

    def groups(self, rank: int) -> range:
        """The key/value heads that ``rank`` holds."""
        if self.copies > 1:
            head = rank // self.copies
            return range(head, head + 1)
        share = self.kv_heads // self.degree
        return range(rank * share, (rank + 1) * share)

    def pattern(self, pattern: Pattern, rank: int) -> Pattern:
        """The pattern that the heads of ``rank`` have, counted from its own first head."""
        mine = tuple(pattern.for_group(group) for group in self.groups(rank))
        return mine[0] if len(set(mine)) == 1 else PerHead(mine)

    def balance(self, pattern: Pattern, length: int) -> float:
        """Attended pairs of the busiest rank over the mean of all ranks; 1 is perfect.

        Members of a PerHead alternate over the groups, so this is 1 whenever each rank has a
        multiple of as many groups as there are members.
        """
        area = {member: _pairs(member, length) for member in _members(pattern)}
        ranks = [
            sum(area[pattern.for_group(group)] for group in self.groups(rank))
            for rank in range(self.degree)
        ]
        return max(ranks) * self.degree / sum(ranks) if sum(ranks) else 1.0


def _members(pattern: Pattern) -> set[Pattern]:
    return set(pattern.members) if isinstance(pattern, PerHead) else {pattern}


def _pairs(pattern: Pattern, length: int) -> int:
    """For learned blocks the bound: which are selected is known at run time."""
    return pattern.pairs_bound(length) if isinstance(pattern, BlockTopK) else pattern.pairs(length)

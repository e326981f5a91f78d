"""How heads are split over ranks: one rule for tensor parallelism, Ulysses and the planner.

Heads are split by key/value group. A rank gets an equal share of the query heads, and either whole
groups or, where ranks outnumber the key/value heads, a part of one group beside a copy of its
key/value head. Ulysses ranks take groups in any order; a tensor rank has a stretch of those that a
layer stores, so a run stores them in an order in which such stretches attend evenly
(:func:`stored_order`). Pure Python, so that the control plane refuses what workers would refuse.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msa_kernels.pattern import BlockTopK, Pattern, PerHead

from msa_workloads.dealing import EVEN, dealt, imbalance, nested

TENSOR_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of a config's ``model_type`` that tensor parallelism splits."""


Order = tuple[int, ...]
"""The key/value heads of a layer by their numbers in the model, each with its query heads."""


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


def check_members(pattern: Pattern, kv_heads: int) -> None:
    """Raise :class:`HeadsError` where a PerHead has members that no key/value head would use."""
    members = len(pattern.members) if isinstance(pattern, PerHead) else 1
    if members > kv_heads:
        unused = members - kv_heads
        raise HeadsError(
            f"found {members} members for {kv_heads} key/value head{'s' * (kv_heads > 1)}: the "
            f"last {unused} of them would never be used; at most {kv_heads} member"
            f"{'s' * (kv_heads > 1)}, or a Union of them for every head"
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

    def order(self, pattern: Pattern, length: int) -> Order:
        """The key/value heads in the order in which equal shares of them attend evenly.

        As they come where that is even within :data:`EVEN` or where nothing is; otherwise an
        order whose busiest rank attends at most that much more than the mean, if there is one,
        and the best that was found if there is none.
        """
        return _even_order(self, pattern, length)

    def pattern(
        self, pattern: Pattern, rank: int, order: Order | None = None
    ) -> Pattern:  # fmt: skip
        """The pattern that the heads of ``rank`` have, counted from its own first head.

        ``order`` is that of the key/value heads over the ranks; None is as they come.
        """
        mine = tuple(
            pattern.for_group(order[group] if order else group) for group in self.groups(rank)
        )
        return mine[0] if len(set(mine)) == 1 else PerHead(mine)

    def balance(
        self, pattern: Pattern, length: int, order: Order | None = None
    ) -> float:  # fmt: skip
        """Attended pairs of the busiest rank over the mean of all ranks; 1 is perfect.

        Members of a PerHead alternate over the groups, so this is 1 whenever each rank has a
        multiple of as many groups as there are members.
        """
        ranks = self.areas(pattern, length, order)
        return max(ranks) * self.degree / sum(ranks) if sum(ranks) else 1.0

    def areas(self, pattern: Pattern, length: int, order: Order | None = None) -> list[int]:
        """Attended pairs of each rank, one query head a key/value head."""
        area = {member: _pairs(member, length) for member in _members(pattern)}
        return [
            sum(area[pattern.for_group(order[g] if order else g)] for g in self.groups(rank))
            for rank in range(self.degree)
        ]


def busiest(
    q_heads: int, kv_heads: int, tensor: int, shares: int, pattern: Pattern, length: int
) -> float:
    """Attended pairs of the busiest rank over the mean where ``tensor`` ranks split the heads as
    they are stored and each of them splits its own over ``shares`` Ulysses ranks in the best
    order. ``pattern`` is that of the heads as stored (:func:`stored`)."""
    outer = HeadSplit(q_heads, kv_heads, tensor)
    inner = HeadSplit(q_heads // tensor, max(1, kv_heads // tensor), shares)
    ranks: list[int] = []
    for rank in range(tensor):
        mine = outer.pattern(pattern, rank)
        ranks += inner.areas(mine, length, inner.order(mine, length))
    return max(ranks) * len(ranks) / sum(ranks) if sum(ranks) else 1.0


def stored(pattern: Pattern, order: Order | None) -> Pattern:
    """The pattern of a layer that stores its key/value heads in ``order``; None is the model's."""
    return pattern if order is None else PerHead(tuple(pattern.for_group(g) for g in order))


def stored_orders(
    layers: Sequence[Pattern], heads: tuple[int, int], tensor: int, shares: int, length: int
) -> dict[int, Order]:
    """:func:`stored_order` of every layer where that is not the model's own; ``heads`` are query
    and key/value heads. Raises :class:`HeadsError` for degrees that do not split them."""
    found = {
        layer: stored_order(*heads, tensor, shares, pattern, length)
        for layer, pattern in enumerate(layers)
    }
    return {layer: order for layer, order in found.items() if order is not None}


def report_heads(
    layers: Sequence[Pattern], heads: tuple[int, int], orders: Mapping[int, Order], tensor: int,
    shares: int, length: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """JSON-ready: how heads whose patterns differ are stored, and how evenly the ranks that split
    them attend, beside what the model's order would give; nothing where neither says anything."""
    kinds: dict[tuple[Pattern, Order | None], list[int]] = {}
    for layer, pattern in enumerate(layers):
        if isinstance(pattern, PerHead) and (layer in orders or tensor * shares > 1):
            kinds.setdefault((pattern, orders.get(layer)), []).append(layer)
    return [
        {
            "layers": some,
            "order": None if order is None else list(order),
            "balance": round(busiest(*heads, tensor, shares, stored(pattern, order), length), 4),
            "plain": round(busiest(*heads, tensor, shares, pattern, length), 4),
        }
        for (pattern, order), some in kinds.items()
    ]


@functools.lru_cache(maxsize=256)
def stored_order(
    q_heads: int, kv_heads: int, tensor: int, shares: int, pattern: Pattern, length: int
) -> Order | None:
    """The order in which a run that starts on these ranks stores a layer's key/value heads.

    None is the model's own: where that is even within :data:`EVEN` over the ``tensor`` ranks and
    the ``shares`` Ulysses ranks of each, or where nothing that was found is more even. Otherwise
    an even one, if there is one, and among those one that is even for most other degrees too:
    the run may go on on another mesh. What is even over some ranks is so over any divisor of them.
    """
    if tensor == 1 or not isinstance(pattern, PerHead):
        return None

    area = [_pairs(pattern.for_group(group), length) for group in range(kv_heads)]
    degrees = [n for n in range(2, kv_heads) if kv_heads % n == 0]

    def price(order: Order | None) -> tuple[float, float, int]:
        kept = stored(pattern, order)
        here = [area[group] for group in order or range(kv_heads)]
        return (
            max(EVEN, busiest(q_heads, kv_heads, tensor, shares, kept, length)),
            max(EVEN, imbalance(here, min(tensor, kv_heads))),
            sum(imbalance(here, n) > EVEN for n in degrees) if order else 0,
        )

    best: Order | None = None
    least = price(None)
    if least[0] <= EVEN:
        return None
    for ranks in reversed(degrees):
        if ranks % tensor == 0:
            order = tuple(group for share in nested(area, ranks) for group in share)
            if (found := price(order)) < least:
                best, least = order, found
    return best


@functools.lru_cache(maxsize=256)
def _even_order(split: HeadSplit, pattern: Pattern, length: int) -> Order:
    plain = tuple(range(split.kv_heads))
    if split.copies > 1 or not isinstance(pattern, PerHead):
        return plain
    area = [_pairs(pattern.for_group(group), length) for group in plain]
    over = imbalance(area, split.degree)
    if split.kv_heads == split.degree or over <= EVEN:
        return plain
    found = tuple(group for share in dealt(area, split.degree) for group in share)
    return found if imbalance([area[g] for g in found], split.degree) < over else plain


def _members(pattern: Pattern) -> set[Pattern]:
    return set(pattern.members) if isinstance(pattern, PerHead) else {pattern}


def _pairs(pattern: Pattern, length: int) -> int:
    """For learned blocks the bound: which are selected is known at run time."""
    return pattern.pairs_bound(length) if isinstance(pattern, BlockTopK) else pattern.pairs(length)

"""How heads are split over ranks: one rule for tensor parallelism, Ulysses and the planner.

Heads are split by key/value group. A rank gets an equal share of the query heads, and either whole
groups or, where ranks outnumber the key/value heads, a part of one group beside a copy of its
key/value head. Pure Python, so that the control plane refuses what workers would refuse.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msa_kernels.pattern import BlockTopK, Pattern, PerHead

TENSOR_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of a config's ``model_type`` that tensor parallelism splits."""


EVEN = 1.03
"""Attended area of the busiest rank over the mean that counts as even."""

TRIED = 4096
"""Dead ends after which the search for an even order gives up."""


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

    def order(self, pattern: Pattern, length: int) -> tuple[int, ...]:
        """The key/value heads in the order in which equal shares of them attend evenly.

        As they come where that is even within :data:`EVEN` or where nothing is; otherwise an
        order whose busiest rank attends at most that much more than the mean, if there is one,
        and the best that was found if there is none.
        """
        return _even_order(self, pattern, length)

    def pattern(
        self, pattern: Pattern, rank: int, order: tuple[int, ...] | None = None
    ) -> Pattern:  # fmt: skip
        """The pattern that the heads of ``rank`` have, counted from its own first head.

        ``order`` is that of the key/value heads over the ranks; None is as they come.
        """
        mine = tuple(
            pattern.for_group(order[group] if order else group) for group in self.groups(rank)
        )
        return mine[0] if len(set(mine)) == 1 else PerHead(mine)

    def balance(
        self, pattern: Pattern, length: int, order: tuple[int, ...] | None = None
    ) -> float:  # fmt: skip
        """Attended pairs of the busiest rank over the mean of all ranks; 1 is perfect.

        Members of a PerHead alternate over the groups, so this is 1 whenever each rank has a
        multiple of as many groups as there are members.
        """
        ranks = self.areas(pattern, length, order)
        return max(ranks) * self.degree / sum(ranks) if sum(ranks) else 1.0

    def areas(
        self, pattern: Pattern, length: int, order: tuple[int, ...] | None = None
    ) -> list[int]:
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
    they come and each of them splits its own over ``shares`` Ulysses ranks in the best order."""
    outer = HeadSplit(q_heads, kv_heads, tensor)
    inner = HeadSplit(q_heads // tensor, max(1, kv_heads // tensor), shares)
    ranks: list[int] = []
    for rank in range(tensor):
        mine = outer.pattern(pattern, rank)
        ranks += inner.areas(mine, length, inner.order(mine, length))
    return max(ranks) * len(ranks) / sum(ranks) if sum(ranks) else 1.0


@functools.lru_cache(maxsize=256)
def _even_order(split: HeadSplit, pattern: Pattern, length: int) -> tuple[int, ...]:
    plain = tuple(range(split.kv_heads))
    if split.copies > 1 or not isinstance(pattern, PerHead):
        return plain
    area = [_pairs(pattern.for_group(group), length) for group in plain]
    limit = EVEN * sum(area) / split.degree
    size = split.kv_heads // split.degree
    if size == 1 or max(split.areas(pattern, length)) <= limit:
        return plain
    greedy = _deal(area, split.degree)
    if max(sum(area[g] for g in share) for share in greedy) > limit:
        greedy = _search(area, split.degree, limit) or greedy
    found = tuple(group for share in greedy for group in sorted(share))
    better = split.balance(pattern, length, found) < split.balance(pattern, length)
    return found if better else plain


def _deal(area: list[int], ranks: int) -> list[list[int]]:
    """Items over ranks, as many on each: the largest left to the rank with the least so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(area)), key=lambda n: -area[n]):
        room = [share for share in shares if len(share) < len(area) // ranks]
        min(room, key=lambda share: sum(area[n] for n in share)).append(item)
    return shares


def _search(area: list[int], ranks: int, limit: float) -> list[list[int]] | None:
    """Items over ranks, as many on each, with at most ``limit`` on any; None where there is no
    way, or none was found in :data:`TRIED` steps. Items of one area are alike."""
    items: dict[int, list[int]] = {}
    for item in sorted(range(len(area)), key=lambda n: -area[n]):
        items.setdefault(area[item], []).append(item)
    areas, size = list(items), len(area) // ranks
    hopeless: set[tuple[int, ...]] = set()

    def fillings(left: tuple[int, ...], kind: int, need: int, room: float) -> Iterator[list[int]]:
        """Counts of the kinds from ``kind`` on that fill one rank."""
        if kind == len(areas):
            if not need:
                yield []
            return
        for count in range(min(left[kind], need), -1, -1):
            if (spare := room - count * areas[kind]) >= 0:
                for rest in fillings(left, kind + 1, need - count, spare):
                    yield [count, *rest]

    def fill(left: tuple[int, ...], rank: int) -> list[list[int]] | None:
        total = sum(n * a for n, a in zip(left, areas, strict=True))
        if rank == ranks:
            return []
        if left in hopeless or total > limit * (ranks - rank) or len(hopeless) > TRIED:
            return None
        first = next(kind for kind, count in enumerate(left) if count)
        for counts in fillings(left, 0, size, limit):
            # Somebody gets the largest that is left: this rank, since ranks are alike.
            if counts[first]:
                rest = tuple(n - c for n, c in zip(left, counts, strict=True))
                if (others := fill(rest, rank + 1)) is not None:
                    return [counts, *others]
        hopeless.add(left)
        return None

    found = fill(tuple(len(some) for some in items.values()), 0)
    if found is None:
        return None
    return [
        [items[a].pop() for a, count in zip(areas, counts, strict=True) for _ in range(count)]
        for counts in found
    ]


def _members(pattern: Pattern) -> set[Pattern]:
    return set(pattern.members) if isinstance(pattern, PerHead) else {pattern}


def _pairs(pattern: Pattern, length: int) -> int:
    """For learned blocks the bound: which are selected is known at run time."""
    return pattern.pairs_bound(length) if isinstance(pattern, BlockTopK) else pattern.pairs(length)

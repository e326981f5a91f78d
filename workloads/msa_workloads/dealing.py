"""Items over ranks, as many on each, with nearly equal sums: which heads a rank has.

Pure Python: it decides what the planner tells and what workers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

EVEN = 1.03
"""Sum of the busiest rank over the mean that counts as even."""

TRIED = 50_000
"""Steps after which the search for an even way gives up: some tens of milliseconds."""


def imbalance(area: Sequence[int], ranks: int) -> float:
    """Sum of the busiest of ``ranks`` equal stretches over the mean."""
    size, total = len(area) // ranks, sum(area)
    most = max(sum(area[begin : begin + size]) for begin in range(0, len(area), size))
    return most * ranks / total if total else 1.0


def dealt(area: Sequence[int], ranks: int) -> list[list[int]]:
    """Items of each rank: even within :data:`EVEN` if a way is found, else as dealt by size."""
    limit = EVEN * sum(area) / ranks
    found = _deal(area, ranks)
    if max(sum(area[item] for item in share) for share in found) > limit:
        found = _search(area, ranks, limit) or found
    return sorted(sorted(share) for share in found)


def nested(area: Sequence[int], ranks: int) -> list[list[int]]:
    """:func:`dealt`; where that is uneven, with ranks so next to each other that half as many (or
    the largest part that divides them) are as even as can be."""
    found = dealt(area, ranks)
    sums = [sum(area[item] for item in share) for share in found]
    fewer = next((n for n in range(ranks // 2, 1, -1) if ranks % n == 0), 1)
    if fewer == 1 or imbalance(sums, ranks) <= EVEN:
        return found
    return [found[rank] for block in nested(sums, fewer) for rank in block]


def _deal(area: Sequence[int], ranks: int) -> list[list[int]]:
    """Items over ranks, as many on each: the largest left to the rank with the least so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(area)), key=lambda n: -area[n]):
        room = [share for share in shares if len(share) < len(area) // ranks]
        min(room, key=lambda share: sum(area[n] for n in share)).append(item)
    return shares


def _search(area: Sequence[int], ranks: int, limit: float) -> list[list[int]] | None:
    """Items over ranks, as many on each, with at most ``limit`` on any; None where there is no
    way, or none was found in :data:`TRIED` steps. Items of one area are alike."""
    items: dict[int, list[int]] = {}
    for item in sorted(range(len(area)), key=lambda n: -area[n]):
        items.setdefault(area[item], []).append(item)
    areas, size = list(items), len(area) // ranks
    hopeless: set[tuple[int, ...]] = set()
    steps = 0

    def fillings(
        left: tuple[int, ...], kind: int, need: int, room: float, least: int
    ) -> Iterator[list[int]]:
        """Counts of the kinds from ``kind`` on that fill one rank, at least ``least`` of it."""
        nonlocal steps
        steps += 1
        if kind == len(areas):
            yield []
            return
        others = sum(left[kind + 1 :])
        for count in range(min(left[kind], need), max(least, need - others) - 1, -1):
            spare = room - count * areas[kind]
            if spare >= (need - count) * areas[-1] and steps <= TRIED:
                for rest in fillings(left, kind + 1, need - count, spare, 0):
                    yield [count, *rest]

    def fill(left: tuple[int, ...], rank: int) -> list[list[int]] | None:
        total = sum(n * a for n, a in zip(left, areas, strict=True))
        if rank == ranks:
            return []
        if left in hopeless or total > limit * (ranks - rank):
            return None
        first = next(kind for kind, count in enumerate(left) if count)
        # Somebody gets the largest that is left: this rank, since ranks are alike.
        for some in fillings(left, first, size, limit, 1):
            counts = [0] * first + some
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

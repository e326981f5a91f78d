"""What context parallelism did in a run, by kind of layer: bytes, balance, and what was hidden."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from msa_kernels.pattern import Pattern

from msa_workloads.context import exchange
from msa_workloads.context.home import Packing, Rule, choose
from msa_workloads.context.layout import LayoutError
from msa_workloads.context.solver import weighted_area
from msa_workloads.context.split import Split, head_patterns
from msa_workloads.heads import HeadSplit, Order, busiest, stored

TIMED_STEP = 3
"""Step of an attempt whose exchanges are timed on GPUs: kernels are compiled by then."""


@contextmanager
def timed(step: int) -> Iterator[None]:
    """Time the exchanges of this step of the attempt, if it is the one."""
    exchange.time_exchanges(step == TIMED_STEP)
    try:
        yield
    finally:
        exchange.time_exchanges(False)


class Account:
    """Keeps what a run's report says about its context ranks."""

    def __init__(
        self, split: Split, rules: Sequence[Rule], layers: Sequence[Pattern],
        heads: tuple[int, int], tensor: tuple[int, int], orders: Mapping[int, Order],
    ) -> None:  # fmt: skip
        """``heads`` are those of all tensor ranks; ``tensor`` is their number and this rank's;
        ``orders`` tells of layers that store heads in another order than the model's."""
        self._split, self._rules, self._heads = split, rules, heads
        self._tensor = tensor[0]
        share = HeadSplit(*heads, tensor[0])
        self._whole: dict[Pattern, Pattern] = {}
        self._stored: dict[Pattern, Pattern] = {}
        for layer, pattern in enumerate(layers):
            kept = self._stored.setdefault(pattern, stored(pattern, orders.get(layer)))
            self._whole.setdefault(share.pattern(kept, tensor[1]), pattern)
        self._layers = Counter(layers)
        exchange.reset()

    def report(self, steps: int, packings: Sequence[Packing]) -> dict[str, Any]:
        """JSON-ready; collective. Bytes are per step, balance is that of ``packings``."""
        split, options = self._split, self._split.options
        mine = {
            self._whole.get(kind, kind): {p: some.received for p, some in purposes.items()}
            for kind, purposes in exchange.moved_by_kind().items()
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        timing = exchange.hidden()
        dist.all_gather_object(ranks, (mine, timing and (timing.seconds, timing.waited)))
        times = [time for _, time in ranks if time]
        return {
            "ranks": split.home.ranks * split.heads,
            "heads": split.heads,
            "method": options.method,
            "gradients": options.gradients,
            "layout": split.home.name,
            "candidates": [rule.describe() for rule in self._rules],
            "kinds": [
                self._kind(pattern, count, [counted for counted, _ in ranks], steps, packings)
                for pattern, count in self._layers.items()
            ],
            "heads_bytes": _most([c.get(None, {}) for c, _ in ranks], "heads", steps),
            "hidden": None if not times else _share(times),
        }

    def _kind(
        self, pattern: Pattern, layers: int, ranks: list[dict[Pattern, dict[str, int]]],
        steps: int, packings: Sequence[Packing],
    ) -> dict[str, Any]:  # fmt: skip
        counted = [rank.get(pattern, {}) for rank in ranks]
        weights, home = head_patterns([pattern], self._heads[1]), self._split.home
        split = *self._heads, self._tensor, self._split.heads
        most = total = 0
        for documents in packings:
            layout = home.of(documents)
            rows = weighted_area(weights, documents, layout.tokens)
            area = [
                int(rows[tokens[tokens < layout.tokens]].sum())
                for tokens in map(layout.tokens_of, range(layout.ranks))
            ]
            most, total = most + max(area), total + sum(area)
        return {
            "pattern": pattern.to_dict() if _plain(pattern) else str(pattern),
            "layers": layers,
            "balance": round(most * home.ranks / total, 4) if total else 1.0,
            "heads_balance": round(busiest(*split, self._stored[pattern], home.tokens), 4),
            "needed": _most(counted, "needed", steps),
            "keys": _most(counted, "keys", steps),
            "gradients": _most(counted, "gradients", steps),
            "alone": self._alone(weights, packings),
        }

    def _alone(
        self, weights: Any, packings: Sequence[Packing]
    ) -> dict[str, Any]:  # fmt: skip
        """The layout that these layers alone would have, beside what they have here."""
        home = self._split.home
        try:
            rules = choose(home.tokens, home.ranks, weights, packings, multiple=home.multiple)
        except LayoutError:
            return {}
        here = next((r for r in rules if r.home.name == home.name), None)
        return {
            "layout": rules[0].home.name,
            "received": rules[0].received[0],
            "received_here": None if here is None else here.received[0],
        }


def _most(ranks: Sequence[dict[str, int]], purpose: str, steps: int) -> dict[str, int]:
    """Bytes per step of the busiest receiver, and of all ranks."""
    received = [rank.get(purpose, 0) for rank in ranks]
    return {"most": max(received) // max(1, steps), "total": sum(received) // max(1, steps)}


def _share(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    seconds, waited = (sum(part) for part in zip(*times, strict=True))
    return {
        "share": round(max(0.0, 1.0 - waited / seconds) if seconds else 1.0, 4),
        "milliseconds": round(seconds * 1000 / len(times), 3),
        "waited_milliseconds": round(waited * 1000 / len(times), 3),
    }


def _plain(pattern: Pattern) -> bool:
    """Whether the pattern has a form that users write; one limited by the model's own window has
    none."""
    from msa_kernels.pattern import PatternError, from_dict

    try:
        return from_dict(pattern.to_dict()) == pattern
    except (PatternError, TypeError):
        return False

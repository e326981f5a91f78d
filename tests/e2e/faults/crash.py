"""Kills the operator before and after its writes, each once, and remembers where."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .rules import Call, Moment

_PASSING = re.compile(
    rb'"resourceVersion": ?"[0-9]+"|"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z"|[0-9]+\.[0-9]+'
)
"""What differs when the same is written again: versions, times, and lengths of time."""


def identity(call: Call, body: bytes) -> str:
    """The same for a write and for the same write after a crash."""
    name = call.name
    if call.resource == "events":
        # Their names and counts are made anew.
        body = b" ".join(sorted(re.findall(rb'"(?:reason|message)": ?"[^"]*"', body)))
    digest = hashlib.sha256(_PASSING.sub(b"", body)).hexdigest()[:12]
    return f"{call.verb} {call.resource} {call.namespace}/{name} {digest}"


@dataclass
class Everywhere:
    """Kills before and after every write that was not met before; by chance, a part of them."""

    kill: Callable[[], None]
    share: float = 1.0
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    met: set[tuple[str, str]] = field(default_factory=set)
    kills: Counter[str] = field(default_factory=Counter)

    def moment(self, when: str) -> Moment:
        async def reached(call: Call, body: bytes) -> bool:
            key = (when, identity(call, body))
            if key in self.met:
                return True
            self.met.add(key)
            if self.chance.random() >= self.share:
                return True
            self.kills[f"{when} {call.verb} {call.resource}"] += 1
            self.kill()
            return False

        return reached

    def report(self) -> str:
        lines = [f"{count:4d}  {what}" for what, count in sorted(self.kills.items())]
        writes = len({what for _, what in self.met})
        return f"{sum(self.kills.values())} kills at {writes} writes\n" + "\n".join(lines)


@dataclass
class Once:
    """Kills once in each namespace: before or after its n-th write."""

    kill: Callable[[], None]
    points: dict[str, tuple[int, str]]
    writes: Counter[str] = field(default_factory=Counter)
    kills: list[str] = field(default_factory=list)

    def moment(self, when: str) -> Moment:
        async def reached(call: Call, _: bytes) -> bool:
            if when == "before":
                self.writes[call.namespace] += 1
            if self.points.get(call.namespace) != (self.writes[call.namespace], when):
                return True
            number, _when = self.points.pop(call.namespace)
            self.kills.append(f"{when} write {number}, {call.verb} {call.resource}")
            self.kill()
            return False

        return reached

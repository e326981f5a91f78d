"""A whole life of one job, in steps that follow what its status says.

It trains, loses a worker, goes on from the checkpoint, is suspended and resumed in mid-run, ends,
gives everything back, and is deleted. Nothing here waits: whoever drives it looks again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..process import wait_for
from .world import World

STEPS = 30
END = ["WorkerLost", "Suspended", "Succeeded"]
"""Why the attempts of an undisturbed life end. Of a lost worker, its driver's error may be what is
seen first."""


@dataclass
class Life:
    """One job in a namespace of its own."""

    world: World
    name: str = "job"
    loses: bool = True
    """Without a loss it is ten seconds shorter: no backoff."""
    stage: str = ""
    last: dict[str, Any] = field(default_factory=dict)
    """The last status that was there."""

    def __post_init__(self) -> None:
        self._steps = self._live()
        self.over = False

    def look(self) -> bool:
        """Goes on as far as it can now; True once it is over."""
        if not self.over:
            self.over = next(self._steps, None) is None
        return self.over

    def _live(self) -> Iterator[str]:
        world, name = self.world, self.name
        heads = world.simulator.heads
        world.create(name, {
            "training.maxSteps": STEPS, "checkpoint.everySteps": 5, "failure.maxRestarts": 20,
        })  # fmt: skip
        uid = world.uid(name)
        heads.limits[uid] = 10
        yield from self._until("trains", lambda s: s.step >= 10)
        if self.loses:
            world.simulator.delete_pod(world.namespace, world.cluster(name), "worker")
            yield from self._until("starts again", lambda s: s.attempts >= 2)
        heads.limits[uid] = 20
        yield from self._until("goes on", lambda s: s.step >= 20)
        world.patch(name, {"suspend": True})
        yield from self._until("is suspended",
                               lambda s: s.true("Suspended") and not world.held())  # fmt: skip
        heads.limits.pop(uid)
        world.patch(name, {"suspend": False})
        yield from self._until("is complete", lambda s: s.true("Complete"))
        yield from self._until("gave back what it held", lambda _: not world.held())
        world.delete(name)
        self.stage = "is deleted"
        while world.job(name) is not None or world.records():
            yield self.stage

    def _until(self, stage: str, holds: Any) -> Iterator[str]:
        self.stage = stage
        while True:
            self.last = self.world.status(self.name) or self.last
            if holds(Shown(self.last)):
                return
            yield stage

    def check(self) -> None:
        """It ended as an undisturbed life does."""
        assert self.over, self.told()
        reasons = [a["reason"] for a in self.last["attempts"]]
        if self.loses and reasons[0] == "TrainingFailed":
            assert self.last["attempts"][0]["message"] == "a worker died", self.told()
            reasons[0] = "WorkerLost"
        assert reasons == END[not self.loses :], (reasons, self.told())
        assert self.last["progress"]["step"] == STEPS
        first = [a["fromStep"] for a in self.last["attempts"]]
        assert first == ([0, 10, 20] if self.loses else [0, 20]), self.told()

    def told(self) -> str:
        return f"{self.world.namespace}/{self.name} {self.stage}: {json.dumps(self.last)[:3000]}"


@dataclass(frozen=True)
class Shown:
    """A status, as far as a life follows it."""

    status: dict[str, Any]

    @property
    def step(self) -> int:
        return (self.status.get("progress") or {}).get("step", 0)

    @property
    def attempts(self) -> int:
        return len(self.status.get("attempts") or ())

    def true(self, condition: str) -> bool:
        found = {c["type"]: c["status"] for c in self.status.get("conditions") or ()}
        return found.get(condition) == "True"


def live(lives: list[Life], timeout_s: float, between: Any = lambda: None) -> None:
    """Drives them all to their end; `between` is called between the looks."""

    def all_over() -> bool:
        between()
        return sum(life.look() for life in lives) == len(lives)

    try:
        wait_for(all_over, "every life was over", timeout_s)
    except TimeoutError as late:
        left = "\n".join(life.told() for life in lives if not life.over)
        raise TimeoutError(f"{late}\n{left}") from None

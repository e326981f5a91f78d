"""The operator dies at every single write of a job's life, and the end is always the same."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.faults.crash import Everywhere, Once
from e2e.faults.life import Life, live
from e2e.faults.running import Operator
from e2e.faults.stand import Stand, standing
from e2e.fixtures import not_here
from e2e.paths import Unavailable
from e2e.process import wait_for

pytestmark = pytest.mark.slow
SHARE = 0.3
"""Of the moments at which the operator is killed in the sample."""
PARTS = 10
"""Of all moments of a life: those of one part are met in lives that are led together, so that
every death is one in the life of each of them."""


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    try:
        with standing(tmp_path_factory.mktemp("crash")) as made:
            yield made
    except Unavailable as reason:
        not_here(reason)


@pytest.fixture(autouse=True)
def cleared(stand: Stand) -> Iterator[None]:
    yield
    stand.clear()


def harm(stand: Stand, how: Everywhere | Once) -> None:
    for at in (stand.proxy, stand.simulator.heads):
        at.before, at.after = how.moment("before"), how.moment("after")


def reviving(stand: Stand, operator: Operator) -> Any:
    """Starts the operator again whenever it has ended."""

    def revive() -> None:
        if not operator.alive:
            stand.release()
            operator.start(ready=False)

    return revive


def check(stand: Stand, lives: list[Life]) -> None:
    """Nothing was ever double, nothing is left, and the operator does nothing more."""
    for life in lives:
        life.check()
        life.world.clean()
    assert stand.simulator.violations == []


@pytest.mark.parametrize(
    "share", [SHARE, pytest.param(1.0, marks=pytest.mark.full)], ids=["sample", "every"]
)
def test_killed_before_and_after_the_writes_of_one_life(stand: Stand, share: float, capsys: Any):
    operator = stand.operator().start()
    how = Everywhere(operator.kill, share)
    harm(stand, how)
    life = Life(stand.world("everywhere"))
    live([life], 600, reviving(stand, operator))
    check(stand, [life])
    # It never ended by itself; two writes at once may die of one kill.
    assert 0 < operator.starts - 1 <= sum(how.kills.values())
    told = how.report()
    record("everywhere", share, told)
    with capsys.disabled():
        print(f"\n{told}", file=sys.stderr)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_killed_once_in_each_of_many_lives(stand: Stand, part: int, capsys: Any):
    """As many lives as a life has moments: each with one death of its own, and all the others'."""
    operator = stand.operator().start()
    counting = Once(operator.kill, {})
    harm(stand, counting)
    whole = Life(stand.world("counted"))
    live([whole], 180)
    check(stand, [whole])
    writes = counting.writes[whole.world.namespace]
    every = [(n, when) for n in range(1, writes + 1) for when in ("before", "after")]
    points = every[part::PARTS]
    lives = [Life(stand.world("once")) for _ in points]
    spaces = [life.world.namespace for life in lives]
    how = Once(operator.kill, dict(zip(spaces, points, strict=True)))
    harm(stand, how)
    live(lives, 400, reviving(stand, operator))
    check(stand, lives)
    told = [f"{len(how.kills)} kills in {len(points)} lives of {writes} writes", *how.kills]
    record(f"once-{part}", 1.0, "\n".join(told))
    with capsys.disabled():
        print("\n" + "\n".join(told), file=sys.stderr)


def record(what: str, share: float, told: str) -> None:
    """Kept where FLASH_MSA_RECORD names a folder."""
    if folder := os.environ.get("FLASH_MSA_RECORD"):
        path = Path(folder) / f"crash-{what}-{share:g}.json"
        path.write_text(json.dumps(told.splitlines(), indent=1) + "\n")


def test_a_second_operator_takes_over_and_never_acts_beside_the_first(stand: Stand):
    short = {"lease": {"durationSeconds": 4, "renewSeconds": 3, "retrySeconds": 0.5}}
    first = stand.operator("operator-0", **short).start()
    life = Life(stand.world("two"))
    wait_for(lambda: life.look() or life.last.get("phase") == "Running", "it runs", 60)
    second = stand.operator("operator-1", **short).start()
    first.kill()
    live([life], 120)
    check(stand, [life])
    assert second.alive and not first.alive

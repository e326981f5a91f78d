"""The operator's clock goes on through every change of the machine's."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_operator.reconcile import attempts
from msa_operator.reconcile.intent import Intent
from msa_operator.reconcile.lifecycle import TABLE
from msa_operator.runtime.clock import SLEW, SteadyClock
from reconcile_world import World, observe

DAY = 86_400.0
RETRY = next(t for t in TABLE if t.when.startswith("backoff is over"))


class Machine:
    """Two clocks of one machine, of which one can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed, self.wrong = 0.0, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.passed)
        monkeypatch.setattr(time, "time", lambda: 1e9 + self.passed + self.wrong)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3600), st.floats(-DAY, DAY)), max_size=20),
)
def test_it_never_jumps(changes: list[tuple[float, float]]):
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        clock = SteadyClock()
        before = clock()
        for seconds, wrong in changes:
            machine.passed += seconds
            machine.wrong = wrong
            now = clock()
            assert abs(now - before - seconds) <= seconds * SLEW + 1e-3
            before = now


def test_it_comes_to_the_machines_time(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch)
    clock = SteadyClock()
    machine.wrong = 3.0
    machine.passed += 400.0
    assert clock() == pytest.approx(time.time())


@pytest.mark.parametrize(
    ("ahead", "waits"),
    [(0.0, False), (attempts.BACKOFF_MAX_S - 1, True), (attempts.BACKOFF_MAX_S + 1, False)],
)
def test_a_backoff_that_a_clock_set_back_made_endless_is_over(ahead: float, waits: bool):
    world = World()
    intent = replace(Intent(), phase="Recovering", replace=True, retry_at=world.now + ahead)
    state = observe(replace(world, intent=intent))
    assert RETRY.holds(state) is not waits

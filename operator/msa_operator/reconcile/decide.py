"""From what was seen to what is done: pure, and the same for the same state.

An intent that changed is persisted before any action that it names, so a crash at any point leaves
a state from which the same end is reached.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msa_operator.api import values
from msa_operator.reconcile import conditions, ensure
from msa_operator.reconcile.actions import Action, PersistIntent, RecordEvent
from msa_operator.reconcile.conditions import Condition
from msa_operator.reconcile.intent import TERMINAL, Intent, Phase
from msa_operator.reconcile.lifecycle import TABLE
from msa_operator.reconcile.observe import State

POLL_S = 15.0
"""Between looks at a run or a wait that no event would end: its progress is pulled."""
REPLAN_S = 600.0
"""Between looks at a spec without a plan: a HardwareProfile may have come."""
_LONGEST_CHAIN = 8


@dataclass(frozen=True)
class Decision:
    """Actions are carried out in order; the first that fails ends the round."""

    actions: tuple[Action, ...]
    conditions: tuple[Condition, ...]
    phase: Phase
    intent: Intent
    requeue_after: float | None
    """Seconds; None when only an event can bring news."""


def decide(state: State, poll: float = POLL_S) -> Decision:
    """What to do now. Never raises for any state that can be observed.

    ``poll`` is the longest time in seconds between two looks at what no event would tell.
    """
    intent, events, again = _follow(state)
    now = replace(state, intent=intent)
    persisted = (PersistIntent(intent),) if intent != state.intent else ()
    todo = () if again else ensure.actions(now)
    wait = 0.0 if again else _requeue(now, poll)
    return Decision((*persisted, *todo, *events), conditions.of(now), intent.phase, intent, wait)


def _follow(state: State) -> tuple[Intent, tuple[RecordEvent, ...], bool]:
    """The intent after every transition that holds, its events, and whether to look again."""
    events: list[RecordEvent] = []
    if state.job.deleted is not None:
        return state.intent, (), False
    for _ in range(_LONGEST_CHAIN):
        row = next((t for t in TABLE if t.source == state.intent.phase and t.holds(state)), None)
        if row is None:
            break
        intent = row.then(state)
        if intent.phase != state.intent.phase:
            kind = "Warning" if intent.phase in ("Failed", "Recovering") else "Normal"
            events.append(RecordEvent(kind, intent.reason, intent.message))
        state = replace(state, intent=intent)
        if row.observe_again:
            return intent, tuple(events), True
    return state.intent, tuple(events), False


def _requeue(s: State, poll: float) -> float | None:
    """Seconds until time itself may change the decision."""
    if s.job.deleted is not None:
        return poll if s.job.finalizer else None
    phase = s.intent.phase
    if phase in TERMINAL:
        return _terminal(s, poll)
    if phase == "Suspended":
        return poll if s.ours or s.capacity.held or s.job.finalizer else None
    if phase == "Pending":
        return REPLAN_S
    if phase == "Recovering" and s.now < s.intent.retry_at:
        return min(poll, s.intent.retry_at - s.now)
    return poll


def _terminal(s: State, poll: float) -> float:
    cleanup, age = s.job.spec.cleanup, s.age(s.intent.ended or s.intent.since)
    left = max(poll, values.seconds(cleanup.ttl) - age)
    if s.capacity.held or s.job.finalizer or s.live_submissions:
        return poll
    if s.ours:
        return min(left, max(poll, values.seconds(cleanup.after) - age))
    return left

"""decide over every state reached: one cluster, one submission, deadlines, and crash anywhere."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_operator.reconcile.actions import (
    CreateCluster,
    ForceDeletePod,
    PersistIntent,
    RecordEvent,
    RemoveFinalizer,
    Submit,
)
from msa_operator.reconcile.conditions import merge
from msa_operator.reconcile.decide import Decision, decide
from msa_operator.reconcile.ensure import RETURN_S
from msa_operator.reconcile.intent import TERMINAL
from msa_operator.reconcile.lifecycle import TABLE
from reconcile_world import (
    EVENTS,
    SPECS,
    TICK_S,
    World,
    act,
    apply,
    cooperate,
    key,
    observe,
    reconcile,
    spec,
)

LEGAL = {(t.source, target) for t in TABLE for target in t.targets}
STATES = 6_000
"""Bound on the search in this suite; breadth first, so every short sequence is in it."""


def check(before: World, after: World, decision: Decision) -> None:
    """What holds after every round, whole or cut short."""
    assert len(after.clusters) <= 1
    assert len(after.live) <= 1
    kinds = [type(a) for a in decision.actions]
    assert kinds.count(PersistIntent) <= 1 and PersistIntent not in kinds[1:]
    if before.intent.phase in TERMINAL:
        assert decision.intent == before.intent
        assert not {CreateCluster, Submit} & {*kinds}
    if decision.phase in TERMINAL:
        assert not {CreateCluster, Submit} & {*kinds}
    idle = decision.phase == "Suspended" and not before.clusters and not before.held
    unheld = before.deleted is not None and not before.finalizer
    assert decision.requeue_after is not None or idle or unheld
    assert decision.requeue_after is None or 0 <= decision.requeue_after < 1e6


def explore(start: World, most: int) -> dict[object, World]:
    """Worlds reached by events and rounds: whole, cut short by a crash, or acting on old news."""
    found = {key(start): start}
    queue = deque([start])
    while queue and len(found) < most:
        w = queue.popleft()
        for after in successors(w):
            if not after.gone and key(after) not in found:
                found[key(after)] = after
                queue.append(after)
    return found


def successors(w: World):
    whole, decision = reconcile(w)
    check(w, whole, decision)
    yield whole
    for writes in range(1, len(decision.actions)):
        part, _ = reconcile(w, writes)
        check(w, part, decision)
        yield part
    for event in EVENTS.values():
        now = event(w)
        yield now
        late = act(now, decision.actions, w)  # it happened between the look and the writes
        check(w, late, decision)
        yield late


@pytest.fixture(scope="module")
def reached() -> list[World]:
    return list(explore(World(), STATES).values())


def test_every_phase_is_reached(reached):
    phases = {w.intent.phase for w in reached}
    assert phases >= {"Pending", "Suspended", "Provisioning", "Starting", "Running", "Recovering",
                      "Draining", "Complete", "Failed", "Queued"}  # fmt: skip


def test_every_change_of_phase_is_in_the_table(reached):
    for w in reached:
        chain = w.intent
        decision = decide(observe(w))
        if decision.phase != chain.phase:
            assert _path(chain.phase, decision.phase), (chain.phase, decision.phase)


def _path(a, b) -> bool:
    known = {a}
    for _ in range(8):
        known |= {t for s, t in LEGAL if s in known}
    return b in known


def test_a_deleted_job_always_goes(reached):
    for w in reached[::7]:
        now = EVENTS["delete"](w)
        for _ in range(40):
            if now.gone:
                break
            now, _ = reconcile(now)
            now = now if now.gone else replace(cooperate(now), now=now.now + 15)
        assert now.gone and now.deleted is not None and not now.clusters
        assert not now.held or now.now - now.deleted >= RETURN_S


def test_a_finalizer_goes_even_when_nothing_can_be_returned(reached):
    for w in [w for w in reached if w.finalizer][::7]:
        now = EVENTS["delete"](w)
        for _ in range(8):
            if now.gone:
                break
            decision = decide(observe(now))
            if RemoveFinalizer() in decision.actions:
                now = apply(now, RemoveFinalizer())
            now = EVENTS["tick"](now)
        assert now.gone


def test_no_wait_is_for_ever(reached):
    """Nothing but time: every job ends suspended or terminal within its deadlines, or waits in a
    queue, which has no deadline."""
    ends = {*TERMINAL, "Suspended", "Queued"}
    for w in reached[::7]:
        now = w
        for _ in range(40):
            if now.gone or now.intent.phase in ends:
                break
            now, _ = reconcile(now)
            now = EVENTS["tick"](now)
        assert now.gone or now.deleted is not None or now.intent.phase in ends


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.integers(0, 3)), max_size=30))
def test_any_sequence_keeps_the_rules(events):
    w = World()
    for name, writes in events:
        w = EVENTS[name](w)
        if w.gone:
            break
        after, decision = reconcile(w, None if writes == 3 else writes)
        check(w, after, decision)
        w = after


SCRIPTS: dict[str, dict[int, str]] = {
    "all goes well": {},
    "suspended and resumed": {4: "suspend", 9: "suspend"},
    "suspended at creation": {0: "suspend", 3: "suspend"},
    "node lost": {4: "node lost"},
    "head lost": {4: "head lost"},
    "worker lost": {4: "worker lost"},
    "training fails": {4: "fail"},
    "deleted in mid-run": {4: "delete"},
    "fails twice": {4: "fail", 7: "fail", 8: "fail", 9: "fail", 10: "fail"},
}


class Killed(Exception):
    """The operator died."""


def life(script: dict[int, str], die_at: int = -1) -> tuple[World, int]:
    """A whole life; the operator dies once, before its write number ``die_at``."""
    w, writes = World(), 0
    for round_ in range(120):
        if round_ in script:
            w = EVENTS[script[round_]](w)
        try:
            for action in decide(observe(w)).actions:
                if writes == die_at:
                    writes += 1
                    raise Killed
                writes += not isinstance(action, RecordEvent)
                w = apply(w, action)
                assert len(w.clusters) <= 1 and len(w.live) <= 1
                if w.gone:
                    return w, writes
        except Killed:
            pass  # what it knew is lost, what it wrote is there
        w = replace(cooperate(w, last_step=6), now=w.now + 15)
    return w, writes


def end(w: World) -> object:
    reasons = [a.reason for a in w.intent.attempts if a.reason != "Suspended"]
    return w.gone, w.intent.phase, reasons[-1:], w.held, w.finalizer, len(w.clusters)


def test_dying_before_and_after_every_write_changes_no_end(capsys):
    """Dying after write n is dying before write n + 1: what it had in memory is lost alike."""
    kills = 0
    for name, script in SCRIPTS.items():
        whole, writes = life(script)
        for n in range(writes + 1):
            kills += 1
            assert end(life(script, n)[0]) == end(whole), (name, n)
    with capsys.disabled():
        print(f"\nkilled at {kills} writes of {len(SCRIPTS)} lives", file=sys.stderr)


def test_the_lives_end_as_they_should():
    phases = {name: life(script)[0].intent.phase for name, script in SCRIPTS.items()}
    assert phases.pop("fails twice") == "Failed"
    phases.pop("deleted in mid-run")
    assert set(phases.values()) == {"Complete"}, phases


def test_suspend_at_creation_creates_nothing():
    w = World(suspend=True)
    for _ in range(3):
        w, decision = reconcile(w)
    assert (w.intent.phase, w.clusters, w.held, w.finalizer) == ("Suspended", (), (), False)
    assert decision.requeue_after is None
    assert {c.type: c.status for c in decision.conditions}["Planned"] == "True"


def running(**changes) -> World:
    w = World(**changes)
    for _ in range(3):
        w, _ = reconcile(w)
        w = cooperate(w, last_step=99)
    w, _ = reconcile(w)
    assert w.intent.phase == "Running"
    return w


def conditions(w: World, **changes) -> dict[str, tuple[str, str, str]]:
    found = decide(replace(observe(w), **changes)).conditions
    return {c.type: (c.status, c.reason, c.message) for c in found}


def test_training_waits_for_every_worker():
    w, _ = reconcile(World())
    state = observe(EVENTS["up"](w))
    late = replace(state, pods=tuple(replace(p, ready=p.name != "w1") for p in state.pods))
    assert not any(isinstance(a, Submit) for a in decide(late).actions)
    assert decide(late).phase == "Provisioning"
    assert any(isinstance(a, Submit) for a in decide(state).actions)


def test_a_partial_gang_is_released_when_capacity_does_not_come():
    w, _ = reconcile(World())
    w, _ = reconcile(replace(w, now=w.now + 361))
    assert (w.intent.phase, w.intent.reason) == ("Failed", "CapacityTimeout")
    for _ in range(4):
        w, _ = reconcile(replace(EVENTS["collected"](w), now=w.now + 100))
    assert not w.clusters and not w.held and not w.finalizer


def test_suspend_asks_for_a_checkpoint_first_and_not_for_ever():
    w = EVENTS["suspend"](running())
    w, decision = reconcile(w)
    assert [type(a).__name__ for a in decision.actions][:2] == ["PersistIntent", "RequestDrain"]
    _late, decision = reconcile(replace(w, now=w.now + 301))
    assert "StopSubmission" in [type(a).__name__ for a in decision.actions]
    done = replace(EVENTS["drained"](w), now=w.now + 1)
    done, decision = reconcile(done)
    assert "StopSubmission" in [type(a).__name__ for a in decision.actions]
    done, _ = reconcile(done)
    assert done.intent.phase == "Suspended" and done.intent.checkpoint_step > 0


def test_an_edit_while_running_is_refused_with_the_reason():
    w = running()
    job = observe(w).job
    changed = tuple((k, "0" if k == "training" else v) for k, v in job.parts)
    found = conditions(w, job=replace(job, parts=changed, generation=2))
    assert found["Planned"][:2] == ("True", "EditRefused")
    assert "spec.training" in found["Planned"][2] and "suspend" in found["Planned"][2]
    assert decide(replace(observe(w), job=replace(job, parts=changed))).phase == "Running"


def test_pods_of_a_lost_node_are_force_deleted_by_uid():
    w = EVENTS["node lost"](running())
    decision = decide(observe(w))
    (lost,) = [p for p in observe(w).pods if p.node_lost]
    assert ForceDeletePod(lost.name, lost.uid) in decision.actions
    assert (decision.phase, decision.intent.reason) == ("Recovering", "NodeLost")


def test_a_lost_node_is_replanned_around_when_the_job_says_so():
    chosen = {f: spec({"spec.suspend": f, "spec.failure.onNodeLoss": ["Replan", "Fail"]})
              for f in (False, True)}  # fmt: skip
    for fewer, phase in ((1, "Recovering"), (None, "Failed")):
        w = EVENTS["node lost"](running(specs=chosen, fewer=fewer))
        decision = decide(observe(w))
        assert (decision.phase, decision.intent.machines) == (phase, fewer)


def test_a_hang_dumps_stacks_before_it_stops():
    w = running()
    w = replace(w, now=w.now + 1801, intent=replace(w.intent, since_active=w.now + 1801))
    names = [type(a).__name__ for a in decide(observe(w)).actions]
    assert names.index("DumpStacks") < names.index("StopSubmission")


def test_another_owners_cluster_is_never_adopted():
    w, _ = reconcile(World())
    state = observe(w)
    foreign = replace(state, clusters=tuple(replace(c, ours=False) for c in state.clusters))
    decision = decide(foreign)
    assert decision.intent.cluster != w.intent.cluster and decision.intent.epoch == 2
    assert not any(isinstance(a, CreateCluster) for a in decision.actions)


def test_a_refused_plan_stalls_and_says_why():
    state = observe(World())
    decision = decide(replace(state, planning=replace(state.planning, content="", refused="why")))
    found = {c.type: c for c in decision.conditions}
    assert (found["Planned"].status, found["Stalled"].status) == ("False", "True")
    assert found["Planned"].message == "why" and decision.requeue_after


def test_one_of_ready_reconciling_and_stalled_is_true(reached):
    for w in reached[::11]:
        found = conditions(w)
        true = [n for n in ("Ready", "Reconciling", "Stalled") if found[n][0] == "True"]
        assert len(true) == 1 or (w.deleted is not None and "Reconciling" in true), true
        assert all(reason for _, reason, _ in found.values())


def test_conditions_keep_their_times_until_they_change():
    w = running()
    old = decide(observe(w)).conditions
    new = merge(old, decide(observe(replace(w, now=w.now + 9))).conditions)
    assert [c.changed for c in new] == [c.changed for c in old]
    lost = decide(observe(EVENTS["head lost"](replace(w, now=w.now + TICK_S)))).conditions
    changed = {c.type for c, o in zip(merge(old, lost), old, strict=True) if c.changed > o.changed}
    assert changed == {"Running", "Degraded", "Ready", "Reconciling", "CheckpointFresh"}


def test_time_that_jumps_back_harms_nothing():
    w = running()
    decision = decide(observe(replace(w, now=w.now - 10_000)))
    assert decision.phase == "Running" and decision.requeue_after == 15.0


def test_suspended_specs_differ_in_nothing_else():
    assert SPECS[True].model_copy(update={"suspend": False}) == SPECS[False]


def recovering(w: World) -> World:
    """A worker was lost under a submission that still runs, and the backoff is over."""
    w = EVENTS["worker lost"](w)
    w, _ = reconcile(w, 1)
    assert w.intent.phase == "Recovering" and len(w.live) == 1
    return replace(w, now=w.intent.retry_at)


def test_the_next_attempt_waits_until_the_last_one_is_over():
    w = recovering(running())
    assert decide(observe(w)).phase == "Recovering"
    w, _ = reconcile(w)
    assert not w.live and decide(observe(w)).phase == "Starting"


def test_what_runs_is_stopped_before_anything_is_submitted():
    w = recovering(running())
    stopped, _ = reconcile(w)
    begun = decide(observe(stopped)).intent
    other = decide(observe(replace(w, intent=begun)))
    assert [type(a).__name__ for a in other.actions] == ["StopSubmission"]


def test_a_cluster_is_not_replaced_while_nothing_can_be_rendered():
    w, _ = reconcile(EVENTS["head lost"](running()))
    state = observe(replace(EVENTS["collected"](w), now=w.now + 99))
    assert decide(state).phase == "Provisioning"
    without = replace(state, planning=replace(state.planning, content="", refused="why"))
    assert decide(without).phase == "Recovering" and decide(without).requeue_after


def test_an_untouched_spec_is_not_called_edited():
    assert conditions(running())["Planned"][:2] == ("True", "Planned")


def test_time_that_nodes_are_held_never_shrinks():
    w, _ = reconcile(World())
    w, _ = reconcile(replace(w, suspend=True, now=w.now - 500))
    assert (w.intent.phase, w.intent.active_used) == ("Suspended", 0.0)


def test_a_deadline_while_running_drains_and_fails():
    w = running()
    w = replace(w, now=w.now + 2401)
    w = EVENTS["step"](EVENTS["api"](EVENTS["api"](w)))
    w, decision = reconcile(w)
    assert (decision.phase, decision.intent.reason) == ("Draining", "DeadlineExceeded")
    w = EVENTS["drained"](w)
    for _ in range(2):
        w, _ = reconcile(w)
    assert (w.intent.phase, w.intent.reason) == ("Failed", "DeadlineExceeded")
    assert w.intent.attempts[-1].reason == "DeadlineExceeded"


def test_a_failed_job_keeps_its_head_and_frees_its_workers():
    w = running()
    for _ in range(2):
        w = EVENTS["fail"](w)
        for _ in range(4):
            w, _ = reconcile(w)
            w = replace(cooperate(w, last_step=99), now=w.now + 15)
    assert w.intent.phase == "Failed" and "maxRestarts" in w.intent.message
    assert [c.workers for c in w.clusters] == [0]
    w, _ = reconcile(replace(w, now=w.now + 181))
    for _ in range(3):
        w, _ = reconcile(EVENTS["collected"](w))
    assert not w.clusters and not w.finalizer and not w.gone
    assert reconcile(replace(w, now=w.now + 601))[0].gone


def test_a_queue_holds_a_job_without_a_deadline():
    w, _ = reconcile(World())
    state = observe(replace(w, now=w.now + 9_000))
    held = replace(state, intent=replace(state.intent, phase="Queued", since_active=None),
                   clusters=tuple(replace(c, suspended=True) for c in state.clusters))  # fmt: skip
    assert decide(held).phase == "Queued" and decide(held).requeue_after
    free = decide(replace(held, clusters=state.clusters))
    assert (free.phase, free.intent.since) == ("Provisioning", state.now)


def test_preemption_costs_no_attempt_and_keeps_the_place_in_the_queue():
    w, decision = reconcile(EVENTS["preempted"](running()))
    (cluster,) = w.clusters
    assert decision.phase == "Queued" and not decision.intent.failures
    assert decision.intent.attempts[-1].reason == "Preempted"
    for _ in range(2):
        w, decision = reconcile(cooperate(w))
    assert decision.phase == "Running" and decision.intent.number == 2
    assert [c.uid for c in w.clusters] == [cluster.uid]


def test_node_loss_is_worked_through_in_the_jobs_order():
    """Waits for a node, goes on with fewer, fails; a run that steps again starts over."""
    w = EVENTS["node lost"](running(fewer=1))
    w, decision = reconcile(w)
    assert (decision.phase, decision.intent.losses_tried) == ("Recovering", 0)
    w, decision = reconcile(replace(w, now=w.now + 15))
    assert decision.phase == "Provisioning" and decision.intent.cluster == w.clusters[0].name
    w, decision = reconcile(replace(w, now=w.now + 361))
    assert (decision.phase, decision.intent.reason) == ("Recovering", "Replan")
    assert (decision.intent.machines, decision.intent.losses_tried) == (1, 1)
    assert decision.requeue_after == 0
    for _ in range(3):
        w, decision = reconcile(replace(EVENTS["collected"](w), now=w.now + 15))
    assert (decision.phase, decision.intent.epoch) == ("Provisioning", 2)
    failed, _ = reconcile(replace(w, now=w.now + 361))
    assert failed.intent.phase == "Failed" and "nothing left" in failed.intent.message
    for _ in range(3):
        w, decision = reconcile(cooperate(w, last_step=99))
    assert (decision.phase, decision.intent.losses_tried) == ("Running", 0)


def test_a_head_that_cannot_be_reached_is_given_time_and_then_replaced():
    w = EVENTS["api"](running())
    assert decide(observe(replace(w, now=w.now + 299))).phase == "Running"
    decision = decide(observe(replace(w, now=w.now + 300)))
    assert (decision.phase, decision.intent.reason) == ("Recovering", "HeadLost")
    assert decision.intent.replace


def test_a_submission_that_is_never_taken_is_retried_on_another_cluster():
    w, _ = reconcile(World())
    w = EVENTS["api"](EVENTS["up"](w))
    w, decision = reconcile(w)
    assert decision.phase == "Starting" and not w.live
    w, decision = reconcile(replace(w, now=w.now + 300))
    assert (decision.phase, decision.intent.reason) == ("Recovering", "SubmissionFailed")
    assert decision.intent.replace and w.clusters[0].deleting

"""What is done in each phase, again and again until it is so: idempotent actions from a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msa_operator.api import values
from msa_operator.reconcile.actions import (
    Action,
    AddFinalizer,
    CreateCluster,
    DeleteCluster,
    DeleteJob,
    DumpStacks,
    ForceDeletePod,
    PrepareCapacity,
    RecordEvent,
    ReleaseWorkers,
    RemoveFinalizer,
    RequestDrain,
    ReturnCapacity,
    StopSubmission,
    Submit,
)
from msa_operator.reconcile.intent import Phase
from msa_operator.reconcile.lifecycle import DRAIN_S, STOP_S
from msa_operator.reconcile.observe import Cluster, State

RETURN_S = 900.0
"""A deleted job is let go after this, whatever could not be returned: a finalizer that stays
forever blocks namespaces and queues, and is worse than what it guards."""
SILENCE_S = 30.0
"""How long a head that does not answer is asked again before a deleted job gives it up."""


def actions(s: State) -> tuple[Action, ...]:
    """Everything to be done now in the intent's phase, in order."""
    forced = (ForceDeletePod(p.name, p.uid) for p in s.pods if p.node_lost)
    if s.job.deleted is not None:
        return (*forced, *_deleted(s))
    return (*forced, *_PHASES[s.intent.phase](s))


def _nothing(s: State) -> Iterator[Action]:
    yield from ()


def _delete(clusters: tuple[Cluster, ...]) -> Iterator[Action]:
    for cluster in clusters:
        if not cluster.deleting:
            yield DeleteCluster(cluster.name, cluster.uid)


def _clear(s: State) -> Iterator[Action]:
    """No cluster, then nothing outside, then no finalizer."""
    if s.ours:
        yield from _delete(s.ours)
    elif s.capacity.held:
        for name in s.capacity.held:
            yield ReturnCapacity(name)
    elif s.job.finalizer:
        yield RemoveFinalizer()


def _provisioning(s: State) -> Iterator[Action]:
    others = tuple(c for c in s.ours if c.name != s.intent.cluster)
    yield from _delete(others)
    if s.ours or s.name_taken:
        return  # the old cluster goes before the new one comes
    if s.capacity.outside and not s.job.finalizer:
        yield AddFinalizer()
    if s.capacity.outside and not s.capacity.prepared:
        yield PrepareCapacity()
    yield CreateCluster(s.intent.cluster)


def _starting(s: State) -> Iterator[Action]:
    attempt = s.intent.attempt
    if attempt is None or not s.api.reachable:
        return
    others = [x for x in s.live_submissions if x.id != attempt.submission_id]
    for other in others:
        yield StopSubmission(other.id)
    if not others and s.submission is None:
        yield Submit(attempt.submission_id, resume=attempt.number > 1)


def _recovering(s: State) -> Iterator[Action]:
    if s.intent.replace:
        yield from _delete(s.ours)
        return
    for live in s.live_submissions:
        if s.intent.reason == "Hang":
            yield DumpStacks(live.id)
        yield StopSubmission(live.id)


def _draining(s: State) -> Iterator[Action]:
    drained = s.run is not None and s.run.drained
    for live in s.live_submissions:
        if drained or s.age(s.intent.since) >= DRAIN_S:
            yield StopSubmission(live.id)
        else:
            yield RequestDrain(live.id)


def _terminal(s: State) -> Iterator[Action]:
    cleanup, ended = s.job.spec.cleanup, s.intent.ended or s.intent.since
    policy = cleanup.on_success if s.intent.phase == "Complete" else cleanup.on_failure
    live = s.live_submissions
    stuck = bool(live) and s.age(ended) >= STOP_S
    if s.age(ended) >= values.seconds(cleanup.ttl):
        yield DeleteJob()
    kept = s.age(ended) < values.seconds(cleanup.after) and policy != "DeleteCluster" and not stuck
    if not kept or not s.ours:
        yield from _clear(s)
        return
    for submission in live:
        yield StopSubmission(submission.id)
    for cluster in s.ours:
        if cluster.name != s.intent.cluster:
            yield from _delete((cluster,))
        elif policy == "KeepHead" and cluster.workers_wanted and not cluster.deleting:
            yield ReleaseWorkers(cluster.name, cluster.uid)


def _deleted(s: State) -> Iterator[Action]:
    """The job object is being deleted; without our finalizer, garbage collection does it all."""
    if not s.job.finalizer or s.job.deleted is None:
        return
    waited = s.age(s.job.deleted)
    if waited >= RETURN_S:
        left = [*(c.name for c in s.ours), *s.capacity.held]
        yield RemoveFinalizer()  # first: an action that fails ends the round
        if left:
            yield RecordEvent("Warning", "NotReturned",
                              f"given up after {RETURN_S:.0f} s: {', '.join(left)}")  # fmt: skip
        return
    if _saves(s, waited):
        for live in s.live_submissions:
            yield RequestDrain(live.id)
        return
    yield from _clear(s)


def _saves(s: State, waited: float) -> bool:
    """A last checkpoint is still worth waiting for."""
    if s.intent.attempt is None or s.cluster is None or s.head is None or waited >= DRAIN_S:
        return False
    if not s.api.reachable:
        return waited < SILENCE_S
    return bool(s.live_submissions) and not (s.run is not None and s.run.drained)


_PHASES: dict[Phase, Callable[[State], Iterator[Action]]] = {
    "Pending": _nothing, "Planned": _nothing, "Suspended": _clear, "Queued": _provisioning,
    "Provisioning": _provisioning, "Starting": _starting, "Running": _nothing,
    "Recovering": _recovering, "Draining": _draining, "Complete": _terminal, "Failed": _terminal,
}  # fmt: skip

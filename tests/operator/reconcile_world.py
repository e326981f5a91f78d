"""A tiny world in which decisions are carried out: a job, clusters, submissions, and what befalls
them. Frozen, so that every state reached can be kept and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from msa_operator.api import parse_job
from msa_operator.reconcile import observe as seen
from msa_operator.reconcile.actions import (
    Action,
    AddFinalizer,
    CreateCluster,
    DeleteCluster,
    DeleteJob,
    ForceDeletePod,
    PersistIntent,
    PrepareCapacity,
    ReleaseWorkers,
    RemoveFinalizer,
    RequestDrain,
    ReturnCapacity,
    StopSubmission,
    Submit,
)
from msa_operator.reconcile.decide import Decision, decide
from msa_operator.reconcile.intent import Intent
from msa_operator.reconcile.lifecycle import parts
from operator_jobs import job

TICK_S = 200.0
WORKERS = 2
SHORT = {
    "spec.failure.maxRestarts": 1,
    "spec.deadlines": {"capacity": "6m", "start": "6m", "active": "40m"},
    "spec.cleanup": {"onSuccess": "DeleteCluster", "onFailure": "KeepHead", "after": "3m",
                     "ttl": "10m"},
}  # fmt: skip
UID = "6f1d2c3b-0000-4000-8000-000000000001"


def spec(changes: dict[str, Any] | None = None):
    return parse_job(job({**SHORT, **(changes or {})})).spec


SPECS = {flag: spec({"spec.suspend": flag}) for flag in (False, True)}
PARTS = parts(SPECS[False])


@dataclass(frozen=True, kw_only=True)
class Sub:
    id: str
    status: seen.SubmissionStatus = "Running"
    step: int = 0
    checkpoint: int = 0
    stepped: float = 0.0
    asked: bool = False
    drained: bool = False


@dataclass(frozen=True, kw_only=True)
class Ray:
    name: str
    uid: str
    up: bool = False
    """Head and all workers are ready."""
    head_up: bool = False
    deleting: bool = False
    suspended: bool = False
    """A queue holds it: it has no pods."""
    lost: bool = False
    head: int = 0
    worker: int = 0
    workers: int = WORKERS
    subs: tuple[Sub, ...] = ()


@dataclass(frozen=True, kw_only=True)
class World:
    suspend: bool = False
    deleted: float | None = None
    gone: bool = False
    finalizer: bool = False
    outside: bool = True
    intent: Intent = field(default_factory=Intent)
    clusters: tuple[Ray, ...] = ()
    api: bool = True
    api_since: float = 0.0
    held: tuple[str, ...] = ()
    serial: int = 0
    now: float = 36_000.0
    fewer: int | None = None
    specs: Any = None

    @property
    def ray(self) -> Ray | None:
        return next((c for c in self.clusters if c.name == self.intent.cluster), None)

    @property
    def live(self) -> list[Sub]:
        return [s for c in self.clusters for s in c.subs if s.status in ("Pending", "Running")]


def observe(w: World) -> seen.State:
    """What the operator would see."""
    ray = w.ray
    pods: list[seen.Pod] = []
    for c in w.clusters:
        pods += _pods(c)
    api = ray is not None and w.api and ray.head_up and not ray.deleting
    subs = ray.subs if ray is not None and api else ()
    last = subs[-1] if subs else None
    return seen.State(
        job=seen.Job(name="small", uid=UID, spec=(w.specs or SPECS)[w.suspend], parts=PARTS,
                     finalizer=w.finalizer, deleted=w.deleted),
        intent=w.intent,
        now=w.now,
        planning=seen.Planning(content="c", pods=WORKERS, summary="dp2", fewer=w.fewer),
        clusters=tuple(
            seen.Cluster(name=c.name, uid=c.uid, deleting=c.deleting, suspended=c.suspended,
                         workers_wanted=c.workers)
            for c in w.clusters
        ),
        pods=tuple(pods),
        api=seen.JobsApi(reachable=api, since=w.api_since, submissions=tuple(
            seen.Submission(id=s.id, status=s.status, message="exit 1") for s in subs)),
        progress=None if last is None else seen.Progress(
            submission_id=last.id, step=last.step, checkpoint_step=last.checkpoint,
            stepped=last.stepped, drained=last.drained),
        capacity=seen.Capacity(outside=w.outside, prepared=bool(w.held), held=w.held),
    )  # fmt: skip


def _pods(c: Ray) -> list[seen.Pod]:
    if c.suspended:
        return []
    of = {"cluster": c.name, "deleting": c.deleting}
    head = seen.Pod(name="head", uid=f"{c.uid}-h{c.head}", head=True, ready=c.head_up, **of)
    workers = []
    for n in range(max(c.workers, int(c.lost))):
        uid = f"{c.uid}-w{n}-{c.worker if n == 0 else 0}"
        workers.append(seen.Pod(name=f"w{n}", uid=uid, head=False, ready=c.up, node=f"n{n}",
                                node_lost=c.lost and n == 0, **of))  # fmt: skip
    return [head, *workers]


def apply(w: World, action: Action) -> World:
    """One write, as the API server or Ray would take it."""
    match action:
        case PersistIntent(intent):
            return replace(w, intent=intent)
        case AddFinalizer():
            return replace(w, finalizer=True)
        case RemoveFinalizer():
            return _collect(replace(w, finalizer=False))
        case PrepareCapacity():
            assert w.finalizer, "something outside was made before the finalizer"
            return replace(w, held=("pool",))
        case ReturnCapacity(_):
            return replace(w, held=())
        case CreateCluster(name):
            assert name == w.intent.cluster, "a cluster was created that no intent names"
            if any(c.name == name for c in w.clusters):
                return w
            made = Ray(name=name, uid=f"u{w.serial}")
            return replace(w, clusters=(*w.clusters, made), serial=w.serial + 1)
        case DeleteCluster(name, uid):
            return _each(w, lambda c: replace(c, deleting=True)
                         if (c.name, c.uid) == (name, uid) else c)  # fmt: skip
        case ReleaseWorkers(_, uid):
            return _each(w, lambda c: replace(c, workers=0) if c.uid == uid else c)
        case Submit(id, _):
            attempt = w.intent.attempt
            assert attempt is not None and attempt.submission_id == id, "submitted without intent"
            begun = Sub(id=id, stepped=w.now, step=attempt.from_step, checkpoint=attempt.from_step)
            return _each(w, lambda c: replace(c, subs=(*c.subs, begun))
                         if c.name == w.intent.cluster and id not in [s.id for s in c.subs]
                         else c)  # fmt: skip
        case RequestDrain(id):
            return _subs(w, lambda s: replace(s, asked=True) if s.id == id else s)
        case StopSubmission(id):
            return _subs(w, lambda s: replace(s, status="Stopped")
                         if s.id == id and s.status == "Running" else s)  # fmt: skip
        case ForceDeletePod(_, _):
            return _each(w, lambda c: replace(c, lost=False, worker=c.worker + 1, up=False))
        case DeleteJob():
            return _collect(replace(w, deleted=w.now if w.deleted is None else w.deleted))
    return w


def _collect(w: World) -> World:
    if w.deleted is not None and not w.finalizer:
        return replace(w, gone=True, clusters=())
    return w


def _each(w: World, change: Callable[[Ray], Ray]) -> World:
    return replace(w, clusters=tuple(change(c) for c in w.clusters))


def _subs(w: World, change: Callable[[Sub], Sub]) -> World:
    return _each(w, lambda c: replace(c, subs=tuple(change(s) for s in c.subs)))


def _on_run(w: World, change: Callable[[Sub], Sub]) -> World:
    return _subs(w, lambda s: change(s) if s.status == "Running" else s)


def _come_up(c: Ray) -> Ray:
    return c if c.deleting or c.lost or c.suspended else replace(c, up=True, head_up=True)


def _preempt(c: Ray) -> Ray:
    """Its pods end; those that come later are others."""
    down = replace(c, suspended=True, up=False, head_up=False, lost=False, subs=())
    return replace(down, head=c.head + 1, worker=c.worker + 1)


EVENTS: dict[str, Callable[[World], World]] = {
    "up": lambda w: _each(w, _come_up),
    "collected": lambda w: replace(
        w, clusters=tuple(c for c in w.clusters if not c.deleting or c.lost)
    ),
    "step": lambda w: _on_run(w, lambda s: replace(s, step=min(3, s.step + 1), stepped=w.now)),
    "checkpoint": lambda w: _on_run(w, lambda s: replace(s, checkpoint=s.step)),
    "drained": lambda w: _on_run(
        w, lambda s: replace(s, drained=True, checkpoint=s.step) if s.asked else s
    ),
    "succeed": lambda w: _on_run(w, lambda s: replace(s, status="Succeeded")),
    "fail": lambda w: _on_run(w, lambda s: replace(s, status="Failed")),
    "node lost": lambda w: _each(w, lambda c: replace(c, lost=True, up=False) if c.up else c),
    "worker lost": lambda w: _each(w, lambda c: replace(c, worker=c.worker + 1) if c.up else c),
    "head lost": lambda w: _each(w, lambda c: replace(c, head=c.head + 1, subs=()) if c.up else c),
    "preempted": lambda w: _each(w, _preempt),
    "admitted": lambda w: _each(w, lambda c: replace(c, suspended=False)),
    "api": lambda w: replace(w, api=not w.api, api_since=w.now),
    "suspend": lambda w: replace(w, suspend=not w.suspend),
    "delete": lambda w: _collect(replace(w, deleted=w.now)) if w.deleted is None else w,
    "tick": lambda w: replace(w, now=w.now + TICK_S),
}


def act(w: World, actions: tuple[Action, ...], read: World) -> World:
    """Carry out what was decided from ``read``; the first refusal ends the round."""
    for action in actions:
        edited = (w.suspend, w.deleted) != (read.suspend, read.deleted)
        conflict = isinstance(action, PersistIntent) and edited
        if w.gone or conflict or (isinstance(action, AddFinalizer) and w.deleted is not None):
            break
        w = apply(w, action)
    return w


def reconcile(w: World, stop_after: int | None = None) -> tuple[World, Decision]:
    """One round; with ``stop_after`` the operator dies after that many writes of it."""
    decision = decide(observe(w))
    return act(w, decision.actions[:stop_after], w), decision


def key(w: World) -> Any:
    """The same for worlds that behave alike: ages for times, generations forgotten."""

    def age(t: float | None) -> float | None:
        return None if t is None else max(-300.0, min(w.now - t, 3000.0))

    i = w.intent
    attempt = i.attempt
    ray = w.ray
    return (
        w.suspend, age(w.deleted), w.gone, w.finalizer, w.held, w.api, age(w.api_since),
        i.phase, age(i.since), i.replace, i.after, age(i.retry_at), age(i.ended), i.losses_tried,
        i.in_a_row, tuple(n for _, n in i.failures), min(3000.0, i.active_used),
        age(i.since_active), i.cluster == "", attempt is None,
        attempt and ray and (attempt.head == f"{ray.uid}-h{ray.head}/0", attempt.from_step,
                             attempt.submission_id in [s.id for s in ray.subs]),
        attempt and observe(w).workers and seen.gang(observe(w).workers) == attempt.workers,
        tuple((c.name == i.cluster, c.up, c.head_up, c.deleting, c.suspended, c.lost, c.workers,
               tuple((s.status, s.step, s.checkpoint, age(s.stepped), s.asked, s.drained)
                     for s in c.subs[-1:])) for c in w.clusters),
    )  # fmt: skip


def cooperate(w: World, last_step: int = 2) -> World:
    """A world in which everything goes well moves on by one look of the operator."""
    for event in ("collected", "admitted", "up"):
        w = EVENTS[event](w)
    w = _on_run(w, lambda s: replace(s, step=s.step + 1, stepped=w.now))
    for event in ("checkpoint", "drained"):
        w = EVENTS[event](w)
    return _on_run(w, lambda s: replace(s, status="Succeeded")
                   if s.step >= last_step and not s.asked else s)  # fmt: skip

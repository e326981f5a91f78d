"""Carrying out a decision: what was decided is written first, and every step may be repeated.

The first action that fails ends the round: the next look decides again. Anything destructive is
done only after the Lease was read again and is still ours, and with the uid of what was seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from msa_operator.api import JobError
from msa_operator.metrics import Metrics
from msa_operator.reconcile import actions as do
from msa_operator.reconcile import conditions, names, status
from msa_operator.reconcile.actions import Action
from msa_operator.reconcile.decide import Decision
from msa_operator.reconcile.intent import TERMINAL, Intent
from msa_operator.reconcile.lifecycle import active
from msa_operator.runtime import views
from msa_operator.runtime.capacity import Provider
from msa_operator.runtime.children import Children, NameTaken
from msa_operator.runtime.events import Recorder
from msa_operator.runtime.head import HeadError, Heads
from msa_operator.runtime.kube import JOBS, PODS, Kube, KubeError
from msa_operator.runtime.look import Look
from msa_operator.runtime.memory import Memory
from msa_operator.runtime.report import Reporter, progress_of
from msa_operator.runtime.store import JobObject, Store

TURN_S = 1.0
"""Between two writes of which the second says that something is so, or is not so any more."""
UPGRADE_S = 30.0
"""Between two looks whether the custom resource definitions have been upgraded."""

_log = logging.getLogger(__name__)
_FENCED = (
    do.DeleteCluster, do.ReleaseWorkers, do.ForceDeletePod, do.DeleteJob, do.RemoveFinalizer,
    do.ReturnCapacity, do.StopSubmission, do.Submit,
)  # fmt: skip


class Again(Exception):
    """The round is over and another is wanted: something is not as it was seen.

    ``failed`` when it is not expected to be better at once.
    """

    def __init__(self, why: str, after: float | None = 0.0, *, failed: bool = False) -> None:
        super().__init__(why)
        self.after = after
        self.failed = failed


@dataclass(frozen=True)
class Acting:
    """What is at hand in one round."""

    look: Look
    decision: Decision
    memory: Memory


class Actor:
    def __init__(
        self, store: Store, kube: Kube, heads: Heads, recorder: Recorder, metrics: Metrics,
        provider: Provider, fence: Callable[[], None], every: float = 15.0,
    ) -> None:  # fmt: skip
        self._store = store
        self._kube = kube
        self._heads = heads
        self._children = Children(kube, store)
        self._reporter = Reporter(kube, store, metrics, every)
        self._recorder = recorder
        self._metrics = metrics
        self._provider = provider
        self._fence = fence
        """Raises when the Lease is not ours any more."""
        self._every = every
        """Seconds between two writes that follow no decision."""
        self._remembers = False

    def carry_out(self, look: Look, decision: Decision, memory: Memory) -> float | None:
        """Do it; seconds after which a status that was held back may be written.

        Raises :class:`Again` where the round has to end early.
        """
        acting = Acting(look, decision, memory)
        told = [a for a in decision.actions if isinstance(a, do.RecordEvent)]
        persisted = False
        try:
            for action in decision.actions:
                if isinstance(action, do.RecordEvent):
                    continue
                self._do(acting, action)
                persisted = persisted or isinstance(action, do.PersistIntent)
        finally:
            # A change of phase that was persisted is told, whatever failed after it.
            if persisted or not any(isinstance(a, do.PersistIntent) for a in decision.actions):
                for event in told:
                    self._recorder.record(look.job, event.type, event.reason, event.message)
        if look.state.job.deleted is not None or do.DeleteJob() in decision.actions:
            return None
        if look.state.planning.refused:
            self._tell(acting, "Refused", look.state.planning.refused)
        wait = None if persisted else self._show(acting)
        later = self._report(acting, complete=decision.phase == "Complete")
        return min((w for w in (wait, later) if w is not None), default=None)

    def _do(self, acting: Acting, action: Action) -> None:
        name, result = type(action).__name__, "error"
        try:
            if isinstance(action, _FENCED):
                self._fence()
            self._one(acting, action)
            result = "ok"
        except KubeError as error:
            if error.conflict:
                result = "conflict"
                self._refresh(acting.look.job)
                raise Again(f"{name}: {error}") from None
            acting.memory.trouble = self._trouble(acting, action, error)
            raise Again(f"{name}: {error}", error.retry_after, failed=True) from None
        except HeadError as error:
            raise Again(f"{name}: {error}", None, failed=True) from None
        finally:
            self._metrics.acted(name, result)

    def _one(self, acting: Acting, action: Action) -> None:
        look = acting.look
        owner, memory = look.owner, acting.memory
        match action:
            case do.PersistIntent(intent):
                self._persist(acting, status.canonical(intent))
            case do.AddFinalizer():
                self._finalizers(look.job, lambda f: (*f, names.FINALIZER))
            case do.RemoveFinalizer():
                self._finalizers(
                    look.job, lambda f: tuple(x for x in f if x != names.FINALIZER)
                )  # fmt: skip
            case do.PrepareCapacity():
                self._provider.prepare(look.state, owner)
            case do.ReturnCapacity(name):
                self._provider.give_back(name, owner)
            case do.CreateCluster(name):
                self._create(acting, name)
            case do.DeleteCluster(name, uid):
                self._children.delete_cluster(owner, name, uid)
            case do.ReleaseWorkers(name, uid):
                self._children.release_workers(owner, name, uid)
            case do.Submit(id, resume):
                self._at_head(acting, lambda h: self._heads.submit(h, id, resume, owner.name))
            case do.RequestDrain(id):
                self._drain(acting, id)
            case do.DumpStacks(id):
                self._stacks(acting, id)
            case do.StopSubmission(id):
                self._at_head(acting, lambda h: self._heads.stop(h, id))
            case do.ForceDeletePod(name, uid):
                if self._kube.delete(PODS, owner.namespace, name, uid, grace=0):
                    _log.info("pod %s deleted by force: its node is gone", name)
                self._store.removed(PODS, uid)
                memory.silent.pop(uid, None)
            case do.DeleteJob():
                self._kube.delete(JOBS, owner.namespace, owner.name, owner.uid)
            case do.RecordEvent(kind, reason, message):
                self._recorder.record(look.job, kind, reason, message)

    def _persist(self, acting: Acting, intent: Intent) -> None:
        """The intent and all else that the status says, refused when the object has changed."""
        before = acting.look.state.intent
        if not self._remembers:
            self._try(acting, intent)
        self._write(acting, intent)
        namespace = acting.look.owner.namespace
        if before.phase != intent.phase:
            self._metrics.left(before.phase, acting.look.state.age(before.since))
            _log.info(
                "%s -> %s: %s %s", before.phase, intent.phase, intent.reason, intent.message
            )  # fmt: skip
        was = before.attempt
        if was is not None and intent.attempt is None and intent.attempts:
            self._metrics.attempt_ended(namespace, intent.attempts[-1].reason)

    def _try(self, acting: Acting, intent: Intent) -> None:
        """Once per process: whether the API server would keep all of an intent.

        Half of one would be worse than none, and a restart must know what was done before it.
        """
        patched = self._patch(acting, intent, dry_run=True).get("status")
        try:
            self._remembers = status.read(patched) == intent
        except JobError:
            self._remembers = False
        if not self._remembers:
            told = (
                "the API server does not keep what the operator has to remember: the custom "
                "resource definitions are older than the operator; upgrade flash-msa-crds"
            )
            self._tell(acting, "OldDefinitions", told)
            raise Again(told, UPGRADE_S, failed=True)

    def _show(self, acting: Acting) -> float | None:
        """Write the status where it says something else now, but not too often."""
        patch = self._difference(acting, acting.look.state.intent)
        if not patch:
            return None
        every = self._every
        if "observedGeneration" in patch:
            every = 0.0  # a person waits for it
        elif _turns(acting.look.job.raw.get("status"), patch):
            every = min(every, TURN_S)
        left = acting.memory.status_written + every - time.monotonic()
        if left > 0:
            return left
        try:
            self._write(acting, acting.look.state.intent)
        except KubeError as error:
            if not error.conflict:
                raise Again(f"status: {error}", error.retry_after, failed=True) from None
            self._refresh(acting.look.job)
            raise Again(f"status: {error}") from None
        return None

    def _write(self, acting: Acting, intent: Intent) -> None:
        self._store.wrote(JOBS, self._patch(acting, intent))
        acting.memory.status_written = time.monotonic()

    def _patch(self, acting: Acting, intent: Intent, *, dry_run: bool = False) -> dict[str, Any]:
        job = acting.look.job
        patch = {
            "metadata": {"resourceVersion": job.meta.version},
            "status": self._difference(acting, intent),
        }
        return self._kube.patch(
            JOBS, job.meta.namespace, job.meta.name, patch, subresource="status", dry_run=dry_run
        )

    def _difference(self, acting: Acting, intent: Intent) -> dict[str, Any]:
        look = acting.look
        old = look.job.raw.get("status")
        s = replace(look.state, intent=intent)
        merged = conditions.merge(status.conditions(old), acting.decision.conditions)
        planned = look.planned
        wanted = s.cluster.workers_wanted if s.cluster else 0
        ready = sum(p.ready for p in s.workers) if s.cluster else 0
        nodes = sorted({p.node for p in s.workers if p.node})[:1024] if s.cluster else []
        hours = active(s) if intent.phase in TERMINAL else intent.active_used
        shown = status.Shown(
            generation=s.job.generation,
            conditions=merged,
            plan=planned.status() if planned else None,
            nodes={
                "summary": f"{ready}/{wanted}", "ready": ready, "wanted": wanted, "names": nodes,
            },
            head_service=look.head_service,
            namespace=look.owner.namespace,
            node_hours=hours / 3600 * max(1, planned.machines if planned else 1),
        )  # fmt: skip
        keep = ("progress", "plan", "cost")
        made = status.write(intent, shown)
        if intent.phase == "Complete" and (told := _last_told(acting, intent)):
            last = intent.attempts[-1]
            made["progress"] = {
                **told, "step": last.to_step, "eta": "0s", "checkpointStep": last.checkpoint_step,
            }  # fmt: skip
        return status.difference(old, made, keep)

    def _report(self, acting: Acting, *, complete: bool) -> float | None:
        try:
            return self._reporter.report(acting.look, acting.memory, complete=complete)
        except KubeError as error:
            if not error.conflict:
                raise Again(f"progress: {error}", error.retry_after, failed=True) from None
            self._refresh(acting.look.job)
            raise Again(f"progress: {error}") from None

    def _create(self, acting: Acting, name: str) -> None:
        look, planned, intent = acting.look, acting.look.planned, acting.decision.intent
        if planned is None or planned.name(intent.epoch) != name:
            raise Again(f"{name} is not what was looked at")
        try:
            self._children.create(planned.rendered, name, look.owner, first=intent.epoch == 1)
        except NameTaken as taken:
            self._store.stranger(look.job.key, taken.found)
            raise Again(str(taken)) from None
        acting.memory.trouble = ""

    def _at_head(self, acting: Acting, call: Callable[[Any], None]) -> None:
        head, contact = acting.look.head, acting.memory.contact
        if head is None:
            raise Again("there is no head to ask", None, failed=True)
        if contact is not None:
            contact.stale = True
        call(head)

    def _drain(self, acting: Acting, id: str) -> None:
        """A run that does not take the request is asked again; in the end it is stopped."""
        try:
            self._at_head(acting, self._heads.drain)
        except HeadError as error:
            _log.info("%s took no drain request: %s", id, error)

    def _stacks(self, acting: Acting, id: str) -> None:
        """As far as they can be had: what hangs must be ended in any case."""
        told = f"no stacks of {id} could be had"
        try:
            head = acting.look.head
            if head is not None:
                folder, lagging = self._heads.stacks(head)
                told = f"stacks of every rank are in {folder}" + (
                    f"; {lagging}" if lagging else ""
                )
        except HeadError as error:
            told = f"{told}: {error}"
        self._recorder.record(acting.look.job, "Warning", "Stacks", told)

    def _finalizers(
        self, job: JobObject, change: Callable[[tuple[str, ...]], tuple[str, ...]]
    ) -> None:
        now = self._store.job(job.key) or job
        body = {
            "metadata": {
                "resourceVersion": now.meta.version, "finalizers": list(change(now.finalizers)),
            }
        }  # fmt: skip
        self._store.wrote(JOBS, self._kube.patch(JOBS, job.meta.namespace, job.meta.name, body))

    def _refresh(self, job: JobObject) -> None:
        """After a conflict: what is known of the job is old, and its event may never come."""
        found = self._kube.find(JOBS, job.meta.namespace, job.meta.name)
        if found is None:
            self._store.removed(JOBS, job.meta.uid)
        elif (seen := views.meta(found)) is not None:
            if seen.uid != job.meta.uid:
                self._store.removed(JOBS, job.meta.uid)
            self._store.wrote(JOBS, found)

    def _trouble(self, acting: Acting, action: Action, error: KubeError) -> str:
        if not isinstance(action, do.CreateCluster) or not error.refused:
            return acting.memory.trouble
        self._tell(acting, "NotCreated", error.message[:900])
        return f"the API server refuses it: {error.message}"[:900]

    def _tell(self, acting: Acting, reason: str, message: str) -> None:
        """A warning as an event, once."""
        if (reason, message) not in acting.memory.told:
            acting.memory.told.add((reason, message))
            self._recorder.record(acting.look.job, "Warning", reason, message)


def _last_told(acting: Acting, intent: Intent) -> dict[str, Any]:
    """What the last attempt's run said at last: it may be newer than what the status shows."""
    seen = acting.memory.seen
    if seen is not None and seen.report.submission == intent.attempts[-1].submission_id:
        return progress_of(seen)
    return (acting.look.job.raw.get("status") or {}).get("progress") or {}


def _turns(old: Any, patch: dict[str, Any]) -> bool:
    """Whether a condition has turned."""
    new = {c["type"]: c["status"] for c in patch.get("conditions") or ()}
    return bool(new) and new != {c.type: c.status for c in status.conditions(old)}

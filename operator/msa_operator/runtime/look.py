"""A look at one job and its surroundings: from cached objects and its head's answers to a State.

Objects come from the store, so a look costs the API server nothing in the usual case; the head is
asked at most every few seconds. Raises :class:`~msa_operator.runtime.kube.KubeError` when what
has to be known cannot be asked for.
"""

from __future__ import annotations

import base64
import binascii
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from msa_operator.api import JobError, LongContextJob, parse_job, values
from msa_operator.api.job import API_VERSION
from msa_operator.reconcile import names, status
from msa_operator.reconcile.desired import Owner
from msa_operator.reconcile.intent import HOLDING, TERMINAL, Intent
from msa_operator.reconcile.lifecycle import parts
from msa_operator.reconcile.observe import Job, JobsApi, Planning, Pod, Progress, State
from msa_operator.runtime import views
from msa_operator.runtime.capacity import Provider
from msa_operator.runtime.cluster import ClusterFacts
from msa_operator.runtime.head import Head, HeadError, Heads
from msa_operator.runtime.kube import CONFIGMAPS, SECRETS, TEMPLATES, Kube, KubeError
from msa_operator.runtime.memory import Contact, Memory, Read, Seen
from msa_operator.runtime.planning import Planned, Planner, explain, read_record
from msa_operator.runtime.store import JobObject, Store
from msa_operator.runtime.views import RayCluster, RayPod

NODE_SILENT_S = 60.0
"""A pod that was told to end and whose node has said nothing for this long will not confirm it:
its tolerations are over, and Kubernetes itself waits for the node for ever."""
ASK_AGAIN_S = 60.0
"""A refusal may have had a passing cause, such as a Hub that could not be reached."""
CONTACT_MAX_S = 60.0
"""Longest wait between two tries of a head that does not answer."""

_log = logging.getLogger(__name__)
_PLAIN = {
    "apiVersion": API_VERSION, "kind": "LongContextJob", "metadata": {"name": "unreadable"},
    "spec": {"model": {"preset": "tiny-llama"}, "data": {"source": "python-stdlib://"},
             "sequence": {"length": 4096}, "training": {"maxSteps": 1},
             "hardware": {"device": "cpu", "workers": 1}},
}  # fmt: skip
"""Stands in for a spec that cannot be read and of which no accepted one is on record."""


@dataclass(frozen=True)
class Look:
    """What was seen, and what acting on it needs beside."""

    state: State
    job: JobObject
    owner: Owner
    planned: Planned | None
    head: Head | None
    head_service: str


class Observer:
    def __init__(
        self, store: Store, kube: Kube, heads: Heads, planner: Planner, cluster: ClusterFacts,
        provider: Provider, clock: Callable[[], float] = time.time, poll: float = 15.0,
    ) -> None:  # fmt: skip
        self._store = store
        self._kube = kube
        self._heads = heads
        self._planner = planner
        self._cluster = cluster
        self._provider = provider
        self._clock = clock
        self._gap = min(5.0, poll / 2)
        """Seconds between two exchanges with a head, however many events come."""

    def look(self, job: JobObject, memory: Memory) -> Look:
        """The state of a job now. Raises :class:`KubeError`, and :class:`JobError` for a status
        that nobody could have written."""
        now = round(self._clock(), 3)
        owner = Owner(job.meta.name, job.meta.namespace, job.meta.uid)
        found = self._read(job, owner, memory)
        clusters = self._store.clusters(job.key)
        pods = [p for p in self._store.pods(job.key) if p.job_uid == job.meta.uid]
        state = State(
            job=Job(
                name=job.meta.name, uid=job.meta.uid, spec=found.spec, parts=found.parts,
                generation=job.meta.generation, finalizer=names.FINALIZER in job.finalizers,
                deleted=_deleted(job, now),
            ),
            intent=found.intent, now=now,
            clusters=tuple(c.seen_by(job.meta.uid) for c in clusters),
            pods=self._pods(pods, memory),
        )  # fmt: skip
        capacity = self._provider.observe(state, owner)
        if memory.trouble:
            capacity = replace(capacity, message=memory.trouble)
        state = replace(state, capacity=capacity)
        planning, planned = self._planning(state, found, owner, memory, job)
        state = replace(state, planning=planning)
        service, contact = self._contact(state, clusters, pods, memory)
        if memory.reached is not None:
            reachable, since = memory.reached
            submissions = contact.submissions if contact and reachable else ()
            api = JobsApi(reachable=reachable, since=since, submissions=submissions)
            state = replace(state, api=api)
        # After the head was asked, and whether it answered or not: a head that is gone says
        # nothing, and how far its run had come must not be lost with it.
        if memory.seen is None:
            memory.seen = _recalled(job, state)
        state = replace(state, progress=_progress(memory.seen))
        head = contact.head if contact else None
        return Look(state, job, owner, planned, head, service)

    def _read(self, job: JobObject, owner: Owner, memory: Memory) -> Read:
        if memory.read is not None and memory.read.version == job.meta.version:
            return memory.read
        intent = status.read(job.raw.get("status"))
        parsed, problem = None, ""
        try:
            plain = {k: job.raw.get(k) for k in ("apiVersion", "kind", "metadata", "spec")}
            parsed = parse_job(plain)
        except JobError as error:
            problem = explain(error)
        if parsed is not None:
            read = Read(job.meta.version, parsed, parsed.spec, "", parts(parsed.spec), intent)
        else:
            if intent.phase in HOLDING:
                self._held(intent, owner, None, memory)
            usable = memory.accepted or parse_job(_PLAIN)
            # The same parts as accepted: nothing can be said of what was edited.
            read = Read(job.meta.version, None, usable.spec, problem, intent.accepted, intent)
        memory.read = read
        return read

    def _pods(self, found: list[RayPod], memory: Memory) -> tuple[Pod, ...]:
        out, silent = [], {}
        for each in found:
            pod, lost = each.pod, False
            if pod.node and (pod.deleting or (pod.phase == "Running" and not pod.ready)):
                node = self._cluster.node(pod.node)
                lost = node == "gone"
                if node == "silent" and pod.deleting:
                    since = memory.silent.get(pod.uid, time.monotonic())
                    silent[pod.uid] = since
                    lost = time.monotonic() - since >= NODE_SILENT_S
            out.append(replace(pod, node_lost=lost))
        memory.silent = silent
        return tuple(out)

    def _planning(
        self, s: State, found: Read, owner: Owner, memory: Memory, job: JobObject
    ) -> tuple[Planning, Planned | None]:
        intent = s.intent
        if intent.phase in TERMINAL or s.job.deleted is not None:
            shown = (job.raw.get("status") or {}).get("plan") or {}
            return Planning(summary=str(shown.get("summary", ""))), None
        if intent.phase in HOLDING:
            planned = self._held(intent, owner, found.job, memory)
            if planned is None:
                return Planning(refused=found.problem or "what was planned is not on record"), None
            fewer = self._fewer(s, owner, planned, memory, found)
            return Planning(
                content=planned.content, pods=planned.pods, summary=planned.summary, fewer=fewer
            ), planned
        if found.job is None:
            return Planning(refused=found.problem), None
        planned, refused = self._current(found.job, owner, found.parts, intent.machines, memory)
        if planned is not None and not refused:
            refused = self._dry_run(planned, owner, memory)
        if planned is None or refused:
            return Planning(refused=refused), None
        return Planning(
            content=planned.content, pods=planned.pods, summary=planned.summary
        ), planned

    def _current(
        self, job: LongContextJob, owner: Owner, made_of: Any, machines: int | None, memory: Memory
    ) -> tuple[Planned | None, str]:
        """The plan of the spec as it is; asked again after a while, since machines may come."""
        inputs = (made_of, machines, self._cluster.edition())
        known, now = memory.planned, time.monotonic()
        if known is None or known[0] != inputs or (known[2] and now - known[3] >= ASK_AGAIN_S):
            planned, refused = None, ""
            try:
                planned = self._planner.plan(job, owner, machines)
            except JobError as error:
                refused = explain(error)
            except Exception as error:
                # One job that the planner cannot bear is that job's condition, no crash loop.
                _log.exception("the planner failed")
                refused = f"the planner failed with {error!r}; its log has more"
            known = memory.planned = inputs, planned, refused, now
        return known[1], known[2]

    def _dry_run(self, planned: Planned, owner: Owner, memory: Memory) -> str:
        """What the API server says of the pods, without making any; empty when nothing."""
        known, now = memory.checked, time.monotonic()
        same = known is not None and known[0] == planned.content
        if known is not None and same and (not known[1] or now - known[2] < ASK_AGAIN_S):
            return known[1]
        said = ""
        for template in planned.rendered.templates(owner.name):
            try:
                self._kube.create(
                    TEMPLATES, owner.namespace, pod_template(template, owner), dry_run=True
                )
            except KubeError as error:
                if not error.refused:
                    raise
                said = f"the API server would not take the pods: {error.message}"[:900]
                break
        memory.checked = planned.content, said, now
        return said

    def _held(
        self, intent: Intent, owner: Owner, job: LongContextJob | None, memory: Memory
    ) -> Planned | None:
        """The plan of the cluster that the intent names, or of the one that replaces it."""
        key = (intent.cluster, intent.epoch, intent.machines, intent.replace)
        if memory.held is not None and memory.held[0] == key:
            return memory.held[1]
        records = self._records(intent, owner)
        base = next((r for r in records if r[0].rendered.name(intent.epoch) == intent.cluster),
                    records[0] if records else None)  # fmt: skip
        accepted = base[1] if base else job
        memory.accepted = accepted or memory.accepted
        planned = base[0] if base else None
        fits = planned is not None and (
            intent.machines is None or planned.machines <= intent.machines
        )
        named = planned is not None and planned.rendered.name(intent.epoch) == intent.cluster
        if not fits or not (intent.replace or named):
            if accepted is None:
                return None
            try:
                planned = self._planner.plan(accepted, owner, intent.machines)
            except JobError as error:
                _log.warning("what was planned cannot be planned again: %s", explain(error))
                return None
        assert planned is not None
        memory.held = key, planned
        return planned

    def _records(self, intent: Intent, owner: Owner) -> list[tuple[Planned, LongContextJob]]:
        """What is on record of the job's clusters: the intended one's, else of any other."""
        name = intent.cluster
        named = self._kube.find(CONFIGMAPS, owner.namespace, name) if name else None
        found = _readable([named] if named else [], owner)
        if not found:
            mark = f"{names.JOB_UID}={owner.uid}"
            found = _readable(list(self._kube.list(CONFIGMAPS, owner.namespace, mark)), owner)
        return found

    def _fewer(
        self, s: State, owner: Owner, planned: Planned, memory: Memory, found: Read
    ) -> int | None:
        """Machines of the next smaller plan, where a decision may ask for it now."""
        intent, choices = s.intent, s.job.spec.failure.on_node_loss
        lost = any(p.node_lost for p in s.members)
        late = intent.phase == "Provisioning" and intent.attempts and (
            s.age(intent.since) >= values.seconds(s.job.spec.deadlines.capacity)
        )  # fmt: skip
        job = memory.accepted or found.job
        if "Replan" not in choices or not (lost or late) or job is None:
            return None
        smaller = self._planner.fewer(job, owner, planned)
        return None if smaller is None else smaller.machines

    def _contact(
        self, s: State, clusters: list[RayCluster], pods: list[RayPod], memory: Memory
    ) -> tuple[str, Contact | None]:
        """The head's service, and what its Jobs API said, if this is a time to ask it."""
        mine = next((c for c in clusters if s.cluster and c.meta.uid == s.cluster.uid), None)
        service = mine.head_service if mine else ""
        phase = s.intent.phase
        asks = phase in ("Starting", "Running", "Recovering", "Draining") or phase in TERMINAL
        seen = s.head
        if not asks:
            memory.contact = memory.reached = None
            return service, None
        if not service or seen is None or seen.phase != "Running":
            memory.contact = None
            _reached(memory, False, s.now)
            return service, None
        contact = memory.contact
        if contact is None or contact.identity != seen.identity or contact.head.service != service:
            pod = next(p for p in pods if p.meta.uid == seen.uid)
            head = Head(pod.meta.namespace, service, self._token(pod))
            contact = memory.contact = Contact(seen.identity, head)
        wait = min(CONTACT_MAX_S, self._gap * 2 ** min(contact.failures, 8))
        if contact.stale or time.monotonic() - contact.asked >= wait:
            self._ask(contact, s, memory)
        return service, contact

    def _ask(self, contact: Contact, s: State, memory: Memory) -> None:
        contact.stale = False
        try:
            contact.submissions = self._heads.submissions(contact.head)
            contact.reachable, contact.failures = True, 0
        except HeadError as error:
            contact.reachable, contact.failures = False, contact.failures + 1
            _log.info("the head does not answer: %s", error)
            if error.code in (401, 403):
                memory.contact = None  # its token is another one by now
        contact.asked = time.monotonic()
        _reached(memory, contact.reachable, s.now)
        if not contact.reachable or s.intent.phase not in ("Starting", "Running", "Draining"):
            return
        try:
            report = self._heads.report(contact.head)
        except HeadError as error:
            _log.debug("no progress: %s", error)
            return
        last = memory.seen
        same = last is not None and last.report.submission == report.submission
        grew = not same or last is None or report.step > last.report.step
        stepped = s.now if grew or last is None else last.stepped
        memory.seen = Seen(report, stepped, s.now)

    def _token(self, pod: RayPod) -> str | None:
        """Ray's token, of the Secret from which the head itself has it."""
        if pod.token_secret is None:
            return None
        name, key = pod.token_secret
        secret = self._kube.find(SECRETS, pod.meta.namespace, name)
        data = (secret or {}).get("data") or {}
        try:
            return base64.b64decode(data[key], validate=True).decode()
        except (KeyError, TypeError, ValueError, binascii.Error):
            _log.warning("Secret %s holds no token under %s", name, key)
            return None


def _reached(memory: Memory, reachable: bool, now: float) -> None:
    if memory.reached is None or memory.reached[0] != reachable:
        memory.reached = reachable, now


def pod_template(template: dict[str, Any], owner: Owner) -> dict[str, Any]:
    """A core/v1 PodTemplate for the dry run: real pod rules, and no pod."""
    return {
        "apiVersion": "v1", "kind": "PodTemplate",
        "metadata": {"name": f"{owner.name}-{owner.uid}", "namespace": owner.namespace},
        "template": template,
    }  # fmt: skip


def _readable(objects: list[Any], owner: Owner) -> list[tuple[Planned, LongContextJob]]:
    out = []
    for each in objects:
        owners = (each.get("metadata") or {}).get("ownerReferences") or []
        if not any(o.get("uid") == owner.uid for o in owners):
            continue
        try:
            out.append(read_record(owner, each.get("data")))
        except ValueError as error:
            _log.warning("ConfigMap %s: %s", each["metadata"].get("name"), error)
    return out


def _deleted(job: JobObject, now: float) -> float | None:
    if job.deletion is None:
        return None
    try:
        return min(now, status.seconds_of(job.deletion))
    except ValueError:
        return now


def _recalled(job: JobObject, s: State) -> Seen | None:
    """What the status says of the attempt that is open: an operator before this one wrote it.

    Its step counts as made now: how long none was made, this operator has not seen.
    """
    shown = (job.raw.get("status") or {}).get("progress")
    attempt = s.intent.attempt
    if attempt is None or not isinstance(shown, dict):
        return None
    try:
        received = status.seconds_of(str(shown.get("updated")))
    except ValueError:
        return None
    if received < attempt.started:
        return None  # of the attempt before
    found = views.report({**shown, "submission": attempt.submission_id})
    return None if found is None else Seen(found, s.now, received)


def _progress(seen: Seen | None) -> Progress | None:
    if seen is None:
        return None
    report = seen.report
    return Progress(
        submission_id=report.submission, step=report.step, checkpoint_step=report.checkpoint_step,
        stepped=seen.stepped, drained=report.drained,
    )  # fmt: skip

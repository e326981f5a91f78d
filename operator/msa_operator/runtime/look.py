"""A look at one job and its surroundings: from cached objects and its head's answers to a State.

Objects come from the store, so a look costs the API server nothing in the usual case; the head is
asked at most every few seconds. Raises :class:`~msa_operator.runtime.kube.KubeError` when what
has to be known cannot be asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from msa_operator.api import JobError, parse_job
from msa_operator.api.job import API_VERSION
from msa_operator.reconcile import names, status
from msa_operator.reconcile.desired import Owner
from msa_operator.reconcile.intent import HOLDING, Intent
from msa_operator.reconcile.lifecycle import parts
from msa_operator.reconcile.observe import Job, Pod, State
from msa_operator.runtime.capacity import Provider
from msa_operator.runtime.cluster import ClusterFacts
from msa_operator.runtime.contact import Contacts
from msa_operator.runtime.head import Head
from msa_operator.runtime.memory import Memory, Read
from msa_operator.runtime.planning import Planned, explain
from msa_operator.runtime.plans import Plans
from msa_operator.runtime.store import JobObject, Store
from msa_operator.runtime.views import RayPod

NODE_SILENT_S = 60.0
"""A pod that was told to end and whose node has said nothing for this long will not confirm it:
its tolerations are over, and Kubernetes itself waits for the node for ever."""

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
        self, store: Store, plans: Plans, contacts: Contacts, cluster: ClusterFacts,
        provider: Provider, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._store = store
        self._plans = plans
        self._contacts = contacts
        self._cluster = cluster
        self._provider = provider
        self._clock = clock

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
        planning, planned = self._plans.observe(state, found, owner, memory, job)
        state = replace(state, planning=planning)
        if state.intent.phase in HOLDING and memory.accepted is not None:
            same = _as_accepted(state, parts(memory.accepted.spec))
            state = replace(state, job=replace(state.job, parts=same))
        state, service, head = self._contacts.observe(state, job, clusters, pods, memory)
        return Look(state, job, owner, planned, head, service)

    def _read(self, job: JobObject, owner: Owner, memory: Memory) -> Read:
        last = memory.read
        if last is not None and last.version == job.meta.version:
            return last
        said = job.raw.get("status")
        told = status.digest(said)
        intent = last.intent if last is not None and last.told == told else status.read(said)
        known = job.meta.version, job.meta.generation, told
        if last is not None and last.job is not None and last.generation == known[1]:
            # Whatever changed, it was not the spec.
            read = Read(*known, last.job, last.spec, "", last.parts, intent)
        else:
            read = self._parse(job, owner, intent, known, memory)
        memory.read = read
        return read

    def _parse(
        self, job: JobObject, owner: Owner, intent: Intent, known: tuple[str, int, bytes],
        memory: Memory,
    ) -> Read:  # fmt: skip
        try:
            plain = {k: job.raw.get(k) for k in ("apiVersion", "kind", "metadata", "spec")}
            parsed = parse_job(plain)
        except JobError as error:
            if intent.phase in HOLDING:
                self._plans.held(intent, owner, None, memory)
            usable = memory.accepted or parse_job(_PLAIN)
            # The same parts as accepted: nothing can be said of what was edited.
            return Read(*known, None, usable.spec, explain(error), intent.accepted, intent)
        return Read(*known, parsed, parsed.spec, "", parts(parsed.spec), intent)

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


def _as_accepted(s: State, accepted: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The parts of the spec, in the hashes of whoever accepted it.

    A newer version may know fields that the older one lacked: where both specs are the same as
    this version reads them, nothing was edited.
    """
    before, then = dict(accepted), dict(s.intent.accepted)
    now = {k: then.get(k) if before.get(k) == v else v for k, v in s.job.parts}
    found = {**{k: v for k, v in then.items() if k not in now}, **now}
    return tuple(sorted((k, v) for k, v in found.items() if v is not None))


def _deleted(job: JobObject, now: float) -> float | None:
    if job.deletion is None:
        return None
    try:
        return min(now, status.seconds_of(job.deletion))
    except ValueError:
        return now

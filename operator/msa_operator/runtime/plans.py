"""The plan that counts for a job: the one on record while it holds a cluster, else a new one."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from msa_operator.api import JobError, LongContextJob, values
from msa_operator.reconcile import names
from msa_operator.reconcile.desired import Owner
from msa_operator.reconcile.intent import HOLDING, TERMINAL, Intent
from msa_operator.reconcile.names import content_hash
from msa_operator.reconcile.observe import Planning, State
from msa_operator.runtime.cluster import ClusterFacts
from msa_operator.runtime.kube import CONFIGMAPS, TEMPLATES, Kube, KubeError
from msa_operator.runtime.memory import Made, Memory, Read
from msa_operator.runtime.planning import Planned, Planner, explain, read_record
from msa_operator.runtime.store import JobObject

MOUNTED = "runspec"
"""Stands in for the ConfigMap's name, which a dry run does not look for."""
TAKEN = 1024
TAKEN_S = 600.0
"""A policy of the cluster may change; the pods themselves are judged again when they are made."""
ASK_AGAIN_S = 60.0
"""A refusal may have had a passing cause, such as a Hub that could not be reached."""

_log = logging.getLogger(__name__)


class Plans:
    def __init__(self, kube: Kube, planner: Planner, cluster: ClusterFacts) -> None:
        self._kube = kube
        self._planner = planner
        self._cluster = cluster
        self._lock = threading.Lock()
        self._taken: dict[tuple[str, str], float] = {}
        """Pods that the API server would take, by namespace and content, and when it said so."""

    def observe(
        self, s: State, found: Read, owner: Owner, memory: Memory, job: JobObject
    ) -> tuple[Planning, Planned | None]:
        """What planning says for the state's intent, and the plan itself where there is one."""
        intent = s.intent
        if intent.phase in TERMINAL or s.job.deleted is not None:
            if intent.phase in TERMINAL:
                memory.planned = memory.held = memory.accepted = None
            shown = (job.raw.get("status") or {}).get("plan") or {}
            return Planning(summary=str(shown.get("summary", ""))), None
        if intent.phase in HOLDING:
            planned = self.held(intent, owner, found.job, memory)
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
        if known is None or known.inputs != inputs or (
            known.refused and now - known.at >= ASK_AGAIN_S
        ):  # fmt: skip
            planned, refused = None, ""
            try:
                planned = self._planner.plan(job, owner, machines)
            except JobError as error:
                refused = explain(error)
            except Exception as error:
                # One job that the planner cannot bear is that job's condition, no crash loop.
                _log.exception("the planner failed")
                refused = f"the planner failed with {error!r}; its log has more"
            known = memory.planned = Made(inputs, job, planned, refused, now)
        return known.plan, known.refused

    def _dry_run(self, planned: Planned, owner: Owner, memory: Memory) -> str:
        """What the API server says of the pods, without making any; empty when nothing."""
        known, now = memory.checked, time.monotonic()
        same = known is not None and known[0] == planned.content
        if known is not None and same and (not known[1] or now - known[2] < ASK_AGAIN_S):
            return known[1]
        said = ""
        for template in planned.rendered.templates(MOUNTED):
            # Jobs that are alike have pods that are alike but for their labels.
            alike = owner.namespace, content_hash(template["spec"])
            if now - self._taken.get(alike, float("-inf")) < TAKEN_S:
                continue
            try:
                self._kube.create(
                    TEMPLATES, owner.namespace, pod_template(template, owner), dry_run=True
                )
                with self._lock:
                    self._taken[alike] = now
                    while len(self._taken) > TAKEN:
                        self._taken.pop(next(iter(self._taken)))
            except KubeError as error:
                if not error.refused:
                    raise
                said = f"the API server would not take the pods: {error.message}"[:900]
                break
        memory.checked = planned.content, said, now
        return said

    def held(
        self, intent: Intent, owner: Owner, job: LongContextJob | None, memory: Memory
    ) -> Planned | None:
        """The plan of the cluster that the intent names, or of the one that replaces it."""
        key = (intent.cluster, intent.epoch, intent.machines, intent.replace)
        if memory.held is not None and memory.held[0] == key:
            return memory.held[1]
        records = _fresh(intent, memory) or self._records(intent, owner)
        base = next((r for r in records if r[0].name(intent.epoch) == intent.cluster),
                    records[0] if records else None)  # fmt: skip
        accepted = base[1] if base else job
        memory.accepted = accepted or memory.accepted
        planned = base[0] if base else None
        fits = planned is not None and (
            intent.machines is None or planned.machines <= intent.machines
        )
        named = planned is not None and planned.name(intent.epoch) == intent.cluster
        if not fits or not (intent.replace or named):
            if accepted is None:
                return None
            try:
                planned = self._planner.plan(accepted, owner, intent.machines)
            except JobError as error:
                _log.warning("what was planned cannot be planned again: %s", explain(error))
                return None
        assert planned is not None
        memory.held, memory.planned = (key, planned), None
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


def _fresh(intent: Intent, memory: Memory) -> list[tuple[Planned, LongContextJob]]:
    """The plan that was just made, if the intended cluster is made from it: its name says that
    what is or will be on record is the same."""
    if memory.planned is None or memory.planned.plan is None:
        return []
    planned, job = memory.planned.plan, memory.planned.job
    return [(planned, job)] if planned.name(intent.epoch) == intent.cluster else []


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

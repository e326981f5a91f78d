"""Objects of the API server and answers of a head, as values: the one place where each is checked.

What an object lacks or gets wrong is taken as not there, never as an exception: a pod without a
status is a pod that is not ready. An answer that is not what was asked for is None.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from msa_operator.reconcile import names
from msa_operator.reconcile.observe import Cluster, Pod, Submission, SubmissionStatus

RAY_CLUSTER = "ray.io/cluster"
RAY_TYPE = "ray.io/node-type"
TOKEN_ENV = "RAY_AUTH_TOKEN"
TEXT = 500
"""Longest message taken over, in characters."""

Key = tuple[str, str]
"""Namespace and name of a job."""
_STATUSES: dict[str, SubmissionStatus] = {
    "PENDING": "Pending", "RUNNING": "Running", "STOPPED": "Stopped", "SUCCEEDED": "Succeeded",
    "FAILED": "Failed",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """What is read of any object's metadata."""

    namespace: str
    name: str
    uid: str
    version: str
    """resourceVersion: compared for equality only."""
    generation: int
    job: str
    """Name of the job that the object is labelled with."""
    deleting: bool
    owner: str
    """Uid of the controlling owner."""

    @property
    def key(self) -> Key:
        """The job that the object is labelled with."""
        return self.namespace, self.job


@dataclass(frozen=True, kw_only=True, slots=True)
class RayCluster:
    meta: Meta
    suspended: bool
    workers_wanted: int
    head_service: str
    """As KubeRay names it, once it does."""

    def seen_by(self, uid: str) -> Cluster:
        """The cluster as the job object with this uid sees it."""
        return Cluster(
            name=self.meta.name, uid=self.meta.uid, ours=self.meta.owner == uid,
            deleting=self.meta.deleting, suspended=self.suspended,
            workers_wanted=self.workers_wanted,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPod:
    meta: Meta
    pod: Pod
    job_uid: str
    token_secret: tuple[str, str] | None
    """Name and key of the Secret from which it has Ray's token."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run's control endpoint says of it."""

    submission: str
    state: str
    step: int
    max_steps: int
    loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    eta_seconds: float | None
    checkpoint_step: int
    checkpoint_uri: str
    drained: bool
    error: str


def meta(raw: Any) -> Meta | None:
    """Metadata of an object; None for what is none."""
    found = _map(_map(raw).get("metadata"))
    name, uid = _text(found.get("name")), _text(found.get("uid"))
    if not name or not uid:
        return None
    owner = next(
        (o for o in map(_map, _list(found.get("ownerReferences"))) if o.get("controller") is True),
        {},
    )
    return Meta(
        namespace=_shared(found.get("namespace")), name=name, uid=uid,
        version=_text(found.get("resourceVersion")), generation=_whole(found.get("generation")),
        job=_shared(_map(found.get("labels")).get(names.JOB)),
        deleting=bool(found.get("deletionTimestamp")), owner=_shared(owner.get("uid")),
    )  # fmt: skip


def asks(raw: Any) -> bool:
    """Whether a job object holds an edit or a deletion that its status does not show yet.

    Of a new job, no: many may come at once, and none would be before the others.
    """
    found, status = _map(_map(raw).get("metadata")), _map(_map(raw).get("status"))
    shown = _whole(status.get("observedGeneration"))
    return bool(found.get("deletionTimestamp")) or 0 < shown < _whole(found.get("generation"))


def cluster(raw: Any) -> RayCluster | None:
    found = meta(raw)
    if found is None:
        return None
    spec, status = _map(raw.get("spec")), _map(raw.get("status"))
    groups = [_map(g) for g in _list(spec.get("workerGroupSpecs"))]
    wanted = sum(
        _whole(g.get("replicas")) * max(1, _whole(g.get("numOfHosts")))
        for g in groups
        if g.get("suspend") is not True
    )
    return RayCluster(
        meta=found, suspended=spec.get("suspend") is True, workers_wanted=wanted,
        head_service=_text(_map(status.get("head")).get("serviceName")),
    )  # fmt: skip


def pod(raw: Any) -> RayPod | None:
    found = meta(raw)
    if found is None:
        return None
    spec, status = _map(raw.get("spec")), _map(raw.get("status"))
    phase = status.get("phase")
    if phase not in ("Pending", "Running", "Succeeded", "Failed"):
        phase = "Pending"
    conditions = {_text(c.get("type")): c for c in map(_map, _list(status.get("conditions")))}
    states = [_map(c) for c in _list(status.get("containerStatuses"))]
    labels = _map(_map(raw.get("metadata")).get("labels"))
    head = labels.get(RAY_TYPE) == "head"
    return RayPod(
        meta=found,
        pod=Pod(
            name=found.name, uid=found.uid, cluster=_shared(labels.get(RAY_CLUSTER)), head=head,
            phase=cast(Literal["Pending", "Running", "Succeeded", "Failed"], sys.intern(phase)),
            ready=_map(conditions.get("Ready")).get("status") == "True",
            restarts=sum(_whole(s.get("restartCount")) for s in states),
            node=_shared(spec.get("nodeName")), deleting=found.deleting,
            message="" if phase == "Running" and not head else _waits(status, conditions),
        ),
        job_uid=_shared(labels.get(names.JOB_UID)),
        token_secret=_token_secret(spec) if head else None,
    )  # fmt: skip


def _waits(status: Mapping[str, Any], conditions: Mapping[str, Any]) -> str:
    """Why a pod is not running: what the kubelet says of a container, or the scheduler."""
    for name in ("initContainerStatuses", "containerStatuses"):
        for each in map(_map, _list(status.get(name))):
            state = _map(each.get("state"))
            waiting, ended = _map(state.get("waiting")), _map(state.get("terminated"))
            reason = _text(waiting.get("reason"))
            if reason and reason not in ("PodInitializing", "ContainerCreating"):
                return f"{reason}: {_text(waiting.get('message'))}"[:TEXT].rstrip(": ")
            if ended and _whole(ended.get("exitCode")):
                code, why = _whole(ended.get("exitCode")), _text(ended.get("reason"))
                return f"{_text(each.get('name'))} ended with {code} {why}".strip()[:TEXT]
    scheduled = _map(conditions.get("PodScheduled"))
    return _text(scheduled.get("message"))[:TEXT] if scheduled.get("status") == "False" else ""


def _token_secret(spec: Mapping[str, Any]) -> tuple[str, str] | None:
    for container in map(_map, _list(spec.get("containers"))):
        for variable in map(_map, _list(container.get("env"))):
            if variable.get("name") == TOKEN_ENV:
                source = _map(_map(variable.get("valueFrom")).get("secretKeyRef"))
                if source.get("name") and source.get("key"):
                    return _text(source["name"]), _text(source["key"])
    return None


def node_state(raw: Any) -> Literal["there", "silent", "gone"]:
    """Whether a node's machine runs; silent: its kubelet says nothing any more."""
    spec, status = _map(_map(raw).get("spec")), _map(_map(raw).get("status"))
    taints = {_text(t.get("key")) for t in map(_map, _list(spec.get("taints")))}
    if taints & {"node.kubernetes.io/out-of-service", "node.cloudprovider.kubernetes.io/shutdown"}:
        return "gone"
    ready = next(
        (c for c in map(_map, _list(status.get("conditions"))) if c.get("type") == "Ready"), {}
    )
    return "silent" if ready.get("status") == "Unknown" else "there"


def submissions(raw: Any) -> tuple[Submission, ...] | None:
    """What the Jobs API lists; entries without a submission id are other drivers."""
    if not isinstance(raw, list):
        return None
    found = []
    for each in map(_map, raw):
        id, status = each.get("submission_id"), _STATUSES.get(_text(each.get("status")))
        if isinstance(id, str) and id and status is not None:
            message = _text(each.get("message"))[-TEXT:]
            found.append(Submission(id=id, status=status, message=message))
    return tuple(found)


def report(raw: Any) -> Report | None:
    """What ``/progress`` answers."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("submission"), str):
        return None
    return Report(
        submission=raw["submission"], state=_text(raw.get("state")), step=_whole(raw.get("step")),
        max_steps=_whole(raw.get("maxSteps")), loss=_number(raw.get("loss")),
        tokens_per_second=_number(raw.get("tokensPerSecond")), mfu=_number(raw.get("mfu")),
        eta_seconds=_number(raw.get("etaSeconds")),
        checkpoint_step=_whole(raw.get("checkpointStep")),
        checkpoint_uri=_text(raw.get("checkpointUri"))[:1024],
        drained=raw.get("drained") is True, error=_text(raw.get("error"))[:TEXT],
    )  # fmt: skip


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _shared(value: Any) -> str:
    """A text that many objects have, kept once."""
    return sys.intern(value) if type(value) is str else ""


def _whole(value: Any) -> int:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return min(value, (1 << 53) - 1) if good else 0


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good and math.isfinite(value) and abs(value) < 1e9 else None

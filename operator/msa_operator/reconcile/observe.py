"""What was seen of a job and its surroundings at one moment, as values that decide can compare.

Times are seconds of the operator's own clock, never of what was observed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from msa_operator.api.job import JobSpec
from msa_operator.reconcile.intent import Intent
from msa_operator.reconcile.names import cluster_name

SubmissionStatus = Literal["Pending", "Running", "Stopped", "Succeeded", "Failed"]
OVER: frozenset[SubmissionStatus] = frozenset({"Stopped", "Succeeded", "Failed"})


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job object. ``generation`` grows with every edit of its spec."""

    name: str
    uid: str
    spec: JobSpec
    parts: tuple[tuple[str, str], ...] = ()
    """Hashes of the spec's parts, by :func:`msa_operator.reconcile.lifecycle.parts`."""
    generation: int = 1
    finalizer: bool = False
    """Ours is on the object."""
    deleted: float | None = None
    """When its deletion was first asked for."""


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What the planner says of the spec as it is now."""

    content: str = ""
    """Hash of what would be rendered; empty when there is no plan."""
    pods: int = 0
    """Worker pods of the plan."""
    summary: str = ""
    refused: str = ""
    """Why there is no plan, or why the API server would not take its pods."""
    fewer: int | None = None
    """The next smaller number of machines that has a plan whose checkpoint can be read."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A RayCluster that carries the job's label."""

    name: str
    uid: str = ""
    ours: bool = True
    """Its owner's uid is the job's."""
    deleting: bool = False
    suspended: bool = False
    """A queue holds it back."""
    workers_wanted: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A pod of one of the job's clusters, by the name that its label gives."""

    name: str
    uid: str
    cluster: str
    head: bool
    phase: Literal["Pending", "Running", "Succeeded", "Failed"] = "Running"
    ready: bool = True
    restarts: int = 0
    node: str = ""
    node_lost: bool = False
    """Its node is confirmed gone: deleted, or its machine ended."""
    deleting: bool = False
    message: str = ""
    """Why it waits: what the scheduler or the kubelet says."""

    @property
    def identity(self) -> str:
        """Changes with the pod and with any restart of its container."""
        return f"{self.uid}/{self.restarts}"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A submission that the Jobs API lists."""

    id: str
    status: SubmissionStatus
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class JobsApi:
    """The head's Jobs API. ``submissions`` means nothing while it cannot be reached."""

    reachable: bool = False
    since: float = 0.0
    """Since when it has been as it is."""
    submissions: tuple[Submission, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the run itself last said; belongs to one attempt."""

    submission_id: str = ""
    step: int = 0
    checkpoint_step: int = 0
    stepped: float = 0.0
    """When ``step`` last grew, or was first seen."""
    drained: bool = False
    """The run has written its last checkpoint's marker after a drain request."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What lies outside the namespace and would not be collected with the job."""

    outside: bool = False
    """The job's nodes need such a thing, as a NodePool of its own."""
    prepared: bool = True
    held: tuple[str, ...] = ()
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class State:
    job: Job
    intent: Intent
    now: float
    planning: Planning = field(default_factory=Planning)
    clusters: tuple[Cluster, ...] = ()
    pods: tuple[Pod, ...] = ()
    """Of every cluster of the job: an old one's may be stuck on a lost node."""
    api: JobsApi = field(default_factory=JobsApi)
    progress: Progress | None = None
    capacity: Capacity = field(default_factory=Capacity)

    def age(self, since: float) -> float:
        """Seconds since then; never negative, also when the clock was set back."""
        return max(0.0, self.now - since)

    @property
    def cluster(self) -> Cluster | None:
        """The intended cluster, if it is ours and stays."""
        return next(
            (c for c in self.ours if c.name == self.intent.cluster and not c.deleting), None
        )

    @property
    def ours(self) -> tuple[Cluster, ...]:
        return tuple(c for c in self.clusters if c.ours)

    @property
    def name_taken(self) -> bool:
        """Somebody else's cluster has the name: it is never adopted."""
        return any(c.name == self.intent.cluster and not c.ours for c in self.clusters)

    @property
    def members(self) -> tuple[Pod, ...]:
        """Pods of the intended cluster."""
        return tuple(p for p in self.pods if p.cluster == self.intent.cluster)

    @property
    def head(self) -> Pod | None:
        """The head, unless it is ending."""
        return next((p for p in self.members if p.head and _alive(p)), None)

    @property
    def workers(self) -> tuple[Pod, ...]:
        return tuple(p for p in self.members if not p.head and _alive(p))

    @property
    def complete(self) -> bool:
        """Head and all workers of the gang are ready: only then may training start."""
        cluster, head = self.cluster, self.head
        if cluster is None or head is None or not head.ready or not cluster.workers_wanted:
            return False
        ready = [p for p in self.workers if p.ready and p.phase == "Running"]
        return len(ready) == len(self.workers) == cluster.workers_wanted

    @property
    def submission(self) -> Submission | None:
        """The current attempt's, as the Jobs API lists it."""
        attempt = self.intent.attempt
        found = self.api.submissions if self.api.reachable and attempt else ()
        return next((s for s in found if attempt and s.id == attempt.submission_id), None)

    @property
    def live_submissions(self) -> tuple[Submission, ...]:
        if not self.api.reachable or self.cluster is None:
            return ()
        return tuple(s for s in self.api.submissions if s.status not in OVER)

    @property
    def run(self) -> Progress | None:
        """Progress of the current attempt; what an earlier one said does not count."""
        attempt, seen = self.intent.attempt, self.progress
        if attempt is None or seen is None or seen.submission_id != attempt.submission_id:
            return None
        return seen

    def name(self, content: str, epoch: int) -> str:
        """The name of a cluster of this job with that content in that epoch."""
        return cluster_name(self.job.name, self.job.uid, content, epoch)

    def next_name(self) -> str:
        """The cluster's name in the epoch after this one."""
        return self.name(self.planning.content, self.intent.epoch + 1)


def _alive(pod: Pod) -> bool:
    ended = pod.phase in ("Succeeded", "Failed")
    return not (pod.deleting or pod.node_lost or ended)


def gang(workers: tuple[Pod, ...]) -> str:
    """Digest of the workers' identities: short, and different when any is another."""
    text = ",".join(sorted(p.identity for p in workers))
    return hashlib.sha256(text.encode()).hexdigest()[:16]

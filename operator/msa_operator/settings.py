"""What an operator was installed with: read once, checked as a job file is, never changed.

The chart's ``settings`` value is this file, and its schema is generated from these types.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from msa_operator.api import values
from msa_operator.api.fields import ObjectName, Quantity
from msa_operator.api.load import read_document
from msa_operator.api.problems import JobError, Problem
from msa_operator.api.read import Reader
from msa_operator.api.schema import Each, Int, Model, Number, Rule, Text
from msa_operator.planner.hardware import MIB
from msa_operator.reconcile import pods

PATH = Path("/etc/flash-msa-operator/settings.yaml")
"""Where the chart mounts it."""
LEASE = "flash-msa-operator"
"""Name of the Lease in the operator's namespace."""
PORT = 8080
"""Of /healthz, /readyz and /metrics."""

Namespace = Text(63, values.LABEL, "a namespace's name", values.nearest_name, shortest=1)
Seconds = Annotated[float, Number(0, 86_400, above=True)]


class CheckpointStorage(Model):
    """Where checkpoints of jobs go that name no folder of their own; at most one of the two."""

    uri: Annotated[
        str | None,
        Text(1024, r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?$", "s3://bucket/prefix",
             lambda found: values.nearest_uri(found, ("s3",))),
    ] = None  # fmt: skip
    """A bucket, s3://bucket/prefix; each job gets a folder of its own below it."""
    claim: ObjectName | None = None
    """A PersistentVolumeClaim of this name in each job's namespace, mounted by all pods."""

    rules: ClassVar = (
        Rule(
            "!has(self.uri) || !has(self.claim)",
            "give uri or claim",
            lambda c: not (c.uri and c.claim),
            found=lambda c: "found both",
        ),
    )

    def default_uri(self, namespace: str, job: str) -> str | None:
        """The folder of a job that names none; None when nothing was installed for it.

        ``job`` has to tell job objects apart, not only their names.
        """
        if self.uri:
            return f"{self.uri.rstrip('/')}/{namespace}/{job}"
        if self.claim:
            return f"file://{pods.CHECKPOINTS_FOLDER}/{job}"
        return None


class Lease(Model):
    """Which of two operators acts. A standby takes over ``duration`` after the last renewal."""

    duration_seconds: Seconds = 30.0
    """How long a renewal counts, by the clock of whoever reads it."""
    renew_seconds: Seconds = 20.0
    """An operator that cannot renew for this long stops acting and exits."""
    retry_seconds: Seconds = 5.0
    """Between two renewals."""

    rules: ClassVar = (
        Rule(
            "self.retrySeconds < self.renewSeconds && self.renewSeconds < self.durationSeconds",
            "retrySeconds < renewSeconds < durationSeconds",
            lambda s: s.retry_seconds < s.renew_seconds < s.duration_seconds,
            found=lambda s: (
                f"found {s.retry_seconds:g}, {s.renew_seconds:g} and {s.duration_seconds:g}"
            ),
        ),
    )


class Timeouts(Model):
    """Of single calls; what a job may take is in the job."""

    api_seconds: Seconds = 15.0
    """A call of the API server, a list included."""
    watch_seconds: Seconds = 240.0
    """The server ends a watch after this, so that a dead connection cannot last."""
    silence_seconds: Seconds = 300.0
    """A watch that brought nothing and did not end for this long is stalled: /healthz is red."""
    head_seconds: Seconds = 5.0
    """A call of a run's head: Jobs API and control endpoint."""

    rules: ClassVar = (
        Rule(
            "self.watchSeconds < self.silenceSeconds",
            "silenceSeconds above watchSeconds: a quiet watch that ends in time is healthy",
            lambda t: t.watch_seconds < t.silence_seconds,
            "silenceSeconds",
            lambda t: f"found {t.silence_seconds:g} with watchSeconds {t.watch_seconds:g}",
            lambda t: f"{t.watch_seconds + 60:g}",
        ),
    )


class Settings(Model):
    """Everything an operator is told at its start. Unknown keys are errors."""

    image: Annotated[
        str, Text(1024, r"^[^\s]+$", "an image such as registry/flash-msa-worker:1.0", shortest=1)
    ]
    """Image of head and workers; a job's pod.image comes first."""
    ray_version: Annotated[
        str, Text(32, r"^[0-9]+\.[0-9]+\.[0-9]+$", "a version such as 2.60.0", shortest=5)
    ]
    """Of the Ray in that image. KubeRay's token authentication needs it, and Ray 2.52."""
    head_cpu: Quantity = "2"
    """CPUs that each head requests."""
    head_memory: Quantity = "8Gi"
    """Memory of each head."""
    daemonset_memory: Quantity = "0"
    """Memory that the cluster's daemonsets take of every node, kept free by workers."""
    namespaces: Annotated[tuple[str, ...], Each(Namespace, 256, unique=True)] = ()
    """Namespaces whose jobs are run; all where the list is empty."""
    metrics_namespace: Annotated[str, Text(63, f"^$|{values.LABEL}", "a namespace's name")] = ""
    """Namespace from which runs' metrics are scraped; empty opens their ports to nobody."""
    checkpoint: CheckpointStorage = Field(default_factory=CheckpointStorage)
    """Default storage of checkpoints."""
    resync_seconds: Seconds = 300.0
    """Every job is looked at again after this, whatever events came."""
    progress_seconds: Seconds = 15.0
    """Between two looks at a run's progress."""
    concurrency: Annotated[int, Int(1, 256)] = 16
    """Jobs that are worked on at once."""
    lease: Lease = Field(default_factory=Lease)
    timeouts: Timeouts = Field(default_factory=Timeouts)

    def for_pods(self, namespace: str) -> pods.Settings:
        """What rendering needs; ``namespace`` is the operator's own."""
        return pods.Settings(
            image=self.image,
            ray_version=self.ray_version,
            namespace=namespace,
            head_cpu=self.head_cpu,
            head_memory=self.head_memory,
            daemonsets_mib=round(values.quantity(self.daemonset_memory) / MIB),
            metrics_namespace=self.metrics_namespace,
            checkpoint_claim=self.checkpoint.claim or "",
        )


def load(path: str | Path = PATH) -> Settings:
    """Read a settings file.

    Raises :class:`JobError` with every problem found, each with its line.
    """
    document, name = read_document(path)
    reader = Reader(lambda inside: f"{name}:{document.line(inside)}")
    found = reader.read(Settings, document.value)
    if found is None:
        raise JobError(reader.problems, name)
    return found


def with_namespaces(settings: Settings, namespaces: tuple[str, ...]) -> Settings:
    """``settings`` with the namespaces of the command line, where it gives any.

    Raises :class:`JobError` for a name that no namespace can have.
    """
    if not namespaces:
        return settings
    reader = Reader(lambda _: "--namespace")
    plain = settings.model_dump(by_alias=True, exclude_none=True)
    found = reader.read(Settings, plain | {"namespaces": list(namespaces)})
    if found is None:
        raise JobError([dataclasses.replace(p, path="") for p in reader.problems])
    return found


__all__ = [
    "LEASE", "PATH", "PORT", "CheckpointStorage", "JobError", "Lease", "Problem", "Settings",
    "Timeouts", "load", "with_namespaces",
]  # fmt: skip

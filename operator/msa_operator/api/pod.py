"""What a job says about its pods: the few fields that everyone needs; podPatch has the rest."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from msa_operator.api import values
from msa_operator.api.fields import ObjectName, Quantity, Switch
from msa_operator.api.schema import Choice, Int, Map, Model, Opaque, Rule, Text


class ObjectReference(Model):
    name: ObjectName


class EnvVar(Model):
    name: Annotated[
        str,
        Text(253, r"^[A-Za-z_][A-Za-z0-9_]*$", "letters, digits and '_'", shortest=1),
    ]  # fmt: skip
    value: Annotated[str | None, Text(32_768)] = None
    value_from: Annotated[dict[str, Any] | None, Opaque()] = None
    """As in a pod: secretKeyRef, configMapKeyRef, fieldRef."""

    rules: ClassVar = (
        Rule(
            "!has(self.value) || !has(self.valueFrom)",
            "value and valueFrom exclude each other",
            lambda e: e.value is None or e.value_from is None,
            "valueFrom",
            lambda e: "found beside value",
        ),
    )


class Volume(Model):
    name: Annotated[
        str, Text(63, values.LABEL, "a volume name (lower case, digits, '-')", shortest=1)
    ]
    mount_path: Annotated[
        str, Text(1024, r"^/[^:]*$", "an absolute path", lambda f: f"/{f}", shortest=1)
    ]
    read_only: Switch = False
    source: Annotated[dict[str, Any], Opaque()]
    """As in a pod: persistentVolumeClaim, hostPath, configMap and others."""


class Toleration(Model):
    key: Annotated[str, Text(317)] = ""
    operator: Annotated[str, Choice(("Equal", "Exists"))] = "Equal"
    value: Annotated[str, Text(63)] = ""
    effect: Annotated[str | None, Choice(("NoSchedule", "PreferNoSchedule", "NoExecute"))] = None
    toleration_seconds: Annotated[int | None, Int(0)] = None


class Pod(Model):
    image: Annotated[str | None, Text(512, r"^[^\s]+$", "an image reference", shortest=1)] = None
    """Image of head and workers; default: what the operator was installed with."""
    service_account_name: ObjectName | None = None
    """Account whose rights the pods have, such as reading a bucket."""
    image_pull_secrets: Annotated[tuple[ObjectReference, ...], Field(max_length=16)] = ()
    """Secrets for the image's registry."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=256)] = ()
    """Environment of head and workers."""
    volumes: Annotated[tuple[Volume, ...], Field(max_length=64)] = ()
    """Volumes, each with the path where it is mounted."""
    node_selector: Annotated[dict[str, str], Map(64, 63)] = Field(default_factory=dict)
    """Labels that a worker's node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=64)] = ()
    """Taints that workers tolerate, beside those of GPUs."""
    priority_class_name: ObjectName | None = None
    """Priority of head and workers."""
    memory: Quantity | None = None
    """Memory of a worker pod; default: what its machine can give."""
    cpu: Quantity | None = None
    """CPUs of a worker pod; default: what its machine can give."""


class Queue(Model):
    name: ObjectName
    """The Kueue LocalQueue."""

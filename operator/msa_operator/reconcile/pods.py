"""Pod templates of head and workers, as plain Kubernetes mappings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msa_operator.api import values
from msa_operator.api.job import LongContextJob
from msa_operator.planner.hardware import GIB, MIB, memory_request_mib
from msa_operator.planner.request import Plan

GPU = "nvidia.com/gpu"
EFA = "vpc.amazonaws.com/efa"
RUNSPEC_FOLDER = "/etc/flash-msa"
CHECKPOINTS_FOLDER = "/checkpoints"
"""Where the default claim is mounted in jobs that name no folder of their own."""
CONTROL_PORT = 8267
"""Progress and drain requests, on the head; 8265 and 8266 are Ray's."""

NOT_READY_S = 30
"""A lost node's pods are given up after this long; Kubernetes waits 300 s unless told."""
GRACE_S = 30
"""From SIGTERM to SIGKILL: a checkpoint is drained for before pods end, not during it."""
STOP = ["/bin/sh", "-c", "ray stop --force >/dev/null 2>&1 &"]
"""Before SIGTERM, which does nothing: `ray start` is the container's first process and handles no
signal, nor does it end when its children were ended by one. Without this every pod would hold its
accelerators for the whole of GRACE_S. In the background: the hook would die with the container,
and be shown as failed."""
OBJECT_STORE_MIN = 80_000_000
"""Bytes; Ray refuses less than 75 MiB."""
OBJECT_STORE_MAX = 4 * GIB
"""Bytes; a run passes specs and reports through it, never tensors."""
SHM_MAX = 16 * GIB
"""Bytes beside the object store, for NCCL's and the loaders' segments."""
EFA_MEMORY_MIN = 32 * GIB
"""Bytes; with less, queue pairs cannot be set up and NCCL fails in ways that do not say so."""

UNDISTURBED = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""Consolidation and scale-down must leave a run's nodes alone."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the operator was installed with."""

    image: str
    ray_version: str
    namespace: str = "flash-msa-system"
    """The operator's own, from which it reaches heads."""
    head_cpu: str = "2"
    head_memory: str = "8Gi"
    daemonsets_mib: int = 0
    """Memory that the cluster's daemonsets take of every node."""
    metrics_namespace: str = ""
    """Namespace that scrapes Ray's metrics; empty opens the port to nobody."""
    checkpoint_claim: str = ""
    """Claim in each job's namespace for checkpoints of jobs that name no folder."""


@dataclass(frozen=True)
class WorkerSize:
    """One worker pod. Memory in bytes."""

    pods: int
    gpus: int
    efa: int
    cpu: str
    memory: int

    @property
    def ray_cpus(self) -> int:
        """CPUs that Ray may hand out: whole ones, at least one."""
        return max(1, math.floor(values.quantity(self.cpu)))


def worker_size(job: LongContextJob, plan: Plan, settings: Settings) -> WorkerSize:
    """One pod per machine, or per rank on CPUs."""
    pod, node = job.spec.pod, plan.machine
    if node.accelerator is None:
        memory = _bytes(pod.memory) or _round(plan.rank.total + plan.rank.host) + GIB
        return WorkerSize(plan.mesh.world_size, 0, 0, pod.cpu or "1", memory)
    efa = node.efa if plan.machines > 1 and job.spec.network.efa != "Disabled" else 0
    memory = _bytes(pod.memory) or memory_request_mib(node, settings.daemonsets_mib) * MIB
    # The kubelet, the network and device plugins need a part of the CPUs.
    cpu = pod.cpu or str(max(1, node.cpus * 9 // 10 - 1))
    return WorkerSize(plan.machines, min(plan.mesh.world_size, node.count), efa, cpu, memory)


def _bytes(quantity: str | None) -> int:
    return int(values.quantity(quantity)) if quantity else 0


def _round(size: float) -> int:
    return math.ceil(size / MIB) * MIB


def object_store(memory: int) -> int:
    """Bytes of Ray's object store in a pod with this memory."""
    return max(OBJECT_STORE_MIN, min(OBJECT_STORE_MAX, memory // 10))


def shared_memory(memory: int) -> int:
    """Bytes of /dev/shm; part of the pod's memory, never on top of it."""
    return object_store(memory) + min(SHM_MAX, memory // 8)


def head(job: LongContextJob, name: str, settings: Settings, marks: dict[str, str]) -> Any:
    """The head's template: no accelerator, the RunSpec mounted, the control port open."""
    memory = _bytes(settings.head_memory)
    template = _template(
        job, "ray-head", settings, marks, memory,
        requests={"cpu": settings.head_cpu}, limits={},
    )  # fmt: skip
    container = template["spec"]["containers"][0]
    container["ports"] = [
        {"name": "gcs", "containerPort": 6379},
        {"name": "dashboard", "containerPort": 8265},
        {"name": "control", "containerPort": CONTROL_PORT},
        {"name": "metrics", "containerPort": 8080},
    ]
    template["spec"]["volumes"].append({"name": "runspec", "configMap": {"name": name}})
    container["volumeMounts"].append(
        {"name": "runspec", "mountPath": RUNSPEC_FOLDER, "readOnly": True}
    )
    return template


def worker(
    job: LongContextJob, size: WorkerSize, settings: Settings, marks: dict[str, str],
    node_labels: Mapping[str, str],
) -> Any:  # fmt: skip
    """A worker's template, before the job's podPatch."""
    devices = {name: n for name, n in ((GPU, size.gpus), (EFA, size.efa)) if n}
    counts = {name: str(n) for name, n in devices.items()}
    template = _template(
        job, "ray-worker", settings, marks, size.memory,
        requests={"cpu": size.cpu, **counts}, limits=counts,
    )  # fmt: skip
    spec, container = template["spec"], template["spec"]["containers"][0]
    if selector := {**node_labels, **job.spec.pod.node_selector}:
        spec["nodeSelector"] = selector
    if size.gpus:
        spec["tolerations"].append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    spec["tolerations"] += [_toleration(t) for t in job.spec.pod.tolerations]
    if size.efa:
        # Registered memory is locked memory.
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
        # FI_PROVIDER makes a missing device an error rather than a fall back to TCP.
        preset = {"FI_PROVIDER": "efa", "NCCL_NET": "ofi", "FI_EFA_USE_HUGE_PAGE": "0"}
        given = {variable["name"] for variable in container["env"]}
        container["env"] = [
            *({"name": n, "value": v} for n, v in preset.items() if n not in given),
            *container["env"],
        ]
    if not size.gpus:
        spec["topologySpreadConstraints"] = [_spread()]
    return template


def _template(
    job: LongContextJob, container: str, settings: Settings, marks: dict[str, str], memory: int,
    *, requests: dict[str, str], limits: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    pod = job.spec.pod
    claim = settings.checkpoint_claim if job.spec.checkpoint.uri is None else ""
    spec: dict[str, Any] = {
        # A container that came back would have an empty store and look healthy.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [_lost("not-ready"), _lost("unreachable")],
        "volumes": [
            {
                "name": "shared-mem",
                "emptyDir": {"medium": "Memory", "sizeLimit": str(shared_memory(memory))},
            },
            *(
                [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}]
                if claim
                else []
            ),
            *({"name": v.name, **v.source} for v in pod.volumes),
        ],
        "containers": [
            {
                "name": container,
                "image": pod.image or settings.image,
                "resources": {
                    "requests": {**requests, "memory": str(memory)},
                    "limits": {**limits, "memory": str(memory)},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
                },
                "lifecycle": {"preStop": {"exec": {"command": STOP}}},
                "env": [_env(e) for e in pod.env],
                "volumeMounts": [
                    {"name": "shared-mem", "mountPath": "/dev/shm"},
                    *([{"name": "checkpoints", "mountPath": CHECKPOINTS_FOLDER}] if claim else []),
                    *(_mount(v) for v in pod.volumes),
                ],
            }
        ],
    }  # fmt: skip
    if pod.service_account_name:
        spec["serviceAccountName"] = pod.service_account_name
    if pod.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": s.name} for s in pod.image_pull_secrets]
    if pod.priority_class_name:
        spec["priorityClassName"] = pod.priority_class_name
    return {"metadata": {"labels": dict(marks), "annotations": dict(UNDISTURBED)}, "spec": spec}


def _lost(state: str) -> dict[str, Any]:
    return {
        "key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute",
        "tolerationSeconds": NOT_READY_S,
    }  # fmt: skip


def _env(variable: Any) -> dict[str, Any]:
    if variable.value_from is not None:
        return {"name": variable.name, "valueFrom": variable.value_from}
    return {"name": variable.name, "value": variable.value or ""}


def _mount(volume: Any) -> dict[str, Any]:
    mount = {"name": volume.name, "mountPath": volume.mount_path}
    return {**mount, "readOnly": True} if volume.read_only else mount


def _toleration(toleration: Any) -> dict[str, Any]:
    return toleration.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)


def _spread() -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"ray.io/node-type": "worker"}},
    }

"""What should exist for a job and its plan: RayCluster, ConfigMap and NetworkPolicy; pure.

The cluster's name holds a hash of everything rendered here and of the epoch. Nothing that lives
is ever changed: another rendering has another name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msa_workloads.runspec import RunSpec

from msa_operator.api import values
from msa_operator.api.job import API_VERSION, LongContextJob
from msa_operator.api.problems import JobError, Problem
from msa_operator.planner.hardware import GIB
from msa_operator.planner.request import Plan
from msa_operator.reconcile import names, patch, pods
from msa_operator.reconcile.pods import CONTROL_PORT, EFA, GPU, Settings

RUNSPEC = "runspec.json"
JOB = "job.json"
RECORD = "cluster.json"
CONFIG_BYTES = 1_000_000
"""A ConfigMap holds 1 MiB, its metadata included."""
HUGEPAGE = 2 << 20


@dataclass(frozen=True)
class Owner:
    """The job object that children belong to."""

    name: str
    namespace: str
    uid: str

    def reference(self) -> dict[str, Any]:
        return {
            "apiVersion": API_VERSION, "kind": "LongContextJob", "name": self.name,
            "uid": self.uid, "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip


@dataclass(frozen=True)
class Rendered:
    """Everything of a job's children but the names, which depend on it."""

    owner: Owner
    cluster: dict[str, Any]
    config: dict[str, str]
    ingress: list[dict[str, Any]]
    labels: dict[str, str]

    @property
    def content(self) -> str:
        """Hash of all of it, without epoch and names."""
        return names.content_hash([self.cluster, self.config, self.ingress, self.labels])

    def name(self, epoch: int) -> str:
        """The cluster's name in this epoch."""
        return names.cluster_name(self.owner.name, self.owner.uid, self.content, epoch)

    def templates(self, name: str) -> list[dict[str, Any]]:
        """The pod templates of head and workers under that name."""
        spec = _mounted(self.cluster, name)
        groups = (spec["headGroupSpec"], *spec["workerGroupSpecs"])
        return [group["template"] for group in groups]

    def children(self, name: str) -> list[dict[str, Any]]:
        """The manifests under a name that was decided on: what the cluster mounts comes first."""
        spec = _mounted(self.cluster, name)
        policy = {
            "podSelector": {"matchLabels": {"ray.io/cluster": name}},
            "policyTypes": ["Ingress"],
            "ingress": [_within(name), *self.ingress],
        }
        config = {"immutable": True, "data": self.record()}
        return [
            self._object("v1", "ConfigMap", name, config),
            self._object("networking.k8s.io/v1", "NetworkPolicy", name, {"spec": policy}),
            self._object("ray.io/v1", "RayCluster", name, {"spec": spec}),
        ]

    def record(self) -> dict[str, str]:
        """What :func:`from_record` reads: another cluster for the same run is made from it."""
        made = json.dumps(
            {"cluster": self.cluster, "ingress": self.ingress, "labels": self.labels},
            sort_keys=True, separators=(",", ":"),
        )  # fmt: skip
        return {**self.config, RECORD: made}

    def _object(self, version: str, kind: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        metadata = {
            "name": name, "namespace": self.owner.namespace, "labels": dict(self.labels),
            "ownerReferences": [self.owner.reference()],
        }  # fmt: skip
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def from_record(owner: Owner, data: Mapping[str, str]) -> Rendered:
    """What was rendered when a ConfigMap was made, whatever this version would render.

    Raises :class:`ValueError` when it is not one of ours.
    """
    try:
        record = json.loads(data[RECORD])
        config = {RUNSPEC: data[RUNSPEC], JOB: data[JOB]}
        cluster, ingress, labels = (record[k] for k in ("cluster", "ingress", "labels"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no record of a run: {error!r}") from None
    if not (isinstance(cluster, dict) and isinstance(ingress, list) and isinstance(labels, dict)):
        raise ValueError("no record of a run: cluster, ingress and labels have other types")
    return Rendered(owner, cluster, config, ingress, labels)


def render(
    job: LongContextJob, plan: Plan, run: RunSpec, owner: Owner, settings: Settings,
    node_labels: Mapping[str, str] | None = None,
) -> Rendered:  # fmt: skip
    """The children of a job.

    ``node_labels`` are those of the machine's HardwareProfile; without one, nodes are chosen by
    their instance type. Raises :class:`JobError` for what no cluster could run.
    """
    if run.recovery.owner != "operator":
        raise ValueError(f"the operator restarts attempts, the RunSpec says {run.recovery.owner}")
    size = pods.worker_size(job, plan, settings)
    _check_network(job, plan, size)
    _check_checkpoints(job, run, size, settings)
    marks = names.labels(owner.name, owner.uid)
    labels = {**marks, **_queue(job)}
    template = patch.merge(
        pods.worker(job, size, settings, marks, _node_labels(plan, node_labels)),
        job.spec.pod_patch,
    )
    _check_patched(template, size)
    cluster = {
        "rayVersion": settings.ray_version,
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": _start(0, 0, int(values.quantity(settings.head_memory))),
            "template": pods.head(job, "", settings, marks),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": size.pods,
                "minReplicas": size.pods,
                "maxReplicas": size.pods,
                "rayStartParams": _start(size.ray_cpus, _gpus(template), size.memory),
                "template": template,
            }
        ],
    }
    return Rendered(owner, cluster, _config(job, run), _ingress(settings), labels)


def _config(job: LongContextJob, run: RunSpec) -> dict[str, str]:
    """The RunSpec, and the job as it was accepted: later edits must not reach a running job."""
    exclude: Any = {"status": True, "metadata": True, "spec": set(names.SAFE)}
    accepted = job.model_dump_json(by_alias=True, exclude=exclude)
    config = {RUNSPEC: run.to_json(), JOB: accepted}
    if (size := sum(len(text.encode()) for text in config.values())) > CONFIG_BYTES:
        raise JobError([Problem(
            "spec.attention.pattern", f"the run's description has {size} bytes",
            f"at most {CONFIG_BYTES}: it travels in a ConfigMap", "a larger block",
        )])  # fmt: skip
    return config


def _start(cpus: int, gpus: int, memory: int) -> dict[str, str]:
    """Parameters of ``ray start``; counts are given so that Ray guesses none."""
    return {
        "num-cpus": str(cpus), "num-gpus": str(gpus),
        "object-store-memory": str(pods.object_store(memory)),
    }  # fmt: skip


def _node_labels(plan: Plan, given: Mapping[str, str] | None) -> dict[str, str]:
    if plan.machine.accelerator is None or plan.machine.shared:
        return {}
    return dict(given) if given else {"node.kubernetes.io/instance-type": plan.machine.name}


def _queue(job: LongContextJob) -> dict[str, str]:
    if job.spec.queue is None:
        return {}
    name = job.spec.queue.name
    if len(name) > 63:
        raise JobError([Problem(
            "spec.queue.name", f"{len(name)} characters", "at most 63: it becomes a label's value",
        )])  # fmt: skip
    return {names.QUEUE: name}


def _check_network(job: LongContextJob, plan: Plan, size: pods.WorkerSize) -> None:
    problems = []
    if job.spec.network.efa == "Required" and size.pods > 1 and not size.efa:
        problems.append(Problem(
            "spec.network.efa", f"Required, and {plan.machine.name} has no EFA interface",
            "Auto or Disabled for this machine", "Auto",
        ))  # fmt: skip
    if size.efa and size.memory < pods.EFA_MEMORY_MIN:
        problems.append(Problem(
            "spec.pod.memory", f"{size.memory / GIB:.1f}Gi for a worker with EFA",
            "at least 32Gi: queue pairs of EFA cannot be set up with less", "32Gi",
        ))  # fmt: skip
    if problems:
        raise JobError(problems)


def _check_checkpoints(
    job: LongContextJob, run: RunSpec, size: pods.WorkerSize, settings: Settings
) -> None:
    """Refuse checkpoints that each of several pods would write where no other sees them."""
    uri = run.checkpoint.uri
    if size.pods == 1 or not uri.startswith("file://"):
        return
    folder = f"{uri.removeprefix('file://').rstrip('/')}/"
    mounts = [f"{v.mount_path.rstrip('/')}/" for v in job.spec.pod.volumes]
    if settings.checkpoint_claim and job.spec.checkpoint.uri is None:
        mounts.append(f"{pods.CHECKPOINTS_FOLDER}/")
    if not any(folder.startswith(mount) for mount in mounts):
        raise JobError([Problem(
            "spec.checkpoint.uri", f"{uri} lies in each pod alone, and the plan has {size.pods}",
            "s3:// or a folder on a volume of pod.volumes that all pods share",
        )])  # fmt: skip


def _container(template: Any) -> Any:
    spec = template.get("spec") or {}
    found = spec.get("containers") or [{}]
    return next((c for c in found if c.get("name") == "ray-worker"), {})


def _gpus(template: Any) -> int:
    return int(_limits(template).get(GPU, 0))


def _limits(template: Any) -> dict[str, Any]:
    return (_container(template).get("resources") or {}).get("limits") or {}


def _check_patched(template: Any, size: pods.WorkerSize) -> None:
    """Refuse a podPatch that takes away what the plan or recovery stands on."""
    at = "spec.podPatch.spec"
    problems = []
    spec = template.get("spec") or {}
    if spec.get("restartPolicy") != "Never":
        problems.append(Problem(
            f"{at}.restartPolicy", f"found {spec.get('restartPolicy')}",
            "Never: the operator restarts attempts, a pod never restarts in place", "Never",
        ))  # fmt: skip
    first = (spec.get("containers") or [{}])[0].get("name")
    if first != "ray-worker":
        problems.append(Problem(
            f"{at}.containers", f"found {first} first", "ray-worker: Ray starts in the first"
        ))  # fmt: skip
    resources = _container(template).get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name, planned in ((GPU, size.gpus), (EFA, size.efa)):
        for part, found in (("limits", limits), ("requests", requests)):
            if str(found.get(name, 0)) != str(planned):
                problems.append(Problem(
                    f"{at}.containers[ray-worker].resources.{part}.{name}",
                    f"found {found.get(name, 0)}", f"{planned}, as planned", str(planned),
                ))  # fmt: skip
    problems += _hugepages(f"{at}.containers[ray-worker].resources", limits, requests)
    if problems:
        raise JobError(problems)


def _hugepages(at: str, limits: Any, requests: Any) -> list[Problem]:
    """What the API server would say of huge pages only when pods are made."""
    name = "hugepages-2Mi"
    if name not in limits and name not in requests:
        return []
    problems = []
    limit, requested = limits.get(name), requests.get(name, limits.get(name))
    if limit is None or str(limit) != str(requested):
        problems.append(Problem(
            f"{at}.requests.{name}", f"found {requested}",
            f"must be equal to {name} limit of {limit}", str(limit or requested),
        ))  # fmt: skip
    for part, found in (("limits", limit), ("requests", requested)):
        size = values.quantity(str(found)) if found is not None else 0
        if size % HUGEPAGE:
            pages = max(1, math.ceil(size / HUGEPAGE))
            problems.append(Problem(
                f"{at}.{part}.{name}", f"found {found}",
                "must be multiple of 2Mi", f"{pages * 2}Mi",
            ))  # fmt: skip
    if not {"cpu", "memory"} & {*limits, *requests}:
        problems.append(Problem(at, "huge pages alone", "HugePages require cpu or memory"))
    return problems


def _mounted(cluster: dict[str, Any], name: str) -> dict[str, Any]:
    """The cluster with the ConfigMap's name in the head's volume."""
    volume = [{"name": "runspec", "configMap": {"name": name}}]
    return patch.merge(
        cluster, {"headGroupSpec": {"template": {"spec": {"volumes": volume}}}}
    )  # fmt: skip


def _within(name: str) -> dict[str, Any]:
    """Pods of one cluster reach each other on every port: Ray and NCCL choose theirs."""
    return {"from": [{"podSelector": {"matchLabels": {"ray.io/cluster": name}}}]}


def _ingress(settings: Settings) -> list[dict[str, Any]]:
    """From outside: the operator to dashboard and control port, a scraper to the metrics."""
    operator = {
        "namespaceSelector": _namespace(settings.namespace),
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": names.OPERATOR}},
    }
    rules = [{"from": [operator], "ports": [_port(8265), _port(CONTROL_PORT)]}]
    if settings.metrics_namespace:
        scraper = {"namespaceSelector": _namespace(settings.metrics_namespace)}
        # Ray's metrics, and the run's; what else the control port offers asks for the token.
        rules.append({"from": [scraper], "ports": [_port(8080), _port(CONTROL_PORT)]})
    return rules


def _namespace(name: str) -> dict[str, Any]:
    return {"matchLabels": {"kubernetes.io/metadata.name": name}}


def _port(number: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": number}

"""What is around a run in a cluster: storage, nodes and network policies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from msa_operator.doctor.finding import Finding, failed, ok, unknown, warning
from msa_operator.doctor.target import Installed, Target, or_unknown
from msa_operator.network.needs import closed, installation, needed, operator_pod
from msa_operator.network.policies import Address, Pod
from msa_operator.planner.hardware import CATALOGUE
from msa_operator.reconcile import names
from msa_operator.reconcile.pods import EFA, GPU
from msa_operator.runtime.kube import NODES, POLICIES, KubeError, Resource

CLAIMS = Resource("", "v1", "persistentvolumeclaims")


def storage(target: Target, installed: Installed) -> list[Finding]:
    """Where checkpoints of jobs go that name no folder."""
    check = "default storage"
    if installed.settings is None:
        return [
            unknown(
                check,
                "the operator's settings cannot be read",
                "name a folder in spec.checkpoint.uri, or ask an administrator",
            )
        ]
    chosen = installed.settings.get("checkpoint") or {}
    if uri := chosen.get("uri"):
        return [ok(check, f"{uri}/{target.namespace}/<job>-<id>")]
    if not (claim := chosen.get("claim")):
        return [
            warning(
                check,
                "none is installed",
                "every job names a folder in spec.checkpoint.uri, or the chart's "
                "settings.checkpoint gives one",
            )
        ]
    return [or_unknown(check, lambda: _claim(target, claim), "persistentvolumeclaims")]


def _claim(target: Target, name: str) -> Finding:
    check, where = "default storage", f"claim {name} in namespace {target.namespace}"
    found = target.kube.find(CLAIMS, target.namespace, name)
    if found is None:
        return failed(check, f"there is no {where}", "make it, ReadWriteMany, or use a bucket")
    if "ReadWriteMany" not in found["spec"].get("accessModes", ()):
        return failed(
            check,
            f"{where} is {', '.join(found['spec'].get('accessModes', ()))}",
            "ReadWriteMany: pods on several nodes write it",
        )
    phase = found.get("status", {}).get("phase", "Pending")
    if phase == "Lost":
        return failed(check, f"{where} has lost its volume", "restore the volume")
    # Many storage classes bind when the first pod comes.
    return ok(check, f"{where}, {phase}")


def nodes(target: Target) -> list[Finding]:
    """Nodes that are ready, what accelerators they offer, and plugins that are missing."""
    found: list[Finding] = []

    def look() -> Finding:
        every = list(target.kube.list(NODES))
        found.extend(_plugins(every))
        ready = [n for n in every if _is_ready(n)]
        gpus = sum(int(n["status"].get("allocatable", {}).get(GPU, 0)) for n in ready)
        text = f"{len(ready)} of {len(every)} ready, {gpus} GPUs"
        if not ready:
            return failed("nodes", text, "kubectl describe nodes")
        if not gpus:
            return ok("nodes", f"{text} (jobs may bring their own, or use hardware.device: cpu)")
        return ok("nodes", text)

    return [or_unknown("nodes", look, "nodes"), *found]


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _plugins(every: Iterable[dict[str, Any]]) -> Iterable[Finding]:
    """Nodes whose machine type has devices that they do not offer."""
    lacking: dict[str, list[str]] = {GPU: [], EFA: []}
    for node in filter(_is_ready, every):
        labels = node["metadata"].get("labels", {})
        machine = CATALOGUE.get(labels.get("node.kubernetes.io/instance-type", ""))
        offered = node["status"].get("allocatable", {})
        for device, count in (
            (GPU, machine.count if machine else 0),
            (EFA, machine.efa if machine else 0),
        ):
            if count and not int(offered.get(device, 0)):
                lacking[device].append(node["metadata"]["name"])
    if lacking[GPU]:
        yield failed(
            "GPU plugin",
            f"no {GPU} on {', '.join(lacking[GPU][:3])}",
            "install NVIDIA's device plugin or GPU operator, and see its pods there",
        )
    if lacking[EFA]:
        yield warning(
            "EFA plugin",
            f"no {EFA} on {', '.join(lacking[EFA][:3])}",
            "install the aws-efa-k8s-device-plugin, and nodes with EFA interfaces: "
            "without it runs over several nodes use slow TCP",
        )


def network(target: Target, installed: Installed) -> list[Finding]:
    """What the policies that exist would close for a job here; enforcement nobody can tell."""
    home, settings = installed.namespace, installed.settings or {}

    def look() -> Finding:
        policies = list(target.kube.list(POLICIES, target.namespace))
        if home != target.namespace:
            policies += _visible(target, home)
        scraper = None
        if monitoring := settings.get("metricsNamespace"):
            scraper = Pod("Prometheus", monitoring)
        marks = names.labels("job", "uid")
        operator = operator_pod(home)
        if installed.labels is not None:
            operator = replace(operator, labels=installed.labels)
        ends = installation("job", target.namespace, marks, 2, operator, scraper)
        # A job opens its own pods to these; what closes them all the same is somebody else's.
        own = {
            "metadata": {"name": "job", "namespace": target.namespace},
            "spec": {"podSelector": {"matchLabels": {"ray.io/cluster": "job"}}, "ingress": [{}]},
        }
        blocked = closed(needed(ends, Address("192.0.2.1")), [*policies, own])
        wanted = [c for c in blocked if not isinstance(c.connection.target, Address)]
        if wanted:
            first = wanted[0]
            return failed(
                "network policies",
                f"{first.connection.why}: port {first.port} is closed; {first.verdict.why}",
                "allow it there: docs/install.md has every connection that runs need",
            )
        return ok(
            "network policies", f"{len(policies)} here let everything through that runs need"
        )

    return [
        or_unknown("network policies", look, "networkpolicies"),
        unknown(
            "policy enforcement",
            "no API tells whether the network plugin enforces policies",
            "ask whoever runs the cluster; on EKS it is a setting of the VPC CNI",
        ),
    ]


def _visible(target: Target, namespace: str) -> list[dict[str, Any]]:
    try:
        return list(target.kube.list(POLICIES, namespace))
    except KubeError as error:
        if error.code == 403:
            return []
        raise

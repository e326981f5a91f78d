"""The programs that a cluster needs: our operator, and KubeRay."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from msa_operator import yaml12
from msa_operator.doctor.finding import Finding, failed, ok, warning
from msa_operator.doctor.target import DEFINITIONS, Installed, Target, deployments, or_unknown
from msa_operator.reconcile import names
from msa_operator.runtime.kube import CONFIGMAPS, PODS, KubeError

SELECTOR = f"app.kubernetes.io/name={names.OPERATOR}"
KUBERAY = "install KubeRay 1.5.1 or newer with its custom resources"


def operator(target: Target) -> tuple[Installed, Finding]:
    """The operator as it is installed, whether it runs, and whether its version is ours."""
    installed = Installed()

    def look() -> Finding:
        nonlocal installed
        there = list(deployments(target, SELECTOR))
        if not there:
            chart = "charts/flash-msa-operator"
            return failed(
                "operator",
                "no Deployment of it is there",
                f"helm install {names.OPERATOR} {chart}",
            )
        for deployment in there:
            installed = _installed(target, deployment)
            watched = (installed.settings or {}).get("namespaces") or [target.namespace]
            if target.namespace in watched:
                return _running(target, deployment)
        return failed(
            "operator", f"none watches namespace {target.namespace}",
            "add it to settings.namespaces of the chart, or give another --namespace",
        )  # fmt: skip

    found = or_unknown("operator", look, "deployments")
    return installed, found


def _installed(target: Target, deployment: dict[str, Any]) -> Installed:
    namespace = deployment["metadata"]["namespace"]
    labels = deployment["spec"]["template"]["metadata"].get("labels", {})
    return Installed(namespace, labels, _settings(target, namespace))


def _running(target: Target, deployment: dict[str, Any]) -> Finding:
    meta = deployment["metadata"]
    where = f"{meta['namespace']}/{meta['name']}"
    version = meta.get("labels", {}).get("app.kubernetes.io/version", "unknown")
    mine = metadata.version("flash-msa-operator")
    if not deployment["spec"].get("replicas"):
        return failed(
            "operator",
            f"{where} is scaled to 0: nothing watches jobs",
            f"kubectl scale deployment {meta['name']} -n {meta['namespace']} --replicas=1",
        )
    if not deployment.get("status", {}).get("readyReplicas"):
        why = _waiting(target, meta["namespace"])
        return failed(
            "operator",
            f"{where} {version} is not ready{why}",
            f"kubectl describe pods -n {meta['namespace']} -l {SELECTOR}",
        )
    if version != mine:
        return warning(
            "operator",
            f"{where} is {version}, this command is {mine}",
            "use one version of both; one minor version apart works",
        )
    return ok("operator", f"{where} {version}, ready")


def _waiting(target: Target, namespace: str) -> str:
    """Why its containers do not run, in the kubelet's words."""
    try:
        pods = list(target.kube.list(PODS, namespace, SELECTOR))
    except KubeError:
        return ""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses", ()):
            if waiting := container.get("state", {}).get("waiting"):
                return f": {waiting.get('reason', '')} {waiting.get('message', '')}".rstrip()
    return ": it has no pod" if not pods else ""


def _settings(target: Target, namespace: str) -> dict[str, Any] | None:
    try:
        found = target.kube.find(CONFIGMAPS, namespace, names.OPERATOR)
        value = yaml12.load(found["data"]["settings.yaml"]).value if found else None
    except (KubeError, KeyError, yaml12.YamlError):
        return None
    return value if isinstance(value, dict) else None


def kuberay(target: Target) -> list[Finding]:
    """KubeRay's definition, whether it has the token, and whether its controller runs."""

    def definition() -> Finding:
        there = target.kube.find(DEFINITIONS, "", "rayclusters.ray.io")
        if there is None:
            return failed("KubeRay", "this cluster does not know RayCluster", KUBERAY)
        spec = next(
            (
                v["schema"]["openAPIV3Schema"]["properties"]["spec"]
                for v in there["spec"]["versions"]
                if v["name"] == "v1" and v["served"]
            ),
            {},
        )
        if "authOptions" not in spec.get("properties", {}):
            return failed(
                "KubeRay", "older than 1.5.1: it cannot guard dashboards with a token", KUBERAY
            )
        return ok("KubeRay", "1.5.1 or newer, by its custom resources")

    def controller() -> Finding:
        labels = "app.kubernetes.io/name in (kuberay,kuberay-operator)"
        found = list(deployments(target, labels))
        if not found:
            return warning(
                "KubeRay operator",
                "no Deployment with its labels is there",
                "if KubeRay runs under other labels, all is well; otherwise install it",
            )
        image = found[0]["spec"]["template"]["spec"]["containers"][0]["image"]
        if not found[0].get("status", {}).get("readyReplicas"):
            meta = found[0]["metadata"]
            return failed(
                "KubeRay operator",
                f"{image} is not ready",
                f"kubectl describe deployment {meta['name']} -n {meta['namespace']}",
            )
        return ok("KubeRay operator", f"{image}, ready")

    return [
        or_unknown("KubeRay", definition, "custom resource definitions"),
        or_unknown("KubeRay operator", controller, "deployments"),
    ]

"""The real KubeRay operator: its own module's manifests, in an image built here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .apiserver import ApiServer
from .build import tool, version
from .images import KUBERAY
from .process import run

NAMESPACE = "kuberay-system"


def install_definitions(server: ApiServer) -> None:
    """Installs the CRDs: four megabytes, on which the API server works for ten seconds."""
    # Server-side: their descriptions exceed what client-side apply can store.
    server.apply(_config() / "crd" / "bases", timeout_s=180)


def install(server: ApiServer, timeout_s: float = 90) -> None:
    """Installs the operator, after its CRDs; returns once it is available."""
    server.apply(f"{{apiVersion: v1, kind: Namespace, metadata: {{name: {NAMESPACE}}}}}")
    server.apply(manifests(_config()))
    wait = ["wait", "--for=condition=Available", f"--timeout={timeout_s:.0f}s"]
    target = ["--namespace", NAMESPACE, "deployment/kuberay-operator"]
    server.kubectl(*wait, *target, timeout_s=timeout_s + 10)


def _config() -> Path:
    return tool("kuberay-operator").parent / "config"


def manifests(config: Path) -> str:
    """The operator's objects as upstream has them, in our namespace and with our image."""
    objects: list[dict[str, Any]] = []
    for folder in ("rbac", "manager"):
        text = run([str(tool("kubectl")), "kustomize", str(config / folder)])
        objects += [found for found in yaml.safe_load_all(text) if found]
    for found in objects:
        if not found["kind"].startswith("Cluster"):
            found["metadata"]["namespace"] = NAMESPACE
        for subject in found.get("subjects", ()):
            subject["namespace"] = NAMESPACE
        if found["kind"] == "Deployment":
            _fit(found["spec"]["template"]["spec"])
    return yaml.safe_dump_all(objects)


def _fit(pod: dict[str, Any]) -> None:
    pod["nodeSelector"] = {"kubernetes.io/hostname": "node-1"}
    (container,) = pod["containers"]
    container["image"] = KUBERAY
    container["command"] = ["/app"]
    # A tenth of a core takes half a minute to start; what it waits for here is ours to choose.
    container["resources"] = {
        "requests": {"cpu": "50m", "memory": "64Mi"},
        "limits": {"memory": "512Mi"},
    }
    container["readinessProbe"] |= {"initialDelaySeconds": 1, "periodSeconds": 1}


def describe() -> str:
    return f"KubeRay {version('kuberay')}"

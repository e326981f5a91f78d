"""The operator's own account, with exactly the rights that the chart grants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msa_operator import rbac

from ..apiserver import ApiServer

NAMESPACE = "flash-msa-system"
ACCOUNT = "flash-msa-operator"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/flash-msa-operator"
RBAC = "rbac.authorization.k8s.io"


def kubeconfig(server: ApiServer, url: str, path: Path) -> Path:
    """Makes the account and its roles, and writes a kubeconfig by which it reaches ``url``."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    server.apply(json.dumps(namespace))
    items = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _named(NAMESPACE)},
        *_granted("ClusterRole", [*rbac.rules("jobs"), *rbac.rules("cluster")]),
        *_granted("Role", rbac.rules("own")),
    ]
    server.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    token = server.kubectl("create", "token", ACCOUNT, f"--namespace={NAMESPACE}").strip()
    authority = (server.authority.folder / "ca.crt").read_text()
    path.touch(mode=0o600)
    path.write_text(json.dumps(_config(url, token, authority)))
    return path


def _named(namespace: str = "") -> dict[str, str]:
    return {"name": ACCOUNT, **({"namespace": namespace} if namespace else {})}


def _granted(kind: str, rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A role and its binding to the account."""
    metadata = _named("" if kind == "ClusterRole" else NAMESPACE)
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    return [
        {"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{RBAC}/v1", "kind": f"{kind}Binding", "metadata": metadata,
            "roleRef": {"apiGroup": RBAC, "kind": kind, "name": ACCOUNT}, "subjects": [subject],
        },
    ]  # fmt: skip


def _config(url: str, token: str, authority: str) -> dict[str, Any]:
    import base64

    ca = base64.b64encode(authority.encode()).decode()
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "operator",
        "clusters": [{"name": "test",
                      "cluster": {"server": url, "certificate-authority-data": ca}}],
        "users": [{"name": "operator", "user": {"token": token}}],
        "contexts": [{"name": "operator", "context": {"cluster": "test", "user": "operator"}}],
    }  # fmt: skip

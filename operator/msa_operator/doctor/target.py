"""What is looked at, and what happens when a user may not look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msa_operator.doctor.finding import Finding, failed, unknown
from msa_operator.runtime.kube import Kube, KubeError, Resource

NAMESPACE = "flash-msa-system"
"""Where the operator is looked for by a user who may not list every namespace."""
DEFINITIONS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
DEPLOYMENTS = Resource("apps", "v1", "deployments")


@dataclass(frozen=True)
class Target:
    kube: Kube
    namespace: str
    """Where the user's jobs are."""
    server: str = ""
    """The API server's address, for people."""


@dataclass(frozen=True)
class Installed:
    """The operator that was found: where, how its pods are labelled, with which settings."""

    namespace: str = NAMESPACE
    labels: Mapping[str, str] | None = None
    settings: Mapping[str, Any] | None = None
    """None when they cannot be read."""


def deployments(target: Target, labels: str) -> Iterable[dict[str, Any]]:
    """Those of the whole cluster, or of the usual namespace for a user who may see no more."""
    try:
        yield from target.kube.list(DEPLOYMENTS, "", labels)
    except KubeError as error:
        if error.code != 403:
            raise
        yield from target.kube.list(DEPLOYMENTS, NAMESPACE, labels)


def or_unknown(check: str, look: Callable[[], Finding], resources: str) -> Finding:
    """What ``look`` finds, or that it may not look."""
    try:
        return look()
    except KubeError as error:
        if error.code == 403:
            return unknown(
                check,
                f"you may not read {resources}",
                "ask an administrator to run msa doctor --cluster",
            )
        return failed(
            check, f"could not be read: {error}", "try again; see the API server's health"
        )

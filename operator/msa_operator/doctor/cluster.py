"""A cluster: can this user train there? Only reads, and asks what the user may do.

Every function looks at one thing and gives findings for it. What the user may not read is
``unknown``, with whom to ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msa_operator import crd
from msa_operator.doctor.finding import Finding, failed, ok, warning
from msa_operator.doctor.software import kuberay, operator
from msa_operator.doctor.surroundings import network, nodes, storage
from msa_operator.doctor.target import DEFINITIONS, Target, or_unknown
from msa_operator.runtime.kube import KubeError

KUBERNETES = (1, 30)
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
UPGRADE = "helm upgrade --install flash-msa-crds charts/flash-msa-crds"

RIGHTS = (
    (
        ("create", "get", "list", "watch", "patch", "delete"),
        "flashmsa.dev",
        "longcontextjobs",
        "to submit, see, suspend and delete jobs",
    ),
    (("get", "list"), "", "pods", "for msa status"),
    (("get",), "", "pods/log", "for msa logs"),
    (("get", "list"), "", "events", "to see what happened"),
    (("list",), "ray.io", "rayclusters", "for msa delete, which waits for the nodes"),
)
"""What the ``msa`` command does in a job's namespace as its user."""


def findings(target: Target) -> list[Finding]:
    """Everything about the cluster; without an API server, only that."""
    first = api_server(target)
    if first.state == "failed":
        return [first]
    installed, found = operator(target)
    return [
        first, *definitions(target), found, *kuberay(target), *rights(target),
        *storage(target, installed), *nodes(target), *network(target, installed),
    ]  # fmt: skip


def api_server(target: Target) -> Finding:
    check = "API server"
    try:
        version = target.kube.call("GET", "/version", "version")
    except KubeError as error:
        if error.code in (401, 403):
            return failed(
                check,
                f"{target.server} does not know you: {error.message}",
                "log in again, or choose another --context",
            )
        return failed(
            check,
            f"{target.server} does not answer: {error.message}",
            "look at kubectl config view, your network, and whether the cluster is up",
        )
    number = (int(version["major"]), int(version["minor"].rstrip("+")))
    text = f"{target.server}, Kubernetes {version['gitVersion']}"
    if number < KUBERNETES:
        return failed(check, text, f"Kubernetes {'.'.join(map(str, KUBERNETES))} or newer")
    return ok(check, text)


def definitions(target: Target) -> list[Finding]:
    """The custom resources: known, and the ones that this command was built with."""
    found = []
    for wanted in crd.definitions().values():
        kind = wanted["spec"]["names"]["kind"]
        found.append(
            or_unknown(
                kind, lambda w=wanted: _definition(target, w), "custom resource definitions"
            )
        )
    return found


def _definition(target: Target, wanted: dict[str, Any]) -> Finding:
    name, kind = wanted["metadata"]["name"], wanted["spec"]["names"]["kind"]
    there = target.kube.find(DEFINITIONS, "", name)
    if there is None:
        return failed(kind, "this cluster does not know it", UPGRADE)
    (mine,) = (v["schema"]["openAPIV3Schema"] for v in wanted["spec"]["versions"])
    version = wanted["spec"]["versions"][0]["name"]
    theirs = next(
        (
            v["schema"]["openAPIV3Schema"]
            for v in there["spec"]["versions"]
            if v["name"] == version and v["served"]
        ),
        None,
    )
    if theirs is None:
        return failed(kind, f"the cluster does not serve {version}", UPGRADE)
    known, served = set(_paths(mine)), set(_paths(theirs))
    if missing := known - served:
        return failed(kind, f"older than this command: lacks {_some(missing)}", UPGRADE)
    if more := served - known:
        return warning(
            kind, f"newer than this command: also has {_some(more)}", "upgrade the msa command"
        )
    if mine != theirs:
        return warning(
            kind,
            "same fields with other rules or texts",
            "upgrade the custom resources and the msa command to one version",
        )
    return ok(kind, f"{version}, current")


def _paths(node: dict[str, Any], path: str = "") -> Iterable[str]:
    for name, inner in node.get("properties", {}).items():
        at = f"{path}.{name}" if path else name
        yield at
        yield from _paths(inner, at)
        yield from _paths(inner.get("items") or {}, f"{at}[]")


def _some(paths: set[str]) -> str:
    shown = sorted(paths)[:3]
    return ", ".join(shown) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def rights(target: Target) -> list[Finding]:
    """What the user may do in the namespace of the jobs, by the API server's own word."""
    where = f"namespace {target.namespace}"
    found = []
    try:
        for verbs, group, resource, why in RIGHTS:
            missing = [v for v in verbs if not _allowed(target, v, group, resource)]
            if missing:
                full = f"{resource}.{group}" if group else resource
                found.append(failed(
                    "your rights", f"you may not {', '.join(missing)} {full} in {where} ({why})",
                    f"ask for the cluster role edit in {where}; the operator's chart adds jobs to "
                    "it (rbac.aggregate)",
                ))  # fmt: skip
    except KubeError as error:
        again = "try again; see the API server's health"
        return [failed("your rights", f"could not be asked for: {error}", again)]
    return found or [ok("your rights", f"all that msa needs in {where}")]


def _allowed(target: Target, verb: str, group: str, resource: str) -> bool:
    plain, _, sub = resource.partition("/")
    wanted = {
        "namespace": target.namespace, "verb": verb, "group": group, "resource": plain,
        "subresource": sub,
    }  # fmt: skip
    review = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": wanted},
    }  # fmt: skip
    answer = target.kube.call("POST", REVIEWS, "selfsubjectaccessreviews", body=review)
    return bool(answer["status"].get("allowed"))

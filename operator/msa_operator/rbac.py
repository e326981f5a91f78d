"""What the operator may do on an API server, and why: the chart's roles and the table in the
documentation are generated from here, and nothing else grants anything.

A verb that no line of code uses does not belong here. The end-to-end tests run the operator with
exactly these rights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Scope = Literal["jobs", "cluster", "own"]
"""Where a rule holds: the namespaces of the jobs, the cluster, or the operator's own namespace."""


@dataclass(frozen=True)
class Rule:
    scope: Scope
    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    why: str
    names: tuple[str, ...] = ()
    """Only objects of these names."""

    def manifest(self) -> dict[str, Any]:
        """The rule as a Role holds it."""
        plain = {"apiGroups": [self.group], "resources": list(self.resources)}
        if self.names:
            plain["resourceNames"] = list(self.names)
        return {**plain, "verbs": list(self.verbs)}


RULES: tuple[Rule, ...] = (
    Rule("jobs", "flashmsa.dev", ("longcontextjobs",),
         ("get", "list", "watch", "patch", "delete"),
         "to see jobs, to set and remove the finalizer, to delete a job whose ttl has passed"),
    Rule("jobs", "flashmsa.dev", ("longcontextjobs/status",), ("patch",),
         "what users read, and what the operator goes on from"),
    Rule("jobs", "flashmsa.dev", ("longcontextjobs/finalizers",), ("update",),
         "children that block their owner's deletion, where that admission check is on"),
    Rule("jobs", "ray.io", ("rayclusters",),
         ("get", "list", "watch", "create", "patch", "delete"),
         "a job's cluster; patch only sets its workers to none"),
    Rule("jobs", "", ("configmaps",), ("get", "list", "create", "delete"),
         "the run's description, which the head mounts"),
    Rule("jobs", "networking.k8s.io", ("networkpolicies",), ("get", "list", "create", "delete"),
         "closes dashboard and control port to all but the operator"),
    Rule("jobs", "", ("pods",), ("list", "watch", "delete"),
         "readiness and losses; delete for pods whose node is gone"),
    Rule("jobs", "", ("podtemplates",), ("create",),
         "a dry run of the pods of a plan; nothing is stored"),
    Rule("jobs", "", ("secrets",), ("get",),
         "the token with which KubeRay guards a head; read by name, never listed"),
    Rule("jobs", "", ("events",), ("create",), "what happened, for kubectl describe"),
    Rule("cluster", "flashmsa.dev", ("hardwareprofiles",), ("list",),
         "machines that administrators describe"),
    Rule("cluster", "", ("nodes",), ("get", "list"),
         "whether a node is gone; the memory of CPU workers"),
    Rule("own", "coordination.k8s.io", ("leases",), ("create",), "the first operator makes it"),
    Rule("own", "coordination.k8s.io", ("leases",), ("get", "update"),
         "one operator acts at a time", ("flash-msa-operator",)),
)  # fmt: skip


def rules(scope: Scope) -> list[dict[str, Any]]:
    """The rules of one scope, as a Role holds them."""
    return [rule.manifest() for rule in RULES if rule.scope == scope]


def table() -> str:
    """The table in the documentation."""
    where = {
        "jobs": "namespaces of jobs", "cluster": "cluster", "own": "the operator's namespace",
    }  # fmt: skip
    rows = ["| resource | verbs | where | why |", "| --- | --- | --- | --- |"]
    for rule in RULES:
        what = ", ".join(f"`{_full(resource, rule.group)}`" for resource in rule.resources)
        names = f" ({', '.join(rule.names)})" if rule.names else ""
        rows.append(
            f"| {what}{names} | {', '.join(rule.verbs)} | {where[rule.scope]} | {rule.why} |"
        )
    return "\n".join(rows)


def _full(resource: str, group: str) -> str:
    """As kubectl has it: ``longcontextjobs.flashmsa.dev/status``."""
    plain, slash, sub = resource.partition("/")
    return f"{plain}{f'.{group}' if group else ''}{slash}{sub}"

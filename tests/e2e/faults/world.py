"""One namespace of a test: jobs in it, the operator beside it, and what must hold at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..apiserver import ApiServer
from ..process import wait_for
from .jobs import JOBS, job
from .simulator import CLUSTERS, Simulator

CHILDREN = {
    "RayCluster": CLUSTERS.replace("/rayclusters", "/namespaces/{}/rayclusters"),
    "Pod": "/api/v1/namespaces/{}/pods",
    "Secret": "/api/v1/namespaces/{}/secrets",
}
"""What holds machines or keys: nothing of it may outlive the run."""
RECORDS = (
    "/api/v1/namespaces/{}/configmaps?labelSelector=flashmsa.dev/job",
    "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
)
"""Stay with the job, as the record of what ran, and go with it."""


@dataclass
class World:
    server: ApiServer
    simulator: Simulator
    namespace: str

    def __post_init__(self) -> None:
        namespace = f"{{apiVersion: v1, kind: Namespace, metadata: {{name: {self.namespace}}}}}"
        self.server.apply(namespace)

    def create(self, name: str, changes: dict[str, Any] | None = None) -> None:
        body = json.dumps(job(name, self.namespace, changes))
        self.server.kubectl("create", "-f", "-", stdin=body)

    def patch(self, name: str, spec: dict[str, Any]) -> None:
        words = ["patch", "longcontextjob", name, f"--namespace={self.namespace}"]
        self.server.kubectl(*words, "--type=merge", "--patch", json.dumps({"spec": spec}))

    def delete(self, name: str) -> None:
        words = ["delete", "longcontextjob", name, f"--namespace={self.namespace}"]
        self.server.kubectl(*words, "--wait=false")

    def job(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.server.get(f"{JOBS.format(self.namespace)}/{name}"))
        except OSError:
            return None

    def status(self, name: str) -> dict[str, Any]:
        return (self.job(name) or {}).get("status") or {}

    def phase(self, name: str) -> str:
        return self.status(name).get("phase") or ""

    def cluster(self, name: str) -> str:
        """The cluster that the job's status names."""
        return (self.status(name).get("ray") or {}).get("cluster") or ""

    def until(
        self, name: str, phase: str, timeout_s: float = 60, does: Callable[[], Any] | None = None
    ) -> dict[str, Any]:
        """The status once the job is in that phase; `does` is called between the looks."""

        def there() -> bool:
            if does is not None:
                does()
            return self.phase(name) == phase

        try:
            wait_for(there, f"{name} was {phase}", timeout_s)
        except TimeoutError as late:
            raise TimeoutError(
                f"{late}; it is {json.dumps(self.status(name), indent=1)}"
            ) from None
        return self.status(name)

    def uid(self, name: str) -> str:
        found = self.job(name)
        assert found is not None
        return found["metadata"]["uid"]

    def held(self) -> dict[str, list[str]]:
        """What holds machines or keys now."""
        return {kind: names for kind in CHILDREN if (names := self.children(kind))}

    def records(self) -> list[str]:
        """What stays until a job is deleted."""
        found = []
        for path in RECORDS:
            items = json.loads(self.server.get(path.format(self.namespace)))["items"]
            found += [item["metadata"]["name"] for item in items]
        return found

    def children(self, kind: str) -> list[str]:
        items = json.loads(self.server.get(CHILDREN[kind].format(self.namespace)))["items"]
        return [item["metadata"]["name"] for item in items]

    def clean(self, timeout_s: float = 60) -> None:
        """Returns once no run holds anything; nothing that must never be was ever so."""
        wait_for(lambda: not self.held(), f"nothing was left in {self.namespace}", timeout_s)
        assert self.simulator.violations == []

    def submissions(self, name: str) -> list[tuple[str, int]]:
        """Every submission of the job that was started, with its first step."""
        uid, started = self.uid(name), self.simulator.heads.started
        return [(submission, step) for owner, submission, step in started if owner == uid]

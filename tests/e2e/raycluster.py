"""A small Ray cluster on the test cluster, made by KubeRay, and its Jobs API."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from . import images
from .cluster import Cluster
from .process import wait_for

DASHBOARD = 8265
READY_TIMEOUT_S = 150.0
"""Idle cores need 30 s; Python's imports are slow beside a busy neighbour."""
OBJECT_STORE_BYTES = 80_000_000
"""Just above the least that Ray accepts: it is memory of this machine."""


SHARED = "/shared"


def manifest(name: str, namespace: str, workers: int, claim: str = "") -> dict[str, Any]:
    """One head without CPUs and workers of one CPU, spread over the nodes where that is possible.

    claim: a PersistentVolumeClaim that every pod mounts at SHARED. What the runtime needs is in
    the images; the rest is what any cluster would be given.
    """
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "rayVersion": version("ray"),
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                "rayStartParams": _start(0),
                "template": _pod("ray-head", "4Gi", claim),
            },
            "workerGroupSpecs": [
                {
                    "groupName": "workers",
                    "replicas": workers,
                    "minReplicas": workers,
                    "maxReplicas": workers,
                    "rayStartParams": _start(1),
                    "template": _pod("ray-worker", "2Gi", claim),
                }
            ],
        },
    }


def _start(cpus: int) -> dict[str, str]:
    return {"num-cpus": str(cpus), "object-store-memory": str(OBJECT_STORE_BYTES)}


def _pod(container: str, memory: str, claim: str) -> dict[str, Any]:
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"ray.io/node-type": "worker"}},
    }
    resources = {"requests": {"cpu": "200m", "memory": "512Mi"}, "limits": {"memory": memory}}
    volumes = [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
    return {
        "spec": {
            "volumes": volumes,
            "restartPolicy": "Never",
            # Nothing here has to be saved, and `ray start` waits out whatever it is given.
            "terminationGracePeriodSeconds": 3,
            "topologySpreadConstraints": [spread],
            "securityContext": {"runAsNonRoot": True},
            "containers": [
                {
                    "name": container,
                    "image": images.WORKER,
                    "resources": resources,
                    "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                    "volumeMounts": [
                        {"name": volume["name"], "mountPath": SHARED} for volume in volumes
                    ],
                }
            ],
        }
    }


@dataclass
class RayCluster:
    """A RayCluster that is ready. Jobs are submitted through a forwarded port of its head."""

    cluster: Cluster
    name: str
    namespace: str
    url: str
    token: str

    @classmethod
    def create(
        cls, cluster: Cluster, name: str, namespace: str, workers: int, claim: str = ""
    ) -> RayCluster:
        """Creates it; returns once every worker is ready and the dashboard answers."""
        cluster.server.apply(json.dumps(manifest(name, namespace, workers, claim)))
        path = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{name}"
        status: dict[str, Any] = {}

        def ready() -> bool:
            status.update(json.loads(cluster.server.get(path)).get("status", {}))
            return status.get("state") == "ready" and status.get("readyWorkerReplicas") == workers

        wait_for(ready, f"the Ray cluster {name} was ready", READY_TIMEOUT_S)
        secret = json.loads(cluster.server.get(f"/api/v1/namespaces/{namespace}/secrets/{name}"))
        token = base64.b64decode(secret["data"]["auth_token"]).decode()
        port = cluster.forward(status["head"]["podIP"], DASHBOARD)
        return cls(cluster, name, namespace, f"http://127.0.0.1:{port}", token)

    def pods(self) -> list[dict[str, Any]]:
        selector = f"?labelSelector=ray.io/cluster={self.name}"
        return self.cluster.list(f"/api/v1/namespaces/{self.namespace}/pods{selector}")

    def submit(self, job: str, entrypoint: str, environment: dict[str, str] | None = None) -> None:
        """Submits a job under that submission id, as `ray job submit` does."""
        body = {
            "entrypoint": entrypoint,
            "submission_id": job,
            "runtime_env": {"env_vars": environment or {}},
        }
        self.request("/api/jobs/", body)

    def wait(self, job: str, timeout_s: float) -> str:
        """The final status of the job, by Ray's name for it."""
        status = ""

        def ended() -> bool:
            nonlocal status
            status = self.request(f"/api/jobs/{job}")["status"]
            return status in ("SUCCEEDED", "FAILED", "STOPPED")

        wait_for(ended, f"the Ray job {job} ended", timeout_s)
        return status

    def logs(self, job: str) -> str:
        return self.request(f"/api/jobs/{job}/logs")["logs"]

    def request(self, path: str, body: object = None) -> dict[str, Any]:
        """The JSON answer of the dashboard; OSError with its words when it refuses."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as refusal:
            words = refusal.read().decode(errors="replace")[-2000:]
            raise OSError(f"{path}: {refusal.code} {words}") from refusal

    def delete(self) -> None:
        """Deletes it and returns once its pods are gone."""
        self.cluster.server.kubectl(
            "delete", "raycluster", self.name, f"--namespace={self.namespace}", timeout_s=90
        )
        wait_for(lambda: not self.pods(), f"the pods of {self.name} were gone", 90)

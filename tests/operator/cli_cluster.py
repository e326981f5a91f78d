"""The msa command against a real API server: a namespace, and the operator's pen."""

from __future__ import annotations

import datetime
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from e2e.apiserver import ApiServer
from msa_operator.cli import cli
from msa_operator.cli.cluster import Connection, connect
from msa_operator.runtime.kube import JOBS, KubeError

CRDS = Path(__file__).parents[2] / "manifests" / "crds"
DEADLINE = 360.0


def install(server: ApiServer) -> None:
    """The custom resources, and only those."""
    server.apply(CRDS)
    end, pause = time.monotonic() + DEADLINE, threading.Event()
    for path in ("longcontextjobs", "hardwareprofiles"):
        while True:
            try:
                server.get(f"/apis/flashmsa.dev/v1alpha1/{path}")
                break
            except OSError:
                assert time.monotonic() < end, f"{path} is not served"
                pause.wait(0.1)


@dataclass(frozen=True)
class Bench:
    """A namespace of a server, the command as its user starts it, and the operator's pen."""

    server: ApiServer
    namespace: str
    at: Connection

    @classmethod
    def make(cls, server: ApiServer) -> Bench:
        namespace = f"cli-{uuid.uuid4().hex[:8]}"
        server.kubectl("create", "namespace", namespace)
        return cls(server, namespace, connect(str(server.kubeconfig), None, namespace))

    def msa(self, *arguments: object, **options: Any) -> Result:
        """Its own kubeconfig and namespace come last."""
        where = ["--kubeconfig", self.server.kubeconfig, "--namespace", self.namespace]
        words = [str(a) for a in (*arguments, *where)]
        return CliRunner().invoke(cli, words, catch_exceptions=False, **options)

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.at.kube.create(JOBS, self.namespace, body)

    def spec(self, name: str) -> dict[str, Any]:
        return self.at.kube.get(JOBS, self.namespace, name)["spec"]

    def says(self, name: str, status: dict[str, Any]) -> None:
        """Write a status as the operator does."""
        self.at.kube.patch(JOBS, self.namespace, name, {"status": status}, subresource="status")

    def later(self, name: str, act: Callable[[dict[str, Any]], bool]) -> threading.Thread:
        """In a thread: look at the job until ``act`` has done its part."""

        def run() -> None:
            end = datetime.datetime.now() + datetime.timedelta(seconds=DEADLINE)
            pause = threading.Event()
            while datetime.datetime.now() < end:
                try:
                    found = self.at.kube.find(JOBS, self.namespace, name)
                    if found is not None and act(found):
                        return
                except KubeError as error:
                    assert error.conflict or error.gone, error
                pause.wait(0.1)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {
        "type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1,
    }  # fmt: skip


def running(step: int = 412) -> dict[str, Any]:
    """A status in mid-run."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return {
        "observedGeneration": 1,
        "phase": "Running",
        "conditions": [condition("Planned", "True", "Planned", "fsdp2 on 2 CPU workers")],
        "plan": {"summary": "fsdp2 on 2 CPU workers", "notes": ["positions are extended"]},
        "nodes": {"summary": "2/2", "ready": 2, "wanted": 2},
        "attempts": [
            {"number": 1, "submissionId": "small-1", "state": "Over", "reason": "WorkerLost",
             "message": "worker 1 is another pod", "fromStep": 0, "toStep": 230},
            {"number": 2, "submissionId": "small-2", "fromStep": 200, "toStep": step},
        ],
        "progress": {
            "step": step, "maxSteps": 1000, "loss": 2.17341, "tokensPerSecond": 318200,
            "mfu": 0.412, "eta": "2h9m", "checkpointStep": 400,
            "checkpointUri": "s3://ckpt/small", "updated": now.replace("+00:00", "Z"),
        },
        "ray": {"cluster": "small-abcde-12345678", "headService": "small-abcde-12345678-head-svc"},
    }  # fmt: skip

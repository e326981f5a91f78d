"""The operator in a test cluster as helm installs it, and jobs of one namespace that train."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import charts
from .cluster import Cluster
from .faults.jobs import JOBS, job
from .process import wait_for

NAMESPACE = "training"
CLAIM = "checkpoints"
SYSTEM_NODE, OTHER_NODE = "node-1", "node-2"
COME_UP_S = 150.0
TRAIN_S = 240.0
SMALL: dict[str, Any] = {
    "sequence.length": 256,
    "sequence.globalBatchTokens": 1024,
    "training.maxSteps": 60,
    "training.warmupSteps": 5,
    "training.evaluateSequences": 2,
    "checkpoint.everySteps": 10,
    "checkpoint.uri": None,
    # What really runs is small; what the defaults ask for is meant for real machines.
    "pod.memory": "2Gi",
    "pod.cpu": "500m",
}


@dataclass
class Installed:
    """The operator in a cluster, and jobs of one namespace."""

    cluster: Cluster
    say: Callable[[str], None]
    folder: Path
    times: dict[str, float] = field(default_factory=dict)

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        return self.cluster.server.kubectl(*words, stdin=stdin, timeout_s=timeout_s)

    def msa(self, *words: str) -> subprocess.Popen[str]:
        """The command line, started, with the namespace of the jobs."""
        program = Path(sys.executable).with_name("msa")
        where = [f"--namespace={NAMESPACE}", f"--kubeconfig={self.cluster.server.kubeconfig}"]
        return subprocess.Popen(
            [str(program), *words, *where], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def create(self, name: str, **changes: Any) -> float:
        """Creates a job; when."""
        made = job(name, NAMESPACE, {**SMALL, **changes})
        made["spec"]["checkpoint"].pop("uri")
        self.kubectl("create", "-f", "-", stdin=json.dumps(made))
        return time.monotonic()

    def suspend(self, name: str, suspended: bool) -> None:
        body = json.dumps({"spec": {"suspend": suspended}})
        where = [f"--namespace={NAMESPACE}", "--type=merge"]
        self.kubectl("patch", "longcontextjob", name, *where, "--patch", body)

    def status(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self.cluster.server.get(f"{JOBS.format(NAMESPACE)}/{name}"))
        except OSError:
            return {}
        return found.get("status") or {}

    def step(self, name: str) -> int:
        return (self.status(name).get("progress") or {}).get("step", 0)

    def until(
        self, name: str, what: str, holds: Callable[[dict[str, Any]], Any], timeout_s: float,
        since: float = 0.0,
    ) -> dict[str, Any]:  # fmt: skip
        """The status once that holds; the time it took is said and kept."""
        began = since or time.monotonic()
        last: dict[str, Any] = {}

        def now() -> bool:
            last.clear()
            last.update(self.status(name))
            return bool(holds(last))

        try:
            wait_for(now, f"{name}: {what}", timeout_s)
        except TimeoutError as late:
            logs = self.kubectl("logs", f"--namespace={charts.NAMESPACE}",
                                "deployment/flash-msa-operator", "--tail=25")  # fmt: skip
            shown = json.dumps(last, indent=1)
            raise TimeoutError(f"{late}; status {shown}\noperator:\n{logs}") from None
        took = time.monotonic() - began
        self.times[f"{name}: {what}"] = round(took, 1)
        self.say(f"{took:6.1f} s  {name}: {what}")
        return last

    def complete(self, name: str, since: float = 0.0) -> dict[str, Any]:
        """Every step is trained, the status says so, and what it held is gone."""
        found = self.until(name, "Complete", lambda s: true(s, "Complete"), TRAIN_S, since)
        progress = found["progress"]
        assert progress["step"] == progress["maxSteps"] == 60
        assert 0 < progress["loss"] < 6 and progress["checkpointStep"] == 60
        assert found["plan"]["summary"] and found["plan"]["machines"] >= 1
        self.free(name)
        return found

    def free(self, name: str) -> None:
        """Returns once no cluster and no pod of the job is left."""
        began = time.monotonic()

        def gone() -> bool:
            clusters = self.children("/apis/ray.io/v1/namespaces/{}/rayclusters", name)
            return not clusters and not self.pods(name)

        wait_for(gone, f"{name} held nothing", 90)
        self.times[f"{name}: cluster and pods gone"] = round(time.monotonic() - began, 1)

    def children(self, path: str, name: str) -> list[dict[str, Any]]:
        selector = f"?labelSelector=flashmsa.dev/job={name}"
        return self.cluster.list(f"{path.format(NAMESPACE)}{selector}")

    def pods(self, name: str, kind: str = "") -> list[dict[str, Any]]:
        found = self.children("/api/v1/namespaces/{}/pods", name)
        return [p for p in found if kind in ("", p["metadata"]["labels"]["ray.io/node-type"])]

    def past(self, name: str, step: int) -> None:
        """Returns once the job is past that step, and a checkpoint with it."""
        self.until(
            name, f"past step {step}",
            lambda s: (s.get("progress") or {}).get("checkpointStep", 0) >= step, COME_UP_S,
        )  # fmt: skip


def true(status: dict[str, Any], condition: str) -> bool:
    found = {c["type"]: c["status"] for c in status.get("conditions", ())}
    return found.get(condition) == "True"

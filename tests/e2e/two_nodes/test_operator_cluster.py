"""From `helm install` and `kubectl apply` to a trained model, through every loss on the way.

On a whole cluster: the operator is the chart's pod with its account, and pods really train.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from e2e import charts, images
from e2e.cluster import Cluster
from e2e.faults.jobs import JOBS, job
from e2e.process import wait_for

pytestmark = pytest.mark.cluster
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
        found = self.until(name, "Complete", lambda s: _true(s, "Complete"), TRAIN_S, since)
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


@pytest.fixture(scope="module")
def installed(
    cluster: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n  operator: {text}", end="", flush=True, file=sys.stderr)

    server = cluster.server
    began = time.monotonic()
    repository, tag = images.OPERATOR.split(":")
    values = {
        "image": {"repository": repository, "tag": tag},
        "nodeSelector": {"kubernetes.io/hostname": SYSTEM_NODE},
        "settings": {
            "image": images.WORKER, "headMemory": "4Gi", "headCpu": "200m",
            "checkpoint": {"claim": CLAIM}, "progressSeconds": 2,
        },
    }  # fmt: skip
    file = tmp_path_factory.mktemp("values") / "values.json"
    file.write_text(json.dumps(values))
    place = [f"--namespace={charts.NAMESPACE}", "--create-namespace", "--wait", "--timeout=90s"]
    for chart, given in ((charts.CRDS, []), (charts.OPERATOR, [f"--values={file}"])):
        charts.helm("install", chart.name, str(chart), *place, *given,
                    kubeconfig=server.kubeconfig)  # fmt: skip
    say(f"{time.monotonic() - began:6.1f} s  both charts installed, the operator's pod is ready")
    server.apply(f"{{apiVersion: v1, kind: Namespace, metadata: {{name: {NAMESPACE}}}}}")
    folder = cluster.claim(NAMESPACE, CLAIM)
    made = Installed(cluster, say, folder)
    made.times["helm install of both charts, until ready"] = round(time.monotonic() - began, 1)
    yield made
    say(f"times in seconds: {json.dumps(made.times)}")


def _true(status: dict[str, Any], condition: str) -> bool:
    found = {c["type"]: c["status"] for c in status.get("conditions", ())}
    return found.get(condition) == "True"


def continues(status: dict[str, Any], attempts: int = 2) -> None:
    """Every attempt began at the newest checkpoint, and none repeated a step before it."""
    tried = status["attempts"]
    assert len(tried) == attempts, tried
    for before, after in itertools.pairwise(tried):
        assert after["fromStep"] >= before["fromStep"]
        # Checkpoints are written every ten steps: no more than those are done twice.
        assert before["toStep"] - after["fromStep"] <= 10, tried
    assert tried[-1]["fromStep"] > 0 and tried[-1]["toStep"] == 60


def test_suspended_at_creation_it_shows_the_plan_and_runs_when_resumed(installed: Installed):
    since = installed.create("first", suspend=True)
    found = installed.until("first", "Suspended", lambda s: _true(s, "Suspended"), 60, since)
    assert found["plan"]["summary"] and _true(found, "Planned")
    for path in ("/apis/ray.io/v1/namespaces/{}/rayclusters", "/api/v1/namespaces/{}/configmaps",
                 "/api/v1/namespaces/{}/pods"):  # fmt: skip
        assert installed.children(path, "first") == []
    since = time.monotonic()
    installed.suspend("first", False)
    ready = installed.until("first", "RayReady", lambda s: _true(s, "RayReady"), COME_UP_S, since)
    assert len(installed.pods("first", "worker")) == 2
    assert ready["nodes"]["summary"] == "2/2"
    installed.until("first", "Running", lambda s: _true(s, "Running"), COME_UP_S, since)
    found = installed.complete("first", since)
    assert [a["reason"] for a in found["attempts"]] == ["Succeeded"]


def test_the_operator_is_killed_and_a_worker_pod_deleted(installed: Installed):
    since = installed.create("second")
    installed.past("second", 10)
    where = [f"--namespace={charts.NAMESPACE}", "pod", "--grace-period=0", "--force"]
    installed.kubectl("delete", *where, "--selector=app.kubernetes.io/name=flash-msa-operator")
    victim = installed.pods("second", "worker")[0]["metadata"]["name"]
    installed.kubectl("delete", "pod", victim, f"--namespace={NAMESPACE}", "--grace-period=1")
    found = installed.complete("second", since)
    continues(found)
    assert found["attempts"][0]["reason"] == "WorkerLost"


def test_suspended_in_mid_run_it_frees_every_pod_and_goes_on(installed: Installed):
    since = installed.create("third")
    installed.past("third", 10)
    installed.suspend("third", True)
    found = installed.until("third", "suspended", lambda s: _true(s, "Suspended"), 90)
    installed.free("third")
    attempt = found["attempts"][-1]
    assert attempt["reason"] == "Suspended"
    # The checkpoint that it was asked for: of its very last step.
    saved = found["progress"]["checkpointStep"]
    assert saved >= 10 and saved == attempt["toStep"]
    installed.suspend("third", False)
    found = installed.complete("third", since)
    continues(found)
    assert found["attempts"][1]["fromStep"] == saved


@pytest.mark.full
def test_the_heads_node_loses_power(installed: Installed):
    # Everything of the job is placed on the node that will be lost.
    installed.kubectl("cordon", SYSTEM_NODE)
    try:
        since = installed.create("fourth")
        installed.past("fourth", 10)
    finally:
        installed.kubectl("uncordon", SYSTEM_NODE)
    (head,) = installed.pods("fourth", "head")
    assert head["spec"]["nodeName"] == OTHER_NODE
    installed.cluster.stop_node(OTHER_NODE)
    try:
        # What a cloud's controller does once the machine is known to have ended.
        lost = time.monotonic()
        installed.kubectl("wait", f"node/{OTHER_NODE}", "--for=condition=Ready=Unknown",
                          "--timeout=60s", timeout_s=70)  # fmt: skip
        installed.kubectl("delete", "node", OTHER_NODE)
        installed.until("fourth", "the loss is in the status",
                        lambda s: s["attempts"][0].get("reason"), 60, lost)  # fmt: skip
        found = installed.complete("fourth", since)
    finally:
        installed.cluster.start_node(OTHER_NODE)
    continues(found)
    assert found["attempts"][0]["reason"] in ("NodeLost", "HeadLost")


def test_kubectl_shows_what_happened(installed: Installed):
    shown = installed.kubectl("get", "lcj", f"--namespace={NAMESPACE}")
    installed.say(f"kubectl get lcj\n{shown}")
    header, *rows = shown.splitlines()
    assert header.split()[:2] == ["NAME", "PHASE"]
    assert [row.split()[0] for row in rows][:3] == ["first", "second", "third"]
    assert all("Complete" in row for row in rows)
    told = installed.kubectl("describe", "lcj", "second", f"--namespace={NAMESPACE}")
    assert "WorkerLost" in told and "Succeeded" in told

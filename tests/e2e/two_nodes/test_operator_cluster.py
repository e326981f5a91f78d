"""From `helm install` and `kubectl apply` to a trained model, through every loss on the way.

On a whole cluster: the operator is the chart's pod with its account, and pods really train.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from e2e import charts
from e2e.faults.jobs import SAMPLE
from e2e.installed import COME_UP_S, NAMESPACE, OTHER_NODE, SYSTEM_NODE, Installed, true

pytestmark = pytest.mark.cluster


def continues(status: dict[str, Any], attempts: int = 2) -> None:
    """Every attempt began at the newest checkpoint, and none repeated a step before it."""
    tried = status["attempts"]
    assert len(tried) == attempts, tried
    for before, after in itertools.pairwise(tried):
        assert after["fromStep"] >= before["fromStep"]
        # Checkpoints are written every ten steps: no more than those are done twice.
        assert before["toStep"] - after["fromStep"] <= 10, tried
    assert tried[-1]["fromStep"] > 0 and tried[-1]["toStep"] == 60


def test_suspended_at_creation_and_in_mid_run_it_holds_nothing_and_goes_on(installed: Installed):
    # One sequence over both workers, where the others train one sequence each.
    split = {"parallelism.policy": "Fixed", "parallelism.context": 2,
             "attention.pattern.window": 64}  # fmt: skip
    since = installed.create("first", suspend=True, **split)
    found = installed.until("first", "Suspended", lambda s: true(s, "Suspended"), 60, since)
    assert found["plan"]["summary"] and true(found, "Planned")
    assert found["plan"]["degrees"]["context"] == 2
    for path in ("/apis/ray.io/v1/namespaces/{}/rayclusters", "/api/v1/namespaces/{}/configmaps",
                 "/api/v1/namespaces/{}/pods"):  # fmt: skip
        assert installed.children(path, "first") == []
    since = time.monotonic()
    installed.suspend("first", False)
    ready = installed.until("first", "RayReady", lambda s: true(s, "RayReady"), COME_UP_S, since)
    assert len(installed.pods("first", "worker")) == 2
    assert ready["nodes"]["summary"] == "2/2"
    installed.until("first", "Running", lambda s: true(s, "Running"), COME_UP_S, since)
    installed.past("first", 10)

    installed.suspend("first", True)
    found = installed.until("first", "suspended", lambda s: true(s, "Suspended"), 90)
    installed.free("first")
    attempt = found["attempts"][-1]
    assert attempt["reason"] == "Suspended"
    # The checkpoint that it was asked for: of its very last step.
    saved = found["progress"]["checkpointStep"]
    assert saved >= 10 and saved == attempt["toStep"]
    installed.suspend("first", False)
    installed.until("first", "ready again", lambda s: true(s, "RayReady"), COME_UP_S)
    # Whoever follows has every line, to the end: of a container that does not run as root.
    follower = installed.msa("logs", "first", "--follow")
    found = installed.complete("first", since)
    continues(found)
    assert found["attempts"][1]["fromStep"] == saved
    assert [a["reason"] for a in found["attempts"]] == ["Suspended", "Succeeded"]
    shown, said = follower.communicate(timeout=60)
    assert follower.returncode == 0 and "first is Complete" in said
    for rank in (0, 1):
        assert f"(rank {rank} " in shown
    # Ray's own controller shows where a question of its own waited when the machine is busy.
    ours = [line for line in shown.splitlines() if not line.startswith("(TrainController ")]
    assert "checkpoint of step 60 committed" in shown and "Traceback" not in "\n".join(ours)


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


@pytest.mark.full
def test_the_sample_as_it_is_trains_to_the_end(installed: Installed):
    where = f"--namespace={NAMESPACE}"
    since = time.monotonic()
    installed.kubectl("apply", "-f", str(SAMPLE), where)
    for condition in ("Planned", "RayReady", "Running"):
        installed.until("stdlib-4k", condition, lambda s, c=condition: true(s, c), 300, since)
    installed.kubectl("wait", "lcj/stdlib-4k", where, "--for=condition=Complete",
                      "--timeout=15m", timeout_s=930)  # fmt: skip
    found = installed.until("stdlib-4k", "Complete", lambda s: true(s, "Complete"), 5, since)
    progress = found["progress"]
    assert found["plan"]["summary"] and found["plan"]["degrees"]["dataShard"] == 2
    assert progress["step"] == progress["maxSteps"] == progress["checkpointStep"] == 300
    # What the same run reaches on one machine, in nats of a byte.
    assert 0 < progress["loss"] < 2.5
    installed.free("stdlib-4k")
    installed.say(installed.kubectl("get", "lcj", "stdlib-4k", where))
    installed.say(installed.kubectl("describe", "lcj", "stdlib-4k", where))


@pytest.mark.full
def test_the_heads_node_loses_power(installed: Installed):
    # Everything of the job is placed on the node that will be lost.
    installed.kubectl("cordon", SYSTEM_NODE)
    try:
        since = installed.create("third")
        installed.past("third", 10)
    finally:
        installed.kubectl("uncordon", SYSTEM_NODE)
    (head,) = installed.pods("third", "head")
    assert head["spec"]["nodeName"] == OTHER_NODE
    installed.cluster.stop_node(OTHER_NODE)
    try:
        # What a cloud's controller does once the machine is known to have ended.
        lost = time.monotonic()
        installed.kubectl("wait", f"node/{OTHER_NODE}", "--for=condition=Ready=Unknown",
                          "--timeout=60s", timeout_s=70)  # fmt: skip
        installed.kubectl("delete", "node", OTHER_NODE)
        installed.until("third", "the loss is in the status",
                        lambda s: s["attempts"][0].get("reason"), 60, lost)  # fmt: skip
        found = installed.complete("third", since)
    finally:
        installed.cluster.start_node(OTHER_NODE)
    continues(found)
    assert found["attempts"][0]["reason"] in ("NodeLost", "HeadLost")


def test_kubectl_shows_what_happened(installed: Installed):
    shown = installed.kubectl("get", "lcj", f"--namespace={NAMESPACE}")
    installed.say(f"kubectl get lcj\n{shown}")
    header, *rows = shown.splitlines()
    assert header.split()[:2] == ["NAME", "PHASE"]
    assert {"first", "second"} <= {row.split()[0] for row in rows}
    assert all("Complete" in row for row in rows)
    told = installed.kubectl("describe", "lcj", "second", f"--namespace={NAMESPACE}")
    assert "WorkerLost" in told and "Succeeded" in told

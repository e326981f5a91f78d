"""Jobs in a queue, on a real API server that does to RayClusters what Kueue does.

Kueue itself needs an image that cannot be had everywhere. What it does to a RayCluster with its
label is small: its webhook creates it suspended, admission unsets that and adds to the pod
templates where they may run, and who is preempted is suspended again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.apiserver import ApiServer
from e2e.faults.simulator import Simulator
from e2e.faults.world import World
from e2e.process import wait_for
from runtime_operator import Running

pytestmark = pytest.mark.usefixtures("hurry")

WEBHOOK = """
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: queue}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    resourceRules:
    - {apiGroups: [ray.io], apiVersions: [v1], operations: [CREATE], resources: [rayclusters]}
  matchConditions:
  - name: queued
    expression: "'kueue.x-k8s.io/queue-name' in object.metadata.?labels.orValue({})"
  mutations:
  - patchType: JSONPatch
    jsonPatch:
      expression: '[JSONPatch{op: "add", path: "/spec/suspend", value: true}]'
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: queue}
spec: {policyName: queue}
"""
POOL = {"cloud.example/pool": "research"}


@pytest.fixture(scope="module")
def simulator(api_server: ApiServer) -> Iterator[Simulator]:
    api_server.apply(WEBHOOK)
    wait_for(lambda: _acts(api_server), "the queue holds clusters back", 60)
    found = Simulator(api_server)
    yield found
    found.stop()
    kinds = ("mutatingadmissionpolicybinding", "mutatingadmissionpolicy")
    for kind in kinds:
        api_server.kubectl("delete", kind, "queue")


def _acts(server: ApiServer) -> bool:
    """Policies are used some time after they were applied."""
    cluster = {
        "apiVersion": "ray.io/v1", "kind": "RayCluster",
        "metadata": {"generateName": "probe-", "labels": {"kueue.x-k8s.io/queue-name": "q"}},
        "spec": {"headGroupSpec": {
            "rayStartParams": {}, "template": {"spec": {"containers": [{"name": "ray-head"}]}},
        }},
    }  # fmt: skip
    words = ["create", "--dry-run=server", "--namespace=default", "--output=json", "-f", "-"]
    return json.loads(server.kubectl(*words, stdin=json.dumps(cluster)))["spec"].get(
        "suspend", False
    )


def queued(world: World, name: str) -> dict[str, Any]:
    """The RayCluster of a job that waits in a queue, which holds no pod."""
    world.create(name, {"queue": {"name": "research"}})
    world.until(name, "Queued")
    (cluster,) = clusters(world)
    assert cluster["spec"]["suspend"] is True
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert not world.children("Pod")
    return cluster


def clusters(world: World) -> list[dict[str, Any]]:
    path = f"/apis/ray.io/v1/namespaces/{world.namespace}/rayclusters"
    return json.loads(world.server.get(path))["items"]


def say(world: World, cluster: dict[str, Any], suspended: bool) -> None:
    """Admit with a place to run, or preempt."""
    patch: list[dict[str, Any]] = [{"op": "add", "path": "/spec/suspend", "value": suspended}]
    if not suspended:
        for group in ("headGroupSpec", "workerGroupSpecs/0"):
            path = f"/spec/{group}/template/spec/nodeSelector"
            patch.append({"op": "add", "path": path, "value": POOL})
    where = [f"--namespace={world.namespace}", "--type=json", "--patch", json.dumps(patch)]
    world.server.kubectl("patch", "raycluster", cluster["metadata"]["name"], *where)


def test_a_job_waits_for_its_queue_and_runs_where_that_says(world: World, operator: Running):
    cluster = queued(world, "small")
    world.simulator.hold = True
    say(world, cluster, suspended=False)
    world.until("small", "Running", 120)
    (running,) = clusters(world)
    # What the queue added stays: the cluster is never applied again.
    assert running["metadata"]["uid"] == cluster["metadata"]["uid"]
    assert running["spec"]["headGroupSpec"]["template"]["spec"]["nodeSelector"] == POOL
    world.simulator.hold = False
    done = world.until("small", "Complete", 120)
    assert [a["reason"] for a in done["attempts"]] == ["Succeeded"]
    world.clean()


def test_a_job_in_a_queue_can_be_suspended_and_deleted(world: World, operator: Running):
    queued(world, "small")
    world.patch("small", {"suspend": True})
    world.until("small", "Suspended")
    wait_for(lambda: not clusters(world), "its place in the queue was given up", 30)
    queued(world, "other")
    world.delete("other")
    world.clean()


def test_a_job_that_is_preempted_goes_on_when_it_is_admitted_again(
    world: World, operator: Running
):
    cluster = queued(world, "small")
    world.simulator.hold = True
    say(world, cluster, suspended=False)
    world.until("small", "Running", 60)
    say(world, cluster, suspended=True)
    world.until("small", "Queued", 60)
    world.simulator.hold = False
    (waiting,) = clusters(world)
    assert waiting["spec"]["suspend"] is True and not world.children("Pod")
    say(world, waiting, suspended=False)
    done = world.until("small", "Complete", 90)
    assert len(done["attempts"]) == 2 and not world.simulator.violations
    assert done["attempts"][0]["reason"] == "Preempted"
    assert waiting["metadata"]["uid"] == cluster["metadata"]["uid"]  # its place in the queue
    assert done["attempts"][1]["fromStep"] == done["attempts"][0]["checkpointStep"]
    world.clean()

"""Lives of jobs: the operator on a real API server, with pods and heads simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.apiserver import ApiServer
from e2e.faults.jobs import JOBS
from e2e.faults.simulator import Simulator
from e2e.faults.world import World
from e2e.process import wait_for
from msa_operator.api import parse_job
from msa_operator.reconcile.desired import Owner
from msa_operator.runtime import look
from msa_operator.runtime.planning import Planner
from runtime_operator import Running, settings

pytestmark = pytest.mark.usefixtures("hurry")

WRITES = {"CREATE", "PATCH", "PUT", "DELETE", "DRYRUN"}
MOST_WRITES = 25
"""Of a job from its creation to the end of its cluster, without events, progress and the Lease."""


@pytest.fixture(scope="module")
def simulator(api_server: ApiServer) -> Iterator[Simulator]:
    found = Simulator(api_server)
    yield found
    found.stop()


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def events(world: World) -> list[tuple[str, str]]:
    path = f"/api/v1/namespaces/{world.namespace}/events"
    return [
        (e["reason"], e.get("message", "")) for e in json.loads(world.server.get(path))["items"]
    ]


def held(world: World) -> None:
    """Runs get stuck after their first steps, so that a test meets them running."""
    world.simulator.hold = True


def test_a_life_takes_few_writes(world: World, operator: Running):
    world.create("small")
    done = world.until("small", "Complete", 90)
    world.clean()
    (attempt,) = done["attempts"]
    assert (attempt["reason"], attempt["toStep"], attempt["checkpointStep"]) == (
        "Succeeded", 20, 20,
    )  # fmt: skip
    assert done["progress"]["step"] == done["progress"]["maxSteps"] == 20
    assert condition(done, "Complete")["status"] == condition(done, "Ready")["status"] == "True"
    counted = writes(operator)
    assert sum(counted.values()) <= MOST_WRITES, counted
    assert {"Planned", "CreatingCluster", "Submitting", "Stepping", "Succeeded"} >= {
        reason for reason, _ in events(world)
    }
    print(f"\n{sum(counted.values())} writes: {counted}")


def test_a_run_that_ended_without_an_operator_is_shown_with_its_last_step(
    api_server: ApiServer, simulator: Simulator, world: World
):
    held(world)
    with Running(api_server, simulator.heads_url, world.namespace):
        world.create("small")
        wait_for(lambda: world.status("small").get("progress"), "a first step is shown", 60)
        before = world.job("small")
    assert before is not None and before["status"]["progress"]["step"] < 20
    simulator.heads.finish(world.uid("small"))
    with Running(api_server, simulator.heads_url, world.namespace):
        world.until("small", "Complete", 60)
        world.clean()
    since = before["metadata"]["resourceVersion"]
    statuses = [seen["object"].get("status", {}) for seen in history(world, "small", since)]
    complete = [s["progress"] for s in statuses if s.get("phase") == "Complete"]
    # Never written over by what the run said before.
    assert complete and {(p["step"], p["checkpointStep"]) for p in complete} == {(20, 20)}
    assert {p["loss"] for p in complete} == {before["status"]["progress"]["loss"]}


def history(world: World, name: str, since: str) -> list[dict[str, Any]]:
    """Every state that the object has had."""
    path = JOBS.format(world.namespace)
    query = f"?watch=1&resourceVersion={since}&fieldSelector=metadata.name={name}&timeoutSeconds=1"
    return [json.loads(line) for line in world.server.get(path + query).splitlines()]


def writes(operator: Running) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for metric in operator.operator.metrics.registry.collect():
        for sample in metric.samples:
            if sample.name == "msa_operator_api_requests_total":
                verb, resource = sample.labels["verb"], sample.labels["resource"]
                if verb in WRITES and resource not in ("events", "leases"):
                    key = (verb, resource)
                    found[key] = found.get(key, 0) + int(sample.value)
    return found


def test_suspended_at_creation_it_shows_the_plan_and_creates_nothing(
    world: World, operator: Running
):
    world.create("small", {"suspend": True})
    found = world.until("small", "Suspended")
    assert found["plan"]["degrees"]["dataShard"] == 2 and found["attempts"] == []
    wait_for(lambda: condition(world.status("small"), "Suspended").get("status") == "True",
             "it was suspended", 10)  # fmt: skip
    assert not world.children("RayCluster") and "ray" not in found
    config = f"/api/v1/namespaces/{world.namespace}/configmaps"
    made = [c["metadata"]["name"] for c in json.loads(world.server.get(config))["items"]]
    assert not [name for name in made if name.startswith("small")]
    world.patch("small", {"suspend": False})
    world.until("small", "Complete")
    world.clean()


def test_suspended_in_mid_run_it_writes_a_checkpoint_and_goes_on_from_it(
    world: World, operator: Running
):
    held(world)
    world.create("small")
    world.until("small", "Running")
    world.patch("small", {"suspend": True})
    found = world.until("small", "Suspended")
    world.clean()
    assert found["attempts"][-1]["reason"] == "Suspended"
    step = found["attempts"][-1]["checkpointStep"]
    assert 0 < step < 20
    world.simulator.hold = False
    world.patch("small", {"suspend": False})
    done = world.until("small", "Complete")
    assert [first for _, first in world.submissions("small")] == [0, step]
    assert done["ray"]["epoch"] == 2
    world.clean()


@pytest.mark.parametrize("phase", ["Suspended", "Provisioning", "Running", "Complete"])
def test_deleted_in_any_phase_nothing_stays(world: World, operator: Running, phase: str):
    world.simulator.hold = phase == "Running"
    world.simulator.paused = phase == "Provisioning"
    try:
        world.create("small", {"suspend": phase == "Suspended",
                               "cleanup": {"onSuccess": "KeepCluster"}})  # fmt: skip
        world.until("small", phase)
        world.delete("small")
        wait_for(lambda: world.job("small") is None, "the job was gone", 30)
    finally:
        world.simulator.paused = False
    world.clean()
    wait_for(lambda: not operator.operator.store.known(), "it was forgotten", 10)


def test_an_edit_of_what_runs_is_refused_and_a_safe_one_used(world: World, operator: Running):
    held(world)
    world.create("small")
    before = world.until("small", "Running")
    world.patch("small", {"training": {"learningRate": 0.5}, "deadlines": {"active": "2h"}})
    wait_for(lambda: condition(world.status("small"), "Planned")["reason"] == "EditRefused",
             "the edit was refused", 20)  # fmt: skip
    assert "spec.training" in condition(world.status("small"), "Planned")["message"]
    assert "deadlines" not in condition(world.status("small"), "Planned")["message"]
    world.simulator.hold = False
    done = world.until("small", "Complete")
    assert done["plan"]["hash"] == before["plan"]["hash"]
    assert len(world.submissions("small")) == 1
    world.clean()


def test_a_lost_head_means_a_new_cluster_of_the_same_plan(world: World, operator: Running):
    held(world)
    world.create("small")
    before = world.until("small", "Running")
    # Not used: what replaces a lost cluster is what was accepted.
    world.patch("small", {"training": {"learningRate": 0.5}})
    world.simulator.restart_head(world.namespace, before["ray"]["cluster"])
    wait_for(lambda: world.status("small")["ray"]["epoch"] == 2, "it had another cluster", 60)
    world.simulator.hold = False
    done = world.until("small", "Complete", 90)
    assert [a["reason"] for a in done["attempts"]] == ["HeadLost", "Succeeded"]
    assert done["plan"]["hash"] == before["plan"]["hash"]
    assert [first for _, first in world.submissions("small")] == [0, 5]
    world.clean()
    assert [n for n in configs(world) if n.startswith("small")] == [done["ray"]["cluster"]]


def configs(world: World) -> list[str]:
    path = f"/api/v1/namespaces/{world.namespace}/configmaps"
    return [c["metadata"]["name"] for c in json.loads(world.server.get(path))["items"]]


def test_a_lost_worker_means_another_attempt_on_the_same_cluster(world: World, operator: Running):
    held(world)
    world.create("small")
    before = world.until("small", "Running")
    world.simulator.delete_pod(world.namespace, before["ray"]["cluster"], "worker")
    wait_for(lambda: len(world.status("small")["attempts"]) == 2, "there was another attempt", 60)
    world.simulator.hold = False
    done = world.until("small", "Complete", 90)
    assert done["ray"]["cluster"] == before["ray"]["cluster"]
    assert done["attempts"][0]["reason"] in ("WorkerLost", "TrainingFailed")
    world.clean()


def test_pods_of_a_node_that_is_gone_are_deleted_by_force(world: World, operator: Running):
    held(world)
    world.create("small")
    before = world.until("small", "Running")
    path = f"/api/v1/namespaces/{world.namespace}/pods"
    pods = json.loads(world.server.get(path))["items"]
    head = next(p for p in pods if p["metadata"]["labels"]["ray.io/node-type"] == "head")
    node = next(n for n in before["nodes"]["names"] if n != head["spec"]["nodeName"])
    world.simulator.lose_node(node)
    try:
        world.simulator.forget_node(node)
        wait_for(lambda: len(world.status("small")["attempts"]) == 2, "it was tried again", 60)
        world.simulator.hold = False
        done = world.until("small", "Complete", 90)
    finally:
        world.simulator.add_node(node)
    assert done["attempts"][0]["reason"] in ("NodeLost", "WorkerLost", "TrainingFailed")
    world.clean()


def test_pods_on_a_node_that_says_nothing_any_more_are_deleted_by_force(
    world: World, operator: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(look, "NODE_SILENT_S", 1.0)
    held(world)
    world.create("small")
    before = world.until("small", "Running")
    node = before["nodes"]["names"][0]
    world.simulator.lose_node(node)
    try:
        silent = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
        world.server.kubectl("patch", "node", node, "--subresource=status", "--type=merge",
                             "--patch", json.dumps(silent))  # fmt: skip
        wait_for(lambda: len(world.status("small")["attempts"]) == 2, "it was tried again", 90)
        world.simulator.hold = False
        world.until("small", "Complete", 90)
        # Also pods of a cluster that is gone: while the node is silent, nobody else ends them.
        world.clean()
    finally:
        world.simulator.add_node(node)


BIG: dict[str, Any] = {
    "model": {"preset": "qwen3-8b"},
    "sequence": {"length": 131072, "globalBatchTokens": 4194304},
    "hardware": {"device": "gpu", "accelerators": {"min": 8, "max": 16},
                 "instanceTypes": ["mine.large"]},
    "failure": {"onNodeLoss": ["Replan", "Fail"]},
}  # fmt: skip
PROFILE = {
    "apiVersion": "flashmsa.dev/v1alpha1", "kind": "HardwareProfile",
    "metadata": {"name": "mine"},
    "spec": {
        "instanceType": "mine.large", "cpus": 192, "memoryMiB": 2000000,
        "nodeLabels": {"pool": "mine"},
        "accelerator": {"name": "H200", "count": 8, "memoryMiB": 144384, "peakTflops": 989,
                        "memoryGBps": 4800, "linkGBps": 900},
        "network": {"efa": 16, "gbps": 3200, "rdma": "GPUDirect"},
    },
}  # fmt: skip


def test_a_described_machine_is_used_and_a_run_goes_on_with_fewer_of_it(
    world: World, operator: Running
):
    world.server.apply(json.dumps(PROFILE))
    held(world)
    world.create("big", BIG)
    before = world.until("big", "Running", 60)
    assert (before["plan"]["machine"], before["plan"]["machines"]) == ("mine.large", 2)
    (cluster,) = rayclusters(world)
    worker = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert worker["nodeSelector"] == {"pool": "mine"}
    node = before["nodes"]["names"][0]
    world.simulator.forget_node(node)
    world.simulator.lose_node(node)
    try:
        wait_for(lambda: world.status("big")["plan"]["machines"] == 1, "it was replanned", 90)
        world.simulator.hold = False
        done = world.until("big", "Complete", 90)
    finally:
        world.simulator.add_node(node)
    assert [a["reason"] for a in done["attempts"]] == ["NodeLost", "Succeeded"]
    assert done["intent"]["machines"] == 1 and done["ray"]["epoch"] == 2
    assert condition(done, "Planned")["reason"] == "Planned"
    assert [first for _, first in world.submissions("big")] == [0, 5]
    world.clean()


def rayclusters(world: World) -> list[dict[str, Any]]:
    path = f"/apis/ray.io/v1/namespaces/{world.namespace}/rayclusters"
    return json.loads(world.server.get(path))["items"]


def test_a_cluster_of_another_owner_is_never_adopted(world: World, operator: Running):
    world.create("small", {"suspend": True})
    world.until("small", "Suspended")
    raw = world.job("small")
    assert raw is not None
    job = parse_job({k: raw[k] for k in ("apiVersion", "kind", "metadata", "spec")})
    planner = Planner(settings(), world.namespace)
    name = planner.plan(job, Owner("small", world.namespace, world.uid("small"))).rendered.name(1)
    pod = {"spec": {"containers": [{"name": "ray-head", "image": "other"}]}}
    spec = {"suspend": True, "headGroupSpec": {"rayStartParams": {}, "template": pod}}
    meta = {"name": name, "namespace": world.namespace}
    taken = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": meta, "spec": spec}
    world.server.kubectl("create", "-f", "-", stdin=json.dumps(taken))
    world.patch("small", {"suspend": False})
    done = world.until("small", "Complete", 90)
    assert done["ray"]["epoch"] == 2 and done["ray"]["cluster"] != name
    wait_for(lambda: world.children("RayCluster") == [name], "only the other's was left", 30)


def test_a_run_that_does_no_step_is_ended_with_its_stacks_written(world: World, operator: Running):
    held(world)
    world.create("small", {"hang": {"step": "3s"}})
    world.until("small", "Running")
    wait_for(lambda: len(world.status("small")["attempts"]) == 2, "it was tried again", 60)
    world.simulator.hold = False
    done = world.until("small", "Complete", 90)
    assert done["attempts"][0]["reason"] == "Hang"
    (told,) = [message for reason, message in events(world) if reason == "Stacks"]
    assert "file:///checkpoints/stacks/" in told and "rank 0 on node-1" in told
    world.clean()


REFUSED = [
    ({"podPatch": {"spec": {"containers": [{"name": "ray-worker", "imagePullPolicy": "No"}]}}},
     "imagePullPolicy"),
    ({"pod": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nothing"}}}]}},
     "spec.nothing"),
    ({"podPatch": {"spec": {"restartPolicy": "Always"}}}, "nearest: Never"),
    ({"checkpoint": {"uri": "file:///data/here"}}, "spec.checkpoint.uri"),
    ({"hardware": {"device": "gpu", "accelerators": {"min": 1, "max": 8}},
      "capacity": {"provisioner": "Karpenter"}}, "nearest: Existing"),
    ({"hardware": {"device": "gpu", "accelerators": {"min": 1, "max": 8},
                   "instanceTypes": ["p5.49xlarge"]}}, "nearest: p5.4xlarge"),
]  # fmt: skip


def test_what_cannot_run_is_refused_with_the_field_and_what_would_do(
    world: World, operator: Running
):
    for n, (changes, _) in enumerate(REFUSED):
        world.create(f"wrong-{n}", changes)
    for n, (_, words) in enumerate(REFUSED):
        wait_for(lambda n=n: condition(world.status(f"wrong-{n}"), "Planned"), "it was said", 30)
        planned = condition(world.status(f"wrong-{n}"), "Planned")
        assert planned["status"] == "False" and planned["reason"] == "Refused"
        assert words in planned["message"], planned
        assert condition(world.status(f"wrong-{n}"), "Stalled")["status"] == "True"
    assert not world.children("RayCluster")


def test_a_refused_job_runs_once_it_is_mended(world: World, operator: Running):
    world.create("small", {"podPatch": {"spec": {"restartPolicy": "Always"}}})
    wait_for(lambda: condition(world.status("small"), "Planned"), "it was refused", 30)
    removal = json.dumps([{"op": "remove", "path": "/spec/podPatch/spec"}])
    words = ("patch", "lcj", "small", f"--namespace={world.namespace}")
    world.server.kubectl(*words, "--type=json", "--patch", removal)
    world.until("small", "Complete")
    world.clean()


def test_one_job_that_cannot_be_read_delays_no_other(world: World, operator: Running):
    world.create("poisoned", {"suspend": True})
    world.until("poisoned", "Suspended")
    patch = {"status": {"intent": {"since": "2026-99-99T99:99:99Z"}}}
    world.server.kubectl("patch", "lcj", "poisoned", f"--namespace={world.namespace}",
                         "--subresource=status", "--type=merge", "--patch",
                         json.dumps(patch))  # fmt: skip
    world.create("small")
    world.until("small", "Complete", 60)
    assert operator.alive and operator.operator.unhealthy() == []


def test_another_operator_goes_on_where_one_stopped(
    api_server: ApiServer, simulator: Simulator, world: World
):
    held(world)
    with Running(api_server, simulator.heads_url, world.namespace):
        world.create("small")
        before = world.until("small", "Running")
    image = "flash-msa-worker:newer"
    with Running(api_server, simulator.heads_url, world.namespace, image=image) as second:
        wait_for(lambda: second.operator.store.known(), "it knew the job", 30)
        world.simulator.hold = False
        done = world.until("small", "Complete", 60)
    assert done["ray"]["cluster"] == before["ray"]["cluster"]
    assert done["plan"]["hash"] == before["plan"]["hash"]
    assert len(world.submissions("small")) == 1
    world.clean()


def test_of_two_operators_one_acts(api_server: ApiServer, simulator: Simulator, world: World):
    heads = simulator.heads_url
    with Running(api_server, heads, world.namespace, name="first") as first:
        wait_for(lambda: first.operator.lease.held, "the first held the Lease", 30)
        with Running(api_server, heads, world.namespace, name="second") as second:
            wait_for(lambda: second.operator.unready() == [], "the second was ready", 30)
            world.create("small")
            world.until("small", "Complete", 60)
            assert not second.operator.lease.held and written(second) == 0
            assert first.stop() == 0
            wait_for(lambda: second.operator.lease.held, "the second took over", 30)
            world.create("other")
            world.until("other", "Complete", 60)
            assert written(second) > 0
    world.clean()


def written(running: Running) -> int:
    return sum(writes(running).values())

"""The test cluster does what a cluster does, and cannot reach beyond itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from e2e import images
from e2e.cluster import Cluster
from e2e.paths import REPOSITORY
from e2e.process import wait_for
from e2e.raycluster import SHARED, RayCluster

pytestmark = pytest.mark.cluster
NAMESPACE = "ray-test"
HEAD = "ray.io/node-type=head"


@pytest.fixture(scope="module")
def ray_cluster(cluster: Cluster) -> Iterator[RayCluster]:
    cluster.server.apply(f"{{apiVersion: v1, kind: Namespace, metadata: {{name: {NAMESPACE}}}}}")
    cluster.claim(NAMESPACE, "shared")
    made = RayCluster.create(cluster, "small", NAMESPACE, workers=2, claim="shared")
    yield made
    made.delete()


def test_workers_are_on_both_nodes(ray_cluster: RayCluster):
    workers = [
        pod for pod in ray_cluster.pods() if pod["metadata"]["labels"]["ray.io/group"] == "workers"
    ]
    assert len(workers) == 2
    assert {pod["spec"]["nodeName"] for pod in workers} == {"node-1", "node-2"}
    # The policy chose the runtime; the template did not ask for it.
    assert {pod["spec"]["runtimeClassName"] for pod in workers} == {images.RUNTIME_CLASS}


def test_two_workers_reduce_a_tensor(ray_cluster: RayCluster):
    ray_cluster.submit("all-reduce", f"python {REPOSITORY}/tests/e2e/allreduce.py 2")
    status = ray_cluster.wait("all-reduce", timeout_s=120)
    logs = ray_cluster.logs("all-reduce")
    assert status == "SUCCEEDED", logs
    assert "all-reduce of 2 ranks on 2 pods: 3.0" in logs


def test_a_job_file_trains_on_two_workers(ray_cluster: RayCluster):
    settings = {
        "training.maxSteps": 4,
        "training.warmupSteps": 1,
        "training.evaluateSequences": 2,
        "sequence.length": 256,
        "sequence.globalBatchTokens": 512,
        "checkpoint.everySteps": 2,
        "checkpoint.uri": f"file://{SHARED}/checkpoints",
    }
    sample = REPOSITORY / "manifests" / "samples" / "stdlib-4k.yaml"
    words = [f"--set {path}={value}" for path, value in settings.items()]
    ray_cluster.submit("train", f"msa run {sample} {' '.join(words)} --output-dir {SHARED}/run")
    status = ray_cluster.wait("train", timeout_s=180)
    assert status == "SUCCEEDED", ray_cluster.logs("train")
    folder = ray_cluster.cluster.folder / "volumes" / NAMESPACE / "shared"
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 4, summary


def test_the_dashboard_wants_its_token(ray_cluster: RayCluster):
    stranger = RayCluster(
        ray_cluster.cluster, ray_cluster.name, NAMESPACE, ray_cluster.url, token="wrong"
    )
    with pytest.raises(OSError, match=r"/api/jobs/: 40[13]"):
        stranger.request("/api/jobs/")


def test_names_services_and_the_api_work_from_a_pod_and_nothing_else(ray_cluster: RayCluster):
    service = f"{ray_cluster.name}-head-svc.{NAMESPACE}.svc.cluster.local"
    script = f"""
import socket, ssl, urllib.request
print(socket.gethostbyname('{service}'))
token = open('/var/run/secrets/kubernetes.io/serviceaccount/token').read()
context = ssl.create_default_context(
    cafile='/var/run/secrets/kubernetes.io/serviceaccount/ca.crt')
request = urllib.request.Request('https://kubernetes.default.svc/version',
                                 headers={{'Authorization': 'Bearer ' + token}})
print(urllib.request.urlopen(request, context=context, timeout=10).status)
for reach in (lambda: socket.gethostbyname('example.com'),
              lambda: socket.create_connection(('192.0.2.1', 80), timeout=10)):
    try:
        reach()
    except OSError as error:
        print(type(error).__name__, error.errno)
"""
    head = f"{ray_cluster.name}-head"
    (pod,) = [
        pod["metadata"]["name"]
        for pod in ray_cluster.pods()
        if pod["metadata"]["name"].startswith(head)
    ]
    answer = ray_cluster.cluster.server.kubectl(
        "exec", "--stdin", f"--namespace={NAMESPACE}", pod, "--", "python", "-", stdin=script
    )
    address, status, name, route = answer.splitlines()
    assert address.startswith("10.89.")
    assert status == "200"
    # At once, and without a packet: no such name, no such route.
    assert name == "gaierror -2" and route == "OSError 101"


def test_a_node_that_loses_power_is_noticed_and_comes_back(cluster: Cluster):
    def lost() -> bool:
        (node,) = [
            node for node in cluster.list("/api/v1/nodes") if node["metadata"]["name"] == "node-2"
        ]
        conditions = {c["type"]: c["status"] for c in node["status"]["conditions"]}
        return conditions["Ready"] == "Unknown"

    cluster.stop_node("node-2")
    wait_for(lost, "the lost node was noticed", 60)
    cluster.start_node("node-2")
    node = json.loads(cluster.server.get("/api/v1/nodes/node-2"))
    conditions = {c["type"]: c["status"] for c in node["status"]["conditions"]}
    assert conditions["Ready"] == "True"

"""Tests do the harm that they name, and the simulated KubeRay does as the real one."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.apiserver import ApiServer
from e2e.build import tool
from e2e.faults.client import admin_tls
from e2e.faults.jobs import JOBS, job, rendered
from e2e.faults.proxy import Proxy
from e2e.faults.rayhead import SERVICE
from e2e.faults.rules import Answer, Call, Expired, Lost, Reset, Silent, on
from e2e.faults.simulator import TOKEN, Simulator
from e2e.process import run, wait_for

NAMESPACE = "harm"


@pytest.mark.parametrize(
    ("method", "path", "watch", "said"),
    [
        ("GET", "/api/v1/namespaces/a/pods", False, "list pods a"),
        ("GET", "/api/v1/pods", True, "watch pods"),
        ("POST", "/api/v1/namespaces/a/pods/b/binding", False, "create pods/binding a/b"),
        ("DELETE", "/api/v1/namespaces/a", False, "delete namespaces /a"),
        ("DELETE", "/apis/ray.io/v1/namespaces/a/rayclusters", False,
         "deletecollection rayclusters a"),
        ("PATCH", "/apis/flashmsa.dev/v1alpha1/namespaces/a/longcontextjobs/b/status", False,
         "patch longcontextjobs/status a/b"),
        ("GET", "/version", False, "get /version"),
    ],
)  # fmt: skip
def test_a_request_is_named_as_access_rules_do(method: str, path: str, watch: bool, said: str):
    assert str(Call.of(method, path, watch)) == said


def test_a_rule_lets_others_through():
    rule = on(Reset(), "write", "pods", times=2, share=0.5)
    create, read = Call("create", "pods"), Call("get", "pods")
    taken = [rule.takes(create) for _ in range(20)]
    assert taken.count(True) == 2 and not all(taken[:2]) and not rule.takes(read)
    assert not on(Reset(), "write").takes(Call("update", "leases"))


@pytest.fixture(scope="module")
def proxy(api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    api_server.apply(f"{{apiVersion: v1, kind: Namespace, metadata: {{name: {NAMESPACE}}}}}")
    made = Proxy(api_server, tmp_path_factory.mktemp("proxy"))
    yield made
    made.stop()


def through(proxy: Proxy, *words: str, stdin: str | None = None) -> str:
    kubectl = [str(tool("kubectl")), f"--kubeconfig={proxy.kubeconfig}", f"-n{NAMESPACE}"]
    return run([*kubectl, *words], stdin=stdin)


def config_map(name: str) -> str:
    return f"{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name}}}}}"


def names(server: ApiServer) -> set[str]:
    items = json.loads(server.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps"))["items"]
    return {item["metadata"]["name"] for item in items}


def test_without_rules_it_is_not_there(proxy: Proxy, api_server: ApiServer):
    through(proxy, "create", "--validate=false", "-f", "-", stdin=config_map("plain"))
    assert "plain" in names(api_server)
    assert proxy.count()["create configmaps"] == 1


@pytest.mark.parametrize(
    ("fault", "words", "written"),
    [
        (Answer(409, "Conflict"), "the proxy says 409", False),
        (Answer(500, "InternalError"), "the proxy says 500", False),
        (Reset(), "connection reset|EOF", False),
        (Lost(), "connection reset|EOF", True),
    ],
)
def test_harm_is_as_named(
    proxy: Proxy, api_server: ApiServer, fault: Any, words: str, written: bool
):
    name = f"map-{type(fault).__name__.lower()}-{getattr(fault, 'code', 0)}"
    proxy.rules = [on(fault, "create", "configmaps", times=1)]
    with pytest.raises(RuntimeError, match=words):
        through(proxy, "create", "--validate=false", "-f", "-", stdin=config_map(name))
    proxy.clear()
    assert (name in names(api_server)) == written


def test_a_client_waits_as_long_as_it_is_told(proxy: Proxy, api_server: ApiServer):
    proxy.rules = [on(Answer(429, "TooManyRequests", retry_after_s=1), "create", times=1)]
    through(proxy, "create", "--validate=false", "-f", "-", stdin=config_map("later"))
    proxy.clear()
    assert "later" in names(api_server)
    assert [r.code for r in proxy.records if r.call.verb == "create"][-2:] == [429, 201]


def first_line(proxy: Proxy, server: ApiServer) -> dict[str, Any]:
    """The first thing that a watch says; TimeoutError when it says nothing for two seconds."""
    tls = urllib.request.HTTPSHandler(context=admin_tls(server))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
    url = f"{proxy.url}/api/v1/namespaces/{NAMESPACE}/configmaps?watch=true"
    with opener.open(url, timeout=2) as answer:
        return json.loads(answer.readline())


def test_watches_expire_and_fall_silent(proxy: Proxy, api_server: ApiServer):
    assert first_line(proxy, api_server)["type"] == "ADDED"
    proxy.rules = [on(Expired(), "watch")]
    assert first_line(proxy, api_server)["object"]["code"] == 410
    proxy.rules = [on(Silent(), "watch")]
    with pytest.raises(TimeoutError):
        first_line(proxy, api_server)
    proxy.clear()


@pytest.fixture(scope="module")
def simulator(api_server: ApiServer) -> Iterator[Simulator]:
    api_server.apply("{apiVersion: v1, kind: Namespace, metadata: {name: simulated}}")
    made = Simulator(api_server)
    yield made
    made.stop()


@pytest.fixture
def cluster(simulator: Simulator, api_server: ApiServer, request: pytest.FixtureRequest) -> str:
    """A RayCluster with two workers that is ready."""
    name = f"c-{request.node.name.removeprefix('test_').replace('_', '-')[:18].rstrip('-')}"
    body = job(name, "simulated")
    api_server.kubectl("create", "-f", "-", stdin=json.dumps(body))
    uid = json.loads(api_server.get(f"{JOBS.format('simulated')}/{name}"))["metadata"]["uid"]
    for child in rendered(body, uid).children(name):
        api_server.kubectl("create", "-f", "-", stdin=json.dumps(child))
    wait_for(lambda: state(api_server, name).get("state") == "ready", f"{name} was ready", 30)
    wait_for(lambda: ("simulated", name) in simulator.heads.heads, "its head was up", 10)
    return name


def state(server: ApiServer, name: str) -> dict[str, Any]:
    path = f"/apis/ray.io/v1/namespaces/simulated/rayclusters/{name}"
    return json.loads(server.get(path)).get("status") or {}


def pods(server: ApiServer, name: str) -> list[dict[str, Any]]:
    path = f"/api/v1/namespaces/simulated/pods?labelSelector=ray.io/cluster={name}"
    return json.loads(server.get(path))["items"]


def ask(
    simulator: Simulator, cluster: str, path: str, body: Any = None, token: str = TOKEN
) -> tuple[int, Any]:
    url = f"{simulator.url}/simulated/{SERVICE}{cluster}/{path}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


def submit(simulator: Simulator, cluster: str, name: str, *flags: str) -> tuple[int, Any]:
    entrypoint = " ".join(["python -m msa_workloads.driver", *flags])
    body = {"submission_id": name, "entrypoint": entrypoint}
    return ask(simulator, cluster, "8265/api/jobs/", body)


def test_a_cluster_comes_up_and_is_secret(
    simulator: Simulator, api_server: ApiServer, cluster: str
):
    kinds = sorted(p["metadata"]["labels"]["ray.io/node-type"] for p in pods(api_server, cluster))
    assert kinds == ["head", "worker", "worker"]
    secret = json.loads(api_server.get(f"/api/v1/namespaces/simulated/secrets/{cluster}"))
    assert base64.b64decode(secret["data"]["auth_token"]).decode() == TOKEN
    assert ask(simulator, cluster, "8265/api/jobs/", token="another")[0] == 401
    assert ask(simulator, cluster, "8265/api/jobs/") == (200, [])


def test_runs_move_on_when_looked_at(simulator: Simulator, cluster: str):
    assert submit(simulator, cluster, "a-1")[0] == 200
    assert submit(simulator, cluster, "a-1")[0] == 500
    seen = [ask(simulator, cluster, "8267/progress")[1] for _ in range(4)]
    assert [s["step"] for s in seen] == [5, 10, 15, 20]
    assert seen[-1]["state"] == "finished" and seen[-1]["checkpointStep"] == 20
    assert ask(simulator, cluster, "8265/api/jobs/a-1")[1]["status"] == "SUCCEEDED"
    with pytest.raises(OSError):
        ask(simulator, cluster, "8267/progress")
    assert simulator.violations == []


def test_a_drained_run_resumes_where_it_was(simulator: Simulator, cluster: str):
    submit(simulator, cluster, "b-1")
    assert ask(simulator, cluster, "8267/progress")[1]["step"] == 5
    assert ask(simulator, cluster, "8267/drain", {})[0] == 202
    assert ask(simulator, cluster, "8267/progress")[1]["drained"]
    assert ask(simulator, cluster, "8265/api/jobs/b-1")[1]["driver_exit_code"] == 75
    submit(simulator, cluster, "b-2", "--resume")
    assert ask(simulator, cluster, "8267/progress")[1]["step"] == 10
    assert simulator.violations == []


def test_what_must_not_be_is_noticed(simulator: Simulator, cluster: str):
    submit(simulator, cluster, "d-1")
    ask(simulator, cluster, "8267/progress")
    submit(simulator, cluster, "d-2")
    noticed = simulator.violations[:]
    simulator.violations.clear()
    assert len(noticed) == 2
    assert "while ['d-1']" in noticed[0] and "with a checkpoint of 5" in noticed[1]


def test_a_pod_that_goes_is_replaced_and_its_run_ends(
    simulator: Simulator, api_server: ApiServer, cluster: str
):
    submit(simulator, cluster, "e-1")
    gone = simulator.delete_pod("simulated", cluster, "worker")

    def replaced() -> bool:
        names = {p["metadata"]["name"] for p in pods(api_server, cluster)}
        return gone not in names and state(api_server, cluster).get("readyWorkerReplicas") == 2

    wait_for(replaced, "the worker was replaced", 20)
    assert ask(simulator, cluster, "8265/api/jobs/e-1")[1]["status"] == "FAILED"
    before = simulator.heads.heads["simulated", cluster].identity
    simulator.restart_head("simulated", cluster)

    def another() -> bool:
        head = simulator.heads.heads.get(("simulated", cluster))
        return head is not None and head.identity != before

    wait_for(another, "the head was another", 20)
    assert ask(simulator, cluster, "8265/api/jobs/") == (200, [])


def test_pods_of_a_lost_node_stay_until_they_are_forced(
    simulator: Simulator, api_server: ApiServer, cluster: str
):
    simulator.lose_node("sim-2")
    simulator.forget_node("sim-2")
    try:
        stuck = [p for p in pods(api_server, cluster) if p["spec"]["nodeName"] == "sim-2"]
        assert stuck and all(p["metadata"].get("deletionTimestamp") for p in stuck)
        for pod in stuck:
            api_server.kubectl("delete", "pod", pod["metadata"]["name"], "-nsimulated",
                               "--grace-period=0", "--force")  # fmt: skip

        def whole() -> bool:
            nodes = {p["spec"].get("nodeName") for p in pods(api_server, cluster)}
            return nodes == {"sim-1"} and state(api_server, cluster)["readyWorkerReplicas"] == 2

        wait_for(whole, "the cluster was whole on the other node", 20)
    finally:
        simulator.add_node("sim-2")


def test_nothing_is_left_of_a_deleted_cluster(
    simulator: Simulator, api_server: ApiServer, cluster: str
):
    api_server.kubectl("delete", "longcontextjob", cluster, "-nsimulated")
    wait_for(lambda: not pods(api_server, cluster), "its pods were gone", 30)
    with pytest.raises(OSError):
        ask(simulator, cluster, "8265/api/jobs/")
    with pytest.raises(OSError, match="404"):
        api_server.get(f"/api/v1/namespaces/simulated/secrets/{cluster}")

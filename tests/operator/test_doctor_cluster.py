"""msa doctor --cluster on a real API server: each thing missing, then there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from e2e import charts
from e2e.apiserver import ApiServer
from e2e.certificates import kubeconfig
from e2e.fixtures import needs_helm, not_here
from e2e.paths import REPOSITORY, Unavailable
from e2e.process import free_ports, wait_for
from msa_operator import crd
from msa_operator.cli import cli
from test_chart_install import kuberay

CRDS = REPOSITORY / "manifests/crds"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    needs_helm()
    try:
        started = ApiServer.start(
            tmp_path_factory.mktemp("doctor"), controllers=("namespace-controller",)
        )
    except Unavailable as reason:
        not_here(reason)
        raise
    try:
        started.kubectl("create", "namespace", "team-a")
        yield started
    finally:
        started.stop()


def run(access: Path, *arguments: str, namespace: str = "team-a") -> Result:
    command = ["doctor", "--cluster", "--kubeconfig", str(access), "--namespace", namespace]
    return CliRunner().invoke(cli, [*command, *arguments])


def look(access: Path, namespace: str = "team-a") -> dict[str, dict[str, Any]]:
    """Findings by what was looked at; each that is not ok says what to do."""
    done = run(access, "--output", "json", namespace=namespace)
    told = json.loads(done.output)
    assert done.exit_code == (0 if told["ok"] else 1), done.output
    for finding in told["findings"]:
        assert finding["state"] == "ok" or finding["action"], finding
    return {f["check"]: f for f in told["findings"]}


def state(found: dict[str, dict[str, Any]], check: str) -> tuple[str, str]:
    return found[check]["state"], found[check]["found"]


def patch_status(
    server: ApiServer, kind: str, name: str, status: Any, namespace: str = ""
) -> None:
    where = ["-n", namespace] if namespace else []
    body = json.dumps({"status": status})
    server.kubectl("patch", kind, name, *where, "--subresource=status", "--type=merge", "-p", body)


def test_an_empty_cluster_lacks_everything_and_says_what_to_do(server: ApiServer):
    found = look(server.kubeconfig)
    assert state(found, "API server")[0] == "ok"
    assert "does not know" in found["LongContextJob"]["found"]
    assert found["LongContextJob"]["action"].endswith("charts/flash-msa-crds")
    assert state(found, "operator") == ("failed", "no Deployment of it is there")
    assert "does not know RayCluster" in found["KubeRay"]["found"]
    assert state(found, "nodes")[0] == "failed"
    assert state(found, "policy enforcement")[0] == "unknown"
    text = run(server.kubeconfig)
    assert text.exit_code == 1 and "failed" in text.output


def test_custom_resources_are_compared_with_those_of_this_command(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
):
    server.apply(CRDS)
    found = look(server.kubeconfig)
    for kind in ("LongContextJob", "HardwareProfile"):
        assert state(found, kind) == ("ok", "v1alpha1, current")
    given = crd.definitions

    def changed(change: Any) -> Any:
        found = given()
        (version,) = found["longcontextjobs.yaml"]["spec"]["versions"]
        change(version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])
        return found

    cases = [
        (lambda spec: spec.__setitem__("newer", {"type": "string"}), "failed", "lacks spec.newer"),
        (lambda spec: spec.pop("queue"), "warning", "also has spec.queue"),
        (lambda spec: spec["suspend"].__setitem__("description", "x"), "warning", "other rules"),
    ]
    for change, expected, told in cases:
        monkeypatch.setattr(crd, "definitions", lambda c=change: changed(c))
        found = look(server.kubeconfig)
        assert state(found, "LongContextJob")[0] == expected
        assert told in found["LongContextJob"]["found"]


def deployment(name: str, labels: dict[str, str], image: str, **status: Any) -> dict[str, Any]:
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": image}]}}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name, "namespace": "kuberay", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": pod}, "status": status,
    }  # fmt: skip


def test_kuberay_is_old_then_new_then_running(server: ApiServer):
    kuberay(server, guarded=False)
    assert "older than 1.5.1" in look(server.kubeconfig)["KubeRay"]["found"]
    kuberay(server, guarded=True)
    found = look(server.kubeconfig)
    assert state(found, "KubeRay")[0] == "ok"
    assert state(found, "KubeRay operator")[0] == "warning"
    server.kubectl("create", "namespace", "kuberay")
    image = "example.org/kuberay/operator:v1.6.0"
    made = deployment("kuberay-operator", {"app.kubernetes.io/name": "kuberay-operator"}, image)
    server.apply(json.dumps(made))
    assert state(look(server.kubeconfig), "KubeRay operator") == (
        "failed",
        f"{image} is not ready",
    )
    ready = {"replicas": 1, "readyReplicas": 1, "updatedReplicas": 1, "availableReplicas": 1}
    patch_status(server, "deployment", "kuberay-operator", ready, "kuberay")
    assert state(look(server.kubeconfig), "KubeRay operator") == ("ok", f"{image}, ready")


def install(server: ApiServer, *arguments: str) -> None:
    text = charts.template(charts.OPERATOR, *arguments)
    server.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)


def test_the_operator_is_found_with_its_version_and_settings(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
):
    server.kubectl("create", "namespace", charts.NAMESPACE)
    install(server)
    where = f"{charts.NAMESPACE}/flash-msa-operator 0.1.0.dev0"
    found = look(server.kubeconfig)
    assert state(found, "operator") == ("failed", f"{where} is not ready: it has no pod")
    assert state(found, "default storage") == ("warning", "none is installed")
    pod = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "operator-1", "namespace": charts.NAMESPACE,
                     "labels": {"app.kubernetes.io/name": "flash-msa-operator"}},
        "spec": {"containers": [{"name": "operator", "image": "gone"}]},
    }  # fmt: skip
    server.apply(json.dumps(pod))
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    status = {"name": "operator", "image": "gone", "imageID": "", "ready": False,
              "restartCount": 0, "state": {"waiting": waiting}}  # fmt: skip
    patch_status(server, "pod", "operator-1", {"containerStatuses": [status]}, charts.NAMESPACE)
    found = look(server.kubeconfig)
    assert found["operator"]["found"].endswith("not ready: ImagePullBackOff no such image")
    ready = {"replicas": 1, "readyReplicas": 1, "updatedReplicas": 1, "availableReplicas": 1}
    patch_status(server, "deployment", "flash-msa-operator", ready, charts.NAMESPACE)
    assert state(look(server.kubeconfig), "operator") == ("ok", f"{where}, ready")
    install(
        server, "--set=settings.namespaces={team-a}", "--set=replicas=0", "--set=rbac.create=false"
    )
    assert "scaled to 0" in look(server.kubeconfig)["operator"]["found"]
    assert (
        "none watches namespace default" in look(server.kubeconfig, "default")["operator"]["found"]
    )
    install(server)


def test_default_storage_has_to_be_a_claim_that_all_pods_can_write(server: ApiServer):
    install(server, "--set=settings.checkpoint.uri=s3://bucket/runs")
    found = look(server.kubeconfig)
    assert state(found, "default storage") == ("ok", "s3://bucket/runs/team-a/<job>-<id>")
    install(server, "--set=settings.checkpoint.claim=shared")
    assert "there is no claim shared" in look(server.kubeconfig)["default storage"]["found"]

    for name, mode, expected in (("once", "ReadWriteOnce", "failed"),
                                 ("many", "ReadWriteMany", "ok")):  # fmt: skip
        server.apply(json.dumps({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": "team-a"},
            "spec": {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}},
        }))  # fmt: skip
        install(server, f"--set=settings.checkpoint.claim={name}")
        assert state(look(server.kubeconfig), "default storage")[0] == expected
    patch_status(server, "pvc", "many", {"phase": "Lost"}, "team-a")
    assert state(look(server.kubeconfig), "default storage")[0] == "failed"
    install(server)


def node(server: ApiServer, name: str, machine: str, **allocatable: str) -> None:
    labels = {"node.kubernetes.io/instance-type": machine}
    made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    server.apply(json.dumps(made))
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    patch_status(server, "node", name, {"conditions": [ready], "allocatable": allocatable})


def test_devices_that_no_plugin_offers_are_missed(server: ApiServer):
    node(server, "plain", "m7i.large", cpu="2")
    found = look(server.kubeconfig)
    assert state(found, "nodes")[0] == "ok" and "0 GPUs" in found["nodes"]["found"]
    node(server, "gpu", "p5.48xlarge", cpu="192")
    found = look(server.kubeconfig)
    assert state(found, "GPU plugin") == ("failed", "no nvidia.com/gpu on gpu")
    assert state(found, "EFA plugin")[0] == "warning"
    node(server, "gpu", "p5.48xlarge", **{"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"})
    found = look(server.kubeconfig)
    assert "GPU plugin" not in found and "EFA plugin" not in found
    assert found["nodes"]["found"] == "2 of 2 ready, 8 GPUs"


def test_a_policy_in_the_way_is_named(server: ApiServer):
    def policy(spec: dict[str, Any]) -> None:
        server.apply(json.dumps({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": "default-deny", "namespace": "team-a"}, "spec": spec,
        }))  # fmt: skip

    policy({"podSelector": {}, "policyTypes": ["Ingress"]})
    # A job opens this for its own pods.
    assert state(look(server.kubeconfig), "network policies")[0] == "ok"
    policy({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]})
    found = look(server.kubeconfig)["network policies"]
    assert found["state"] == "failed" and "team-a/default-deny" in found["found"]
    server.kubectl("delete", "networkpolicy", "default-deny", "-n", "team-a")


def test_a_user_with_few_rights_learns_which_and_what_could_not_be_seen(
    server: ApiServer, tmp_path: Path
):
    server.authority.sign("jane", "jane")
    access = kubeconfig(tmp_path / "jane.conf", server.authority.folder, "jane", server.url)
    found = look(access)
    assert "you may not" in found["your rights"]["found"]
    assert "cluster role edit" in found["your rights"]["action"]
    text = run(access).output
    assert "create, get, list, watch, patch, delete longcontextjobs" in " ".join(text.split())
    for check in ("LongContextJob", "KubeRay", "operator", "nodes", "network policies"):
        assert state(found, check)[0] == "unknown", check
    server.apply(json.dumps({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": {"name": "jane", "namespace": "team-a"},
        "rules": [{"apiGroups": [""], "resources": ["pods", "pods/log", "events"],
                   "verbs": ["get", "list"]}],
    }))  # fmt: skip
    where = ["--user=jane", "--namespace=team-a"]
    server.kubectl("create", "rolebinding", "jane", "--role=jane", *where)
    # Elsewhere these are parts of the cluster's own edit and view, by a controller not here.
    role = f"flash-msa-operator:{charts.NAMESPACE}"
    for part in ("edit", "view"):
        given = f"--clusterrole={role}:{part}"
        server.kubectl("create", "rolebinding", f"jane-{part}", given, *where)
    wait_for(lambda: state(look(access), "your rights")[0] == "ok", "the roles were in force", 20)
    assert state(look(access, "default"), "your rights")[0] == "failed"


def test_no_server_and_no_login_are_told_apart(server: ApiServer, tmp_path: Path):
    (port,) = free_ports(1)
    gone = kubeconfig(tmp_path / "gone.conf", server.authority.folder, "admin",
                      f"https://127.0.0.1:{port}")  # fmt: skip
    found = look(gone)
    assert list(found) == ["API server"] and "does not answer" in found["API server"]["found"]
    config = json.loads(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "a",
        "clusters": [{"name": "a", "cluster": {
            "server": server.url, "certificate-authority": str(server.authority.ca)}}],
        "users": [{"name": "a", "user": {"token": "expired"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    }))  # fmt: skip
    stranger = tmp_path / "stranger.conf"
    stranger.write_text(json.dumps(config))
    found = look(stranger)
    assert "does not know you" in found["API server"]["found"]


def test_nothing_is_changed(server: ApiServer):
    def versions() -> str:
        kinds = "crd,deployment,configmap,node,networkpolicy,role,pvc,pod"
        columns = "custom-columns=n:.metadata.name,v:.metadata.resourceVersion"
        return server.kubectl("get", kinds, "--all-namespaces", "-o", columns)

    before = versions()
    look(server.kubeconfig)
    assert versions() == before

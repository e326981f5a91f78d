"""The charts on a real API server: install, upgrade, uninstall, and the rights that result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e import charts
from e2e.apiserver import ApiServer
from e2e.fixtures import needs_helm, not_here
from e2e.paths import REPOSITORY, Unavailable
from e2e.process import wait_for
from kubernetes import client, config
from msa_operator import rbac
from msa_operator.api import parse_job
from msa_operator.reconcile import desired, lifecycle, status
from msa_workloads.runspec import RunSpec

FIRST = Path(__file__).parent / "golden" / "first-release"
"""What the first release of the charts rendered to, and objects of a job that its operator made.
Never changed again: it is what users have."""
ACCOUNT = f"system:serviceaccount:{charts.NAMESPACE}:flash-msa-operator"
NAMESPACE = [f"--namespace={charts.NAMESPACE}", "--create-namespace"]
TEAMS = ("team-a", "team-b", "team-c")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server of this module's own: what helm installs must not exist before."""
    needs_helm()
    try:
        started = ApiServer.start(
            tmp_path_factory.mktemp("charts"),
            controllers=("garbage-collector-controller", "namespace-controller"),
        )
    except Unavailable as reason:
        not_here(reason)
        raise
    try:
        for team in TEAMS:
            started.kubectl("create", "namespace", team)
        yield started
    finally:
        started.stop()


@pytest.fixture
def helm(server: ApiServer) -> Iterator[Any]:
    """helm as administrator; whatever a test installs is gone after it, definitions too."""
    yield lambda *arguments: charts.helm(*arguments, kubeconfig=server.kubeconfig)
    for release in json.loads(
        charts.helm("list", "-A", "-o", "json", kubeconfig=server.kubeconfig)
    ):
        charts.helm("uninstall", release["name"], "-n", release["namespace"],
                    kubeconfig=server.kubeconfig)  # fmt: skip
    # The collector looks for new kinds every half minute only: the next test does not wait for it.
    ours = ["--namespace=team-a", "--selector=flashmsa.dev/job"]
    server.kubectl("delete", "configmaps,networkpolicies", *ours)
    definitions = server.kubectl("get", "crd", "-o", "name").split()
    if definitions:
        server.kubectl("delete", "--wait=true", *definitions)


def install(helm: Any, chart: Path | str, *arguments: str) -> str:
    """Installs or upgrades under the chart's own name; what helm tells the user."""
    name = Path(chart).name
    return helm("upgrade", "--install", name, str(chart), *NAMESPACE, *arguments)


def kuberay(server: ApiServer, *, guarded: bool) -> None:
    """A RayCluster definition as KubeRay's is, in what matters here."""
    spec: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if guarded:
        spec["properties"] = {
            "authOptions": {"type": "object", "properties": {"mode": {"type": "string"}}}
        }
    schema = {"type": "object", "properties": {"spec": spec}}
    version = {"name": "v1", "served": True, "storage": True,
               "schema": {"openAPIV3Schema": schema}, "subresources": {"status": {}}}  # fmt: skip
    names = {"kind": "RayCluster", "plural": "rayclusters", "singular": "raycluster"}
    server.apply(json.dumps({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "rayclusters.ray.io"},
        "spec": {"group": "ray.io", "scope": "Namespaced", "names": names, "versions": [version]},
    }))  # fmt: skip
    served(server, "ray.io/v1")


def served(server: ApiServer, group_version: str) -> None:
    """Returns once the API server answers for that group."""

    def answers() -> bool:
        try:
            return bool(json.loads(server.get(f"/apis/{group_version}"))["resources"])
        except OSError:
            return False

    wait_for(answers, f"{group_version} was served", 30)


def test_notes_say_what_is_missing(server: ApiServer, helm: Any):
    told = install(helm, charts.OPERATOR)
    assert "does not know LongContextJob" in told and "KubeRay is missing" in told
    assert "No default storage" in told
    told = install(helm, charts.CRDS)
    assert "stay when this release is" in told
    served(server, "flashmsa.dev/v1alpha1")
    kuberay(server, guarded=False)
    told = install(helm, charts.OPERATOR, "--set=settings.checkpoint.claim=shared")
    assert "older than 1.5.1" in told
    assert "does not know" not in told and "No default storage" not in told
    kuberay(server, guarded=True)
    told = install(helm, charts.OPERATOR)
    assert "PROBLEM" not in told


def may(server: ApiServer, verb: str, group: str, resource: str, namespace: str, name: str = ""):
    """Whether the API server would let the operator's account do that."""
    plain, _, sub = resource.partition("/")
    review = client.V1SubjectAccessReview(
        spec=client.V1SubjectAccessReviewSpec(
            user=ACCOUNT,
            resource_attributes=client.V1ResourceAttributes(
                verb=verb, group=group, resource=plain, subresource=sub or None,
                namespace=namespace or None, name=name or None,
            ),
        )
    )  # fmt: skip
    api = config.new_client_from_config(str(server.kubeconfig))
    with api:
        return client.AuthorizationV1Api(api).create_subject_access_review(review).status.allowed


def rights(server: ApiServer, scope: rbac.Scope, namespace: str) -> list[bool]:
    return [
        may(server, verb, rule.group, resource, namespace, name)
        for rule in rbac.RULES if rule.scope == scope
        for verb in rule.verbs for resource in rule.resources for name in rule.names or ("",)
    ]  # fmt: skip


FORBIDDEN = [
    ("list", "", "secrets"), ("watch", "", "secrets"), ("create", "", "secrets"),
    ("create", "", "pods"), ("create", "", "pods/exec"), ("patch", "", "pods"),
    ("patch", "", "configmaps"), ("update", "", "configmaps"), ("delete", "", "nodes"),
    ("create", "", "serviceaccounts/token"), ("delete", "", "namespaces"),
    ("create", "rbac.authorization.k8s.io", "rolebindings"), ("patch", "apps", "deployments"),
    ("create", "flashmsa.dev", "longcontextjobs"), ("deletecollection", "ray.io", "rayclusters"),
]  # fmt: skip


def test_the_operator_may_do_what_the_table_says_and_no_more(server: ApiServer, helm: Any):
    install(helm, charts.OPERATOR)
    wait_for(lambda: may(server, "list", "", "nodes", ""), "the roles were in force", 20)
    assert all(rights(server, "jobs", "team-a")) and all(rights(server, "jobs", "team-c"))
    assert all(rights(server, "cluster", "")) and all(rights(server, "own", charts.NAMESPACE))
    assert not any(rights(server, "own", "team-a"))
    for verb, group, resource in FORBIDDEN:
        for namespace in ("team-a", charts.NAMESPACE):
            assert not may(server, verb, group, resource, namespace), (verb, resource)
    assert not may(server, "update", "coordination.k8s.io", "leases", charts.NAMESPACE, "other")


def test_namespaces_that_are_not_listed_stay_closed(server: ApiServer, helm: Any):
    install(helm, charts.OPERATOR, "--set=settings.namespaces={team-a,team-b}")
    wait_for(lambda: may(server, "list", "", "pods", "team-b"), "the roles were in force", 20)
    assert all(rights(server, "jobs", "team-a"))
    assert not any(rights(server, "jobs", "team-c"))
    assert not may(server, "list", "flashmsa.dev", "longcontextjobs", "")
    # From a list to the whole cluster and back: no role of before is left.
    install(helm, charts.OPERATOR, "--set-json=settings.namespaces=[]")
    wait_for(lambda: may(server, "list", "", "pods", "team-c"), "the roles were in force", 20)
    install(helm, charts.OPERATOR, "--set=settings.namespaces={team-b}")
    wait_for(lambda: not may(server, "list", "", "pods", "team-c"), "the roles were gone", 20)
    assert not any(rights(server, "jobs", "team-a")) and all(rights(server, "jobs", "team-b"))


def test_everything_is_valid_to_the_api_server(server: ApiServer, helm: Any):
    # Strictly: a field that does not exist is an error here, and is dropped in silence elsewhere.
    del helm
    command = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"]
    for arguments in (
        [],
        ["--set=replicas=2,priorityClassName=system-node-critical,settings.metricsNamespace=m",
         "--set=settings.namespaces={team-a}", "--set=tolerations[0].operator=Exists",
         "--set=monitoring.dashboard.enabled=true"],
    ):  # fmt: skip
        text = charts.template(charts.OPERATOR, *arguments, namespace="team-a")
        server.kubectl(*command, stdin=text)


def test_plain_kubectl_installs_the_same_and_helm_takes_it_over(server: ApiServer, helm: Any):
    server.apply(REPOSITORY / "manifests/install.yaml")
    served(server, "flashmsa.dev/v1alpha1")
    wait_for(lambda: may(server, "list", "", "pods", "team-a"), "the roles were in force", 20)
    take = ["--take-ownership", "--force-conflicts"]
    install(helm, charts.CRDS, *take)
    install(helm, charts.OPERATOR, *take)
    found = json.loads(server.kubectl(
        "get", "deployment", "flash-msa-operator", "-n", charts.NAMESPACE, "-o", "json",
        "--show-managed-fields",
    ))  # fmt: skip
    # Server-side: helm says which fields are its own, and takes no other's away.
    managers = {(m["manager"], m["operation"]) for m in found["metadata"]["managedFields"]}
    assert ("helm", "Apply") in managers


def stored(folder: Path, name: str) -> Path:
    """A chart that renders to what the first release of that chart rendered to."""
    chart = folder / name
    (chart / "templates").mkdir(parents=True)
    about = {"apiVersion": "v2", "name": name, "version": "0.1.0-dev.0"}
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about))
    text = (FIRST / f"{name}.yaml").read_text()
    (chart / "templates" / "all.yaml").write_text(text.replace("{{", '{{ "{{" }}'))
    return chart


def objects(server: ApiServer) -> dict[str, Any]:
    """Everything of the team's job, as the server has it."""
    kinds = "longcontextjobs,rayclusters,configmaps,networkpolicies"
    listed = server.kubectl("get", kinds, "-n", "team-a", "-l", "!helm", "-o", "json")
    return {f"{x['kind']}/{x['metadata']['name']}": x for x in json.loads(listed)["items"]}


def make_job(server: ApiServer) -> dict[str, Any]:
    """The stored job with its children and its status, as the first operator left it running."""
    job, *children = yaml.safe_load_all((FIRST / "objects.yaml").read_text())
    made = json.loads(server.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(job)))
    for child in children:
        child["metadata"]["ownerReferences"][0]["uid"] = made["metadata"]["uid"]
        server.kubectl("create", "-f", "-", stdin=json.dumps(child))
    change = json.dumps({"status": job["status"]})
    target = ["longcontextjobs", job["metadata"]["name"], "-n", "team-a"]
    server.kubectl("patch", *target, "--subresource=status", "--type=merge", "-p", change)
    return objects(server)


def test_an_upgrade_leaves_running_jobs_alone(server: ApiServer, helm: Any, tmp_path: Path):
    kuberay(server, guarded=True)
    for name in ("flash-msa-crds", "flash-msa-operator"):
        install(helm, stored(tmp_path, name))
    served(server, "flashmsa.dev/v1alpha1")
    before = make_job(server)
    assert {key.split("/")[0] for key in before} >= {
        "LongContextJob", "RayCluster", "ConfigMap", "NetworkPolicy"
    }  # fmt: skip
    for chart in (charts.CRDS, charts.OPERATOR):
        install(helm, chart)
    # To the resourceVersion: nobody has written any of them. Fields that came later are read with
    # their defaults.
    (job,) = [x for key, x in before.items() if key.startswith("LongContextJob")]
    job["spec"]["attention"]["backend"] = "auto"
    assert objects(server) == before
    # The new operator goes on from what is there.
    intent = status.read(job["status"])
    assert intent.phase == "Running" and intent.attempt is not None
    # Hashes of the parts that have such a field are others, as the test below knows.
    assert {k for k, _ in {*intent.accepted} ^ {*lifecycle.parts(parse_job(job).spec)}} == {
        "attention"
    }
    (held,) = [x for x in before.values() if desired.RUNSPEC in x.get("data", {})]
    assert RunSpec.from_json(held["data"][desired.RUNSPEC]).recovery.owner == "operator"
    accepted = {"metadata": {"name": "small"}, **json.loads(held["data"][desired.JOB])}
    assert parse_job(accepted).spec == parse_job(job).spec
    owner = desired.Owner("small", "team-a", job["metadata"]["uid"])
    record = desired.from_record(owner, held["data"])
    (cluster,) = [x for key, x in before.items() if key.startswith("RayCluster")]
    assert record.children(intent.cluster)[-1]["spec"] == cluster["spec"]
    # An edit elsewhere does not look like one of the field that the stored object lacks.
    change = ["patch", "longcontextjobs", "small", "-n", "team-a", "--type=merge", "-p"]
    server.kubectl(*change, json.dumps({"spec": {"training": {"maxSteps": 101}}}))


def test_uninstalling_leaves_jobs_running_and_installing_again_finds_them(
    server: ApiServer, helm: Any
):
    kuberay(server, guarded=True)
    for chart in (charts.CRDS, charts.OPERATOR):
        install(helm, chart)
    served(server, "flashmsa.dev/v1alpha1")
    before = make_job(server)
    for release in ("flash-msa-operator", "flash-msa-crds"):
        helm("uninstall", release, "-n", charts.NAMESPACE)
    left = server.kubectl("get", "deployment,configmap,role,service,networkpolicy", "-o", "name",
                          "-n", charts.NAMESPACE)  # fmt: skip
    assert set(left.split()) <= {"configmap/kube-root-ca.crt"}
    assert not may(server, "list", "", "pods", "team-a")
    assert objects(server) == before
    for chart in (charts.CRDS, charts.OPERATOR):
        install(helm, chart)
    assert objects(server) == before
    # Nothing is stuck: without an operator, a job and its children go.
    server.kubectl("delete", "longcontextjobs", "--all", "-n", "team-a", "--timeout=30s")
    wait_for(lambda: not any("/small" in key for key in objects(server)), "its children went", 90)


def test_who_may_edit_may_handle_jobs(server: ApiServer, helm: Any):
    install(helm, charts.OPERATOR)
    for role, verbs in {"edit": {"create", "delete", "patch"}, "view": {"get", "list"}}.items():
        found = json.loads(server.kubectl(
            "get", "clusterrole", f"flash-msa-operator:{charts.NAMESPACE}:{role}", "-o", "json"
        ))  # fmt: skip
        assert verbs <= {v for rule in found["rules"] for v in rule["verbs"]}
        assert found["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{role}"]

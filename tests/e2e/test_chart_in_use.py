"""The operator as its image and its chart start it: the environment of its lock, the rights that
helm made, one namespace only.

A real API server, simulated pods: what is tested is the installation, not the training.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from msa_operator import rbac
from prometheus_client.parser import text_string_to_metric_families

from e2e import charts
from e2e.apiserver import ApiServer
from e2e.faults import definitions
from e2e.faults.simulator import Simulator
from e2e.faults.world import World
from e2e.fixtures import needs_helm, not_here
from e2e.paths import REPOSITORY, Unavailable
from e2e.process import Process, free_ports, run, spawn, wait_for

TEAM = "team-a"
VERBS = {"GET": "get", "LIST": "list", "CREATE": "create", "PATCH": "patch", "PUT": "update",
         "DELETE": "delete", "DRYRUN": "create"}  # fmt: skip


@dataclass
class Running:
    """The operator's process and what it serves."""

    process: Process
    port: int
    world: World

    def get(self, path: str) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return answer.read().decode()

    def ready(self) -> bool:
        try:
            return self.get("/readyz") is not None
        except OSError:
            return False

    def samples(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def used(self) -> set[tuple[str, str]]:
        """Verbs and resources of the calls that were let through."""
        calls = self.samples()["msa_operator_api_requests_total"]
        return {(VERBS[c["verb"]], c["resource"]) for c, _ in calls if c["code"] != "403"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    needs_helm()
    folder = tmp_path_factory.mktemp("chart-in-use")
    try:
        server = ApiServer.start(
            folder, controllers=("garbage-collector-controller", "namespace-controller")
        )
        definitions.install(server)
    except Unavailable as reason:
        not_here(reason)
        raise
    simulator = Simulator(server)
    operator: Process | None = None
    try:
        world = World(server, simulator, TEAM)
        given = [
            f"--set=settings.namespaces={{{TEAM}}}",
            "--set=rbac.clusterRead=false,rbac.aggregate=false",
            "--set=settings.checkpoint.uri=s3://bucket/runs",
            # A run moves on when it is looked at.
            "--set-json=settings.progressSeconds=0.5",
        ]
        where = [f"--namespace={charts.NAMESPACE}", "--create-namespace"]
        charts.helm("install", "flash-msa-operator", str(charts.OPERATOR), *where, *given,
                    kubeconfig=server.kubeconfig)  # fmt: skip
        environment = installed(folder / "image")
        operator, port = start(server, folder, simulator.heads_url, environment)
        found = Running(operator, port, world)
        wait_for(found.ready, "the operator was ready", 90, needs=[operator], log=operator.log)
        yield found
    finally:
        if operator is not None:
            operator.stop(30)
        simulator.stop()
        server.stop()


def installed(folder: Path) -> Path:
    """The bin folder of what docker/operator/Dockerfile makes: its lock, and the wheel."""
    uv = [sys.executable, "-m", "uv", "--quiet"]
    python = folder / "venv" / "bin" / "python"
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    run(build, cwd=REPOSITORY, timeout_s=120)
    run([*uv, "venv", "--python", sys.executable, str(folder / "venv")])
    into = ["--python", str(python)]
    lock = str(REPOSITORY / "requirements" / "operator.lock")
    run([*uv, "pip", "sync", *into, "--require-hashes", lock], timeout_s=300)
    (wheel,) = folder.glob("*.whl")
    run([*uv, "pip", "install", *into, "--no-deps", str(wheel)])
    return python.parent


def start(server: ApiServer, folder: Path, heads: str, programs: Path) -> tuple[Process, int]:
    """The process of the chart's Deployment: its command, its settings, its account."""

    def object_of(kind: str) -> dict[str, Any]:
        where = [f"--namespace={charts.NAMESPACE}", "--output=json"]
        return json.loads(server.kubectl("get", kind, "flash-msa-operator", *where))

    pod = object_of("deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    account = f"--namespace={charts.NAMESPACE}"
    token = server.kubectl("create", "token", pod["serviceAccountName"], account).strip()
    access = folder / "operator.conf"
    access.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "operator",
        "clusters": [{"name": "here", "cluster": {
            "server": server.url, "certificate-authority": str(server.authority.ca)}}],
        "users": [{"name": "operator", "user": {"token": token}}],
        "contexts": [{"name": "operator", "context": {"cluster": "here", "user": "operator"}}],
    }))  # fmt: skip
    settings = folder / "settings.yaml"
    settings.write_text(object_of("configmap")["data"]["settings.yaml"])
    mounted = "--settings=/etc/flash-msa-operator/settings.yaml"
    assert mounted in container["args"]
    arguments = [a for a in container["args"] if a != mounted]
    (port,) = free_ports(1)
    ours = [f"--settings={settings}", f"--kubeconfig={access}", f"--port={port}",
            f"--head-address={heads}"]  # fmt: skip
    environment = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    here = {"POD_NAME": "operator-0", "POD_NAMESPACE": charts.NAMESPACE, "OMP_NUM_THREADS": "1"}
    env = [
        f"{k}={v}" for k, v in {**environment, **here, "PATH": f"{programs}:/usr/bin:/bin"}.items()
    ]
    command = ["env", "-i", *env, *container["command"], *arguments, *ours]
    return spawn("operator", command, folder / "operator.log", with_parent=True), port


def test_a_job_completes_with_nothing_but_the_charts_rights(running: Running):
    world = running.world
    world.create("small", {"cleanup.ttl": "5s"})
    wait_for(lambda: world.job("small") is None, "it was complete and its ttl had passed", 120)
    wait_for(lambda: ("update", "leases") in running.used(), "the Lease was renewed", 30)
    found = running.samples()
    ended = {"namespace": TEAM, "reason": "Succeeded"}
    assert found["msa_job_attempts_ended_total"] == [(ended, 1.0)]
    calls = found["msa_operator_api_requests_total"]
    granted = {
        (verb, resource)
        for rule in rbac.RULES if rule.scope != "cluster"
        for verb in rule.verbs for resource in rule.resources
    }  # fmt: skip
    used = running.used()
    assert used - {("get", "discovery")} <= granted
    # A list that was forbidden is a list less, not a stop: only what is left out is refused.
    refused = {c["resource"] for c, _ in calls if c["code"] == "403"}
    assert refused <= {"nodes", "hardwareprofiles"}
    # The other way round: what a plain run does not need is for losses and for replacements.
    assert {(v, r) for v, r in granted - used if v != "watch"} <= {
        ("delete", "pods"), ("delete", "configmaps"), ("delete", "networkpolicies"),
        ("list", "configmaps"), ("list", "networkpolicies"), ("get", "configmaps"),
        ("get", "networkpolicies"), ("update", "longcontextjobs/finalizers"),
        ("patch", "rayclusters"), ("patch", "longcontextjobs"), ("get", "rayclusters"),
        ("get", "longcontextjobs"),
    }  # fmt: skip


def test_what_is_served_is_what_dashboards_ask_for(running: Running):
    world = running.world
    world.simulator.hold = True
    try:
        world.create("seen")
        world.until("seen", "Running", 120)

        def told() -> bool:
            steps = running.samples().get("msa_job_step", ())
            return any(labels == {"namespace": TEAM, "job": "seen"} for labels, _ in steps)

        wait_for(told, "its progress was served", 60)
        found = running.samples()
    finally:
        world.simulator.hold = False
    phases = {c["phase"]: n for c, n in found["msa_jobs"] if c["namespace"] == TEAM}
    assert phases["Running"] == 1
    assert found["msa_operator_leader"] == [({}, 1.0)]
    build = found["msa_operator_build_info"]
    about = yaml.safe_load((charts.OPERATOR / "Chart.yaml").read_text())
    assert build == [({"version": about["appVersion"]}, 1.0)]
    heard = {c["resource"] for c, _ in found["msa_operator_watch_heard_timestamp_seconds"]}
    assert {"longcontextjobs", "rayclusters", "pods"} <= heard
    world.until("seen", "Complete", 120)


def test_memory_is_within_what_the_chart_requests(running: Running, record_property: Any):
    (deployment,) = [
        x for x in yaml.safe_load_all(charts.template(charts.OPERATOR))
        if x and x["kind"] == "Deployment"
    ]  # fmt: skip
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    requested = int(container["resources"]["requests"]["memory"].removesuffix("Mi"))
    resident = psutil.Process(running.process.pid).memory_info().rss / (1 << 20)
    record_property("operator_rss_mib", round(resident))
    print(f"operator: {resident:.0f} MiB resident, {requested} MiB requested")
    assert resident < requested


def test_logs_are_one_json_object_a_line_and_name_the_job(running: Running):
    assert running.process.log
    lines = [json.loads(line) for line in running.process.log.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert not [line for line in lines if line["level"] == "error"], lines

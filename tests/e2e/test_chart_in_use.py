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
USUAL = (
    f"--set=settings.namespaces={{{TEAM}}}",
    "--set=rbac.clusterRead=false,rbac.aggregate=false",
    "--set=settings.checkpoint.uri=s3://bucket/runs",
    # A run moves on when it is looked at; a successor is not waited for.
    "--set-json=settings.progressSeconds=0.2",
    '--set-json=settings.lease={"durationSeconds": 4, "renewSeconds": 3, "retrySeconds": 0.5}',
)
VERBS = {"GET": "get", "LIST": "list", "CREATE": "create", "PATCH": "patch", "PUT": "update",
         "DELETE": "delete"}  # fmt: skip


@dataclass
class Running:
    """An installation by helm, and the process that its Deployment describes."""

    server: ApiServer
    folder: Path
    world: World
    programs: Path
    """The bin folder of the operator's environment."""
    process: Process | None = None
    port: int = 0
    starts: int = 0

    def helm(self, verb: str, *arguments: str) -> str:
        release = ["flash-msa-operator", f"--namespace={charts.NAMESPACE}"]
        return charts.helm(verb, *release, *arguments, kubeconfig=self.server.kubeconfig)

    def install(self, *values: str) -> None:
        """Installs or upgrades, and starts the process anew, as the Deployment would."""
        self.stop()
        where = [str(charts.OPERATOR), "--create-namespace", "--reset-values"]
        self.helm("upgrade", "--install", *where, *USUAL, *values)
        self.start()

    def uninstall(self) -> None:
        self.stop()
        self.helm("uninstall")

    def start(self) -> None:
        (self.port,) = free_ports(1)
        self.starts += 1
        log = self.folder / f"operator-{self.starts}.log"
        self.process = spawn("operator", self._command(), log, with_parent=True)
        wait_for(self.ready, "the operator was ready", 90, needs=[self.process], log=log)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop(30)
            self.process = None

    def _command(self) -> list[str]:
        """The chart's command, arguments, environment, settings and account."""
        pod = self._installed("deployment")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        settings = self.folder / "settings.yaml"
        settings.write_text(self._installed("configmap")["data"]["settings.yaml"])
        mounted = "--settings=/etc/flash-msa-operator/settings.yaml"
        assert mounted in container["args"]
        ours = [
            f"--settings={settings}", f"--kubeconfig={self._access(pod['serviceAccountName'])}",
            f"--port={self.port}", f"--head-address={self.world.simulator.heads_url}",
        ]  # fmt: skip
        environment = {e["name"]: e["value"] for e in container["env"] if "value" in e} | {
            "POD_NAME": f"operator-{self.starts}", "POD_NAMESPACE": charts.NAMESPACE,
            "OMP_NUM_THREADS": "1", "PATH": f"{self.programs}:/usr/bin:/bin",
        }  # fmt: skip
        env = [f"{name}={value}" for name, value in environment.items()]
        arguments = [a for a in container["args"] if a != mounted]
        return ["env", "-i", *env, *container["command"], *arguments, *ours]

    def _installed(self, kind: str) -> dict[str, Any]:
        where = [f"--namespace={charts.NAMESPACE}", "--output=json"]
        return json.loads(self.server.kubectl("get", kind, "flash-msa-operator", *where))

    def _access(self, account: str) -> Path:
        """A kubeconfig with a token of that account, which has what helm granted and no more."""
        where = f"--namespace={charts.NAMESPACE}"
        token = self.server.kubectl("create", "token", account, where).strip()
        path = self.folder / "operator.conf"
        cluster = {"server": self.server.url,
                   "certificate-authority": str(self.server.authority.ca)}  # fmt: skip
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "operator",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "operator", "user": {"token": token}}],
            "contexts": [{"name": "operator", "context": {"cluster": "here", "user": "operator"}}],
        }))  # fmt: skip
        return path

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
        calls = [c for c, _ in self.samples()["msa_operator_api_requests_total"]]
        return {(_verb(c), c["resource"]) for c in calls if c["code"] != "403"}

    def lines(self) -> list[dict[str, Any]]:
        """What every process so far has logged."""
        logs = [self.folder / f"operator-{n + 1}.log" for n in range(self.starts)]
        return [json.loads(line) for log in logs for line in log.read_text().splitlines()]

    def clusters(self, name: str) -> dict[str, Any]:
        """RayClusters, ConfigMaps and policies of a job, as the server has them."""
        kinds = "rayclusters,configmaps,networkpolicies"
        where = [f"--namespace={TEAM}", f"--selector=flashmsa.dev/job={name}", "--output=json"]
        items = json.loads(self.server.kubectl("get", kinds, *where))["items"]
        return {f"{x['kind']}/{x['metadata']['name']}": x for x in items}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    needs_helm()
    folder = tmp_path_factory.mktemp("chart-in-use")
    try:
        server = definitions.serving(folder)
    except Unavailable as reason:
        not_here(reason)
        raise
    simulator = Simulator(server)
    made: Running | None = None
    try:
        world = World(server, simulator, TEAM)
        made = Running(server, folder, world, installed(folder / "image"))
        made.install()
        yield made
    finally:
        if made is not None:
            made.stop()
        simulator.stop()
        server.stop()


def _verb(call: dict[str, str]) -> str:
    """The right that a call needs: a dry run needs that of what it tries."""
    if call["verb"] == "DRYRUN":
        return "patch" if "/" in call["resource"] else "create"
    return VERBS[call["verb"]]


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


def test_upgraded_uninstalled_and_installed_again_a_run_goes_on(running: Running):
    world = running.world
    world.simulator.hold = True
    try:
        world.create("kept")
        world.until("kept", "Running", 120)
        before = running.clusters("kept")
        assert {key.split("/")[0] for key in before} == {
            "RayCluster", "ConfigMap", "NetworkPolicy"
        }  # fmt: skip
        # What new jobs would be rendered to is another thing now.
        other = ["--set=settings.image=example.org/other:2", "--set=settings.headMemory=12Gi"]
        running.install(*other)
        wait_for(lambda: running.samples()["msa_operator_leader"] == [({}, 1.0)], "it led", 60)
        wait_for(lambda: _rounds(running) >= 3, "it had looked at the job", 60)
        assert running.clusters("kept") == before
        running.uninstall()
        assert running.clusters("kept") == before
        assert world.phase("kept") == "Running" and not _finalizers(world, "kept")
        running.install(*other)
        wait_for(lambda: _rounds(running) >= 3, "it had looked at the job", 60)
        assert running.clusters("kept") == before
    finally:
        world.simulator.hold = False
    status = world.until("kept", "Complete", 120)
    (attempt,) = status["attempts"]
    assert attempt["reason"] == "Succeeded" and not world.simulator.violations


def _rounds(running: Running) -> float:
    found = running.samples().get("msa_operator_reconciles_total", [])
    return sum(value for labels, value in found if labels["result"] == "ok")


def _finalizers(world: World, name: str) -> list[str]:
    return (world.job(name) or {"metadata": {}})["metadata"].get("finalizers", [])


def test_without_an_operator_a_job_is_deleted_with_all_that_it_has(running: Running):
    world = running.world
    world.simulator.hold = True
    try:
        world.create("orphan")
        world.until("orphan", "Running", 120)
        running.uninstall()
        world.delete("orphan")
        wait_for(lambda: world.job("orphan") is None, "the job was gone", 60)
        wait_for(lambda: not running.clusters("orphan"), "its children were gone", 60)
    finally:
        world.simulator.hold = False
        running.install()


def test_memory_is_within_what_the_chart_requests(running: Running, record_property: Any):
    (deployment,) = [
        x for x in yaml.safe_load_all(charts.template(charts.OPERATOR))
        if x and x["kind"] == "Deployment"
    ]  # fmt: skip
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    requested = int(container["resources"]["requests"]["memory"].removesuffix("Mi"))
    assert running.process
    resident = psutil.Process(running.process.pid).memory_info().rss / (1 << 20)
    record_property("operator_rss_mib", round(resident))
    print(f"operator: {resident:.0f} MiB resident, {requested} MiB requested")
    assert resident < requested


def test_logs_are_one_json_object_a_line_and_name_the_job(running: Running):
    lines = running.lines()
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert not [line for line in lines if line["level"] == "error"], lines

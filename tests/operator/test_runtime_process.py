"""The process: before its kinds exist, its Lease, its health, its logs, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.apiserver import ApiServer
from e2e.faults import definitions
from e2e.faults.jobs import job
from e2e.faults.simulator import Simulator
from e2e.faults.world import World
from e2e.process import free_ports, spawn, wait_for
from msa_operator import main
from msa_operator.crd import definitions as definition
from msa_operator.runtime import act
from msa_operator.runtime.kube import LEASES, Kube, configuration
from msa_operator.runtime.lease import Lease, LeaseLost
from msa_operator.settings import Lease as Timing
from runtime_operator import SETTINGS, Running

QUICK = Timing.model_validate({"durationSeconds": 2, "renewSeconds": 1.5, "retrySeconds": 0.2})


@pytest.fixture(scope="module")
def simulator(api_server: ApiServer) -> Iterator[Simulator]:
    found = Simulator(api_server)
    yield found
    found.stop()


@pytest.fixture
def world(api_server: ApiServer, simulator: Simulator) -> World:
    simulator.hold = False
    return World(api_server, simulator, f"p-{uuid.uuid4().hex[:8]}")


def test_the_control_plane_loads_no_framework():
    code = "import msa_operator.main, sys; print([m for m in sys.modules if m.split('.')[0] in "
    code += "('torch', 'ray', 'numpy', 'triton', 'transformers')])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_it_waits_for_its_kinds_and_does_nothing_that_they_cannot_remember(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(act, "UPGRADE_S", 0.5)
    server = ApiServer.start(tmp_path)
    clusters = "/apis/ray.io/v1/namespaces/default/rayclusters"
    try:
        with Running(server, "http://127.0.0.1:9", "default") as running:
            wait_for(lambda: "longcontextjobs" in "".join(running.operator.unready()),
                     "it said what is missing", 30)  # fmt: skip
            assert running.operator.unhealthy() == []
            definitions.install(server)
            older(server)
            wait_for(lambda: running.operator.unready() == [], "it was ready", 60)
            wait_for(lambda: running.operator.lease.held, "it held the Lease", 30)
            server.kubectl("create", "-f", "-", stdin=json.dumps(job("small", "default")))
            events = "/api/v1/namespaces/default/events"
            wait_for(lambda: b"OldDefinitions" in server.get(events), "it said what to do", 30)
            assert json.loads(server.get(clusters))["items"] == []
            definitions.install(server)
            wait_for(lambda: json.loads(server.get(clusters))["items"], "it went on", 60)
        assert running.code == 0
    finally:
        server.stop()


def older(server: ApiServer) -> None:
    """The custom resource as a version had it that kept no intent."""
    made = definition()["longcontextjobs.yaml"]
    (served,) = made["spec"]["versions"]
    shown = served["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    del shown["intent"]
    server.apply(json.dumps(made))


def test_what_the_watches_miss_the_next_list_brings(
    api_server: ApiServer, simulator: Simulator, world: World
):
    with Running(api_server, simulator.heads_url, world.namespace, resyncSeconds=1) as running:
        wait_for(lambda: running.operator.lease.held, "it held the Lease", 30)
        running.operator._watches._received = lambda *_: None
        world.create("small", {"suspend": True})
        world.until("small", "Suspended", 30)
        world.delete("small")
        wait_for(lambda: not running.operator.store.known(), "it was forgotten", 30)


def test_health_names_what_is_wrong(
    api_server: ApiServer, simulator: Simulator, world: World, monkeypatch: pytest.MonkeyPatch
):
    operator = Running(api_server, simulator.heads_url, world.namespace).operator
    assert operator.unhealthy() == [] and operator.unready() == ["objects are being read"]
    monkeypatch.setattr(main, "STARVED_S", -1.0)
    operator._working = operator._synced = True
    operator.queue.add(("team", "small"))
    operator._watches._signs = {"/api/v1/pods": time.monotonic() - 1000}
    told = "; ".join(operator.unhealthy())
    for words in ("watch of /api/v1/pods has been silent", "the watches have ended",
                  "for a worker", "a round has been going on"):  # fmt: skip
        assert words in told
    operator.health.stop()


def lease(server: ApiServer, world: World, holder: str) -> Lease:
    kube = Kube(configuration(str(server.kubeconfig)))
    return Lease(kube, world.namespace, "one", holder, QUICK)


def test_the_lease_goes_to_one_and_to_the_next_when_it_is_let_go(
    api_server: ApiServer, world: World
):
    first, second = lease(api_server, world, "a"), lease(api_server, world, "b")
    first.start()
    assert first.acquired(10)
    first.check()
    second.start()
    assert not second.acquired(1)
    with pytest.raises(LeaseLost):
        second.check()
    first.stop()
    assert second.acquired(10)
    second.stop()


def test_a_lease_whose_holder_died_is_taken_when_it_was_seen_unchanged_for_long(
    api_server: ApiServer, world: World
):
    first = lease(api_server, world, "a")
    first.start()
    assert first.acquired(10)
    first.stop(release=False)
    # Its own times say that it lasts: only what was seen here counts.
    second = lease(api_server, world, "b")
    second.start()
    assert second.acquired(20)
    kube = Kube(configuration(str(api_server.kubeconfig)))
    found = kube.get(LEASES, world.namespace, "one")
    assert found["spec"]["holderIdentity"] == "b" and found["spec"]["leaseTransitions"] == 1
    second.stop()


def test_who_loses_the_lease_ends(api_server: ApiServer, simulator: Simulator, world: World):
    with Running(api_server, simulator.heads_url, world.namespace) as running:
        wait_for(lambda: running.operator.lease.held, "it held the Lease", 30)
        patch = json.dumps({"spec": {"holderIdentity": "somebody"}})
        words = ("patch", "lease", "flash-msa-operator", f"--namespace={world.namespace}")
        api_server.kubectl(*words, "--type=merge", "--patch", patch)
        wait_for(lambda: not running.alive, "it ended", 30)
        assert running.code == 1


def test_as_a_process_it_serves_health_and_metrics_logs_json_and_ends_on_sigterm(
    api_server: ApiServer, world: World, tmp_path: Path
):
    given = {**SETTINGS, "namespaces": [world.namespace]}
    file, log = tmp_path / "settings.yaml", tmp_path / "operator.log"
    file.write_text(json.dumps(given))
    (port,) = free_ports(1)
    flags = {"settings": file, "kubeconfig": api_server.kubeconfig, "port": port,
             "head-address": world.simulator.heads_url}  # fmt: skip
    argv = [sys.executable, "-m", "msa_operator.main", *(f"--{k}={v}" for k, v in flags.items())]
    env = {**os.environ, "POD_NAMESPACE": world.namespace, "POD_NAME": "operator-0"}
    process = spawn("operator", argv, log, env, with_parent=True)
    try:
        world.create("small")
        world.until("small", "Complete", 90)
        assert get(port, "/healthz") == (200, "ok\n") and get(port, "/readyz")[0] == 200
        assert "msa_operator_leader 1.0" in get(port, "/metrics")[1]
        assert get(port, "/nothing")[0] == 404
        os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: not process.alive(), "it ended", 30)
    finally:
        process.stop()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    about = [x["message"] for x in lines if x.get("job") == f"{world.namespace}/small"]
    assert any(text.startswith("Starting -> Running") for text in about)
    assert lines[-1]["message"] == "ending"
    world.clean()


def get(port: int, path: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_logs_name_the_job_in_every_form():
    code = (
        "from msa_operator.runtime import logs; import logging, sys; logs.configure(sys.argv[1])\n"
        "with logs.about('team', 'small'): logging.getLogger('x').warning('told %d', 3)\n"
        "logging.getLogger('y').info('plain')"
    )

    def lines(form: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, form], check=True, capture_output=True, text=True
        )
        return done.stderr.splitlines()

    first, second = map(json.loads, lines("json"))
    assert (first["job"], first["level"], first["message"]) == ("team/small", "warning", "told 3")
    assert "job" not in second and second["logger"] == "y"
    assert "[team/small] told 3" in lines("text")[0]


def test_a_request_that_is_tried_again_is_no_error():
    code = (
        "from msa_operator.runtime import logs; import logging; logs.configure('json')\n"
        "log = logging.getLogger('kopf._cogs.clients.watching')\n"
        "log.error('Request attempt #1/9 failed; will retry: GET /apis -> 429')\n"
        "log.error('Request attempt #9/9 failed; escalating: GET /apis -> 429')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    levels = [json.loads(line)["level"] for line in done.stderr.splitlines()]
    assert levels == ["warning", "error"]


@pytest.mark.parametrize("text", ["{}", "image: x\nrayVersion: 2.60.0\nnonsense: 1\n"])
def test_settings_that_cannot_be_used_end_it_at_once_with_the_reason(tmp_path: Path, text: str):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "msa_operator.main", f"--settings={file}", "--log-format=text"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "settings.yaml" in done.stderr

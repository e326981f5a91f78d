"""submit, status, wait, stop, resume and delete against a real API server."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cluster import Bench, condition, install, running
from click.testing import CliRunner, Result
from e2e.apiserver import ApiServer
from e2e.certificates import kubeconfig
from msa_operator.api import JobError, Problem
from msa_operator.cli import cli, cluster, waiting
from msa_operator.cli.jobs import NO_OPERATOR, short
from msa_operator.cli.options import load
from msa_operator.runtime.kube import JOBS, KubeError, Resource
from msa_operator.yaml12 import load as read_yaml
from operator_jobs import job, write

# Their names in the package are those of the commands.
submit = importlib.import_module("msa_operator.cli.submit")
wait = importlib.import_module("msa_operator.cli.wait")


@pytest.fixture(scope="module", autouse=True)
def definitions(api_server: ApiServer) -> None:
    install(api_server)


@pytest.fixture
def bench(api_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.1)
    monkeypatch.setenv("COLUMNS", "200")
    made = Bench.make(api_server)
    yield made
    api_server.kubectl("delete", "namespace", made.namespace, "--wait=false")


def msa(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)


# submit


def test_a_dry_run_shows_plan_and_objects_and_creates_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    file = write(tmp_path)
    done = bench.msa("submit", file, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "plan small  fsdp2 on 2 CPU workers" in done.stderr
    assert "accepted by the API server (dry run)" in done.stderr
    documents = [read_yaml(text).value for text in done.stdout.split("\n---\n")]
    kinds = ["LongContextJob", "ConfigMap", "NetworkPolicy", "RayCluster"]
    assert [d["kind"] for d in documents] == kinds
    assert documents[0]["spec"]["training"] == {"maxSteps": 100, "precision": "fp32"}
    assert bench.at.kube.find(JOBS, bench.namespace, "small") is None
    told = json.loads(bench.msa("submit", file, "--dry-run", "--output", "json").stdout)
    assert told["plan"]["worldSize"] == 2
    assert [o["kind"] for o in told["objects"]] == kinds


def test_a_dry_run_needs_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    done = msa("submit", write(tmp_path), "--dry-run")
    assert done.exit_code == 0, done.output
    assert "not checked by an API server: no cluster: " in done.stderr
    assert "kind: RayCluster" in done.stdout
    done = msa("submit", write(tmp_path))
    assert done.exit_code == 4
    assert "train here with msa run" in done.stderr


def test_submit_says_what_the_operator_makes_of_it(bench: Bench, tmp_path: Path) -> None:
    file = write(tmp_path)

    def takes(found: dict[str, Any]) -> bool:
        bench.says("small", running())
        return True

    thread = bench.later("small", takes)
    done = bench.msa("submit", file, "--set", "training.maxSteps=50")
    thread.join()
    assert done.exit_code == 0, done.output
    assert "plan small  fsdp2 on 2 CPU workers" in done.stdout
    assert "small is submitted: Running" in done.stdout
    assert bench.spec("small")["training"]["maxSteps"] == 50
    manager = bench.at.kube.get(JOBS, bench.namespace, "small")["metadata"]["managedFields"]
    assert "msa" in {entry["manager"] for entry in manager}

    again = bench.msa("submit", file)
    assert again.exit_code == 2
    assert f"a job 'small' exists in namespace {bench.namespace}" in again.stderr


def test_a_plan_that_the_operator_refuses_is_a_problem(bench: Bench, tmp_path: Path) -> None:
    refused = condition("Planned", "False", "Refused", "checkpoint.uri: give one")

    def refuses(found: dict[str, Any]) -> bool:
        bench.says("small", {"observedGeneration": 1, "phase": "Pending", "conditions": [refused]})
        return True

    thread = bench.later("small", refuses)
    done = bench.msa("submit", write(tmp_path), "--suspend")
    thread.join()
    assert done.exit_code == 2
    assert "refused by the operator: checkpoint.uri: give one" in done.stderr
    assert bench.spec("small")["suspend"] is True


def test_without_an_operator_submit_says_so(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "ANSWER_SECONDS", 0.3)
    done = bench.msa("submit", write(tmp_path))
    assert done.exit_code == 124
    assert "small is created, but after" in done.stderr
    assert NO_OPERATOR in done.stderr


def test_a_wrong_file_is_reported_before_anything_is_asked(tmp_path: Path) -> None:
    file = write(tmp_path, {"spec.training.maxSteps": 0})
    done = msa("submit", file, "--output", "json", "--kubeconfig", tmp_path / "none")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["problems"][0]["path"] == "spec.training.maxSteps"


def test_what_the_server_refuses_reads_like_our_own_checks(bench: Bench, tmp_path: Path) -> None:
    file = write(tmp_path)
    loaded = load(str(file), ())
    wrong = job({"spec.training.maxSteps": 0, "spec.hardware.device": "tpu"})
    with pytest.raises(JobError) as refused:
        submit._create(bench.at, wrong, loaded, dry_run=True)
    found = {p.path: p for p in refused.value.problems}
    steps = found["spec.training.maxSteps"]
    assert steps.found.startswith("refused by the API server: ")
    assert "greater than or equal to 1" in steps.found
    assert steps.where.startswith(f"{file}:")
    assert 'Unsupported value: "tpu"' in found["spec.hardware.device"].found
    with pytest.raises(JobError) as refused:
        submit._create(bench.at, job({"spec.training.rate": 1}), loaded, dry_run=True)
    (unknown,) = refused.value.problems
    assert (unknown.path, unknown.found) == (
        "spec.training.rate", "refused by the API server: it does not know this field",
    )  # fmt: skip
    assert isinstance(unknown, Problem)


def test_a_namespace_that_is_not_there(bench: Bench, tmp_path: Path) -> None:
    config = bench.server.kubeconfig
    done = msa("submit", write(tmp_path), "--kubeconfig", config, "--namespace", "nowhere")
    assert done.exit_code == 2
    assert "kubectl create namespace nowhere" in done.stderr


# what can be wrong with a cluster


def test_a_cluster_that_does_not_answer(bench: Bench, tmp_path: Path) -> None:
    dead = kubeconfig(
        tmp_path / "dead", bench.server.authority.folder, "admin", "https://127.0.0.1:1"
    )
    done = msa("status", "--kubeconfig", dead)
    assert done.exit_code == 4
    assert "the cluster does not answer: " in done.stderr
    done = msa("status", "--kubeconfig", dead, "--context", "another")
    assert done.exit_code == 4
    assert "another" in done.stderr


def test_a_user_without_rights(bench: Bench, tmp_path: Path) -> None:
    authority = bench.server.authority
    authority.sign("nobody", "nobody")
    config = kubeconfig(tmp_path / "nobody", authority.folder, "nobody", bench.server.url)
    for words in (("status",), ("wait", "small"), ("stop", "small"), ("logs", "small")):
        done = msa(*words, "--kubeconfig", config, "--namespace", bench.namespace)
        assert done.exit_code == 4, done.output
        assert "not allowed: longcontextjobs.flashmsa.dev" in done.stderr
        assert "rbac.aggregate" in done.stderr


def test_a_cluster_without_the_custom_resources(bench: Bench) -> None:
    with pytest.raises(KubeError) as missing:
        list(bench.at.kube.list(Resource("flashmsa.dev", "v9", "longcontextjobs")))
    assert "helm install flash-msa-crds" in cluster.explain(missing.value)


def test_an_unknown_job_names_the_one_that_was_meant(bench: Bench) -> None:
    done = bench.msa("status", "smal")
    assert done.exit_code == 2
    assert f"no job 'smal' in namespace {bench.namespace}: it has none" in done.stderr
    bench.create(job())
    for words in (("status", "smal"), ("wait", "smal"), ("delete", "smal"), ("resume", "smal")):
        done = bench.msa(*words)
        assert done.exit_code == 2
        assert "; did you mean small?" in done.stderr
    assert "there are small" in bench.msa("status", "other-thing").stderr


# status


def test_status_of_all_and_of_one(bench: Bench) -> None:
    assert "no jobs in namespace" in bench.msa("status").stdout
    bench.create(job())
    bench.create(job({"metadata.name": "waits"}))
    bench.says("small", running())
    reason = "0/2 workers have a node: 0/3 nodes are available: insufficient nvidia.com/gpu"
    bench.says("waits", {
        "observedGeneration": 1, "phase": "Provisioning",
        "conditions": [condition("CapacityReady", "False", "Waiting", reason)],
    })  # fmt: skip
    table = bench.msa("status").stdout.splitlines()
    head = [
        "NAME",
        "PHASE",
        "NODES",
        "STEP",
        "LOSS",
        "TOKENS/S",
        "MFU",
        "ETA",
        "CHECKPOINT",
        "AGE",
    ]
    assert table[0].split() == head
    (line,) = [line for line in table if line.startswith("small ")]
    cells = ["small", "Running", "2/2", "412/1000", "2.1734", "318,200", "41.2%", "2h9m", "400"]
    assert line.split()[:-1] == cells
    assert f"waits: {reason}" in table
    assert "NAMESPACE" in bench.msa("status", "--all-namespaces").stdout

    text = bench.msa("status", "small").stdout
    for part in (
        "fsdp2 on 2 CPU workers", "step 412/1000 (heard ", "318,200 tokens/s, MFU 41.2%",
        "step 400 in s3://ckpt/small", "WorkerLost", "worker 1 is another pod", "Planned",
        "positions are extended", "small-abcde-12345678",
    ):  # fmt: skip
        assert part in text, part
    raw = json.loads(bench.msa("status", "small", "--output", "json").stdout)
    assert raw["status"]["progress"]["step"] == 412
    every = json.loads(bench.msa("status", "--output", "json").stdout)
    assert {item["metadata"]["name"] for item in every["items"]} == {"small", "waits"}


def test_status_watches_until_the_job_ends(bench: Bench) -> None:
    bench.create(job())
    bench.says("small", running())

    def ends(found: dict[str, Any]) -> bool:
        bench.says("small", {"phase": "Complete", "progress": {"step": 1000}})
        return True

    thread = bench.later("small", ends)
    done = bench.msa("status", "small", "--watch")
    thread.join()
    assert done.exit_code == 0
    assert "Complete" in done.stdout
    assert "step 1000/1000" in done.stdout


def test_ages_are_short() -> None:
    seconds = (5, 65, 3600, 3 * 3600 + 120, 26 * 3600, None)
    assert [short(s) for s in seconds] == ["5s", "1m", "1h", "3h2m", "1d2h", ""]


# wait

FAILED = {
    "phase": "Failed", "conditions": [condition("Failed", "True", "MaxRestarts", "6 failures")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "status", "code"),
    [
        ("complete", {"phase": "Complete"}, 0),
        ("complete", FAILED, 1),
        ("running", {"phase": "Running"}, 0),
        ("running", {"phase": "Complete"}, 0),
        ("running", FAILED, 1),
        ("suspended", {"phase": "Suspended"}, 0),
        ("suspended", {"phase": "Complete"}, 1),
    ],
)  # fmt: skip
def test_wait_ends_with_the_state(
    bench: Bench, state: str, status: dict[str, Any], code: int
) -> None:
    bench.create(job())
    bench.says("small", {"observedGeneration": 1, "phase": "Starting"})

    def changes(found: dict[str, Any]) -> bool:
        bench.says("small", status)
        return True

    thread = bench.later("small", changes)
    done = bench.msa("wait", "small", "--for", state, "--timeout", "60s")
    thread.join()
    assert done.exit_code == code, done.output
    if status.get("conditions"):
        assert "small is Failed: 6 failures" in done.stderr


def test_wait_times_out(bench: Bench) -> None:
    bench.create(job())
    done = bench.msa("wait", "small", "--timeout", "1s")
    assert done.exit_code == 124
    assert "small is not complete within the time given: it is New" in done.stderr
    bad = bench.msa("wait", "small", "--timeout", "30mins")
    assert bad.exit_code == 2
    assert "nearest: 30m" in bad.stderr


def test_wait_sees_a_deletion(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = bench.create(job())["metadata"]["uid"]
    # It is said when the job was looked at for the first time.
    monkeypatch.setattr(
        wait, "say", lambda _: bench.at.kube.delete(JOBS, bench.namespace, "small", uid)
    )
    done = bench.msa("wait", "small", "--timeout", "60s")
    assert (done.exit_code, "small was deleted" in done.stderr) == (1, True)


# stop, resume, delete


def test_stop_and_resume(bench: Bench) -> None:
    bench.create(job())
    bench.says("small", running())

    def drains(found: dict[str, Any]) -> bool:
        if not found["spec"].get("suspend"):
            return False
        bench.says("small", {"phase": "Suspended"})
        return True

    thread = bench.later("small", drains)
    done = bench.msa("stop", "small", "--wait")
    thread.join()
    assert done.exit_code == 0, done.output
    assert "small stops after a last checkpoint; msa resume small goes on" in done.stdout
    assert bench.spec("small")["suspend"] is True
    assert "small is suspended already (Suspended)" in bench.msa("stop", "small").stdout

    def runs(found: dict[str, Any]) -> bool:
        if found["spec"].get("suspend"):
            return False
        bench.says("small", {"phase": "Running"})
        return True

    thread = bench.later("small", runs)
    done = bench.msa("resume", "small", "--wait")
    thread.join()
    assert done.exit_code == 0, done.output
    assert "small goes on from step 400" in done.stdout
    assert bench.spec("small")["suspend"] is False
    assert "small is not suspended (Running)" in bench.msa("resume", "small").stdout
    assert bench.msa("stop", "small", "--wait", "--timeout", "1s").exit_code == 124

    bench.says("small", {"phase": "Complete"})
    done = bench.msa("stop", "small")
    assert (done.exit_code, "there is nothing to stop" in done.stderr) == (2, True)
    done = bench.msa("resume", "small")
    assert (done.exit_code, "continues from its checkpoints" in done.stderr) == (2, True)


def test_delete_says_what_goes_and_what_stays(bench: Bench) -> None:
    bench.create(job())
    bench.says("small", running())
    done = bench.msa("delete", "small", "--wait")
    assert done.exit_code == 0, done.output
    assert "RayCluster small-abcde-12345678; both go" in done.stderr
    assert "all work after step 400 is lost; --drain writes one" in done.stderr
    assert "checkpoints stay in s3://ckpt/small" in done.stderr
    assert bench.at.kube.find(JOBS, bench.namespace, "small") is None


def test_delete_with_a_drain_and_what_lies_outside(bench: Bench) -> None:
    body = job()
    body["metadata"]["finalizers"] = ["flashmsa.dev/cleanup"]
    bench.create(body)
    bench.says("small", running())

    def plays(found: dict[str, Any]) -> bool:
        if not found["spec"].get("suspend"):
            return False
        if found["status"]["phase"] == "Running":
            bench.says("small", {"phase": "Suspended"})
        if not found["metadata"].get("deletionTimestamp"):
            return False
        bench.at.kube.patch(JOBS, bench.namespace, "small", {"metadata": {"finalizers": None}})
        return True

    thread = bench.later("small", plays)
    done = bench.msa("delete", "small", "--drain", "--wait")
    thread.join()
    assert done.exit_code == 0, done.output
    assert "what it holds outside its namespace is returned first" in done.stderr
    assert "is lost" not in done.stderr
    assert bench.at.kube.find(JOBS, bench.namespace, "small") is None


def test_delete_that_does_not_end_in_time(bench: Bench) -> None:
    body = job()
    body["metadata"]["finalizers"] = ["flashmsa.dev/cleanup"]
    bench.create(body)
    done = bench.msa("delete", "small", "--wait", "--timeout", "1s")
    assert (done.exit_code, "still there" in done.stderr) == (124, True)
    done = bench.msa("stop", "small")
    assert (done.exit_code, "small is being deleted" in done.stderr) == (2, True)
    bench.at.kube.patch(JOBS, bench.namespace, "small", {"metadata": {"finalizers": None}})


# the command itself


def test_help_and_plan_load_no_client(tmp_path: Path) -> None:
    probe = (
        "import sys\n"
        "from msa_operator.cli import cli\n"
        "cli(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'torch', 'ray', 'numpy', 'kubernetes', 'kopf', 'boto3', 'urllib3'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)))\n"
    )
    for words in (["--help"], ["status", "--help"], ["plan", str(write(tmp_path))]):
        done = subprocess.run(
            [sys.executable, "-c", probe, *words], capture_output=True, text=True, timeout=360,
            check=True,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == "loaded []", words


def test_kubectl_finds_the_plugin(bench: Bench) -> None:
    script = Path(sys.executable).with_name("kubectl-msa")
    where = ["--kubeconfig", str(bench.server.kubeconfig), "--namespace", bench.namespace]
    done = subprocess.run(
        [sys.executable, "-c", "from msa_operator.cli import plugin; plugin()", "status", *where],
        capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip
    assert (done.returncode, "no jobs in namespace" in done.stdout) == (0, True), done.stderr
    if script.exists():
        done = subprocess.run([str(script), "--help"], capture_output=True, text=True, timeout=360)
        assert done.stdout.startswith("Usage: kubectl msa ")

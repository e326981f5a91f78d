"""The driver on a real Ray: what its owner sees, drains and dumps, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msa_workloads.checkpoint import newest_complete
from msa_workloads.progress import Silent, read_rows
from msa_workloads.runspec import RunSpec
from msa_workloads.storage import open_store

# Ranks run this file by its path, outside of pytest.
sys.path.insert(0, str(Path(__file__).parent))
from ray_head import RayHead, free_port, until

pytestmark = pytest.mark.slow

STEPS = 200
TRAINING = {
    "max_steps": STEPS, "warmup_steps": 2, "precision": "fp32", "evaluate_sequences": 2,
}  # fmt: skip


class Driver:
    """A driver and its control endpoint, as its owner sees them."""

    def __init__(self, head: RayHead, folder: Path, spec: RunSpec, submission: str) -> None:
        self.spec, self.head, self.submission = spec, head, submission
        self.file = folder / f"{submission}.json"
        self.file.write_text(spec.to_json())
        self.port = free_port()
        self.environment = {
            "MSA_CONTROL_HOST": "127.0.0.1", "MSA_CONTROL_PORT": str(self.port),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.log = folder / f"{submission}.log"
        self.process: psutil.Popen | None = None

    def start(self, *flags: str) -> Driver:
        with self.log.open("ab") as log:
            self.process = psutil.Popen(
                self.command(*flags),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.head.environment, **self.environment, "RAY_ADDRESS": self.head.gcs},
            )
        return self

    def command(self, *flags: str) -> list[str]:
        return [
            sys.executable, "-m", "msa_workloads.driver", "--spec", str(self.file),
            "--submission", self.submission, *flags,
        ]  # fmt: skip

    def ask(self, path: str, method: str = "GET", token: str | None = None) -> Any:
        """A request to the endpoint; None while there is no endpoint."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            headers={"Authorization": f"Bearer {token or self.head.token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
                return text if path == "/metrics" else json.loads(text)
        except urllib.error.HTTPError:
            raise
        except OSError:
            return None

    def progress(self, condition: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """The first progress for which the condition holds."""

        def holds() -> dict[str, Any] | None:
            assert self.process is None or self.process.poll() is None, self.log.read_text()
            now = self.ask("/progress")
            return now if now and condition(now) else None

        return until(holds, what)

    def ends(self) -> int:
        process = self.process
        assert process is not None
        until(lambda: process.poll() is not None, f"the driver ends:\n{self.log.read_text()}")
        return process.returncode

    def rows(self) -> list[dict[str, Any]]:
        return read_rows((Path(self.spec.output) / "metrics.jsonl").read_text())

    def checkpoint(self) -> int | None:
        marker = newest_complete(open_store(self.spec.checkpoint.uri))
        return marker and marker.step


@pytest.fixture
def driver(
    ray_head: RayHead,
    make_spec: Callable[..., RunSpec],
    tmp_path: Path,
) -> Iterator[Callable[..., Driver]]:
    """Make drivers, and end whatever of them still runs when the test does."""
    made: list[Driver] = []

    def make(submission: str, output: str = "out", **parts: Any) -> Driver:
        parts = {
            "training": TRAINING, "mesh": {"data_shard": 2}, "sequence": {"micro_batch": 1},
            "recovery": {"owner": "operator", "max_restarts": 3},
            "checkpoint": {"every_steps": 50}, **parts,
        }  # fmt: skip
        made.append(Driver(ray_head, tmp_path, make_spec(output, **parts), submission))
        return made[-1]

    yield make
    for one in made:
        if one.process is not None and one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            one.ends()
    until(lambda: not ray_head.workers(), "the workers end with their driver")


def in_peace(spec: str) -> dict[str, Any]:
    """The outcome of the same run on the same ranks, without Ray and without harm."""
    from msa_workloads.train import run

    return run(RunSpec.from_json(spec), Silent())


def test_a_submission_is_watched_drained_and_resumed(
    driver: Callable[..., Driver],
    ray_head: RayHead,
    make_spec: Callable[..., RunSpec],
    on_ranks: Callable[..., Any],
) -> None:
    first = driver("tiny-1")
    entrypoint = " ".join(first.command())
    body = {
        "submission_id": "tiny-1", "entrypoint": entrypoint,
        "runtime_env": {"env_vars": first.environment},
    }  # fmt: skip

    def submitted() -> bool:
        try:
            return ray_head.call("/api/jobs/", body)["submission_id"] == "tiny-1"
        except urllib.error.HTTPError as error:
            # The dashboard answers before the agent that starts jobs does.
            assert "No available agent" in error.read().decode()
            return False

    until(submitted, "the job is taken")
    now = first.progress(lambda p: p["step"] >= 5 and len(p["ranks"]) == 2, "five steps")
    assert (now["submission"], now["state"], now["maxSteps"]) == ("tiny-1", "running", STEPS)
    assert now["loss"] > 0
    assert now["tokensPerSecond"] > 0
    assert now["etaSeconds"] > 0
    assert now["mfu"] is None, "nobody knows a CPU's peak"
    assert [rank["rank"] for rank in now["ranks"]] == [0, 1]
    assert {rank["node"] for rank in now["ranks"]} == {"127.0.0.1"}
    metrics = first.ask("/metrics", token="none")
    assert 'msa_run_step{job="tiny"} ' in metrics
    assert 'msa_run_memory_bytes{job="tiny",rank="1"} ' in metrics
    for path, method in (("/progress", "GET"), ("/drain", "POST"), ("/stacks", "POST")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            first.ask(path, method, token="another")
        assert refused.value.code == 401
    assert first.ask("/progress")["state"] == "running"

    assert first.ask("/drain", "POST") == {"state": "draining"}
    assert first.ask("/drain", "POST") == {"state": "draining"}
    drained = first.progress(lambda p: p["drained"], "the run is drained")
    assert 5 <= drained["step"] < STEPS
    assert drained["step"] == drained["checkpointStep"] == first.checkpoint()
    job = until(
        lambda: (j := ray_head.call("/api/jobs/tiny-1"))["status"] != "RUNNING" and j,
        "the submission ends",
    )
    assert job["driver_exit_code"] == 75
    log = ray_head.call("/api/jobs/tiny-1/logs")["logs"]
    assert f"drained at the checkpoint of step {drained['step']}" in log
    for rank in (0, 1):
        assert f"(rank {rank} pid=" in log, log
    until(lambda: not ray_head.workers(), "the workers end")

    refused = driver("tiny-2").start()
    # It stays for its owner to read how it ended, and no longer.
    told = refused.progress(lambda p: p["state"] == "failed", "the second run is refused")
    assert "already holds a checkpoint of step" in told["error"]
    assert refused.ends() == 1
    assert "already holds a checkpoint of step" in refused.log.read_text()
    again = driver("tiny-3").start("--resume")
    last = again.progress(lambda p: p["state"] == "finished", "the resumed run ends")
    assert again.ends() == 0, again.log.read_text()
    assert (last["step"], last["checkpointStep"]) == (STEPS, STEPS)
    kept = Path(again.spec.checkpoint.uri) / "report"
    assert f"report: {kept}/report.html" in again.log.read_text()
    assert json.loads((kept / "summary.json").read_text())["resumed_from_step"] == drained["step"]
    assert {path.name for path in kept.iterdir()} == {
        "summary.json",
        "report.html",
        "metrics.jsonl",
    }
    peace = make_spec(
        "peace", training=TRAINING, mesh={"data_shard": 2}, sequence={"micro_batch": 1},
        checkpoint={"every_steps": 0},
    )  # fmt: skip
    expected = on_ranks(in_peace, 2, spec=peace.to_json())[0]["history"]
    rows = again.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["digest"] for row in rows] == [row["digest"] for row in expected]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]


@pytest.mark.full
def test_a_drain_before_the_first_step_ends_the_run_at_once(
    driver: Callable[..., Driver],
) -> None:
    early = driver("early-1").start()
    until(lambda: early.ask("/drain", "POST"), "the endpoint is there")
    now = early.progress(lambda p: p["drained"], "the run is drained")
    assert (now["state"], now["step"], now["checkpointStep"]) == ("drained", 0, 0)
    assert early.ends() == 75, early.log.read_text()
    assert early.checkpoint() is None


def test_a_rank_that_hangs_is_named_and_a_killed_driver_leaves_no_worker(
    driver: Callable[..., Driver],
    ray_head: RayHead,
) -> None:
    run = driver("hung-1", training={**TRAINING, "max_steps": 100_000}).start()
    with pytest.raises(urllib.error.HTTPError, match="500"):
        until(lambda: run.ask("/stacks", "POST"), "the endpoint is there")
    run.progress(lambda p: p["step"] >= 5 and len(p["ranks"]) == 2, "five steps")
    hung = ray_head.workers()[1]
    hung.send_signal(signal.SIGSTOP)
    try:
        done = run.ask("/stacks", "POST")
        folder = Path(run.spec.checkpoint.uri) / "stacks" / "hung-1"
        assert done["folder"] == str(folder)
        assert done["lagging"]["node"] == "127.0.0.1"
        rank = done["lagging"]["rank"]
        texts = {n: (folder / f"rank-{n}.txt").read_text() for n in (0, 1)}
        assert f"rank {rank}, pid {hung.pid} on 127.0.0.1, step " in texts[rank]
        assert "answers no signal; its state is T (stopped)" in texts[rank]
        assert "waiting for other ranks" in texts[1 - rank]
        assert "torch/distributed/" in texts[1 - rank]
        assert "train.py" in texts[1 - rank]
    finally:
        hung.send_signal(signal.SIGCONT)
    before = run.ask("/progress")["step"]
    now = run.progress(lambda p: p["step"] > before + 5, "the run goes on as if nothing was")
    assert now["state"] == "running"

    assert run.process is not None
    run.process.kill()
    until(lambda: not ray_head.workers(), "the workers end with their driver")


def test_what_cannot_be_run_says_why(driver: Callable[..., Driver], tmp_path: Path) -> None:
    bad = driver("bad-1", mesh={"data_shard": 1, "context": 64})
    bad.file.write_text(bad.file.read_text().replace('"version": 1', '"version": 99'))
    assert bad.start().ends() == 1
    assert "version: found 99, this program reads 1" in bad.log.read_text()
    blind = driver("bad-2")
    blind.environment["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / "nowhere")
    assert blind.start().ends() == 1
    assert os.fspath(tmp_path / "nowhere") in blind.log.read_text()

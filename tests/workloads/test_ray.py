"""Runs on a real Ray: recovery, interruption, failure, and a job on a cluster with a token."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msa_workloads.progress import read_rows
from msa_workloads.runspec import RunSpec

# Ranks run this file by its path, outside of pytest.
sys.path.insert(0, str(Path(__file__).parent))
from ray_head import RayHead

pytestmark = pytest.mark.slow

DRIVER = """
import signal
import sys
from pathlib import Path
from rich.console import Console
from msa_workloads.launch import RunFailed, run_on_ray
from msa_workloads.runspec import RunSpec

if __name__ == "__main__":
    # Ctrl-C arrives also where the tests were started in a script's background, which ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spec = RunSpec.from_json(Path(sys.argv[1]).read_text())
    try:
        run_on_ray(spec, resume="--resume" in sys.argv, console=Console(width=160))
    except KeyboardInterrupt:
        sys.exit(130)
    except RunFailed as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
"""

DEADLINE = 1200.0
"""Seconds that a submitted job may take on a loaded machine."""

Poll = Callable[[Callable[[], Any], str], Any]


class Driver:
    """A driver process of its own, with a temporary folder that shows what it leaves behind."""

    def __init__(self, folder: Path, spec: RunSpec, *flags: str, **environment: str) -> None:
        self.spec = spec
        self.scratch = folder / "tmp"
        self.scratch.mkdir(exist_ok=True)
        script, file = folder / "driver.py", folder / f"{Path(spec.output).name}.json"
        script.write_text(DRIVER)
        file.write_text(spec.to_json())
        self._log = folder / f"{Path(spec.output).name}.log"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        with self._log.open("ab") as log:
            self.process = psutil.Popen(
                [sys.executable, str(script), str(file), *flags],
                stdout=log,
                stderr=log,
                env={
                    **kept, "HOME": str(folder), "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(self.scratch), **environment,
                },
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self._log.read_text()

    def rows(self) -> list[dict[str, Any]]:
        path = Path(self.spec.output) / "metrics.jsonl"
        return read_rows(path.read_text()) if path.exists() else []

    def summary(self) -> dict[str, Any]:
        return json.loads((Path(self.spec.output) / "summary.json").read_text())

    def workers(self) -> list[psutil.Process]:
        """Training workers, by what Ray calls their processes."""
        found = []
        for child in self.process.children(recursive=True):
            try:
                if "RayTrainWorker" in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    def reaches(self, rows: int, poll: Poll) -> None:
        """Wait until that many steps are on record."""
        self.alive(lambda: len(self.rows()) >= rows, f"{rows} steps", poll)

    def alive(self, condition: Callable[[], Any], what: str, poll: Poll) -> None:
        """Wait for a condition for as long as the driver lives."""

        def there() -> Any:
            assert self.process.poll() is None, self.text
            return condition()

        poll(there, what)

    def ends(self, poll: Poll) -> int:
        poll(lambda: self.process.poll() is not None, f"end of the driver:\n{self.text}")
        return self.process.returncode


@pytest.fixture
def drive(tmp_path_factory: pytest.TempPathFactory, poll: Poll) -> Iterator[Callable[..., Driver]]:
    """Start drivers, and end whatever of them still runs when the test does."""
    # Ray's sockets have paths of at most 107 bytes, so pytest's own folders are too deep.
    import tempfile

    with tempfile.TemporaryDirectory(prefix="msa-") as short:
        started: list[Driver] = []

        def start(spec: RunSpec, *flags: str, **environment: str) -> Driver:
            started.append(Driver(Path(short), spec, *flags, **environment))
            return started[-1]

        yield start
        for driver in started:
            if driver.process.is_running():
                driver.process.send_signal(signal.SIGTERM)
                poll(lambda d=driver: d.process.poll() is not None, "driver ends on SIGTERM")


@pytest.fixture
def ray_spec(make_spec: Callable[..., RunSpec]) -> Callable[..., RunSpec]:
    """Two workers, each with half of the samples of a step of :func:`make_spec`'s run."""

    def make(output: str = "out", **parts: Any) -> RunSpec:
        parts = {
            "mesh": {"data_shard": 2},
            "sequence": {"micro_batch": 1},
            "recovery": {"owner": "ray", "max_restarts": 3},
            **parts,
        }
        return make_spec(output, **parts)

    return make


LONG = {"max_steps": 100, "warmup_steps": 2, "precision": "fp32", "evaluate_sequences": 2}


PEACEFUL: dict[str, dict[str, Any]] = {}
"""Outcomes of :func:`in_peace`, by what the run differs in."""


def in_peace(spec: str) -> dict[str, Any]:
    """The outcome of the same run on the same ranks, without Ray and without harm."""
    from msa_workloads.progress import Silent
    from msa_workloads.train import run

    return run(RunSpec.from_json(spec), Silent())


@pytest.fixture
def peace(
    ray_spec: Callable[..., RunSpec], on_ranks: Callable[..., Any]
) -> Callable[..., dict[str, Any]]:
    """The outcome of :func:`in_peace` for a run of these parts; the text is one for all tests."""

    def run(**parts: Any) -> dict[str, Any]:
        key = repr(sorted(parts.items()))
        if key not in PEACEFUL:
            spec = ray_spec("peace", checkpoint={"every_steps": 0}, **parts)
            PEACEFUL[key] = on_ranks(in_peace, 2, spec=spec.to_json())[0]
        return PEACEFUL[key]

    return run


def agrees(driver: Driver, peaceful: dict[str, Any]) -> None:
    """The run read the same samples in the same order, to the same losses and quality."""
    rows, expected = driver.rows(), peaceful["history"]
    assert [row["step"] for row in rows] == list(range(1, len(expected) + 1))
    assert [row["digest"] for row in rows] == [row["digest"] for row in expected]
    assert [row["samples"] for row in rows] == [[2 * n, 2 * n + 2] for n in range(len(rows))]
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in expected], rel=1e-6)
    bits = [end["held_out"]["bits_per_byte"] for end in (driver.summary(), peaceful)]
    assert bits[0] == pytest.approx(bits[1], rel=1e-6)


def test_stopped_killed_and_hurt_a_run_goes_on_as_if_nothing_was(
    drive: Callable[..., Driver],
    ray_spec: Callable[..., RunSpec],
    peace: Callable[..., dict[str, Any]],
    poll: Poll,
) -> None:
    spec = ray_spec("hurt", training=LONG, checkpoint={"every_steps": 10})
    stopped = drive(spec)
    stopped.reaches(12, poll)
    family = stopped.process.children(recursive=True)
    listening = [
        c.laddr.ip
        for p in family
        for c in p.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert all(ip.removeprefix("::ffff:") == "127.0.0.1" for ip in listening), listening
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.ends(poll) == 130, stopped.text
    poll(lambda: not any(p.is_running() for p in family), "nothing of Ray is left")
    assert not list(stopped.scratch.glob("msa-ray-*"))
    refused = drive(spec)
    assert refused.ends(poll) == 1
    assert "already holds a checkpoint of step" in refused.text

    killed = drive(spec, "--resume")
    killed.reaches(25, poll)
    family, workers = killed.process.children(recursive=True), killed.workers()
    killed.process.kill()
    poll(lambda: not any(p.is_running() for p in workers), "workers end when the driver is killed")
    assert len(killed.rows()) < LONG["max_steps"]

    hurt = drive(spec, "--resume")
    hurt.reaches(45, poll)
    hurt.workers()[1].kill()
    assert hurt.ends(poll) == 0, hurt.text
    assert "resumed from the checkpoint of step" in hurt.text
    summary = hurt.summary()
    assert summary["restarts"] == 1
    assert summary["resumed_from_step"] >= 30
    assert (Path(spec.output) / "logs" / "rank-1.log").exists()
    assert not (hurt.scratch.parent / ".ray").exists(), "no token in the home folder"
    agrees(hurt, peace(training=LONG))
    # Two agents of Ray try for a minute to tell what happened to a control store that is gone.
    poll(lambda: not any(p.is_running() for p in family), "Ray ends when its driver is killed")
    assert not list(hurt.scratch.glob("msa-ray-*")), "the next driver removes what was left"


@pytest.mark.full  # by default a pod is deleted under the operator, in tests/e2e/two_nodes
def test_with_another_owner_of_recovery_ray_restarts_nothing(
    drive: Callable[..., Driver], ray_spec: Callable[..., RunSpec], poll: Poll
) -> None:
    spec = ray_spec("owned", training=LONG, recovery={"owner": "operator"})
    driver = drive(spec)
    driver.reaches(3, poll)
    driver.workers()[1].kill()
    assert driver.ends(poll) == 1
    # The rank that died is named, also where its peer noticed first.
    assert re.search(r"^rank [01] ended without a Python error: ", driver.text, re.MULTILINE)
    assert "whole logs: " in driver.text
    assert "resumed" not in driver.text


def test_what_ends_before_a_step_says_why(
    drive: Callable[..., Driver], ray_spec: Callable[..., RunSpec], poll: Poll
) -> None:
    # A service manager's way to ask, while the workers are still starting.
    ended = drive(ray_spec("ended", training=LONG))
    ended.alive(ended.workers, "the workers start", poll)
    family = ended.process.children(recursive=True)
    ended.process.send_signal(signal.SIGTERM)
    assert ended.ends(poll) == 130, ended.text
    assert "SIGTERM" not in ended.text
    poll(lambda: not any(p.is_running() for p in family), "nothing of Ray is left")

    # A real failure of one rank only: its log folder holds what rank 1 cannot write to.
    spec = ray_spec("broken", recovery={"owner": "none"})
    (Path(spec.output) / "logs" / "rank-1.log").mkdir(parents=True)
    failing = drive(spec)
    assert failing.ends(poll) == 1, failing.text
    assert "rank 1" in failing.text
    assert "IsADirectoryError" in failing.text
    alone = {"mesh": {"data_shard": 1}, "attention": {"dense_layers": (9,)}}
    bad = drive(ray_spec("bad", **alone))
    assert bad.ends(poll) == 2, bad.text
    assert "attention.dense_layers: found 9, allowed: 0 to 1" in bad.text
    assert "Traceback" not in bad.text


@pytest.mark.full  # by default a job is submitted to Ray's pods, in tests/e2e/two_nodes
def test_a_submitted_job_trains_to_the_same_losses(
    ray_head: RayHead,
    ray_spec: Callable[..., RunSpec],
    peace: Callable[..., dict[str, Any]],
    poll: Poll,
    tmp_path: Path,
) -> None:
    submitted = ray_spec("submitted")
    script, file = tmp_path / "driver.py", tmp_path / "submitted.json"
    script.write_text(DRIVER)
    file.write_text(submitted.to_json())
    command = [
        str(Path(sys.executable).with_name("ray")), "job", "submit", "--",
        sys.executable, str(script), str(file),
    ]  # fmt: skip

    def submit() -> subprocess.CompletedProcess[str] | None:
        job = subprocess.run(
            command,
            env=ray_head.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        # The dashboard answers before the agent that starts jobs does.
        return None if "No available agent to submit job" in job.stderr else job

    job = poll(submit, "the cluster takes jobs")
    assert job.returncode == 0, job.stdout + job.stderr
    assert "tiny: finished" in job.stdout
    summary = json.loads((Path(submitted.output) / "summary.json").read_text())
    expected = [row["loss"] for row in peace()["history"]]
    assert summary["losses"] == pytest.approx(expected, rel=1e-6)

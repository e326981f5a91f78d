"""What surrounds a run: one process at a time in a folder, JSON alone on standard output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msa_operator.cli import cli, folders
from msa_operator.cli.hold import InUse, take
from msa_workloads.runspec import RunSpec
from operator_jobs import GONE, write

Launched = list[tuple[RunSpec, bool]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def msa(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Replaces what trains: these tests are about what surrounds it."""
    launch = pytest.importorskip("msa_workloads.launch")
    calls: Launched = []

    def run_on_ray(spec: RunSpec, *, resume: bool, console: Any) -> dict[str, Any]:
        console.print("step 1/1")
        calls.append((spec, resume))
        summary = {"steps": spec.training.max_steps}
        (Path(spec.output) / "summary.json").write_text(json.dumps(summary))
        return summary

    monkeypatch.setattr(launch, "run_on_ray", run_on_ray)
    return calls


@pytest.fixture
def hold() -> Iterator[Callable[[Path], subprocess.Popen]]:
    """Another process that holds a folder until it is killed."""
    code = (
        "import sys; from pathlib import Path; from msa_operator.cli.hold import take\n"
        "held = take(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    started: list[subprocess.Popen] = []

    def start(folder: Path) -> subprocess.Popen:
        other = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(other)
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        return other

    yield start
    for other in started:
        other.kill()
        other.communicate()


def test_a_folder_is_free_again_however_its_holder_ended(here: Path, hold: Callable):
    other = hold(here)
    with pytest.raises(InUse, match=f"process {other.pid} on .* since"):
        take(here)
    other.send_signal(signal.SIGKILL)
    other.wait()
    with take(here), pytest.raises(InUse, match=f"process {os.getpid()}"):
        take(here)


def test_a_run_that_goes_on_is_not_resumed_a_second_time(
    here: Path, launched: Launched, hold: Callable
):
    path = write(here)
    msa("run", path)
    more = ("--resume", "--set", "training.maxSteps=200")
    other = hold(here / "runs/small")
    result = msa("run", path, *more)
    assert result.exit_code == 2 and len(launched) == 1
    assert f"the run in runs/small is going on: process {other.pid}" in result.stderr
    assert msa("run", path, *more, "--dry-run").exit_code == 0
    other.kill()
    other.wait()
    assert msa("run", path, *more).exit_code == 0


def test_runs_that_start_together_get_folders_of_their_own(
    here: Path, launched: Launched, hold: Callable
):
    """The other one has made its folder, and written nothing into it yet."""
    path = write(here)
    (here / "runs/small").mkdir(parents=True)
    hold(here / "runs/small")
    assert "this one goes to runs/small-2" in msa("run", path).stderr
    result = msa("run", path, "--output-dir", "runs/small")
    assert result.exit_code == 2 and "runs/small is in use by process" in result.stderr
    assert len(launched) == 1


def test_two_runs_do_not_write_the_same_checkpoints(
    here: Path, launched: Launched, hold: Callable
):
    path = write(here, {"spec.checkpoint.uri": f"file://{here}/kept"})
    (here / "kept").mkdir()
    hold(here / "kept")
    result = msa("run", path)
    assert result.exit_code == 2 and not launched
    assert "spec.checkpoint.uri" in result.stderr and "kept is in use by" in result.stderr


def test_standard_output_is_the_summary_alone(here: Path, launched: Launched):
    path = write(here)
    result = msa("run", path, "--output", "json")
    assert json.loads(result.stdout) == {"steps": launched[0][0].training.max_steps}
    assert "plan small" in result.stderr and "step 1/1" in result.stderr
    again = msa("run", path, "--resume", "--output", "json")
    assert json.loads(again.stdout) == json.loads(result.stdout)
    assert "is complete" in again.stderr and len(launched) == 1


def test_what_nothing_was_trained_in_is_given_back(here: Path, monkeypatch: pytest.MonkeyPatch):
    launch = pytest.importorskip("msa_workloads.launch")

    def refuse(spec: RunSpec, **_: Any) -> None:
        for name in ("logs", "checkpoints", "ray-train"):
            (Path(spec.output) / name).mkdir()
        raise launch.DataError("books.jsonl:2: no text")

    monkeypatch.setattr(launch, "run_on_ray", refuse)
    path = write(here)
    for _ in range(2):
        result = msa("run", path, "--output", "json")
        assert result.exit_code == 2 and "small-2" not in result.stderr
        assert json.loads(result.stdout)["problems"][0]["found"] == "books.jsonl:2: no text"
        assert folders.fresh(here / "runs/small", explicit=True, reserve=False)


def test_data_that_ends_a_run_in_its_middle_keeps_what_was_trained(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    launch = pytest.importorskip("msa_workloads.launch")

    def stop(spec: RunSpec, **_: Any) -> None:
        (Path(spec.output) / "metrics.jsonl").write_text('{"step": 1}\n')
        raise launch.DataError("an object changed")

    monkeypatch.setattr(launch, "run_on_ray", stop)
    assert msa("run", write(here)).exit_code == 2
    assert (here / "runs/small/runspec.json").exists()
    assert (here / "runs/small/metrics.jsonl").exists()


def test_workers_that_change_the_step_are_told_what_keeps_it(here: Path, launched: Launched):
    path = write(here, {"spec.sequence.globalBatchTokens": GONE})
    msa("run", path)
    fewer = ("--resume", "--set", "hardware.workers=1", "--set", "training.maxSteps=200")
    result = msa("run", path, *fewer)
    assert result.exit_code == 2 and len(launched) == 1
    nearest = result.stderr.split("nearest")[1].split()
    assert nearest[0] == "--set"
    assert msa("run", path, *fewer, *nearest).exit_code == 0


def test_a_folder_that_cannot_be_written_is_named(here: Path):
    path = write(here)
    (here / "file").write_text("")
    result = msa("run", path, "--output-dir", "file/run")
    assert result.exit_code == 2 and "file/run cannot be made: Not a directory" in result.stderr


def test_narrow_terminals_get_reasons_too_and_dense_layers_are_shown(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "40")
    said = " ".join(
        msa("plan", write(here, {"spec.attention.denseLayers": [2, 0]})).stdout.split()
    )
    assert "communication" in said and "Dense in layers 0, 2" in said


@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_a_full_disk_behind_the_output_is_not_a_traceback(here: Path, form: str):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "msa_operator", "plan", str(write(here)), "-o", form],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_folders_with_spaces_are_written_as_in_addresses(here: Path, launched: Launched):
    for name in ("my texts", "my model"):
        (here / name).mkdir()
    (here / "my texts" / "a b.txt").write_text("a text")
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096,
    }  # fmt: skip
    (here / "my model" / "config.json").write_text(json.dumps(config))
    path = write(here, {
        "spec.data.source": f"file://{here}/my%20texts/*.txt",
        "spec.model": {"source": f"file://{here}/my%20model"},
        "spec.checkpoint.uri": f"file://{here}/my%20checkpoints",
    })  # fmt: skip
    result = msa("run", path)
    assert result.exit_code == 0, result.stderr
    assert launched[0][0].model.source == launched[0][0].model.tokenizer == f"{here}/my model"
    assert (here / "my checkpoints" / ".lock").exists()


def test_interrupted_commands_end_with_130(here: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["msa_operator.cli.plan"], "resolve", stop)
    result = msa("plan", write(here))
    assert result.exit_code == 130 and result.stderr == "error: interrupted\n"

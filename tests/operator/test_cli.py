"""The msa command: exit codes, one clear report for a bad file, and folders that are kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msa_operator import extra
from msa_operator.cli import cli
from msa_operator.yaml12 import load
from msa_workloads.runspec import RunSpec
from operator_jobs import GONE, GPU, SAMPLES, write

REPO = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Commands run in an empty folder, outside any Ray cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-hub"))
    yield tmp_path


def msa(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)


def real(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """The command as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "msa_operator", *map(str, arguments)],
        capture_output=True, text=True, timeout=360, check=False,
        env={**os.environ, **(env or {})},
    )  # fmt: skip


BROKEN: dict[str, tuple[Any, str]] = {
    "wrong type": ({"spec.training.maxSteps": "many"}, "an integer"),
    "unknown field": ({"spec.training.maxStep": 5}, "maxSteps"),
    "unit typo": ({"spec.deadlines.start": "30mins"}, "30m"),
    "impossible degrees": (
        {"spec.parallelism": {"policy": "Fixed", "dataShard": 3}}, "3 ranks for 2 workers"),
    "more context ranks than chunks": (
        {"spec.parallelism": {"context": 4096}, "spec.hardware.workers": 4096}, "1 to 2048"),
    "window 0": ({"spec.attention.pattern.window": 0}, "from 1 to"),
    "missing data": ({"spec.data.source": "file:///no/such/folder/*.txt"}, "no file matches"),
    "unreadable bucket": ({"spec.data.source": "s3://corpus/x/*.txt"}, "Could not connect"),
    "unknown scheme": ({"spec.data.source": "ftp://host/x"}, "s3://bucket"),
    "missing section": ({"spec.data": GONE}, "is missing"),
    "bad name": ({"metadata.name": "Upper_Case"}, "upper-case"),
    "long name": ({"metadata.name": "n" * 39}, "39 characters"),
    "another kind": ({"kind": "RayJob"}, "LongContextJob"),
    "batch that does not divide": ({"spec.sequence.globalBatchTokens": 5000}, "a multiple of"),
    "batch for one worker": (
        {"spec.sequence.globalBatchTokens": 4096, "spec.parallelism.context": 1,
         "spec.parallelism.tensor": 1}, "do not divide over 2"),
    "layer that does not exist": ({"spec.attention.denseLayers": [4]}, "the model has 4 layers"),
    "backend that nobody has": ({"spec.attention.backend": "fa5"}, "nearest  fa4"),
    "backend for GPUs": ({"spec.attention.backend": "triton"}, "it needs a GPU"),
    "model that cannot be had": ({"spec.model": {"source": "hf://Qwen/Qwen3-8B"}}, "qwen3-8b"),
    "gpu without gpus": ({**GPU, "spec.model": {"preset": "tiny-llama"}}, "nvidia-smi shows none"),
    "memory": ({"spec.model.preset": "llama-3.1-70b"}, "GiB per worker"),
    "learned pattern": (
        {"spec.attention.pattern": {"type": "BlockTopK", "block": 64, "topk": 4}}, "BlockTopK"),
    "not yaml": ("a: [1, 2", "expected"),
    "tab": ("spec:\n\tmodel: x", "cannot start any token"),
    "duplicate key": ("kind: LongContextJob\nkind: LongContextJob", "given twice"),
    "two documents": ("a: 1\n---\nb: 2", "more than one document"),
    "empty": ("", "is empty"),
    "a list": ("- 1\n- 2", "a mapping with apiVersion"),
    "binary": (b"\x80\x81\x82", "not UTF-8"),
    "bomb": ("a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "\n".join(
        f"{y}: &{y} [{','.join(['*' + x] * 10)}]" for x, y in zip("abcdef", "bcdefg", strict=True)
    ), "aliases"),
}  # fmt: skip
NO_GPU = {"PATH": str(Path(sys.executable).parent), "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
          "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
          "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_gives_one_clear_report_and_exit_code_2(kind: str, here: Path):
    content, said = BROKEN[kind]
    path = here / "job.yaml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    else:
        write(here, content)
    done = real("run", path, env=NO_GPU)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and str(path) in done.stderr
    assert done.stderr.startswith("error: a problem in ")
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert not (here / "runs").exists(), "nothing was started"


def test_problems_are_reported_together_with_lines(here: Path):
    path = write(here, {"spec.training.maxSteps": 0, "spec.deadlines.start": "1 hour"})
    result = msa("plan", path)
    assert result.exit_code == 2
    assert "2 problems" in result.stderr and "nearest  1h" in result.stderr
    line = next(n for n, t in enumerate(path.read_text().splitlines(), 1) if "maxSteps" in t)
    assert f"{path}:{line}  spec.training.maxSteps" in result.stderr


def test_problems_as_json(here: Path):
    result = msa("plan", write(here, {"spec.attention.denseLayers": [9]}), "-o", "json")
    assert result.exit_code == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["path"] == "spec.attention.denseLayers[0]" and problem["nearest"] == "3"
    assert "job.yaml:" in problem["where"]


def test_a_missing_file_names_the_nearest(here: Path):
    write(here)
    result = msa("plan", here / "jb.yaml")
    assert result.exit_code == 2 and "job.yaml" in result.stderr
    assert msa("plan", here).exit_code == 2


def test_bad_flags_exit_2(here: Path):
    path = write(here)
    assert msa("plan").exit_code == 2
    assert msa("plan", path, "--output", "xml").exit_code == 2
    assert msa("plan", path, "--set", "nonsense").exit_code == 2
    assert msa("plan", path, "--profile", here / "none.yaml").exit_code == 2
    assert msa("launch").exit_code == 2


def test_plan_for_this_machine():
    result = msa("plan", SAMPLES / "stdlib-4k.yaml")
    assert result.exit_code == 0
    assert "fsdp2 on 2 CPU workers of this machine" in result.stdout
    assert "SinkWindow(window 512, sinks 64)" in result.stdout


def test_plan_of_a_large_job_says_what_cannot_run_yet():
    arguments = ("plan", SAMPLES / "llama-strided-256k.yaml")
    text = msa(*arguments).stdout
    assert "vpc.amazonaws.com/efa: 16" in text
    assert "layout expected" in text
    missing = None
    for form in ("json", "yaml"):
        result = load(msa(*arguments, "--output", form).stdout).value
        assert result["degrees"]["context"] > 1
        assert result["podResources"]["vpc.amazonaws.com/efa"] == 16
        assert result["context"]["layouts"][0]["balance"] < 1.03
        assert result["rejected"][0]["reason"]
        missing = result["notYetRunnable"]
    assert ("cannot run it yet" in text) == bool(missing)


def test_plan_with_overrides_and_a_profile():
    result = msa(
        "plan", SAMPLES / "qwen-128k.yaml", "--set", "model={preset: qwen3-8b}",
        "--set", "hardware.instanceTypes=[rack-h200]",
        "--profile", SAMPLES / "hardware-profile.yaml", "-o", "json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["machine"] == "rack-h200"


def test_dry_run_prints_the_plan_and_the_runspec_and_starts_nothing(here: Path):
    path = write(here)
    text = msa("run", path, "--dry-run").stdout
    assert text.startswith("plan small") and "\nRunSpec\n" in text
    spec = RunSpec.from_json(msa("run", path, "--dry-run", "-o", "json").stdout)
    assert spec.output == str(here / "runs" / "small")
    assert spec.checkpoint.uri == str(here / "runs" / "small" / "checkpoints")
    assert spec.threads >= 1 and spec.mesh.world_size == 2
    assert not (here / "runs").exists()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunSpec, bool]]:
    """Replaces what trains: these tests are about what surrounds it."""
    launch = pytest.importorskip("msa_workloads.launch")
    calls: list[tuple[RunSpec, bool]] = []

    def run_on_ray(spec: RunSpec, *, resume: bool, console: Any) -> dict[str, Any]:
        del console
        calls.append((spec, resume))
        summary = {"steps": spec.training.max_steps}
        (Path(spec.output) / "summary.json").write_text(json.dumps(summary))
        return summary

    monkeypatch.setattr(launch, "run_on_ray", run_on_ray)
    return calls


def test_a_run_gets_a_folder_of_its_own(here: Path, launched: list[tuple[RunSpec, bool]]):
    path = write(here)
    assert msa("run", path).exit_code == 0
    again = msa("run", path)
    assert "holds an earlier run; this one goes to runs/small-2" in again.stderr
    assert [Path(spec.output).name for spec, _ in launched] == ["small", "small-2"]
    assert RunSpec.from_json((here / "runs/small/runspec.json").read_text()) == launched[0][0]


def test_a_folder_asked_for_by_name_is_never_shared(
    here: Path, launched: list[tuple[RunSpec, bool]]
):
    path = write(here)
    (here / "full").mkdir()
    (here / "full" / "thesis.tex").write_text("years of work")
    result = msa("run", path, "--output-dir", here / "full")
    assert result.exit_code == 2 and "already holds files" in result.stderr
    assert msa("run", path, "--output-dir", here / "new").exit_code == 0
    result = msa("run", path, "--output-dir", here / "new")
    assert result.exit_code == 2 and "--resume" in result.stderr
    assert len(launched) == 1


def test_resume_goes_on_with_the_newest_run(here: Path, launched: list[tuple[RunSpec, bool]]):
    path = write(here)
    result = msa("run", path, "--resume")
    assert result.exit_code == 2 and "nothing to resume" in result.stderr
    for _ in range(11):
        msa("run", path)
    result = msa("run", path, "--resume")
    assert result.exit_code == 0 and "is complete" in result.stderr
    assert len(launched) == 11
    result = msa("run", path, "--resume", "--set", "training.maxSteps=200")
    assert result.exit_code == 0
    spec, resume = launched[-1]
    assert resume and Path(spec.output).name == "small-11" and spec.training.max_steps == 200


def test_resume_without_a_folder_goes_on_from_a_checkpoint_place_of_its_own(
    here: Path, launched: list[tuple[RunSpec, bool]]
):
    path = write(here, {"spec.checkpoint.uri": f"file://{here}/kept"})
    result = msa("run", path, "--resume")
    assert result.exit_code == 0 and f"going on from file://{here}/kept" in result.stderr
    spec, resume = launched[0]
    assert resume and Path(spec.output).name == "small"


def test_a_run_that_goes_on_is_planned_with_the_order_of_heads_that_it_has(here: Path):
    windows = [{"type": "Window", "window": n} for n in (256, 512, 1024, 2048)]
    path = write(here, {
        "spec.model": {"config": {
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
            "vocab_size": 260,
        }},
        "spec.attention": {"pattern": {"type": "PerHead", "members": windows}},
        "spec.parallelism": {"tensor": 2},
    })  # fmt: skip
    began = msa("run", path, "--dry-run", "-o", "json")
    assert began.exit_code == 0, began.stderr
    spec = RunSpec.from_json(began.stdout)
    folder = Path(spec.output)
    saved = Path(spec.checkpoint.uri) / "step-00000002"
    saved.mkdir(parents=True)
    (folder / "runspec.json").write_text(began.stdout)
    assert "stored as" not in msa("run", path, "--resume", "--dry-run").stdout
    none = msa("plan", path, "--resume")
    assert none.exit_code == 2 and "no checkpoint in runs/small/checkpoints" in none.stderr
    marker = {
        "step": 2, "next_sample": 2, "identity": {}, "content_sha256": "", "ranks": 2, "files": {},
        "saved_at": 0.0, "head_orders": {"0": [0, 3, 1, 2, 4, 7, 5, 6]},
    }  # fmt: skip
    (saved / "complete.json").write_text(json.dumps(marker))
    said = " ".join(msa("run", path, "--resume", "--dry-run").stdout.split())
    assert "stored as 0 3 1 2 4 7 5 6 of the model's" in said
    assert "the run keeps the order of its checkpoint" in said
    said = " ".join(msa("plan", path, "--resume").stdout.split())
    assert "stored as 0 3 1 2 4 7 5 6 of the model's" in said
    assert "the run keeps the order of its checkpoint" in said
    away = msa("plan", path, "--resume", "--set", "checkpoint.uri=s3://some/where")
    assert away.exit_code == 2 and "are not read by msa plan" in away.stderr


def test_resume_refuses_another_job(here: Path, launched: list[tuple[RunSpec, bool]]):
    path = write(here)
    msa("run", path)
    result = msa("run", path, "--resume", "--set", "attention.pattern.window=64")
    assert result.exit_code == 2 and "has another attention" in result.stderr
    (here / "runs/small/runspec.json").write_text("{}")
    result = msa("run", path, "--resume")
    assert result.exit_code == 2 and "runspec.json" in result.stderr
    assert len(launched) == 1


def test_a_backend_set_for_one_command_reaches_plan_and_run(
    here: Path, launched: list[tuple[RunSpec, bool]]
):
    path, override = write(here), ("--set", "attention.backend=torch")
    assert "sinks 64), backend torch" in msa("plan", path, *override).stdout
    assert "backend" not in msa("plan", path).stdout
    made = json.loads(msa("plan", path, *override, "-o", "json").stdout)
    assert made["attentionBackend"] == "torch"
    assert msa("run", path, *override).exit_code == 0
    assert msa("run", path, "--resume", "--set", "training.maxSteps=200").exit_code == 0
    assert [spec.attention.backend for spec, _ in launched] == ["torch", "auto"]
    refused = msa("run", path, "--set", "attention.backend=sdpa")
    assert refused.exit_code == 2 and "--set attention.backend" in refused.stderr
    assert "sdpa for SinkWindow: it serves Dense only" in refused.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("DataError", 2, "no such text"),
        ("UnsupportedError", 2, "no such text"),
        ("CheckpointError", 2, "no such text"),
        ("ClusterError", 4, "no such text"),
        ("RunFailed", 1, "the run failed; its files are in"),
        ("KeyboardInterrupt", 130, "--resume"),
    ],
)
def test_exit_codes_of_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: str, code: int, said: str
):
    launch = pytest.importorskip("msa_workloads.launch")
    kind = KeyboardInterrupt if error == "KeyboardInterrupt" else getattr(launch, error)

    def fail(*_: Any, **__: Any) -> None:
        raise kind("no such text")

    monkeypatch.setattr(launch, "run_on_ray", fail)
    result = msa("run", write(here))
    assert result.exit_code == code and said in result.stderr
    assert "Traceback" not in result.stderr


def test_without_the_training_packages_the_extra_is_named(here: Path):
    # A package of that name that cannot be imported stands for one that is not installed.
    (here / "hide" / "torch").mkdir(parents=True)
    (here / "hide" / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    done = real("run", write(here), env={"PYTHONPATH": str(here / "hide")})
    assert done.returncode == 3, done.stderr
    assert extra.command() in done.stderr
    assert not (here / "runs/small/runspec.json").exists(), "the folder is for the next run"
    assert "Traceback" not in done.stderr


def test_the_command_loads_no_framework():
    code = "import msa_operator.cli, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True,
                          text=True, check=True)  # fmt: skip
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    heavy = {"torch", "ray", "numpy", "transformers", "boto3", "kopf", "kubernetes", "rich"}
    assert not loaded & heavy
    for name in ("torch", "ray", "numpy"):
        assert f" {name}\n" not in done.stderr


def test_help_teaches():
    for arguments in ((), ("plan",), ("run",)):
        result = msa(*arguments, "--help")
        assert result.exit_code == 0 and "msa run" in result.stdout + "msa run" * bool(arguments)
    text = msa("--help").stdout
    assert "apiVersion: flashmsa.dev/v1alpha1" in text and "Exit codes" in text
    assert "ray job submit" in msa("run", "--help").stdout
    assert msa("--version").exit_code == 0


def test_the_smallest_job_of_the_help_is_a_job(here: Path):
    text = msa("--help").stdout
    start = text.index("apiVersion:")
    lines = text[start : text.index("\n\n", start)].splitlines()
    path = here / "first.yaml"
    path.write_text("\n".join([lines[0], *(line[4:] for line in lines[1:])]))
    assert msa("plan", path).exit_code == 0


def test_standard_input_is_a_file(here: Path):
    text = write(here).read_text()
    result = CliRunner().invoke(cli, ["plan", "-"], input=text)
    assert result.exit_code == 0
    result = CliRunner().invoke(cli, ["plan", "-"], input=text.replace("tiny-llama", "tiny"))
    assert result.exit_code == 2 and "(standard input):" in result.stderr

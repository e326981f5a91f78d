"""The loop: deterministic, resumable, and clear about what it refuses."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msa_workloads.progress import MetricsFile, read_rows
from msa_workloads.runspec import RunSpec


def losses(outcome: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in outcome["history"]]


def train_all(specs: list[str]) -> list[Any]:
    """Outcome, or error, of several runs one after the other on this rank."""
    from msa_workloads.progress import MetricsFile
    from msa_workloads.train import run

    outcomes = []
    for text in specs:
        spec = RunSpec.from_json(text)
        try:
            outcomes.append(run(spec, MetricsFile(spec.output)))
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


@pytest.mark.slow
def test_runs_repeat_and_resume_bit_for_bit(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec], text_folder: Path
) -> None:
    whole, again = make_spec("a", training={"evaluate_every": 3}), make_spec("b")
    # One run ends at step 4 of a schedule for 6, as if killed there; the next continues it.
    first = make_spec("c")
    cut = replace(first, training=replace(first.training, max_steps=4))
    never = replace(first, checkpoint=replace(first.checkpoint, resume="Never"))
    other = replace(first, training=replace(first.training, seed=1))
    specs = [s.to_json() for s in (whole, again, cut, first, never, other)]
    ((a, b, part, resumed, refused, foreign),) = on_ranks(train_all, 1, specs=specs)

    assert losses(a) == losses(b)
    assert [row["digest"] for row in a["history"]] == [row["digest"] for row in b["history"]]
    assert part["steps"] == 4
    assert resumed["resumed_from_step"] == 4
    assert [row["step"] for row in resumed["history"]] == [1, 2, 3, 4, 5, 6]
    assert [r["digest"] for r in resumed["history"]] == [r["digest"] for r in a["history"]]
    # The cut run's schedule was shorter, so its steps from the warm-up on differ; data does not.
    assert losses(resumed)[:2] == losses(a)[:2]
    assert [r["samples"] for r in a["history"]] == [[2 * n, 2 * n + 2] for n in range(6)]
    assert MetricsFile(first.output).rows() == resumed["history"]

    held = a["held_out"]
    assert held["unit"] == "bytes"
    assert held["sequences"] == 3
    assert [row["step"] for row in a["history"] if "held_out" in row] == [3, 6]
    assert a["history"][5]["held_out"] == held == b["held_out"]
    assert 0 < held["bits_per_byte"] < 12
    assert a["order1"]["predicted"] == held["predicted"]
    assert 0 < a["order1"]["bits_per_byte"] < 8
    assert a["attention"][0]["backend"] == "torch"
    assert losses(a)[-1] < losses(a)[0]
    assert losses(a)[0] == pytest.approx(math.log(260), rel=0.05)

    assert refused.startswith("CheckpointError: ")
    assert "already holds a checkpoint of step 6" in refused
    assert "written by a run with another training.seed" in foreign


@pytest.mark.slow
@pytest.mark.full  # by default a run goes on on three other meshes, in test_reshard.py
def test_a_run_continues_on_another_number_of_ranks(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    """Two ranks start, one goes on; against one rank throughout: same samples, same losses."""
    whole, two = make_spec("whole"), make_spec("moved", mesh={"data_shard": 2})
    two = replace(two, sequence=replace(two.sequence, micro_batch=1))
    # The schedule spans six steps in both; this attempt stops after the checkpoint of step 4.
    (alone,) = on_ranks(train_all, 1, specs=[whole.to_json()])
    pair = on_ranks(interrupted, 2, spec=two.to_json(), step=4)
    assert pair == ["stopped after step 5"] * 2
    one = replace(two, mesh=whole.mesh, sequence=whole.sequence)
    ((moved,),) = on_ranks(train_all, 1, specs=[one.to_json()])
    assert moved["resumed_from_step"] == 4
    rows, expected = moved["history"], alone[0]["history"]
    assert [r["digest"] for r in rows] == [r["digest"] for r in expected]
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in expected], rel=1e-5)


def interrupted(spec: str, step: int) -> str:
    """A run that fails on every rank at the step after ``step``, once its checkpoint is whole."""
    from msa_workloads import train

    real = train.train_step
    calls = 0

    def failing(*arguments: Any) -> float:
        nonlocal calls
        calls += 1
        if calls > step + 1:
            raise RuntimeError(f"stopped after step {calls - 1}")
        return real(*arguments)

    train.train_step = failing
    (outcome,) = train_all([spec])
    return outcome.removeprefix("RuntimeError: ")


@pytest.mark.slow
def test_bad_input_is_refused_with_a_reason(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    def spec(name: str, **parts: Any) -> str:
        return make_spec(name, **parts).to_json()

    lonely = tmp_path / "one.txt"
    lonely.write_text("only one document " * 40)
    ((missing, dense, unsupported, diverged, single),) = on_ranks(
        train_all,
        1,
        specs=[
            spec("a", data={"source": "file:///nowhere/*.txt"}),
            spec("b", attention={"dense_layers": (7,)}),
            spec("c", context={"heads": 2}),
            spec("d", training={"learning_rate": 1e30, "warmup_steps": 0, "clip_norm": 0.0}),
            spec("e", data={"source": f"file://{lonely}"}),
        ],
    )
    assert missing == "DataError: file:///nowhere/*.txt: no file matches"
    assert "attention.dense_layers: found 7" in dense
    assert "context.heads: found 2, which does not divide" in unsupported
    assert diverged.startswith("DivergedError: step 2: loss ")
    assert single["held_out"] is None
    assert single["order1"] is None


@pytest.mark.slow
def test_the_doors_without_ray(make_spec: Callable[..., RunSpec], tmp_path: Path) -> None:
    """``python -m`` and torchrun write the same files and the same losses."""

    def start(name: str, *launcher: str, **parts: Any) -> subprocess.CompletedProcess[str]:
        spec = make_spec(name, **parts)
        file = tmp_path / f"{name}.json"
        file.write_text(spec.to_json())
        command = [sys.executable, "-m", *launcher, "msa_workloads.train", "--spec", str(file)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=720,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip

    alone = start("alone")
    assert alone.returncode == 0, alone.stderr
    assert "tiny: finished" in alone.stdout
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "--local-addr=127.0.0.1"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m"]
    pair = start("pair", *torchrun, mesh={"context": 2})
    assert pair.returncode == 0, pair.stderr
    for name in ("alone", "pair"):
        folder = tmp_path / name
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["steps"] == 6
        rows = read_rows((folder / "metrics.jsonl").read_text())
        assert [row["loss"] for row in rows] == summary["losses"]
        assert "<svg" in (folder / "report.html").read_text()
        assert "checkpoint of step 6 committed" in (folder / "logs" / "rank-0.log").read_text()
    one, two = (json.loads((tmp_path / n / "summary.json").read_text()) for n in ("alone", "pair"))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["context"]["ranks"] == 2 and one["context"] is None
    assert "keys and values a step" in (tmp_path / "pair" / "report.html").read_text()
    assert (tmp_path / "pair" / "logs" / "rank-1.log").exists()

    bad = start("bad", mesh={"tensor": 3})
    assert bad.returncode == 2
    assert "mesh.tensor: found 3, allowed: 1, 2, 4" in bad.stdout + bad.stderr
    assert "Traceback" not in bad.stdout + bad.stderr

"""The benchmarks of training run without a GPU, at a tiny size, from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msa_kernels.pattern import Window
from msa_workloads.runspec import MemorySpec

FOLDER = Path(__file__).parents[2] / "benchmarks" / "training"


def run(script: str, out: Path, options: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), "--tiny", "--out", str(out), *options.split()],
        capture_output=True, text=True, timeout=1500, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_a_step_is_timed_beside_the_peer_and_a_broken_row_costs_that_row(tmp_path: Path) -> None:
    code, found = run(
        "step.py", tmp_path / "step.jsonl",
        "--tokens 256 --steps 1 --loss-chunk 100 --mlp-chunk 64 --seconds 400 "
        "--rows peer/dilated peer/window ours/window",
    )  # fmt: skip
    assert code == 1
    (error,) = [r for r in found if r["kind"] == "error"]
    assert error["row"] == "peer/dilated" and "does not serve Dilated" in error["error"]
    steps = {r["row"]: r for r in found if r["kind"] == "step"}
    assert steps.keys() == {"peer/window", "ours/window"}
    for row in steps.values():
        assert row["losses"][1] < row["losses"][0]
        assert row["tokens_per_second"] > 0
        assert row["parameters"] == steps["peer/window"]["parameters"]


@pytest.mark.slow
def test_a_long_step_has_its_estimate_beside_it(tmp_path: Path) -> None:
    code, found = run(
        "longest.py", tmp_path / "longest.jsonl",
        "--tokens 256 --window 32 --backend auto --loss-chunk 100 --mlp-chunk 64 "
        "--checkpoint-layers 2 --checkpoints-on-device 1",
    )  # fmt: skip
    assert code == 0
    kinds = [r["kind"] for r in found]
    assert kinds[:2] == ["environment", "plan"] and kinds[-1] == "longest"
    last = found[-1]
    assert last["memory"]["checkpoint_layers"] == 2
    assert last["recomputed_layers"] == 3
    assert last["estimate"] == found[1]["estimate"]


def test_a_plan_fits_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import longest
    from common import Shape

    whole = Shape(layers=32)
    assert whole.parameters == 8_030_261_248
    base = MemorySpec(
        checkpointing="full", offload_checkpoints=True, offload_optimizer=True,
        optimizer_states="bf16", parameters="bf16", loss_chunk=8192, mlp_chunk=16384,
    )  # fmt: skip
    window = Window(8192)
    memory = longest.choose(whole, 1_048_576, 1, 133, 108, base, window)
    found = longest.estimate(whole, 1_048_576, 1, memory, window)
    assert found["gpu_peak"] <= 133 and found["host"] <= 108
    # A layer's input is 8 GiB: 32 of them would not fit any host here.
    assert found["unit"] == pytest.approx(8.0, abs=0.01)
    assert memory.checkpoint_layers > 1
    with pytest.raises(ValueError, match="fit no plan"):
        longest.choose(whole, 4_000_000, 1, 133, 108, base, window)


def test_the_longest_run_over_two_gpus_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """h200.jsonl, 2,097,152 tokens: 124.6 GiB, with dQ in fp32 and its narrow copy at the end, 16
    GiB more than the code since then holds."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import longest
    from common import Shape

    rows = [json.loads(line) for line in (FOLDER / "h200.jsonl").read_text().splitlines()]
    run = next(r for r in rows if r["kind"] == "longest" and r["tokens"] == 2_097_152)
    memory = MemorySpec(**run["memory"])
    found = longest.estimate(Shape(layers=32), run["tokens"], 2, memory, Window(run["window"]))
    assert found["gpu_peak"] + 2 * found["unit"] == pytest.approx(run["peak_gib"][0], rel=0.02)

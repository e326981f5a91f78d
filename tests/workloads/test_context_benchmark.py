"""The benchmark of context parallelism runs without GPUs and records what it claims to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_small_run_on_two_processes(tmp_path: Path):
    out = tmp_path / "rows.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "benchmarks/context/two_gpus.py", "--tokens", "512", "--heads", "4", "2", "16",
        "--window", "64", "--multiple", "16", "--rounds", "2", "--warmup", "0", "--out", str(out),
        "--only", "solved", "dilated", "ulysses",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command,
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    rows = {row["method"]: row for row in result["rows"]}
    assert result["ranks"] == 2 and result["device"] == "cpu" and result["date"]
    for row in rows.values():
        assert row["errors"]["out"] < 1e-5 and row["speed_up"] > 0
        low, high = row["speed_up_interval"]
        assert low <= row["speed_up"] <= high
    assert rows["dilated, residues"]["bytes_sent_total"] == [0, 0]
    window = rows["window, solved"]
    assert window["bytes_sent_forward"] == window["bytes_needed_forward"]
    assert rows["window, solved, bf16 gradients"]["errors"]["dk"] < 1e-2

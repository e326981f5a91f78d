"""Whole runs on GPUs: one, two that share each sequence, and two that go on from those."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msa_workloads.runspec import (
    AttentionSpec,
    CheckpointSpec,
    DataSpec,
    MeshSpec,
    ModelSpec,
    RunSpec,
    SequenceSpec,
    TrainingSpec,
)

sys.path.insert(0, str(Path(__file__).parent))
from spawned import needs

pytestmark = pytest.mark.gpu

LENGTH = 1536


def make_spec(folder: Path, device: str = "gpu") -> RunSpec:
    text = folder / "text"
    text.mkdir()
    for n in range(60):
        lines = (f"document {n}, line {m}: the quick brown fox\n" for m in range(20 + n % 7))
        (text / f"{n:02}.txt").write_text("".join(lines))
    return RunSpec(
        name="small",
        model=ModelSpec(config={
            "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
        }),
        data=DataSpec(source=f"file://{text}/*.txt", holdout_fraction=0.1),
        sequence=SequenceSpec(length=LENGTH, micro_batch=2),
        attention=AttentionSpec(pattern={"type": "SinkWindow", "window": 300, "sinks": 4}),
        training=TrainingSpec(
            max_steps=6, learning_rate=3e-3, warmup_steps=2, precision="bf16",
            evaluate_sequences=2,
        ),
        checkpoint=CheckpointSpec(uri="none"), output="none", device=device,
    )  # fmt: skip


def train(spec: RunSpec, folder: Path, ranks: int) -> dict[str, Any]:
    """A run in ``folder``, whose checkpoints are beside it; its summary."""
    keeps = replace(spec.checkpoint, uri=str(folder / "checkpoints"), every_steps=2)
    spec = replace(spec, output=str(folder), checkpoint=keeps)
    folder.mkdir(exist_ok=True)
    file = folder / "given.json"
    file.write_text(spec.to_json())
    launcher = [
        "torch.distributed.run", f"--nproc-per-node={ranks}", "--local-addr=127.0.0.1",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "msa_workloads.train",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "--spec", str(file)], capture_output=True, text=True,
        timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "summary.json").read_text())


def check(one: dict[str, Any], two: dict[str, Any], more: dict[str, Any]) -> None:
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-2)
    assert one["losses"][-1] < one["losses"][0] - 0.3
    assert two["context"]["ranks"] == 2
    assert more["resumed_from_step"] == 6 and len(more["losses"]) == 8
    assert more["losses"][:6] == two["losses"]
    assert more["losses"][-1] < two["losses"][2]


def runs(folder: Path, spec: RunSpec) -> tuple[dict[str, Any], ...]:
    shared = replace(spec, mesh=MeshSpec(context=2))
    longer = replace(
        spec, mesh=MeshSpec(data_shard=2), training=replace(spec.training, max_steps=8),
        sequence=replace(spec.sequence, micro_batch=1),
    )  # fmt: skip
    return (
        train(spec, folder / "one", 1),
        train(shared, folder / "two", 2),
        train(longer, folder / "two", 2),
    )


def test_a_run_on_two_gpus_is_that_of_one_and_goes_on(tmp_path: Path) -> None:
    needs(2)
    one, two, more = runs(tmp_path, make_spec(tmp_path))
    check(one, two, more)
    assert {row["device"] for row in one["attention"]} == {"cuda:0"}

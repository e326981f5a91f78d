"""From a job to its RunSpec: everything arrives, and models come from where the job says."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msa_operator.api import JobError, parse_job
from msa_operator.models import resolve
from msa_operator.planner.hardware import local
from msa_operator.planner.presets import PRESETS
from msa_operator.planner.runtime import EVERYTHING, THIS_VERSION
from msa_operator.runs import machines_of, plan_job, run_spec, same_run, step_tokens
from msa_workloads.runspec import RunSpec
from operator_jobs import GPU, job

HOST = local(cpus=4, memory_mib=32_000)


def built(changes: dict[str, Any] | None = None, **where: Any) -> RunSpec:
    parsed = parse_job(job(changes))
    model = resolve(parsed.spec.model)
    plan = plan_job(parsed, model, machines_of(parsed, (), lambda: HOST), THIS_VERSION)
    places = {"output": "/out", "checkpoint_uri": "/out/checkpoints", "threads": 2} | where
    return run_spec(parsed, plan, model, **places)


def problems(changes: dict[str, Any]) -> list[tuple[str, str, str]]:
    with pytest.raises(JobError) as caught:
        built(changes)
    return [(p.path, p.found, p.nearest) for p in caught.value.problems]


def test_everything_arrives():
    spec = built({
        "spec.data": {"source": "file:///d/*.jsonl", "textField": "body", "packing": False,
                      "holdoutFraction": 0.1},
        "spec.sequence.globalBatchTokens": 4096 * 12,
        "spec.attention.denseLayers": [0, 3],
        "spec.attention.backend": "torch",
        "spec.training": {"maxSteps": 1000, "learningRate": 1e-3, "minLearningRateRatio": 0.2,
                          "weightDecay": 0.01, "beta1": 0.8, "beta2": 0.9, "clipNorm": 2,
                          "precision": "fp32", "seed": 5, "evaluateEvery": 10,
                          "evaluateSequences": 3},
        "spec.checkpoint": {"everySteps": 7, "keep": 9, "resume": "Never"},
        "spec.failure.maxRestarts": 4,
    })  # fmt: skip
    assert (spec.name, spec.output, spec.device, spec.threads) == ("small", "/out", "cpu", 2)
    assert dataclasses.asdict(spec.data) == {
        "source": "file:///d/*.jsonl", "text_field": "body", "packing": False,
        "holdout_fraction": 0.1,
    }  # fmt: skip
    assert (spec.sequence.length, spec.sequence.micro_batch, spec.sequence.accumulation) == (
        4096, 1, 6,
    )  # fmt: skip
    assert step_tokens(spec) == 4096 * 12
    assert spec.attention.pattern == {"type": "SinkWindow", "window": 512, "sinks": 64}
    assert spec.attention.dense_layers == (0, 3) and spec.attention.backend == "torch"
    assert spec.plan["attentionBackend"] == "torch"
    assert dataclasses.asdict(spec.training) == {
        "max_steps": 1000, "learning_rate": 1e-3, "min_learning_rate_ratio": 0.2,
        "warmup_steps": 50, "weight_decay": 0.01, "beta1": 0.8, "beta2": 0.9, "clip_norm": 2.0,
        "precision": "fp32", "seed": 5, "evaluate_every": 10, "evaluate_sequences": 3,
    }  # fmt: skip
    assert dataclasses.asdict(spec.checkpoint) == {
        "uri": "/out/checkpoints", "every_steps": 7, "keep": 9, "resume": "Never",
    }  # fmt: skip
    assert dataclasses.asdict(spec.recovery) == {"owner": "ray", "max_restarts": 4}
    assert spec.mesh.data_ranks == spec.mesh.world_size == 2
    assert spec.plan["summary"].startswith("fsdp2 on 2 CPU workers")
    assert RunSpec.from_json(spec.to_json()) == spec


def test_every_training_field_of_the_job_reaches_the_run():
    from msa_operator.api.job import Training
    from msa_workloads.runspec import TrainingSpec

    assert set(Training.model_fields) == {f.name for f in dataclasses.fields(TrainingSpec)}


def test_a_checkpoint_place_in_the_job_wins():
    assert built({"spec.checkpoint.uri": "s3://ckpt/run"}).checkpoint.uri == "s3://ckpt/run"


def test_positions_are_extended_to_the_length():
    changes = {"spec.model": {"config": {**PRESETS["tiny-llama"], "max_position_embeddings": 16}}}
    assert built(changes).model.config["max_position_embeddings"] == 4096
    assert built().model.config == PRESETS["tiny-llama"]


def test_fixed_degrees():
    spec = built({"spec.parallelism": {"policy": "Fixed", "dataReplicate": 2}})
    assert (spec.mesh.data_replicate, spec.mesh.data_shard) == (2, 1)
    spec = built({"spec.parallelism": {"policy": "Fixed", "context": 2}})
    assert (spec.mesh.context, spec.mesh.data_ranks) == (2, 1)
    assert (spec.context.layout, spec.context.method, spec.context.heads) == (
        "auto", "all_to_all", 1,
    )  # fmt: skip
    assert spec.plan["context"]["layouts"][0]["layout"] == "rotated"


def test_impossible_plans_name_the_field():
    ((path, what, nearest),) = problems({"spec.attention.denseLayers": [4]})
    assert (path, nearest) == ("spec.attention.denseLayers[0]", "3") and "4 layers" in what
    ((path, what, nearest),) = problems({"spec.attention.backend": "triton"})
    assert (path, nearest) == ("spec.attention.backend", "auto") and "needs a GPU" in what
    odd = {
        "spec.sequence.globalBatchTokens": 4096, "spec.parallelism.context": 1,
        "spec.parallelism.tensor": 1,
    }  # fmt: skip
    ((path, _, _),) = problems(odd)
    assert path == "spec.sequence.globalBatchTokens"


def test_machine_types_that_nobody_describes():
    parsed = parse_job(job({**GPU, "spec.hardware.instanceTypes": ["p5.48xlarg", "g6f.xlarge"]}))
    with pytest.raises(JobError) as caught:
        machines_of(parsed, (), lambda: HOST)
    first, second = caught.value.problems
    assert (first.path, first.nearest) == ("spec.hardware.instanceTypes[0]", "p5.48xlarge")
    assert second.path == "spec.hardware.instanceTypes[1]" and "fractional" in second.found


def test_memory_that_no_pod_can_get_is_refused_with_the_most():
    only = {"spec.hardware.instanceTypes": ["p5.48xlarge"]}
    parsed = parse_job(job({**GPU, **only, "spec.pod.memory": "2048Gi"}))
    model = resolve(parsed.spec.model)
    with pytest.raises(JobError) as caught:
        plan_job(parsed, model, machines_of(parsed, (), lambda: HOST), EVERYTHING)
    (problem,) = caught.value.problems
    assert problem.path == "spec.pod.memory" and problem.nearest == "1938410Mi"


def test_checkpoints_that_other_machines_would_not_see_are_noted():
    def notes(changes: dict[str, Any]) -> str:
        parsed = parse_job(job({**GPU, **changes}))
        machines = machines_of(parsed, (), lambda: HOST)
        return " ".join(plan_job(parsed, resolve(parsed.spec.model), machines, EVERYTHING).notes)

    here = {"spec.checkpoint.uri": "file:///ckpt/run"}
    volume = {"name": "ckpt", "mountPath": "/ckpt", "source": {"persistentVolumeClaim": {}}}
    assert "lies on no volume" in notes(here)
    assert "lies on no volume" not in notes({**here, "spec.pod.volumes": [volume]})
    assert "lies on no volume" in notes(
        {**here, "spec.pod.volumes": [{**volume, "mountPath": "/c"}]}
    )
    assert "is not given" in notes({})
    assert "checkpoint.uri" not in notes({"spec.checkpoint.uri": "s3://ckpt/run"})


def test_what_may_change_between_attempts():
    start = built()
    longer = built({"spec.training.maxSteps": 500, "spec.checkpoint.keep": 9}, output="/other")
    assert same_run(start, longer) == ""
    wider = built({"spec.hardware.workers": 1})
    assert same_run(start, wider) == "", "another split of the same tokens"
    assert same_run(start, built({"spec.attention.backend": "torch"})) == "", "exact, as auto is"
    eight = replace(start, attention=replace(start.attention, backend="triton-fp8"))
    assert same_run(start, eight) == same_run(eight, start) == "attention.backend"
    assert same_run(eight, eight) == ""
    for change, name in (
        ({"spec.sequence.globalBatchTokens": 16384}, "tokens of a step"),
        ({"spec.attention.pattern.window": 8}, "attention"),
        ({"spec.training.seed": 1}, "training.seed"),
        ({"spec.data.packing": False}, "data"),
    ):
        assert same_run(start, built(change)) == name


def test_a_model_from_a_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny-llama"]))
    spec = built({"spec.model": {"source": f"file://{tmp_path}", "tokenizer": "bytes"}})
    assert spec.model.source == str(tmp_path) and spec.model.tokenizer == "bytes"
    assert spec.model.config == PRESETS["tiny-llama"]


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, "cannot be read"), ("{", "Expecting"), ("[]", "config.json"),
     ('{"model_type": "bert"}', "allowed: llama")],
)  # fmt: skip
def test_folders_without_a_usable_config(tmp_path: Path, text: str | None, found: str):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    ((path, what, _),) = problems({"spec.model": {"source": f"file://{tmp_path}"}})
    assert path == "spec.model.source" and found in what


def test_inline_configs_are_checked():
    config = {**PRESETS["tiny-llama"], "num_key_value_heads": 3}
    ((path, what, _),) = problems({"spec.model": {"config": config}})
    assert path == "spec.model.config.num_key_value_heads" and "does not divide" in what
    config = {**PRESETS["tiny-llama"], "vocab_size": 256}
    ((path, _, nearest),) = problems({"spec.model": {"config": config}})
    assert (path, nearest) == ("spec.model.config.vocab_size", "260")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """A Hub on loopback: path to body; the local cache is empty."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = files.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield files
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_of_the_hub(hub: dict[str, bytes], tmp_path: Path, monkeypatch: Any):
    changes = {"spec.model": {"source": "hf://Org/Tiny", "tokenizer": "bytes"}}
    ((path, what, _),) = problems(changes)
    assert path == "spec.model.source" and "answered 404" in what
    hub["/Org/Tiny/resolve/main/config.json"] = json.dumps(PRESETS["tiny-llama"]).encode()
    assert built(changes).model.source == "hf://Org/Tiny"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ((_, what, _),) = problems(changes)
    assert "HF_HUB_OFFLINE" in what
    folder = tmp_path / "hub" / "hub" / "models--Org--Tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    cached = {**PRESETS["tiny-llama"], "num_hidden_layers": 2}
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(cached))
    assert built(changes).model.config["num_hidden_layers"] == 2


def test_an_unreachable_hub_names_the_preset(hub: dict[str, bytes], monkeypatch: Any):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    ((_, what, nearest),) = problems({**GPU, "spec.model": {"source": "hf://Qwen/Qwen3-8B"}})
    assert "cannot be reached" in what and nearest == "model: {preset: qwen3-8b}"

"""LongContextJob: defaults, every kind of problem with its place, and all of them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels.pattern import Dense, PerHead, SinkWindow
from msa_operator.api import JobError, load_job, load_profile, parse_job
from msa_operator.api.problems import join, split
from operator_jobs import GONE, GPU, SAMPLES, job, write


def problems(changes: dict[str, Any]) -> list[tuple[str, str, str]]:
    with pytest.raises(JobError) as caught:
        parse_job(job(changes))
    return [(p.path, p.found, p.nearest) for p in caught.value.problems]


def test_defaults():
    spec = parse_job(job({"spec.attention": GONE, **GPU})).spec
    assert spec.attention.pattern == Dense() and spec.attention.backend == "auto"
    assert spec.training.learning_rate == 2e-5 and spec.training.precision == "bf16"
    assert spec.parallelism.policy == "Auto"
    assert spec.capacity.order == ("Reserved", "OnDemand")
    assert spec.failure.on_node_loss == ("WaitReplacement", "Replan", "Fail")
    assert (spec.deadlines.capacity, spec.deadlines.start, spec.deadlines.active) == (
        "30m", "15m", "240h",
    )  # fmt: skip
    assert (spec.cleanup.after, spec.cleanup.ttl) == ("10m", "7d")
    assert (spec.checkpoint.every_steps, spec.checkpoint.keep) == (100, 3)
    assert spec.network.efa == "Auto" and not spec.suspend and spec.queue is None


# One change, and the one problem that it makes: path, part of what was found, nearest.
BROKEN: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "wrong type": ({"spec.training.maxSteps": "many"}, "spec.training.maxSteps", "many", ""),
    "quoted number": ({"spec.sequence.length": "4096"}, "spec.sequence.length", '"4096"', "4096"),
    "k for thousand": ({"spec.training.maxSteps": "2k"}, "spec.training.maxSteps", "2k", "2000"),
    "float for int": ({"spec.training.seed": 1.5}, "spec.training.seed", "1.5", "2"),
    "bool for int": ({"spec.training.seed": True}, "spec.training.seed", "true", ""),
    "yes for true": ({"spec.suspend": "yes"}, "spec.suspend", '"yes"', "true"),
    "text for mapping": ({"spec.data": "text"}, "spec.data", '"text"', ""),
    "list for mapping": ({"spec.cleanup": []}, "spec.cleanup", "[]", ""),
    "unknown field": ({"spec.sequence.lenght": 1}, "spec.sequence.lenght", "unknown", "length"),
    "misplaced field": (
        {"spec.maxSteps": 1}, "spec.maxSteps", "unknown", "spec.training.maxSteps",
    ),
    "snake case": (
        {"spec.training.max_steps": 1}, "spec.training.max_steps", "unknown", "maxSteps",
    ),
    "missing": ({"spec.training": GONE}, "spec.training", "is missing", ""),
    "missing leaf": ({"spec.sequence.length": GONE}, "spec.sequence.length", "is missing", ""),
    "too small": ({"spec.checkpoint.keep": 0}, "spec.checkpoint.keep", "0", "1"),
    "too large": (
        {"spec.data.holdoutFraction": 2}, "spec.data.holdoutFraction", "2", "0.5",
    ),
    "not finite": (
        {"spec.training.learningRate": float("nan")}, "spec.training.learningRate", "NaN", "",
    ),
    "zero rate": ({"spec.training.learningRate": 0}, "spec.training.learningRate", "0", ""),
    "unit typo": ({"spec.deadlines.start": "15 m"}, "spec.deadlines.start", "15 m", "15m"),
    "unit word": ({"spec.cleanup.ttl": "7days"}, "spec.cleanup.ttl", "7days", "7d"),
    "quantity": ({"spec.pod.memory": "64GB"}, "spec.pod.memory", "64GB", "64G"),
    "choice": ({"spec.training.precision": "fp16"}, "spec.training.precision", "fp16", "bf16"),
    "choice case": ({"spec.network.efa": "auto"}, "spec.network.efa", "auto", "Auto"),
    "preset": ({"spec.model.preset": "lama-3-8b"}, "spec.model.preset", "lama", "llama-3-8b"),
    "two models": ({"spec.model.source": "hf://a/b"}, "spec.model", "source and preset", ""),
    "no model": ({"spec.model": {}}, "spec.model", "none", ""),
    "address": ({"spec.data.source": "s3:/bkt/x"}, "spec.data.source", "s3:/", "s3://bkt/x"),
    "web address": ({"spec.data.source": "https://x/y"}, "spec.data.source", "https", ""),
    "batch": (
        {"spec.sequence.globalBatchTokens": 10_000}, "spec.sequence.globalBatchTokens",
        "10000 with length 4096", "8192",
    ),
    "warm-up": (
        {"spec.training.warmupSteps": 200}, "spec.training.warmupSteps", "200 with maxSteps 100",
        "5",
    ),
    "fixed without degrees": ({"spec.parallelism.policy": "Fixed"}, "spec.parallelism.policy",
                              "without degrees", "Auto"),
    "degrees and workers": (
        {"spec.parallelism": {"policy": "Fixed", "dataShard": 3}}, "spec.parallelism",
        "1 x 1 x 3 x 1 = 3 ranks for 2 workers", "dataShard: 2 alone",
    ),
    "degrees and accelerators": (
        {**GPU, "spec.parallelism": {"policy": "Fixed", "tensor": 4, "dataShard": 32}},
        "spec.parallelism", "128 ranks for 8 to 64", "",
    ),
    "cpu without workers": ({"spec.hardware.workers": GONE}, "spec.hardware.workers", "", "2"),
    "cpu with accelerators": (
        {"spec.hardware.accelerators": {"min": 1}}, "spec.hardware.accelerators", "cpu", "",
    ),
    "gpu with workers": (
        {"spec.hardware": {"device": "gpu", "workers": 2}}, "spec.hardware.workers", "gpu", "",
    ),
    "min above max": (
        {**GPU, "spec.hardware.accelerators": {"min": 9, "max": 8}},
        "spec.hardware.accelerators.min", "9 with max 8", "8",
    ),
    "fail first": (
        {"spec.failure.onNodeLoss": ["Fail", "Replan"]}, "spec.failure.onNodeLoss", "Fail, Replan",
        "[Replan, Fail]",
    ),
    "repeated": (
        {"spec.capacity.order": ["Spot", "Spot"]}, "spec.capacity.order[1]", "twice", "",
    ),
    "empty order": ({"spec.capacity.order": []}, "spec.capacity.order", "empty", "[OnDemand]"),
    "unused reservation": (
        {"spec.capacity": {"order": ["Spot"], "reservation": {"ids": ["cr-0123456789abcdef0"]}}},
        "spec.capacity.order", "Spot", "[Reserved, Spot]",
    ),
    "repeated layer": (
        {"spec.attention.denseLayers": [1, 1]}, "spec.attention.denseLayers[1]", "twice", "",
    ),
    "backend": (
        {"spec.attention.backend": "tritn"}, "spec.attention.backend", "tritn", "triton",
    ),
    "piece of a backend's name": (
        {"spec.attention.backend": "FP8"}, "spec.attention.backend", "FP8", "triton-fp8",
    ),
    "backend number": ({"spec.attention.backend": 4}, "spec.attention.backend", "4", ""),
    "env": ({"spec.pod.env": [{"name": "A"}, {"name": "1A"}]}, "spec.pod.env[1].name", "1A", ""),
    "env twice": (
        {"spec.pod.env": [{"name": "A", "value": "x", "valueFrom": {}}]},
        "spec.pod.env[0].valueFrom", "beside value", "",
    ),
    "env number": (
        {"spec.pod.env": [{"name": "A", "value": 5}]}, "spec.pod.env[0].value", "5", '"5"',
    ),
    "node selector": (
        {"spec.pod.nodeSelector": {"a": True}}, "spec.pod.nodeSelector.a", "true", '"true"',
    ),
    "kind": ({"kind": "LongContextjob"}, "kind", "LongContextjob", "LongContextJob"),
    "version": ({"apiVersion": "flashmsa.dev/v1"}, "apiVersion", "v1", "flashmsa.dev/v1alpha1"),
    "name": ({"metadata.name": "My_Job"}, "metadata.name", "My_Job", "my-job"),
    "window 0": (
        {"spec.attention.pattern.window": 0}, "spec.attention.pattern.window", "0", "1",
    ),
    "pattern field": (
        {"spec.attention.pattern.sink": 1}, "spec.attention.pattern.sink", "no such", "sinks",
    ),
    "pattern type": (
        {"spec.attention.pattern.type": "SinkWindows"}, "spec.attention.pattern.type",
        "SinkWindows", "SinkWindow",
    ),
    "pattern missing": (
        {"spec.attention.pattern.sinks": GONE}, "spec.attention.pattern.sinks", "missing", "",
    ),
    "pattern text": ({"spec.attention.pattern": "Dense"}, "spec.attention.pattern", "Dense",
                     "{type: Dense}"),
    "member": (
        {"spec.attention.pattern": {"type": "PerHead", "members": [
            {"type": "Dense"}, {"type": "Union", "members": [{"type": "Dilated", "rate": 0}]}]}},
        "spec.attention.pattern.members[1].members[0].rate", "0", "1",
    ),
    "member type": (
        {"spec.attention.pattern": {"type": "Union", "members": [{"type": "PerHead",
                                                                  "members": []}]}},
        "spec.attention.pattern.members[0].type", "cannot stand inside", "",
    ),
    "columns": (
        {"spec.attention.pattern": {"type": "Columns", "length": 4, "columns": 5}},
        "spec.attention.pattern.columns", "5", "",
    ),
    "bidirectional": (
        {"spec.attention.pattern": {"type": "Dense", "causal": False}},
        "spec.attention.pattern.causal", "later ones", "causal: true",
    ),
    "short block list": (
        {"spec.attention.pattern": {"type": "BlockList", "block": 128, "rows": [[0]]}},
        "spec.attention.pattern.rows", "1 rows of 128", "32 rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_one_mistake_gives_one_problem_at_its_place(kind: str):
    changes, path, found, nearest = BROKEN[kind]
    got = problems(changes)
    assert len(got) == 1, got
    assert got[0][0] == path
    assert found in got[0][1]
    assert got[0][2] == nearest


def test_names_of_38_characters_are_the_longest():
    assert parse_job(job({"metadata.name": "a" * 38})).metadata.name == "a" * 38
    ((path, found, nearest),) = problems({"metadata.name": "a" * 39})
    assert path == "metadata.name" and "39 characters" in found and nearest == "a" * 38
    with pytest.raises(JobError, match="KubeRay allows 53 characters"):
        parse_job(job({"metadata.name": "a" * 39}))


def test_all_problems_are_reported_at_once_and_rules_still_run():
    got = problems({
        "spec.sequence": {"length": 4096, "globalBatchTokens": 5000},
        "spec.training": {"maxSteps": "x", "warmupSteps": 3, "learningRate": -1},
        "spec.hardware": {"device": "cpu"},
        "spec.deadlines.start": "1 hour",
    })  # fmt: skip
    assert [path for path, _, _ in got] == [
        "spec.sequence.globalBatchTokens", "spec.training.maxSteps", "spec.training.learningRate",
        "spec.hardware.workers", "spec.deadlines.start",
    ]  # fmt: skip


def test_every_fault_of_a_pattern_is_reported():
    members = [{"type": "Window"}, {"type": "Dilated", "rate": "4", "size": 2}, {"type": "Foo"}]
    got = problems({"spec.attention.pattern": {"type": "Union", "members": members}})
    assert [path.removeprefix("spec.attention.pattern.") for path, _, _ in got] == [
        "members[0].window", "members[1].rate", "members[1].size", "members[2].type",
    ]  # fmt: skip


def test_null_means_not_given():
    spec = parse_job(job({"spec.checkpoint": None, "spec.training.warmupSteps": None})).spec
    assert spec.checkpoint.keep == 3 and spec.training.warmup_steps is None


def test_an_object_from_a_cluster_is_read():
    raw = job({"metadata.uid": "1", "metadata.generation": 2, "metadata.managedFields": []})
    raw["status"] = {"phase": "Running", "progress": {"step": 3}}
    read = parse_job(raw)
    assert read.status is not None and read.status.progress is not None
    assert read.status.progress.step == 3


def test_overrides_win_and_are_named_in_errors(tmp_path: Path):
    path = write(tmp_path)
    overrides = ["parallelism.context=2", "metadata.name=other", "sequence.globalBatchTokens="]
    read = load_job(path, [*overrides, "attention.pattern={type: Window, window: 8}"])
    assert read.spec.parallelism.context == 2 and read.metadata.name == "other"
    assert read.spec.attention.pattern.to_dict() == {"type": "Window", "window": 8}
    assert read.spec.sequence.global_batch_tokens is None
    with pytest.raises(JobError) as caught:
        load_job(path, ["training.maxSteps=lots", "pod.env[0].name=9"])
    assert {(p.where, p.path) for p in caught.value.problems} == {
        ("--set training.maxSteps", "spec.training.maxSteps"),
        ("--set pod.env[0].name", "spec.pod.env[0].name"),
    }


@pytest.mark.parametrize(
    "text", ["training.maxSteps", "=5", "a[x]=1", "training..x=1", "pod.env[3].name=x",
             "training.maxSteps.x=1", "training.seed=[1"],
)  # fmt: skip
def test_overrides_that_cannot_be_applied(tmp_path: Path, text: str):
    with pytest.raises(JobError) as caught:
        load_job(write(tmp_path), [text])
    assert caught.value.problems[0].where == f"--set {text}"


def test_lines_are_those_of_the_file(tmp_path: Path):
    path = tmp_path / "job.yaml"
    text = (SAMPLES / "stdlib-4k.yaml").read_text()
    path.write_text(text.replace("window: 512", "window: -1").replace("keep: 2", "keeep: 2"))
    with pytest.raises(JobError) as caught:
        load_job(path)
    lines = text.splitlines()
    places = [p.where.rpartition(":") for p in caught.value.problems]
    assert [name for name, _, _ in places] == [str(path)] * 2
    assert "window: 512" in lines[int(places[0][2]) - 1]
    assert "keep: 2" in lines[int(places[1][2]) - 1]


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_samples_are_valid(path: Path):
    if "kind: HardwareProfile" in path.read_text():
        assert load_profile(path).spec.accelerator.count > 0
    else:
        assert load_job(path).metadata.name == path.stem


def test_samples_say_what_they_seem_to_say():
    assert load_job(SAMPLES / "stdlib-4k.yaml").spec.attention.pattern == SinkWindow(512, 64)
    strided = load_job(SAMPLES / "llama-strided-256k.yaml").spec.attention.pattern
    assert isinstance(strided, PerHead) and len(strided.members) == 2


def test_profiles_are_checked_too(tmp_path: Path):
    text = (SAMPLES / "hardware-profile.yaml").read_text()
    path = tmp_path / "profile.yaml"
    path.write_text(text.replace("linkGBps", "linkGbps").replace("count: 8", "count: 0"))
    with pytest.raises(JobError) as caught:
        load_profile(path)
    assert [(p.path, p.nearest) for p in caught.value.problems] == [
        ("spec.accelerator.count", "1"), ("spec.accelerator.linkGbps", "linkGBps"),
    ]  # fmt: skip


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
paths = st.sampled_from([
    "spec", "metadata", "spec.model", "spec.model.config", "spec.data.source", "spec.sequence",
    "spec.sequence.length", "spec.attention", "spec.attention.pattern",
    "spec.attention.denseLayers", "spec.attention.backend",
    "spec.attention.pattern.type", "spec.attention.pattern.members", "spec.parallelism.tensor",
    "spec.hardware", "spec.hardware.accelerators", "spec.hardware.instanceTypes", "spec.pod.env",
    "spec.pod.volumes", "spec.pod.tolerations", "spec.deadlines.start", "spec.capacity.order",
    "spec.failure.onNodeLoss", "spec.cleanup", "spec.podPatch", "spec.queue", "status", "kind",
    "metadata.name", "metadata.labels", "apiVersion",
])  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(st.dictionaries(paths, values, min_size=1, max_size=4))
def test_whatever_stands_in_a_field_is_read_or_reported(changes: dict[str, Any]):
    raw = job()
    for path, value in changes.items():
        *parents, last = split(path)
        at: Any = raw
        for part in parents:
            at = at.get(part) if isinstance(at, dict) else None
        if isinstance(at, dict):
            at[last] = value
    try:
        parse_job(raw)
    except JobError as error:
        assert error.problems
        assert all(p.path and (p.found or p.allowed) for p in error.problems)


@settings(deadline=None)
@given(st.lists(st.one_of(st.from_regex(r"[a-zA-Z]{1,5}", fullmatch=True), st.integers(0, 99)),
                min_size=1, max_size=5).filter(lambda p: isinstance(p[0], str)))  # fmt: skip
def test_paths_are_written_and_read_alike(path: list[str | int]):
    assert list(split(join(path))) == path

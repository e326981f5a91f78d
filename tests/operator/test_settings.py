"""The operator's settings: read strictly, with every problem and its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from msa_operator import settings
from msa_operator.api.problems import JobError
from msa_operator.reconcile import pods

LEAST = "image: example.org/worker:1\nrayVersion: 2.60.0\n"


def _read(folder: Path, text: str) -> settings.Settings:
    path = folder / "settings.yaml"
    path.write_text(text)
    return settings.load(path)


def test_little_has_to_be_given(tmp_path: Path):
    found = _read(tmp_path, LEAST)
    assert found.namespaces == () and found.checkpoint.default_uri("team", "job") is None
    assert found.lease.retry_seconds < found.lease.renew_seconds < found.lease.duration_seconds


def test_everything_that_rendering_needs_is_handed_on(tmp_path: Path):
    text = (
        f"{LEAST}headCpu: 500m\nheadMemory: 2Gi\ndaemonsetMemory: 1Gi\n"
        "metricsNamespace: monitoring\ncheckpoint: {claim: shared}\n"
    )
    assert _read(tmp_path, text).for_pods("system") == pods.Settings(
        image="example.org/worker:1", ray_version="2.60.0", namespace="system", head_cpu="500m",
        head_memory="2Gi", daemonsets_mib=1024, metrics_namespace="monitoring",
        checkpoint_claim="shared",
    )  # fmt: skip


def test_every_problem_is_told_at_once_with_its_line(tmp_path: Path):
    text = (
        f"{LEAST}headMemory: 8GB\nnamspaces: [a]\nlease: {{retrySeconds: 50}}\n"
        "checkpoint: {uri: 's3://bucket/x', claim: shared}\nconcurrency: 0\n"
    )
    with pytest.raises(JobError) as caught:
        _read(tmp_path, text)
    found = {p.path: p for p in caught.value.problems}
    assert set(found) == {"headMemory", "namspaces", "lease", "checkpoint", "concurrency"}
    assert found["namspaces"].nearest == "namespaces" and found["headMemory"].nearest == "8G"
    assert found["lease"].where.endswith("settings.yaml:5")


@pytest.mark.parametrize("missing", ["image", "rayVersion"])
def test_what_has_no_default_is_asked_for(tmp_path: Path, missing: str):
    kept = [line for line in LEAST.splitlines() if not line.startswith(missing)]
    with pytest.raises(JobError, match=f"{missing}: is missing"):
        _read(tmp_path, "\n".join(kept))


def test_a_watch_that_ends_in_time_is_not_taken_for_a_stalled_one(tmp_path: Path):
    with pytest.raises(JobError, match="nearest: 460"):
        _read(tmp_path, f"{LEAST}timeouts: {{watchSeconds: 400}}\n")


def test_default_storage_gives_each_job_a_folder_of_its_own(tmp_path: Path):
    bucket = _read(tmp_path, f"{LEAST}checkpoint: {{uri: 's3://bucket/runs/'}}\n").checkpoint
    assert bucket.default_uri("team", "job") == "s3://bucket/runs/team/job"
    claim = _read(tmp_path, f"{LEAST}checkpoint: {{claim: shared}}\n").checkpoint
    # A claim is of one namespace already.
    assert claim.default_uri("team", "job") == f"file://{pods.CHECKPOINTS_FOLDER}/job"


def test_namespaces_of_the_command_line_come_first_and_are_checked(tmp_path: Path):
    found = _read(tmp_path, f"{LEAST}namespaces: [a]\n")
    assert settings.with_namespaces(found, ()).namespaces == ("a",)
    assert settings.with_namespaces(found, ("b", "c")).namespaces == ("b", "c")
    with pytest.raises(JobError, match=r"--namespace.*nearest: b-c"):
        settings.with_namespaces(found, ("B_c",))

"""msa doctor on this machine: what it finds, what it tells to do, and its exit code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msa_operator import extra, machine
from msa_operator.cli import cli
from msa_operator.doctor import local
from msa_operator.doctor.finding import Finding, well

GPU = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8}


def answers(stdout: str = "", stderr: str = "", code: int = 0) -> local.Run:
    """A check of the kernels that says this."""

    def run(argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, code, stdout, stderr)

    return run


def checked(
    *results: dict[str, Any], gpus: tuple[dict[str, Any], ...] = (), device: str = "cpu"
) -> local.Run:
    """A check with these results; backend torch on case window unless they say otherwise."""
    usual = {"backend": "torch", "case": "window", "errors": {"out": 1e-7}, "ok": True,
             "refused": ""}  # fmt: skip
    found = {
        "machine": {"torch": "2.13.0", "gpus": list(gpus)},
        "device": device,
        "results": [usual | r for r in results],
    }
    return answers(json.dumps(found))


def by_check(found: list[Finding]) -> dict[str, Finding]:
    return {f.check: f for f in found}


def test_this_machine_is_described_and_can_train(tmp_path: Path):
    found = by_check(local.findings(tmp_path, checked({})))
    assert set(found) >= {"Python", "torch", "ray", "memory", "disk", "shared memory", "GPU"}
    assert all(f.state in ("ok", "warning") for f in found.values())
    assert all(f.action for f in found.values() if f.state != "ok")


@pytest.mark.slow
def test_attention_is_checked_in_a_process_of_its_own():
    (gpu, kernels) = local.kernels(())
    assert gpu.state == "ok" and kernels.state == "ok", kernels
    assert "torch" in kernels.found and "cases agree" in kernels.found


@pytest.mark.parametrize(("run", "gpus", "check", "state", "told"), [
    (checked({"ok": False}), 0, "kernels", "failed", "wrong on cpu: torch on window"),
    (checked({}), 1, "GPU", "failed", "PyTorch 2.13.0 sees none"),
    (checked({}, gpus=(GPU,), device="cuda"), 2, "GPU", "warning", "sees 1 of 2"),
    (checked({"backend": "triton"}, gpus=(GPU,), device="cuda"), 1, "GPU", "ok", "1 x NVIDIA"),
    (checked({}, {"backend": "triton", "errors": {}, "refused": "no compiler"}, gpus=(GPU,),
             device="cuda"), 1, "kernels", "warning", "no compiler"),
    (answers(stderr="OSError: libcudart.so.13: cannot open", code=1), 0, "kernels", "failed",
     "libcudart.so.13"),
    (answers(code=-11), 0, "kernels", "failed", "ended with -11"),
])  # fmt: skip
def test_what_the_check_of_kernels_says_is_told(
    run: local.Run, gpus: int, check: str, state: str, told: str
):
    found = by_check(local.kernels([("NVIDIA H200", 143771)] * gpus, run))[check]
    assert (found.state, told in found.found) == (state, True), found
    assert found.state == "ok" or found.action


def test_a_check_that_hangs_or_cannot_start_is_a_finding():
    def hangs(argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(argv, timeout_s)

    def missing(argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        raise OSError("no such file")

    for run, told in ((hangs, "did not end within"), (missing, "cannot be started")):
        (found,) = local.kernels((), run)
        assert found.state == "failed" and told in found.found and "by hand" in found.action


def test_a_missing_package_says_how_to_get_it():
    found = by_check(local.packages(("torch", "no-such-package")))
    assert found["torch"].state == "ok"
    assert found["no-such-package"].state == "failed"
    assert found["no-such-package"].action == extra.command()


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ("{}", 'pip install "flash-msa-operator[train]"'),
        ("not JSON", 'pip install "flash-msa-operator[train]"'),
        (
            '{"url": "file:///my%20code/msa", "dir_info": {}}',
            'pip install "flash-msa-operator[train] @ file:///my%20code/msa"',
        ),
        (
            '{"url": "file:///my%20code/msa", "dir_info": {"editable": true}}',
            'pip install --editable "/my code/msa[train]"',
        ),
        (
            '{"url": "https://host/msa.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}',
            'pip install "flash-msa-operator[train] @ git+https://host/msa.git@abc"',
        ),
    ],
)
def test_the_extra_is_installed_from_where_the_rest_came(origin: str, command: str):
    """What is not on a package index cannot be had from one."""
    assert extra.command(origin) == command


@pytest.mark.parametrize(("free", "state"), [
    (local.DISK_LOW, "ok"), (local.DISK_LOW - 1, "warning"), (local.DISK_LEAST - 1, "failed"),
])  # fmt: skip
def test_space_for_checkpoints_is_looked_for_where_they_would_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, state: str
):
    seen: list[Path] = []

    def usage(path: Path) -> Any:
        seen.append(path)
        return local.shutil._ntuple_diskusage(0, 0, free)  # type: ignore[attr-defined]

    monkeypatch.setattr(local.shutil, "disk_usage", usage)
    assert local.disk(tmp_path / "not" / "yet" / "there").state == state
    assert seen == [tmp_path]


def test_a_folder_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(local.os, "access", lambda path, mode: False)
    found = local.disk(tmp_path)
    assert found.state == "failed" and "--output-dir" in found.action


def test_small_shared_memory_and_few_files_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    small = local.shutil._ntuple_diskusage(64 << 20, 0, 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(local.shutil, "disk_usage", lambda path: small)
    found = local.shared_memory(tmp_path)
    assert found.state == "warning" and "--shm-size" in found.action
    assert local.shared_memory(tmp_path / "none").state == "ok"
    monkeypatch.setattr(local.resource, "getrlimit", lambda what: (1024, 4096))
    assert local.open_files().action == "ulimit -n 4096"
    monkeypatch.setattr(local.machine, "memory_bytes", lambda: 1 << 30)
    assert local.memory().state == "warning"


def invoke(monkeypatch: pytest.MonkeyPatch, found: list[Finding], *arguments: str) -> Any:
    monkeypatch.setattr(local, "findings", lambda folder: found)
    return CliRunner().invoke(cli, ["doctor", *arguments])


GOOD = Finding("Python", "ok", "3.11.2")
BAD = Finding("torch", "failed", "not installed", "install it")
MEAGRE = Finding("disk", "warning", "2 GiB free", "free some")


def test_the_exit_code_is_about_failures_alone(monkeypatch: pytest.MonkeyPatch):
    assert well([GOOD, MEAGRE]) and not well([GOOD, BAD])
    assert invoke(monkeypatch, [GOOD, MEAGRE]).exit_code == 0
    done = invoke(monkeypatch, [GOOD, BAD])
    assert done.exit_code == 1
    for word in ("torch", "not installed", "install it", "1 failed"):
        assert word in done.output


def test_json_has_everything(monkeypatch: pytest.MonkeyPatch):
    done = invoke(monkeypatch, [GOOD, BAD], "--output", "json")
    assert done.exit_code == 1
    told = json.loads(done.output)
    assert told["ok"] is False
    assert told["findings"][1] == {"check": "torch", "state": "failed", "found": "not installed",
                                   "action": "install it"}  # fmt: skip


def test_flags_of_a_cluster_need_the_cluster():
    done = CliRunner().invoke(cli, ["doctor", "--namespace", "team-a"])
    assert done.exit_code == 2 and "go with --cluster" in done.output
    done = CliRunner().invoke(cli, ["doctor", "--cluster", "--kubeconfig", "/no/such/file"])
    assert done.exit_code == 4 and "no cluster" in done.output


def test_gpus_are_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: (("NVIDIA H200", 143771),))
    found = by_check(local.findings(tmp_path, checked({})))
    assert found["GPU"].state == "failed"

"""`pip install .` alone gives the command line and the control plane, without torch.

The wheel is built by the locked build backend and installed into an empty environment with the
pins of requirements/operator.lock. It needs the package index or uv's cache, and fails where
neither has the wheels: skipping would hide a broken distribution.
"""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[1]
PACKAGES = {"msa_kernels": "kernels", "msa_workloads": "workloads", "msa_operator": "operator"}
TRAINING_ONLY = {"jinja2", "matplotlib", "numpy", "ray", "torch", "transformers", "triton"}

pytestmark = pytest.mark.slow


def _run(*command: object, cwd: Path = REPO) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and its base dependencies only."""
    venv = tmp_path_factory.mktemp("base") / "venv"
    python = venv / "bin" / "python"
    uv = Path(sys.executable).parent / "uv"
    _run(uv, "venv", "--quiet", "--python", sys.executable, venv)
    lock = REPO / "requirements" / "operator.lock"
    _run(uv, "pip", "sync", "--quiet", "--python", python, "--require-hashes", lock)
    _run(uv, "pip", "install", "--quiet", "--python", python, "--no-deps", wheel)
    return python.parent


def test_the_wheel_holds_every_tracked_file_of_its_packages_and_nothing_else(wheel: Path):
    tracked = _run("git", "-c", "safe.directory=*", "ls-files", "--", *PACKAGES.values())
    wanted = {name.split("/", 1)[1] for name in tracked.split() if (REPO / name).exists()}
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert wanted <= set(names)
    assert {name.split("/")[0] for name in names} == set(PACKAGES)


def test_the_metadata_keeps_training_in_an_extra(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        files = {name.split(".dist-info/")[-1] for name in archive.namelist()}
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    base = {need.name for need in needs if not (need.marker and "extra" in str(need.marker))}
    assert base and not base & TRAINING_ONLY
    assert {need.name for need in needs} >= TRAINING_ONLY
    assert metadata["License-Expression"] == "Apache-2.0" and "licenses/LICENSE" in files


def test_the_base_install_imports_without_the_training_stack(installed: Path, tmp_path: Path):
    script = (
        "import sys, importlib.util, msa_operator.cli\n"
        f"heavy = {sorted(TRAINING_ONLY)!r}\n"
        "print([name for name in heavy if importlib.util.find_spec(name) or name in sys.modules])"
    )
    found = _run(installed / "python", "-I", "-c", script, cwd=tmp_path)
    assert found.strip() == "[]"


def test_the_base_install_plans_a_job(installed: Path, tmp_path: Path):
    assert "plan" in _run(installed / "msa", "--help", cwd=tmp_path)
    job = REPO / "manifests" / "samples" / "stdlib-4k.yaml"
    assert _run(installed / "msa", "plan", job, cwd=tmp_path).strip()


def test_the_base_install_says_what_a_run_needs(installed: Path, tmp_path: Path):
    job = REPO / "manifests" / "samples" / "stdlib-4k.yaml"
    command = [installed / "msa", "run", job]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "flash-msa-operator[train]" in done.stdout + done.stderr


def test_the_base_install_is_enough_for_the_operator(installed: Path, tmp_path: Path):
    script = (
        "import sys, msa_operator.main\n"
        f"print([name for name in {sorted(TRAINING_ONLY)!r} if name in sys.modules])"
    )
    assert _run(installed / "python", "-I", "-B", "-c", script, cwd=tmp_path).strip() == "[]"
    settings = tmp_path / "settings.yaml"
    settings.write_text("image: example.org/worker:1\nrayVersion: 2.60.0\nnamspaces: [a]\n")
    command = [installed / "python", "-I", "-m", "msa_operator.main", f"--settings={settings}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "nearest: namespaces" in done.stderr

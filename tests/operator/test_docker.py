"""The Dockerfiles, as far as they can be judged without Docker.

What they copy is there, what they install is pinned, and who they run as. That the pins suffice is
shown by tests/test_wheel.py, which makes the operator's environment from the same files.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from e2e import charts
from e2e.fixtures import needs_helm
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).parents[2]
FILES = ("docker/operator/Dockerfile", "docker/worker/Dockerfile")


@dataclass(frozen=True)
class Step:
    stage: str
    word: str
    text: str


def steps(file: str) -> list[Step]:
    """The instructions of a Dockerfile, each with the stage that it belongs to."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (REPO / file).read_text())
    found: list[Step] = []
    stage = ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if not word:
            continue
        if word == "FROM":
            stage = rest.split(" AS ")[1] if " AS " in rest else "final"
        found.append(Step(stage, word, rest))
    return found


def of(file: str, word: str, stage: str = "") -> list[str]:
    return [s.text for s in steps(file) if s.word == word and stage in ("", s.stage)]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps this path out of the build; the last rule that fits counts."""
    out = False
    for line in (REPO / ".dockerignore").read_text().splitlines():
        rule = line.strip()
        if not rule or rule.startswith("#"):
            continue
        keep, pattern = rule.startswith("!"), rule.removeprefix("!")
        parents = [path, *(p.as_posix() for p in Path(path).parents if p.as_posix() != ".")]
        if any(fnmatch.fnmatch(p, pattern) for p in parents):
            out = not keep
    return out


def pins(lock: str) -> dict[str, set[str]]:
    text = (REPO / "requirements" / lock).read_text()
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"(?m)^([a-z0-9-]+)==([^ ]+)", text):
        found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("file", FILES)
def test_what_is_copied_is_there_and_not_ignored(file: str):
    copied = 0
    for text in of(file, "COPY"):
        words = [w for w in shlex.split(text) if not w.startswith("--")]
        if "--from=" in text:
            stage = re.search(r"--from=(\S+)", text)
            assert stage and stage[1] in {s.stage for s in steps(file)}
            continue
        for source in words[:-1]:
            copied += 1
            assert (REPO / source).exists(), source
            assert not ignored(source), f".dockerignore keeps {source} out"
    assert copied


def test_nothing_else_is_sent_to_the_build():
    for path in (".git/config", ".venv/bin/python", "runs/x/metrics.jsonl", "tests/conftest.py"):
        assert ignored(path), path
    assert ignored("operator/msa_operator/__pycache__") and not ignored("operator/msa_operator")


@pytest.mark.parametrize("file", FILES)
def test_what_is_installed_is_pinned_by_hash_or_built_here(file: str):
    installs = [
        part.strip()
        for text in of(file, "RUN") for part in text.split("&&")
        if re.search(r"\bpip (install|wheel)\b", part)
    ]  # fmt: skip
    assert len(installs) == 4
    for command in installs:
        if "-r " in command:
            assert "--require-hashes" in command and "--only-binary :all:" in command
            lock = re.search(r"requirements/(\w+\.lock)", command)
            assert lock and (REPO / "requirements" / lock[1]).exists()
        else:
            # The wheel of this source: nothing is resolved, nothing is fetched.
            assert "--no-deps" in command
            assert "--no-build-isolation" in command or "--no-index" in command
    text = (REPO / file).read_text()
    assert "://" not in text and not of(file, "ADD"), "fetches something that no lock pins"


@pytest.mark.parametrize("file", FILES)
def test_bases_are_pinned_and_the_user_is_a_number(file: str):
    (base,) = of(file, "ARG")
    assert re.fullmatch(r"BASE=\S+:\d+\.\d+\S*", base), "a tag that does not move by itself"
    assert set(of(file, "FROM")) <= {
        "${BASE}", *(f"{b} AS {s}" for b in ("${BASE}", "python") for s in
                     ("wheel", "environment", "python")), "python",
    }  # fmt: skip
    assert of(file, "USER") == ["1000:1000"]
    last = [s.word for s in steps(file) if s.stage == "final"]
    assert last.index("USER") > max(n for n, word in enumerate(last) if word in ("RUN", "COPY"))
    assert not re.search(r"(?i)(secret|token|password)=", (REPO / file).read_text())


def test_the_operator_finds_the_python_that_the_chart_starts():
    needs_helm()
    rendered = yaml.safe_load_all(charts.template(charts.OPERATOR))
    (deployment,) = [x for x in rendered if x and x["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (command,) = of(FILES[0], "CMD")
    assert yaml.safe_load(command) == container["command"]
    assert "PATH=/opt/flash-msa/bin:$PATH" in of(FILES[0], "ENV")[0]


def test_ray_is_found_by_a_login_shell_too():
    # A profile sets PATH anew, so what ENV says is lost in `bash -lc`, which KubeRay uses.
    (profile,) = [t for t in of(FILES[1], "RUN", "final") if "/etc/profile.d" in t]
    assert "PATH=/opt/flash-msa/bin:$PATH" in profile
    (packages,) = [t for t in of(FILES[1], "RUN", "final") if "apt-get" in t]
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(packages.split()), "Triton compiles"


def test_both_images_build_the_wheel_from_the_same_files():
    def sources(file: str) -> list[str]:
        return of(file, "COPY", "wheel")

    assert sources(FILES[0]) == sources(FILES[1])
    backend = Requirement(
        re.findall(r'requires = \["(.*)"\]', (REPO / "pyproject.toml").read_text())[0]
    )
    (version,) = pins("build.lock")[canonicalize_name(backend.name)]
    assert backend.specifier.contains(version)


@pytest.mark.parametrize("lock", ["worker.lock", "build.lock", "operator.lock"])
def test_every_lock_agrees_with_the_one_that_is_tested(lock: str):
    tested = pins("dev.lock")
    assert all(versions <= tested[name] for name, versions in pins(lock).items())
    text = (REPO / "requirements" / lock).read_text()
    assert text.count("--hash=sha256:") >= len(pins(lock)) and "://" not in text


def test_the_workers_lock_is_what_training_needs_and_no_more():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {canonicalize_name(Requirement(r).name) for r in
             [*project["dependencies"], *extras["train"]]}  # fmt: skip
    assert names <= set(pins("worker.lock"))
    tools = {"ruff", "pyright", "pytest", "moto", "hypothesis", "import-linter"}
    assert not tools & set(pins("worker.lock"))
    assert not {"torch", "ray"} & set(pins("operator.lock"))


@pytest.mark.slow
def test_the_wheel_is_built_from_what_is_copied_alone(tmp_path: Path):
    source = tmp_path / "source"
    for text in of(FILES[0], "COPY", "wheel"):
        *names, target = shlex.split(text)
        for name in names:
            at = source / target / (name if target == "./" else "")
            if (REPO / name).is_dir():
                shutil.copytree(REPO / name, at, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                at = at if target == "./" else at / Path(name).name
                at.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPO / name, at)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {"msa_operator/main.py", "msa_workloads/driver.py", "msa_kernels/pattern.py"} <= held

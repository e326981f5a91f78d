"""Rules of the repository that no linter knows. Each failure names the file and the rule."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[1]
ROOTS = ("kernels", "workloads", "operator")
LOCKS = ("requirements/dev.lock", "requirements/operator.lock")
LINES_PER_MODULE = 400
LONGER = {
    "kernels/msa_kernels/pattern.py": 600,  # every pattern kind in one place, as a catalogue
}
CRD_BYTES = 100_000


def _tracked(*patterns: str) -> list[Path]:
    # safe.directory: a checkout may belong to another user than the one who tests it.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    found = [REPO / name for name in listed.split("\0") if name]
    return [path for path in found if path.exists()]


def _modules() -> list[Path]:
    return _tracked(*(f"{root}/*.py" for root in ROOTS))


def _name(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def _pins(lock: str) -> list[tuple[str, str]]:
    """Names with versions; a name has several where markers tell Python versions apart."""
    text = (REPO / lock).read_text()
    return re.findall(r"^([a-z0-9-]+)==([^ ]+)", text, flags=re.MULTILINE)


def _project() -> dict:
    return tomllib.loads((REPO / "pyproject.toml").read_text())


def test_operator_is_no_package():
    # An importable `operator` would shadow the standard library's module in every process.
    assert not (REPO / "operator" / "__init__.py").exists()


def test_modules_are_short_enough_to_read():
    lengths = {_name(path): path.read_text().count("\n") for path in _modules()}
    long = {
        name: lines
        for name, lines in lengths.items()
        if lines > LONGER.get(name, LINES_PER_MODULE)
    }
    assert not long, f"split these modules, {LINES_PER_MODULE} lines is the limit: {long}"


def test_modules_say_what_they_guarantee():
    silent = [
        _name(path) for path in _modules() if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, f"modules without a docstring: {silent}"


def _is_module(name: str) -> bool:
    return any((REPO / root / f"{name.replace('.', '/')}.py").exists() for root in ROOTS)


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}: relative import"
            # `from package import module` imports the module, as import-linter sees it too.
            source = node.module or ""
            inside = {f"{source}.{alias.name}" for alias in node.names}
            names |= {n if _is_module(n) else source for n in inside}
    return names


def test_pure_modules_import_the_standard_library_and_each_other():
    # The import-linter contract lists what is forbidden; this is its other half: what is allowed.
    contracts = _project()["tool"]["importlinter"]["contracts"]
    pure = {
        module
        for contract in contracts
        if contract["name"].startswith("What decides is pure")
        for module in contract["source_modules"]
    }
    sources = {_name(path): path for path in _modules()}
    checked = 0
    for module in sorted(pure):
        stem = module.replace(".", "/")
        for name, path in sources.items():
            inside = name.split("/", 1)[1]
            if inside != f"{stem}.py" and not inside.startswith(f"{stem}/"):
                continue
            checked += 1
            for found in _imported(path):
                top = found.split(".")[0]
                allowed = (
                    top in sys.stdlib_module_names
                    or top in ("pydantic", "pydantic_core")
                    or any(found == other or found.startswith(f"{other}.") for other in pure)
                )
                assert allowed, f"{name} is pure and imports {found}"
    assert checked >= len(pure)


def test_nothing_names_a_private_path_or_a_registry():
    # The rules are spelt in pieces so that this file passes them.
    hosts = ("pypi" + ".org", "python" + "hosted.org", "npm" + "js.org", "crates" + ".io")
    paths = re.compile(r"(?<![\w.}\])/])/(?:work|root)(?=[/\"'`\s]|$)", flags=re.MULTILINE)
    for path in _tracked():
        if path.suffix in {".png", ".pt", ".npz", ".parquet", ".gz"}:
            continue
        text = path.read_text()
        found = [host for host in hosts if host in text] + paths.findall(text)
        assert not found, f"{_name(path)} names {found}"


def test_documented_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE))
    for path in _tracked("*.md", ".ci/run"):
        text = path.read_text()
        # In backquotes, or a line of a code block; a sentence may begin with "make" too.
        commands = re.findall(r"(?m)(?:^|`)make ([a-z]+)(?=`| *#| *$| [A-Z]+=|\s<)", text)
        unknown = set(commands) - targets
        assert not unknown, f"{_name(path)} names make targets that do not exist: {unknown}"


def test_relative_links_lead_somewhere():
    for path in _tracked("*.md"):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" in link or link.startswith("mailto:"):
                continue
            assert (path.parent / link).exists(), f"{_name(path)} links to {link}"


def test_crds_fit_the_size_that_clients_can_apply():
    for path in _tracked("manifests/crds/*.yaml"):
        assert path.stat().st_size < CRD_BYTES, f"{_name(path)} is too large"


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_hash_everything_and_name_no_index(lock: str):
    text = (REPO / lock).read_text()
    assert "://" not in text
    assert "index" not in re.sub(r"(?m)^\s*#.*$", "", text)
    pins = [block for block in re.split(r"(?m)^(?=[a-z0-9])", text) if block.strip()]
    assert len(pins) == len(_pins(lock))
    unhashed = [pin.split()[0] for pin in pins if "--hash=sha256:" not in pin]
    assert not unhashed


def test_locks_agree_with_each_other_and_with_pyproject():
    project = _project()["project"]
    dev, operator = (_pins(lock) for lock in LOCKS)
    assert set(operator) <= set(dev)
    base = [Requirement(line) for line in project["dependencies"]]
    extras = [
        Requirement(line) for group in project["optional-dependencies"].values() for line in group
    ]
    for pins, wanted in ((dev, base + extras), (operator, base)):
        for need in wanted:
            found = [version for name, version in pins if name == canonicalize_name(need.name)]
            assert found and all(map(need.specifier.contains, found)), f"{need}: run make lock"


def _find_python(*candidates: Path | str) -> subprocess.CompletedProcess[str]:
    script = REPO / "requirements" / "find-python.sh"
    command = ["sh", str(script), *map(str, candidates)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _fake(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_interpreter_search_passes_over_what_cannot_serve(tmp_path: Path):
    broken = _fake(tmp_path / "shim", "echo no such version >&2; exit 127")
    found = _find_python("no-such-python", broken, sys.executable)
    assert found.returncode == 0
    assert Path(found.stdout.strip()).samefile(sys.executable)


def test_the_interpreter_search_says_what_is_needed(tmp_path: Path):
    old = _fake(tmp_path / "old", "echo is Python 3.9 >&2; exit 1")
    broken = _fake(tmp_path / "shim", "exit 127")
    found = _find_python(old, broken)
    assert found.returncode == 1 and not found.stdout
    for said in ("3.11, 3.12 or 3.13", f"{old} is Python 3.9", f"{broken} does not run"):
        assert said in found.stderr

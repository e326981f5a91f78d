"""Loading a job from a file or from an API server's object: valid, or every problem at once."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msa_operator import yaml12
from msa_operator.api.job import LongContextJob
from msa_operator.api.problems import JobError, Problem, closest, join, show, split
from msa_operator.api.profile import HardwareProfile
from msa_operator.api.read import Path, Reader
from msa_operator.api.schema import Model

M = TypeVar("M", bound=Model)
_NOWHERE = yaml12.Document(None)


def load_job(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> LongContextJob:
    """Read a job file (``-`` is standard input) and apply ``path=value`` overrides to it.

    An override's path counts from ``spec`` unless it starts with ``spec``, ``metadata``, ``kind``
    or ``apiVersion``; its value is YAML. Raises :class:`JobError` with every problem found.
    """
    return load_located(path, overrides)[0]


def load_located(
    path: str | pathlib.Path, overrides: Sequence[str] = ()
) -> tuple[LongContextJob, str, Callable[[Path], str]]:
    """:func:`load_job`, the name of its source, and where in it a path is written."""
    document, name = read_document(path)
    raw = document.value
    origins: dict[Path, str] = {}
    problems: list[Problem] = []
    for text in overrides:
        try:
            at, value = parse_override(text)
            raw = _assign(raw, at, value)
            origins[at] = f"--set {text.partition('=')[0]}"
        except ValueError as error:
            problems.append(Problem("", str(error), where=f"--set {text}"))
    if problems:
        raise JobError(problems, name)

    def where(inside: Path) -> str:
        for end in range(len(inside), 0, -1):
            if (flag := origins.get(inside[:end])) is not None:
                return flag
        return f"{name}:{document.line(inside)}"

    return _read(LongContextJob, raw, where, name, document), name, where


def parse_job(raw: dict[str, Any]) -> LongContextJob:
    """A job from an API server's object. Raises :class:`JobError`."""
    return _read(LongContextJob, raw, lambda _: "", "")


def load_profile(path: str | pathlib.Path) -> HardwareProfile:
    """Read a HardwareProfile file. Raises :class:`JobError` with every problem found."""
    document, name = read_document(path)
    return _read(
        HardwareProfile, document.value, lambda p: f"{name}:{document.line(p)}", name, document
    )


def parse_override(text: str) -> tuple[Path, Any]:
    """``training.maxSteps=10`` as a path from the top and a value.

    Raises :class:`ValueError` that says what is wrong with it.
    """
    left, sign, right = text.partition("=")
    if not sign or not left.strip():
        raise ValueError("is not path=value, such as training.maxSteps=10")
    path = split(left.strip())
    if path[0] not in ("spec", "metadata", "kind", "apiVersion"):
        path = ("spec", *path)
    try:
        return path, yaml12.load(right).value if right.strip() else None
    except yaml12.YamlError as error:
        raise ValueError(f"value {error.problem}") from None


def read_document(path: str | pathlib.Path) -> tuple[yaml12.Document, str]:
    """The document in a file and the name to call it by. Raises :class:`JobError`."""
    name = "(standard input)" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read(yaml12.MAX_BYTES + 1)
        else:
            with pathlib.Path(path).open("rb") as file:
                raw = file.read(yaml12.MAX_BYTES + 1)
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError):
            folder = pathlib.Path(path).parent
            names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
            near = closest(pathlib.Path(path).name, names)
            hint = str(folder / near) if near else ""
        problem = Problem("", f"cannot be read: {error.strerror}", nearest=hint, where=name)
        raise JobError([problem], name) from None
    try:
        return yaml12.load(raw), name
    except yaml12.YamlError as error:
        line = f":{error.line}" if error.line else ""
        column = f":{error.column}" if error.column else ""
        problem = Problem("", error.problem, where=f"{name}{line}{column}")
        raise JobError([problem], name) from None


def _read(
    kind: type[M], raw: Any, where: Callable[[Path], str], name: str,
    document: yaml12.Document = _NOWHERE,
) -> M:  # fmt: skip
    found = raw.get("kind") if isinstance(raw, dict) else None
    if isinstance(found, str) and found != kind.__name__:
        # Every field of another kind would be unknown: say the one thing that matters.
        nearest = closest(found, [kind.__name__])
        problem = Problem("kind", f"found {show(found)}", kind.__name__, nearest, where(("kind",)))
        raise JobError([problem], name)
    reader = Reader(where)
    value = reader.read(kind, raw)
    if value is None:
        raise JobError(sorted(reader.problems, key=lambda p: document.line(_path(p))), name)
    return value


def _path(problem: Problem) -> Path:
    try:
        return split(problem.path)
    except ValueError:  # a key with dots or brackets of its own: sorted first
        return ()


def _assign(raw: Any, path: Path, value: Any) -> Any:
    """A copy of ``raw`` with ``value`` at ``path``; mappings on the way are made."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(head, int):
        items = list(raw) if isinstance(raw, list) else []
        if head > len(items):
            raise ValueError(f"index {head} is beyond the list's {len(items)} entries")
        items[head : head + 1] = [_assign(items[head] if head < len(items) else {}, rest, value)]
        return items
    if raw is not None and not isinstance(raw, dict):
        raise ValueError(f"{join(path)} is inside {show(raw)}, which is not a mapping")
    known = dict(raw or {})
    known[head] = _assign(known.get(head), rest, value)
    return known

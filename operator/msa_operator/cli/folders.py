"""Which folder a run gets: never one that holds another run's work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msa_workloads.runspec import RunSpec, RunSpecError

from msa_operator.api import JobError, Problem
from msa_operator.runs import same_run

SPEC, SUMMARY = "runspec.json", "summary.json"


@dataclass(frozen=True)
class Folder:
    """Where a run goes. ``finished`` when there is nothing left to do in it."""

    path: Path
    note: str = ""
    finished: bool = False


def fresh(base: Path, *, explicit: bool, reserve: bool) -> Folder:
    """An empty folder: ``base``, or, unless it was asked for by name, ``base-2`` and so on.

    With ``reserve`` the folder is made, so that two runs started together get different ones.
    Raises :class:`JobError` when ``base`` was asked for and holds something.
    """
    if explicit:
        if not _empty(base):
            what = "a run" if (base / SPEC).exists() else "files"
            raise _flag(
                f"{base} already holds {what}",
                "an empty folder, or --resume to go on with its run",
            )
        return _made(base, "", reserve)
    number = 1
    while True:
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        note = f"{base} holds an earlier run; this one goes to {path}" if number > 1 else ""
        if _empty(path):
            try:
                return _made(path, note, reserve)
            except FileExistsError:
                pass
        number += 1


def resumed(
    base: Path,
    *,
    explicit: bool,
    reserve: bool,
    spec_for: Callable[[Path], RunSpec],
    checkpoints: str | None,
) -> Folder:
    """The newest run of this job under ``base``, ``base-2`` and so on, to go on with.

    Without one, a job whose ``checkpoints`` lie in a place of their own goes on from there in a
    new folder: its old one may be gone with the machine that had it. Raises :class:`JobError`
    when there is neither, or when the run trains something else.
    """
    runs = [base] if explicit else _numbered(base)
    runs = [path for path in runs if (path / SPEC).is_file()]
    if not runs and checkpoints is not None:
        folder = fresh(base, explicit=explicit, reserve=reserve)
        return Folder(folder.path, f"no run in {base}; going on from {checkpoints}")
    if not runs:
        raise JobError([Problem(
            "", f"nothing to resume in {base}", "a folder with a run; leave --resume out to start",
            where="--resume",
        )])  # fmt: skip
    path = runs[-1]
    try:
        before = RunSpec.from_json((path / SPEC).read_text())
    except (OSError, RunSpecError) as error:
        raise JobError([Problem("", f"{path / SPEC}: {error}", where="--resume")]) from None
    now = spec_for(path)
    if changed := same_run(before, now):
        raise JobError([Problem(
            "", f"the run in {path} has another {changed}",
            "the job as it was, or a run of its own without --resume", where="--resume",
        )])  # fmt: skip
    if (path / SUMMARY).is_file() and _steps(path) >= now.training.max_steps:
        return Folder(path, f"the run in {path} is complete; nothing to resume", finished=True)
    return Folder(path, f"going on with {path}")


def _steps(path: Path) -> int:
    try:
        steps = json.loads((path / SUMMARY).read_text()).get("steps")
    except (OSError, ValueError, AttributeError):
        return 0
    return steps if isinstance(steps, int) else 0


def _numbered(base: Path) -> list[Path]:
    """``base``, ``base-2``, ... as far as they exist, in order of their numbers."""
    if not base.parent.is_dir():
        return []
    found = []
    for path in base.parent.iterdir():
        match = re.fullmatch(re.escape(base.name) + r"(?:-([1-9][0-9]*))?", path.name)
        if match is not None and path.is_dir():
            found.append((int(match[1] or 1), path))
    return [path for _, path in sorted(found)]


def _empty(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _made(path: Path, note: str, reserve: bool) -> Folder:
    if reserve:
        try:
            path.mkdir(parents=True, exist_ok=path.is_dir())
        except FileExistsError:
            raise
        except OSError as error:
            raise _flag(
                f"{path} cannot be made: {error.strerror}", "a folder you can write to"
            ) from None
    return Folder(path, note)


def _flag(found: str, allowed: str) -> JobError:
    return JobError([Problem("", found, allowed, where="--output-dir")])

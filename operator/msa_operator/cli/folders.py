"""Which folder a run gets: never one that holds another run's work, or that another works in."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote

from msa_workloads.heads import Order
from msa_workloads.runspec import RunSpec, RunSpecError

from msa_operator.api import JobError, Problem
from msa_operator.cli.hold import LOCK, InUse, take
from msa_operator.runs import same_run, step_tokens

SPEC, SUMMARY, METRICS = "runspec.json", "summary.json", "metrics.jsonl"

ALONE = "one process at a time: wait until it ends, or stop it"


@dataclass(frozen=True)
class Folder:
    """Where a run goes. ``finished`` when there is nothing left to do in it; ``hold`` keeps other
    runs out until it is closed."""

    path: Path
    note: str = ""
    finished: bool = False
    hold: TextIO | None = None


def fresh(base: Path, *, explicit: bool, reserve: bool) -> Folder:
    """An empty folder: ``base``, or, unless it was asked for by name, ``base-2`` and so on.

    With ``reserve`` the folder is made and held, so that two runs started together get different
    ones. Raises :class:`JobError` when ``base`` was asked for and holds something.
    """
    number = 1
    while True:
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        note = f"{base} holds an earlier run; this one goes to {path}" if number > 1 else ""
        try:
            hold = _made(path) if reserve and _empty(path) else None
        except InUse as who:
            if explicit:
                raise _flag(f"{path} is in use by {who}", ALONE) from None
        else:
            # Another run may have come and gone since it was looked at.
            if _empty(path):
                return Folder(path, note, hold=hold)
            if hold is not None:
                hold.close()
            if explicit:
                what = "a run" if (base / SPEC).exists() else "files"
                raise _flag(
                    f"{base} already holds {what}",
                    "an empty folder, or --resume to go on with its run",
                )
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
        return replace(folder, note=f"no run in {base}; going on from {checkpoints}")
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
        raise JobError([_other(path, changed, before, now)])
    if (path / SUMMARY).is_file() and _steps(path) >= now.training.max_steps:
        return Folder(path, f"the run in {path} is complete; nothing to resume", finished=True)
    try:
        hold = _made(path) if reserve else None
    except InUse as who:
        raise JobError([Problem(
            "", f"the run in {path} is going on: {who}", ALONE, where="--resume",
        )]) from None  # fmt: skip
    return Folder(path, f"going on with {path}", hold=hold)


def newest_checkpoints(base: Path) -> Path | None:
    """Where the newest run of ``base``, ``base-2`` and so on keeps its checkpoints by default."""
    runs = [path for path in _numbered(base) if (path / SPEC).is_file()]
    return runs[-1] / "checkpoints" if runs else None


def head_orders(checkpoints: Path) -> dict[int, Order] | None:
    """The orders in which the newest checkpoint stores heads, by layer, where they are not the
    model's; None where none can be read. All checkpoints of a run have the same ones."""
    for path in sorted(checkpoints.glob("step-*/complete.json"), reverse=True):
        try:
            orders = json.loads(path.read_text()).get("head_orders", {})
            return {int(layer): tuple(map(int, order)) for layer, order in orders.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return None


def local(uri: str) -> Path | None:
    """The folder of a plain path or a ``file://`` address, in which spaces are ``%20``."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return Path(uri)
    return Path(unquote(rest)) if scheme == "file" else None


def held_checkpoints(uri: str, output: Path) -> TextIO | None:
    """Keep other runs out of a local ``uri`` that is not in ``output``, which is held already.

    Raises :class:`JobError` while another run writes checkpoints there.
    """
    path = local(uri)
    if path is None or path.is_relative_to(output.absolute()):
        return None
    field = "spec.checkpoint.uri"
    try:
        path.mkdir(parents=True, exist_ok=True)
        return take(path)
    except InUse as who:
        raise JobError([Problem(field, f"{path} is in use by {who}", ALONE)]) from None
    except OSError as error:
        raise JobError([Problem(
            field, f"{path} cannot be written: {error.strerror}", "a folder you can write to"
        )]) from None  # fmt: skip


def give_back(folder: Folder) -> None:
    """Empty a folder in which nothing was trained, so that the next run of the job gets it."""
    if _steps_begun(folder.path):
        return
    for name in ("logs", "ray-train", "checkpoints"):
        shutil.rmtree(folder.path / name, ignore_errors=True)
    for name in (METRICS, SPEC):
        (folder.path / name).unlink(missing_ok=True)


def _steps_begun(path: Path) -> bool:
    metrics = path / METRICS
    return any((path / "checkpoints").glob("step-*")) or (
        metrics.is_file() and metrics.stat().st_size > 0
    )


def _other(path: Path, changed: str, before: RunSpec, now: RunSpec) -> Problem:
    found, nearest = f"the run in {path} has another {changed}", ""
    if changed == "tokens of a step":
        tokens = step_tokens(before)
        found += f": {tokens:,}, and this job {step_tokens(now):,}"
        nearest = f"--set sequence.globalBatchTokens={tokens}"
    return Problem(
        "", found, "the job as it was, or a run of its own without --resume", nearest,
        where="--resume",
    )  # fmt: skip


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
    if not path.exists():
        return True
    return path.is_dir() and all(entry.name == LOCK for entry in path.iterdir())


def _made(path: Path) -> TextIO:
    """Make and hold a folder. Raises :class:`InUse`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _flag(
            f"{path} cannot be made: {error.strerror}", "a folder you can write to"
        ) from None
    try:
        return take(path)
    except OSError as error:
        raise _flag(
            f"{path} cannot be written: {error.strerror}", "a folder you can write to"
        ) from None


def _flag(found: str, allowed: str) -> JobError:
    return JobError([Problem("", found, allowed, where="--output-dir")])

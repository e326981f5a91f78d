"""Arguments that commands share, and how their input is loaded and its errors are shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click

from msa_operator.api import HardwareProfile, JobError, LongContextJob, load_profile
from msa_operator.api.load import load_located
from msa_operator.api.problems import Problem, split

BAD_INPUT = 2
FORMATS = ("table", "json", "yaml")


def job_argument(command: Callable) -> Callable:
    """JOB and --set."""
    command = click.option(
        "--set", "overrides", multiple=True, metavar="PATH=VALUE",
        help="Override a field, such as --set training.maxSteps=20. Paths count from spec; "
        "values are YAML. May be repeated.",
    )(command)  # fmt: skip
    return click.argument("job", metavar="JOB")(command)


def profile_option(command: Callable) -> Callable:
    return click.option(
        "--profile", "profiles", multiple=True, metavar="FILE",
        help="A HardwareProfile that describes a machine type. May be repeated.",
    )(command)  # fmt: skip


def output_option(command: Callable) -> Callable:
    return click.option(
        "-o", "--output", "output", type=click.Choice(FORMATS), default="table",
        show_default=True, help="Form of what is printed.",
    )(command)  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """A valid job and a way to say where in its file a path is written."""

    job: LongContextJob
    source: str
    where: Callable[[tuple[str | int, ...]], str]

    def located(self, error: JobError) -> JobError:
        """``error`` with file and line filled in where a problem names a path only."""
        problems = []
        for p in error.problems:
            if not p.where and p.path:
                p = replace(p, where=self.where(split(p.path)))
            problems.append(p)
        return JobError(problems, self.source)


def load(job: str, overrides: tuple[str, ...]) -> Loaded:
    """Raises :class:`JobError`."""
    return Loaded(*load_located(job, overrides))


def load_profiles(paths: tuple[str, ...]) -> list[HardwareProfile]:
    """Every profile. Raises :class:`JobError` with the problems of all files together."""
    found: list[HardwareProfile] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            found.append(load_profile(path))
        except JobError as error:
            problems += error.problems
    if problems:
        raise JobError(problems, "hardware profiles")
    return found


@contextmanager
def bad_input(output: str) -> Iterator[None]:
    """Turn :class:`JobError` into a report and exit code 2."""
    try:
        yield
    except JobError as error:
        if output == "json":
            click.echo(error.to_json())
        report(error)
        sys.exit(BAD_INPUT)


def report(error: JobError) -> None:
    """Every problem on stderr, one block each."""
    count = len(error.problems)
    name = error.source or "the job"
    say = f"{count} problems in {name}" if count > 1 else f"a problem in {name}"
    click.echo(f"{click.style('error:', fg='red', bold=True)} {say}", err=True)
    for p in error.problems:
        path = click.style(p.path, bold=True) if p.path else ""
        head = "  ".join(x for x in (p.where, path) if x)
        click.echo(f"\n  {head}" if head else "", err=True)
        for label, text in (("found", p.found), ("allowed", p.allowed), ("nearest", p.nearest)):
            if text:
                if label == "found":
                    text = text.removeprefix("found ")
                click.echo(f"    {label:8} {text}", err=True)


def emit(value: Any, output: str) -> None:
    """Print a plain value as JSON or YAML."""
    if output == "json":
        import json

        click.echo(json.dumps(value, indent=2))
        return
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(value, sys.stdout)

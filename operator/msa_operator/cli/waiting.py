"""Waiting for a job: it is looked at until a condition holds, through errors that pass."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import click

from msa_operator.api import values
from msa_operator.cli.cluster import RETRIED, Connection
from msa_operator.cli.jobs import JobView, view

LOOK_SECONDS = 2.0
"""Between two looks; a job's status changes every 15 s at most once it runs."""


class Duration(click.ParamType):
    """``90s``, ``30m``, ``1h30m``, ``7d``: seconds."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        try:
            return float(values.seconds(str(value)))
        except ValueError as error:
            near = values.nearest_duration(value)
            self.fail(f"{error}{f'; nearest: {near}' if near else ''}", param, ctx)


def timeout_option(default: str) -> Callable[..., Callable[..., object]]:
    return click.option(
        "--timeout", type=Duration(), default=default, show_default=True, metavar="DURATION",
        help="How long to wait at most; then the exit code is 124.",
    )  # fmt: skip


def look(at: Connection, name: str) -> JobView | None:
    """The job as it is now; None when there is none. Raises KubeError."""
    from msa_operator.runtime.kube import JOBS

    found = at.kube.find(JOBS, at.namespace, name)
    return None if found is None else view(found, datetime.datetime.now(datetime.UTC))


def wait(
    at: Connection, name: str, done: Callable[[JobView | None], bool], seconds: float,
    say: Callable[[JobView], None] = lambda _: None,
) -> tuple[bool, JobView | None]:  # fmt: skip
    """Look until ``done``; whether it was within ``seconds``, and what was seen last.

    ``say`` hears of every change of phase or message. Raises KubeError for what waiting does not
    mend.
    """
    from msa_operator.runtime.kube import KubeError

    end, told = time.monotonic() + seconds, ("", "")
    seen: JobView | None = None
    while True:
        try:
            seen = look(at, name)
            if seen is not None and told != (seen.phase, seen.message):
                told = (seen.phase, seen.message)
                say(seen)
            if done(seen):
                return True, seen
        except KubeError as error:
            if error.code not in RETRIED:
                raise
        left = end - time.monotonic()
        if left <= 0:
            return False, seen
        time.sleep(min(LOOK_SECONDS, left))


def say(job: JobView) -> None:
    """One line on stderr."""
    step = f" at step {job.step}/{job.max_steps}" if job.step is not None else ""
    text = f"{job.name}: {job.phase}{step}"
    click.echo(f"{text}: {job.message}" if job.message else text, err=True)

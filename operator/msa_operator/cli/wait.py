"""``msa wait``: until a job is complete, runs or is suspended; its exit code is for scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from msa_operator.cli.cluster import (
    FAILED,
    TIMED_OUT,
    Connection,
    cluster_options,
    find_job,
    give_up,
)
from msa_operator.cli.jobs import JobView
from msa_operator.cli.waiting import say, timeout_option
from msa_operator.cli.waiting import wait as wait_for

REACHED = {
    "complete": ("Complete",),
    "running": ("Running", "Complete"),
    "suspended": ("Suspended",),
}
"""A job that is complete has been running."""


@click.command(short_help="Wait until a job is complete, runs or is suspended.")
@click.argument("name")
@click.option(
    "--for", "state", type=click.Choice(tuple(REACHED)), default="complete", show_default=True,
    help="What to wait for.",
)  # fmt: skip
@timeout_option("24h")
@cluster_options
def wait(name: str, state: str, timeout: float, connect: Callable[[], Connection]) -> None:
    """Wait for NAME, saying every change of its phase on the way.

    \b
      msa wait qwen-128k && echo trained
      msa wait qwen-128k --for running --timeout 30m

    Exit codes: 0 reached; 1 the job failed, was deleted, or can no longer get there; 124 not in
    time; 2 there is no such job; 4 the cluster cannot be used.
    """
    at = connect()
    find_job(at, name)

    def over(job: JobView | None) -> bool:
        return job is None or job.over or job.phase in REACHED[state]

    done, job = wait_for(at, name, over, timeout, say)
    if not done:
        phase = "not seen" if job is None else job.phase
        give_up(f"{name} is not {state} within the time given: it is {phase}", TIMED_OUT)
    if job is None:
        give_up(f"{name} was deleted", FAILED)
    if job.phase not in REACHED[state]:
        give_up(f"{name} is {job.phase}{f': {job.message}' if job.message else ''}", FAILED)
    sys.exit(0)

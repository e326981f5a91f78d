"""``msa stop`` and ``msa resume``: give a job's nodes back and take it up again."""

from __future__ import annotations

from collections.abc import Callable

import click

from msa_operator.cli.cluster import (
    BAD_INPUT,
    FAILED,
    TIMED_OUT,
    Connection,
    Refused,
    cluster_options,
    find_job,
    give_up,
    patch_spec,
)
from msa_operator.cli.jobs import JobView
from msa_operator.cli.waiting import look, say, timeout_option, wait


@click.command(short_help="Checkpoint a job, stop it and give its nodes back.")
@click.argument("name")
@click.option("--wait", "waits", is_flag=True, help="Return when all nodes are given back.")
@timeout_option("15m")
@cluster_options
def stop(name: str, waits: bool, timeout: float, connect: Callable[[], Connection]) -> None:
    """Suspend NAME: it writes a checkpoint, ends, and its cluster is deleted.

    The job and its checkpoints stay; msa resume goes on from there. A run that writes no
    checkpoint within five minutes is stopped without one.

    \b
      msa stop qwen-128k --wait
      msa resume qwen-128k

    Exit codes: 0 done; 1 the job ended otherwise; 124 not in time; 2 it is over already.
    """
    at = connect()
    job = _current(at, name)
    if job.over:
        raise Refused(f"{name} is {job.phase}: there is nothing to stop", BAD_INPUT)
    if job.suspend:
        click.echo(f"{name} is suspended already ({job.phase})")
    else:
        patch_spec(at, name, {"suspend": True})
        last = " after a last checkpoint" if job.phase == "Running" else ""
        click.echo(f"{name} stops{last}; msa resume {name} goes on")
    if not waits:
        return
    done, seen = wait(at, name, _stopped, timeout, say)
    if not done:
        give_up(f"{name} is not suspended within the time given", TIMED_OUT)
    if seen is None:
        give_up(f"{name} was deleted", FAILED)
    if seen.phase == "Complete":
        click.echo(f"{name} was trained to its end before it stopped")
    elif seen.phase == "Failed":
        give_up(f"{name} failed: {seen.message}", FAILED)


@click.command(short_help="Go on with a stopped job, from its newest checkpoint.")
@click.argument("name")
@click.option("--wait", "waits", is_flag=True, help="Return when it trains again.")
@timeout_option("1h")
@cluster_options
def resume(name: str, waits: bool, timeout: float, connect: Callable[[], Connection]) -> None:
    """Unset suspend of NAME: it is planned again and goes on from its newest checkpoint.

    What was edited in the meantime is used from now on.

    Exit codes: 0 done; 1 the job failed; 124 not in time; 2 it is over already.
    """
    at = connect()
    job = _current(at, name)
    if job.over:
        raise Refused(
            f"{name} is {job.phase} and cannot go on. A new job with the same model, data, "
            "sequence, attention and checkpoint.uri continues from its checkpoints.",
            BAD_INPUT,
        )
    if not job.suspend:
        click.echo(f"{name} is not suspended ({job.phase})")
    else:
        patch_spec(at, name, {"suspend": False})
        step = f" from step {job.checkpoint}" if job.checkpoint else ""
        click.echo(f"{name} goes on{step}")
    if not waits:
        return
    done, seen = wait(at, name, _runs, timeout, say)
    if not done:
        give_up(f"{name} does not run within the time given", TIMED_OUT)
    if seen is None or seen.phase == "Failed":
        give_up(f"{name} {f'failed: {seen.message}' if seen else 'was deleted'}", FAILED)


def _current(at: Connection, name: str) -> JobView:
    find_job(at, name)
    found = look(at, name)
    if found is None:
        raise Refused(f"{name} was deleted just now", BAD_INPUT)
    if found.deleting:
        raise Refused(f"{name} is being deleted", BAD_INPUT)
    return found


def _stopped(job: JobView | None) -> bool:
    return job is None or job.over or job.phase == "Suspended"


def _runs(job: JobView | None) -> bool:
    return job is None or job.over or job.phase == "Running"

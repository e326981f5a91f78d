"""``msa delete``: says what goes and what stays before it does anything."""

from __future__ import annotations

import sys
import time
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
from msa_operator.cli.waiting import LOOK_SECONDS, look, say, timeout_option, wait

TRAINS = ("Running", "Recovering", "Draining")


@click.command(short_help="Delete a job, its cluster and what it holds.")
@click.argument("name")
@click.option("--drain", is_flag=True, help="Stop it first, so that a last checkpoint is written.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--wait", "waits", is_flag=True, help="Return when its cluster is gone, too.")
@timeout_option("20m")
@cluster_options
def delete(
    name: str, drain: bool, yes: bool, waits: bool, timeout: float,
    connect: Callable[[], Connection],
) -> None:  # fmt: skip
    """Delete NAME. Its cluster goes with it; its checkpoints stay where they are.

    \b
      msa delete qwen-128k
      msa delete qwen-128k --drain --wait

    Exit codes: 0 done; 1 it could not be stopped first, or the answer was no; 124 not in time.
    """
    at = connect()
    find_job(at, name)
    job = look(at, name)
    if job is None:
        raise Refused(f"{name} was deleted just now", BAD_INPUT)
    for line in plan(job, drain):
        click.echo(line, err=True)
    if not yes and sys.stdin.isatty() and not click.confirm(f"delete {name}?", err=True):
        sys.exit(FAILED)
    end = time.monotonic() + timeout
    if drain and not job.over and not job.deleting:
        _drain(at, name, timeout)
    from msa_operator.runtime.kube import JOBS

    at.kube.delete(JOBS, at.namespace, name, job.uid)
    click.echo(f"{name} is deleted" if not job.held else f"{name} is being deleted")
    if waits and not _gone(at, job, end):
        give_up(f"{name} or its cluster is still there; msa status {name}", TIMED_OUT)


def plan(job: JobView, drain: bool) -> list[str]:
    """What a deletion does, in words."""
    cluster = f"RayCluster {job.cluster}" if job.cluster else "no cluster"
    lines = [f"{job.name} is {job.phase} and has {cluster}; both go"]
    if job.phase in TRAINS and not drain:
        if job.held:
            lines.append("a last checkpoint is asked for, five minutes at most")
        else:
            step = f"after step {job.checkpoint}" if job.checkpoint else "so far"
            lines.append(
                f"no last checkpoint is written: all work {step} is lost; --drain writes one"
            )
    if job.held:
        lines.append("what it holds outside its namespace is returned first, 15 minutes at most")
    if job.checkpoint_uri:
        lines.append(f"checkpoints stay in {job.checkpoint_uri}")
    return lines


def _drain(at: Connection, name: str, timeout: float) -> None:
    patch_spec(at, name, {"suspend": True})

    def stopped(job: JobView | None) -> bool:
        return job is None or job.over or job.phase == "Suspended"

    done, _ = wait(at, name, stopped, timeout, say)
    if not done:
        give_up(f"{name} does not stop; it is not deleted. msa status {name}", TIMED_OUT)


def _gone(at: Connection, job: JobView, end: float) -> bool:
    """Whether the job and its clusters are gone by then."""
    from msa_operator.runtime.kube import CLUSTERS, JOBS

    labels = f"flashmsa.dev/job-uid={job.uid}"
    has_clusters = at.kube.served(CLUSTERS)
    while True:
        found = at.kube.find(JOBS, at.namespace, job.name)
        there = found is not None and found["metadata"]["uid"] == job.uid
        if not there and not (has_clusters and any(at.kube.list(CLUSTERS, at.namespace, labels))):
            return True
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(LOOK_SECONDS, left))

"""``msa logs``: what all ranks of a job print, from the log of its head's container."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from msa_operator.cli.cluster import BAD_INPUT, Connection, Refused, cluster_options, find_job
from msa_operator.cli.jobs import JobView
from msa_operator.cli.waiting import LOOK_SECONDS, look

CONNECT_SECONDS = 5.0
SILENT_SECONDS = 15.0
"""A log that brings nothing for so long is opened again: its job may be over, or its head gone."""
OVERLAP_SECONDS = 60
"""A log that is opened again begins so long before its last line, for clocks that differ."""

OURS = re.compile(r"^(?P<submission>\S+) \| (?P<text>.*)$", re.DOTALL)
"""A line of a driver's; others of the head's container are Ray's own."""
OF_RANK = re.compile(r"^\(rank (?P<rank>\d+) pid=\d+[^)]*\) ?(?P<text>.*)$", re.DOTALL)


class Lines:
    """Turns a head's log into what was asked for."""

    def __init__(self, rank: int | None, attempt: int | None) -> None:
        self._rank, self._attempt = rank, attempt
        self._last = ""

    def shown(self, line: str) -> Iterator[str]:
        """What to print of a line of the container's log."""
        ours = OURS.match(line)
        if ours is None:
            return
        submission, text = ours["submission"], ours["text"]
        number = submission.rpartition("-")[2]
        if self._attempt is not None and number != str(self._attempt):
            return
        if self._rank is not None:
            of_rank = OF_RANK.match(text)
            if of_rank is None or int(of_rank["rank"]) != self._rank:
                return
            text = of_rank["text"]
        if self._last and self._last != submission:
            yield f"--- attempt {number}"
        self._last = submission
        yield text


@click.command(short_help="Show what the ranks of a job print.")
@click.argument("name")
@click.option("-r", "--rank", type=click.IntRange(0), help="Only this rank, without its label.")
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come, until the job is over.")
@click.option("--attempt", type=click.IntRange(1), help="Only this attempt; default: all.")
@click.option(
    "--pods", is_flag=True,
    help="Everything of every pod instead, each line under its pod's name: Ray's own start and "
    "init containers, for a cluster that does not come up.",
)  # fmt: skip
@cluster_options
def logs(
    name: str, rank: int | None, follow: bool, attempt: int | None, pods: bool,
    connect: Callable[[], Connection],
) -> None:  # fmt: skip
    """Show the output of NAME: the driver's lines, and every rank's under "(rank N ...)".

    It comes from the head's container, so kubectl logs and log collectors have it too. It goes
    with the cluster: metrics and checkpoints stay in the job's checkpoint folder.

    \b
      msa logs qwen-128k --follow
      msa logs qwen-128k --rank 3 --attempt 2
      msa logs qwen-128k --pods
    """
    if pods and (rank is not None or follow or attempt is not None):
        raise click.UsageError("--pods shows everything once; it takes no other choice")
    at = connect()
    find_job(at, name)
    if pods:
        _pods(at, name)
        return
    lines = Lines(rank, attempt)
    if follow:
        _follow(at, name, lines)
    else:
        _once(at, name, lines)


def _once(at: Connection, name: str, lines: Lines) -> None:
    """Print what there is now."""
    from msa_operator.runtime.kube import KubeError

    job = look(at, name)
    head = None if job is None else _head(at, job)
    if job is None or head is None:
        raise Refused(_nothing(job, name), BAD_INPUT)
    printed = 0
    try:
        for line in _read(at, head, follow=False):
            for text in lines.shown(line):
                click.echo(text)
                printed += 1
    except KubeError as error:
        if error.code != 404:
            raise
        # The head's pod went between the two requests.
        job = look(at, name)
        if job is None or job.over or job.phase == "Suspended":
            raise Refused(_nothing(job, name), BAD_INPUT) from None
        raise Refused(
            f"the head of {name} is gone; {name} is {job.phase}. The next one's log: "
            f"msa logs {name} --follow", BAD_INPUT,
        ) from None  # fmt: skip
    if not printed:
        click.echo(f"nothing printed yet; {name} is {job.phase}. msa logs {name} --pods", err=True)


Stamp = tuple[float, int]
"""Seconds since 1970, and the nanoseconds of the last one."""
NEVER: Stamp = (0.0, 0)


def stamped(line: str) -> tuple[Stamp, str]:
    """The time that the kubelet wrote in front of a line, and the line."""
    found = re.match(r"^(\S+?)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) (.*)$", line, re.DOTALL)
    if found is None:
        return NEVER, line
    base, fraction, zone, text = found.groups()
    try:
        at = datetime.datetime.fromisoformat(base + zone.replace("Z", "+00:00"))
    except ValueError:
        return NEVER, line
    return (at.timestamp(), int((fraction or "").ljust(9, "0"))), text


def _follow(at: Connection, name: str, lines: Lines) -> None:
    """Print lines until the job is over; a log that is opened again goes on where it was."""
    seen: dict[str, Stamp] = {}
    heard = time.monotonic()
    told = ""
    while True:
        job = look(at, name)
        head = None if job is None else _head(at, job)
        if head is not None:
            uid = head["metadata"]["uid"]
            since = int(time.monotonic() - heard) + OVERLAP_SECONDS if uid in seen else None
            for line in _read(at, head, follow=True, since=since):
                stamp, line = stamped(line)
                if stamp > seen.get(uid, NEVER):
                    seen[uid], heard = stamp, time.monotonic()
                    for text in lines.shown(line):
                        click.echo(text)
        if job is None or job.over:
            if not seen:
                raise Refused(_nothing(job, name), BAD_INPUT)
            if job is not None:
                click.echo(f"{name} is {job.phase}", err=True)
            return
        if head is None:
            say = f"{name} is {job.phase}{f': {job.message}' if job.message else ''}"
            if say != told:
                click.echo(f"{say}; waiting for its head", err=True)
                told = say
        time.sleep(LOOK_SECONDS)


def _nothing(job: JobView | None, name: str) -> str:
    if job is None:
        return f"{name} was deleted, and its logs with it"
    if job.over or job.phase == "Suspended":
        kept = f"; what it learned is in {job.checkpoint_uri}" if job.checkpoint_uri else ""
        return f"{name} is {job.phase} and its cluster is gone, with the logs{kept}"
    return f"{name} has no head yet: {job.phase}{f', {job.message}' if job.message else ''}"


def _members(at: Connection, job: JobView) -> list[dict[str, Any]]:
    """Pods of the job's present cluster, the head first."""
    from msa_operator.runtime.kube import PODS

    labels = f"flashmsa.dev/job={job.name},flashmsa.dev/job-uid={job.uid}"
    if job.cluster:
        labels += f",ray.io/cluster={job.cluster}"
    pods = list(at.kube.list(PODS, at.namespace, labels))
    return sorted(pods, key=lambda p: (not _is_head(p), p["metadata"]["name"]))


def _is_head(pod: dict[str, Any]) -> bool:
    return pod["metadata"].get("labels", {}).get("ray.io/node-type") == "head"


def _head(at: Connection, job: JobView) -> dict[str, Any] | None:
    """The head's pod, once its container has started."""
    for pod in _members(at, job):
        phase = pod.get("status", {}).get("phase")
        if _is_head(pod) and phase in ("Running", "Succeeded", "Failed"):
            return pod
    return None


def _pods(at: Connection, name: str) -> None:
    from msa_operator.runtime.kube import KubeError

    job = look(at, name)
    members = [] if job is None else _members(at, job)
    if not members:
        raise Refused(_nothing(job, name), BAD_INPUT)
    for pod in members:
        spec = pod.get("spec", {})
        for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
            label = f"{pod['metadata']['name']}/{container['name']}"
            try:
                for line in _read(at, pod, follow=False, container=container["name"]):
                    click.echo(f"{label}: {line}")
            except KubeError as error:
                # A container that waits for its image has no log; the others may have.
                click.echo(f"{label}: no log: {error.message}", err=True)


def _read(
    at: Connection, pod: dict[str, Any], *, follow: bool, container: str = "",
    since: int | None = None,
) -> Iterator[str]:  # fmt: skip
    """Lines of a container's log, those of the last ``since`` seconds; with times to follow.

    Raises KubeError when there is none to be had.
    """
    import urllib3
    from kubernetes import client
    from kubernetes.client.exceptions import ApiException

    from msa_operator.runtime.kube import KubeError

    core = client.CoreV1Api(client.ApiClient(at.settings))
    meta = pod["metadata"]
    container = container or pod["spec"]["containers"][0]["name"]
    try:
        answer: Any = core.read_namespaced_pod_log(
            meta["name"], meta["namespace"], container=container, follow=follow,
            timestamps=follow, since_seconds=since,
            _preload_content=False, _request_timeout=(CONNECT_SECONDS, SILENT_SECONDS),
        )  # fmt: skip
    except ApiException as error:
        if follow and error.status in (404, 500, 502, 503):
            # The pod ends, or its node does not answer now: whoever follows looks again.
            return
        raise KubeError(error.status or 0, str(error.reason), _words(error), None) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise KubeError(0, "", f"log of {meta['name']}: {error}", None) from None
    rest = b""
    try:
        for chunk in answer.stream(1 << 16):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace")
    except (urllib3.exceptions.HTTPError, OSError) as error:
        if not follow:
            raise KubeError(0, "", f"log of {meta['name']}: {error}", None) from None
        # Half a line is read again, whole.
        return
    finally:
        answer.close()
    if rest:
        yield rest.decode(errors="replace")


def _words(error: Any) -> str:
    import json

    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)

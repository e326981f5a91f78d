"""``msa uninstall``: take the operator away without leaving nodes or jobs behind."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from msa_operator.cli.cluster import (
    FAILED,
    TIMED_OUT,
    Connection,
    Refused,
    cluster_options,
    give_up,
)
from msa_operator.cli.jobs import JobView, view
from msa_operator.cli.waiting import LOOK_SECONDS, timeout_option

NAME = "flash-msa-operator"
SELECTOR = f"app.kubernetes.io/name={NAME}"
IDLE = ("New", "Pending", "Planned", "Suspended", "Complete", "Failed")
"""Phases in which a job holds no cluster that its operator still has to end."""

HELM_RELEASE = "meta.helm.sh/release-name"
CRDS = "longcontextjobs.flashmsa.dev hardwareprofiles.flashmsa.dev"


@click.command(short_help="Remove the operator from a cluster; jobs that live come first.")
@click.option(
    "--stop-jobs", is_flag=True,
    help="Suspend every job that lives first: each writes a checkpoint and gives its nodes back.",
)  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@timeout_option("20m")
@cluster_options
def uninstall(
    stop_jobs: bool, yes: bool, timeout: float, connect: Callable[[], Connection]
) -> None:
    """Remove the operator, once no job holds anything that only it returns.

    Refuses while jobs live, and names them. An operator that helm installed is removed by helm.
    Jobs, their checkpoints and the custom resources stay; an operator that is installed again
    takes the jobs up where they are.

    \b
      msa uninstall
      msa uninstall --stop-jobs

    Exit codes: 0 removed; 1 jobs live, or it could not be removed; 124 jobs did not stop in time.
    """
    at = connect()
    installed = _installed(at)
    live = [job for job in _jobs(at) if _lives(job)]
    if live and not stop_jobs:
        lines = [f"  {job.namespace}/{job.name}: {_holds(job)}" for job in live]
        raise Refused(
            "\n".join([
                f"{len(live)} jobs live:", *lines,
                "Wait for them, or let msa uninstall --stop-jobs suspend them first: each writes "
                "a checkpoint, and nothing is lost.",
            ]), FAILED,
        )  # fmt: skip
    if not installed:
        raise Refused(f"no operator is installed (no Deployment with {SELECTOR})", FAILED)
    for found in installed:
        meta = found["metadata"]
        click.echo(f"the operator in namespace {meta['namespace']} goes; jobs stay", err=True)
    if not yes and sys.stdin.isatty() and not click.confirm("go on?", err=True):
        sys.exit(FAILED)
    if live:
        _stop(at, live, timeout)
    for found in installed:
        _remove(at, found)
    click.echo(
        f"the custom resources and all jobs stay; to delete them: kubectl delete crd {CRDS}"
    )


def _installed(at: Connection) -> list[dict[str, Any]]:
    from msa_operator.runtime.kube import Resource

    deployments = Resource("apps", "v1", "deployments")
    return list(at.kube.list(deployments, labels=SELECTOR))


def _jobs(at: Connection) -> list[JobView]:
    from msa_operator.runtime.kube import JOBS, KubeError

    now = datetime.datetime.now(datetime.UTC)
    try:
        return [view(job, now) for job in at.kube.list(JOBS)]
    except KubeError as error:
        if error.code == 404:
            return []  # without the custom resource there are no jobs
        raise


def _lives(job: JobView) -> bool:
    return job.held or job.deleting or job.phase not in IDLE


def _holds(job: JobView) -> str:
    words = [job.phase]
    if job.nodes:
        words.append(f"{job.nodes} nodes")
    if job.held:
        words.append("something outside its namespace")
    if job.deleting:
        words.append("being deleted")
    return ", ".join(words)


def _stop(at: Connection, live: list[JobView], timeout: float) -> None:
    from msa_operator.cli.cluster import FIELD_MANAGER
    from msa_operator.runtime.kube import JOBS

    for job in live:
        if not job.over and not job.suspend and not job.deleting:
            body = {"spec": {"suspend": True}}
            at.kube.patch(JOBS, job.namespace, job.name, body, manager=FIELD_MANAGER)
    click.echo(f"{len(live)} jobs are asked to stop", err=True)
    end, before = time.monotonic() + timeout, len(live)
    while left := [job for job in _jobs(at) if _lives(job)]:
        if len(left) != before:
            click.echo(f"{len(left)} jobs still live", err=True)
            before = len(left)
        rest = end - time.monotonic()
        if rest <= 0:
            names = ", ".join(f"{job.namespace}/{job.name} ({job.phase})" for job in left[:10])
            give_up(f"these jobs do not stop: {names}; nothing is removed", TIMED_OUT)
        time.sleep(min(LOOK_SECONDS, rest))


def _remove(at: Connection, deployment: Mapping[str, Any]) -> None:
    meta = deployment["metadata"]
    namespace = meta["namespace"]
    release = (meta.get("annotations") or {}).get(HELM_RELEASE)
    if release:
        _helm(at, release, namespace)
        return
    instance = meta["labels"].get("app.kubernetes.io/instance", NAME)
    _delete(at, namespace, f"{SELECTOR},app.kubernetes.io/instance={instance}")


def _helm(at: Connection, release: str, namespace: str) -> None:
    """By helm, which keeps a record of its own of what it installed."""
    command = ["helm", "uninstall", release, "--namespace", namespace]
    helm = shutil.which("helm")
    if helm is None:
        give_up(f"helm installed it, and is not on this machine: {' '.join(command)}", FAILED)
    if at.kubeconfig:
        command.append(f"--kubeconfig={at.kubeconfig}")
    if at.context:
        command.append(f"--kube-context={at.context}")
    done = subprocess.run([helm, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        give_up(f"{' '.join(command)}: {done.stderr.strip()}", FAILED)
    click.echo(done.stdout.strip(), err=True)


def _delete(at: Connection, namespace: str, selector: str) -> None:
    """Everything with those labels: the process first, what it needs after it."""
    from msa_operator.runtime.kube import (
        CONFIGMAPS,
        LEASES,
        POLICIES,
        KubeError,
        Resource,
    )

    rbac = "rbac.authorization.k8s.io"
    for resource in (
        Resource("apps", "v1", "deployments"),
        Resource("", "v1", "services"),
        CONFIGMAPS,
        POLICIES,
        # In an installation for named namespaces these are in each of them.
        Resource(rbac, "v1", "rolebindings"),
        Resource(rbac, "v1", "roles"),
        Resource(rbac, "v1", "clusterrolebindings", namespaced=False),
        Resource(rbac, "v1", "clusterroles", namespaced=False),
        Resource("", "v1", "serviceaccounts"),
    ):
        for found in list(at.kube.list(resource, labels=selector)):
            meta = found["metadata"]
            at.kube.delete(resource, meta.get("namespace", ""), meta["name"], meta["uid"])
            click.echo(f"deleted {resource.plural}/{meta['name']}", err=True)
    try:
        lease = at.kube.find(LEASES, namespace, NAME)
        if lease is not None:
            at.kube.delete(LEASES, namespace, NAME, lease["metadata"]["uid"])
    except KubeError as error:
        # It expires by itself, and the next operator takes it over.
        click.echo(f"the Lease stays: {error.message}", err=True)

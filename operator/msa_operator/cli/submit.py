"""``msa submit``: plan a job, show the plan, and hand the job to the operator of a cluster."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from msa_kernels.capabilities import AUTO

from msa_operator.api import HardwareProfile, JobError, LongContextJob, Problem
from msa_operator.api.problems import split
from msa_operator.cli.cluster import (
    BAD_INPUT,
    FIELD_MANAGER,
    TIMED_OUT,
    Connection,
    Refused,
    cluster_options,
    explain,
)
from msa_operator.cli.jobs import NO_OPERATOR, JobView
from msa_operator.cli.options import (
    Loaded,
    bad_input,
    emit,
    job_argument,
    load,
    load_profiles,
    output_option,
    profile_option,
    report,
)

if TYPE_CHECKING:
    from msa_operator.runtime.kube import KubeError
    from msa_operator.runtime.planning import Planned
    from msa_operator.settings import Settings

ANSWER_SECONDS = 20.0
"""How long the operator gets to say what it makes of a new job; it takes about a second."""

OPERATOR = "app.kubernetes.io/name=flash-msa-operator"
UNKNOWN = {
    "image": "the-operators/worker-image",
    "rayVersion": "0.0.0",
    "checkpoint": {"claim": "the-operators-claim"},
}
"""Stand in a dry run for what only the operator's settings say."""


@click.command(short_help="Train a job on a cluster, by its operator.")
@job_argument
@click.option(
    "--dry-run", is_flag=True,
    help="Print the plan and all objects, have the job checked by the API server where one can "
    "be reached, and create nothing.",
)  # fmt: skip
@click.option("--suspend", is_flag=True, help="Create it suspended: planned, nothing started.")
@profile_option
@output_option
@cluster_options
def submit(
    job: str, overrides: tuple[str, ...], dry_run: bool, suspend: bool, profiles: tuple[str, ...],
    output: str, connect: Callable[[], Connection],
) -> None:  # fmt: skip
    """Plan JOB, show the plan, create it, and say what the operator makes of it.

    The plan shown is this command's, with the cluster's HardwareProfiles where you may read them;
    the operator's own is in msa status.

    \b
      msa submit job.yaml
      msa submit job.yaml --dry-run
      msa submit job.yaml --set training.maxSteps=20 --namespace team-a && msa wait NAME
      msa submit job.yaml --suspend && msa status NAME      # the plan, and nothing spent

    Exit codes: 0 the operator has taken it; 2 the job cannot be used; 4 the cluster cannot;
    124 no operator answers, and the job waits for one.
    """
    from msa_operator.runtime.kube import KubeError

    with bad_input(output):
        loaded = load(job, overrides)
        body = _body(loaded.job, suspend)
        try:
            at = connect()
        except Refused as refused:
            if not dry_run:
                raise
            at, unchecked = None, str(refused)
        else:
            unchecked = ""
        settings = _settings(at)
        known = [*load_profiles(profiles), *_profiles(at)]
        planned = None
        try:
            planned = _plan(loaded.job, body, settings, known, at)
        except JobError as error:
            if not _unreachable_model(loaded.job, error):
                raise loaded.located(error) from None
            click.echo(f"not planned here, the operator will: {error}", err=True)
        if dry_run:
            if at is not None:
                try:
                    _create(at, body, loaded, dry_run=True)
                except KubeError as error:
                    unchecked = explain(error)
            _show_dry_run(body, planned, settings, unchecked, output)
            return
        assert at is not None
        if output == "table" and planned is not None:
            _print_plan(loaded.job, planned)
        created = _create(at, body, loaded, dry_run=False)
    if output != "table":
        emit(created, output)
    _answer(at, loaded.job.metadata.name, loud=output == "table")


def _body(job: LongContextJob, suspend: bool) -> dict[str, Any]:
    """The object as the file wrote it, overrides included, without what is a default."""
    body = job.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"status"})
    if suspend:
        body["spec"]["suspend"] = True
    return body


def _settings(at: Connection | None) -> Settings | None:
    """What the operator was installed with; None where that cannot be read."""
    from msa_operator import yaml12
    from msa_operator.api.read import Reader
    from msa_operator.runtime.kube import CONFIGMAPS, KubeError
    from msa_operator.settings import Settings

    if at is None:
        return None
    try:
        for found in at.kube.list(CONFIGMAPS, labels=OPERATOR):
            text = (found.get("data") or {}).get("settings.yaml")
            if text:
                return Reader(lambda _: "").read(Settings, yaml12.load(text).value)
    except (KubeError, yaml12.YamlError):
        # Not everybody may look into the operator's namespace.
        return None
    return None


def _profiles(at: Connection | None) -> list[HardwareProfile]:
    """The cluster's HardwareProfiles, as far as they can be read."""
    from msa_operator.api.read import Reader
    from msa_operator.runtime.kube import PROFILES, KubeError

    if at is None:
        return []
    try:
        raw = list(at.kube.list(PROFILES))
    except KubeError:
        return []
    found = [Reader(lambda _: "").read(HardwareProfile, _known(item)) for item in raw]
    return [profile for profile in found if profile is not None]


def _known(item: Mapping[str, Any]) -> dict[str, Any]:
    """Without what only the API server writes."""
    return {
        "apiVersion": item.get("apiVersion", "flashmsa.dev/v1alpha1"),
        "kind": "HardwareProfile",
        "metadata": {"name": item["metadata"]["name"]},
        "spec": item.get("spec"),
    }


def _plan(
    job: LongContextJob, body: Mapping[str, Any], settings: Settings | None,
    profiles: Sequence[HardwareProfile], at: Connection | None,
) -> Planned:  # fmt: skip
    """The plan as the operator makes it. Raises :class:`JobError`."""
    from msa_operator.reconcile.desired import Owner
    from msa_operator.runtime.planning import Planner
    from msa_operator.settings import Settings

    if settings is None:
        # The operator may well have a default storage; whether it has, it says itself.
        settings = Settings.model_validate(UNKNOWN)
    namespace = at.namespace if at else "default"
    owner = Owner(str(body["metadata"]["name"]), namespace, "00000000-0000-0000-0000-000000000000")
    return Planner(settings, "flash-msa-system", lambda: profiles).plan(job, owner)


def _unreachable_model(job: LongContextJob, error: JobError) -> bool:
    """Whether only this machine lacks something: the model, which the operator may reach."""
    return job.spec.model.source is not None and all(
        p.path.startswith("spec.model") for p in error.problems
    )


def _create(
    at: Connection, body: Mapping[str, Any], loaded: Loaded, *, dry_run: bool
) -> dict[str, Any]:
    """Raises :class:`JobError` with what the API server refuses, KubeError, and Refused."""
    from msa_operator.runtime.kube import JOBS, KubeError

    query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
    if dry_run:
        query["dryRun"] = "All"
    name = body["metadata"]["name"]
    try:
        return at.kube.call(
            "POST", JOBS.path(at.namespace), JOBS.plural, body=dict(body), query=query
        )
    except KubeError as error:
        if error.reason == "AlreadyExists":
            raise Refused(
                f"a job {name!r} exists in namespace {at.namespace} (msa status {name}).\n"
                "Give this one another name (--set metadata.name=...), delete that one, or edit "
                "it with kubectl apply.",
                BAD_INPUT,
            ) from None
        if error.code == 404 and "namespaces" in error.message:
            raise Refused(
                f"there is no namespace {at.namespace!r}: kubectl create namespace "
                f"{at.namespace}", BAD_INPUT,
            ) from None  # fmt: skip
        if error.code in (400, 422):
            raise JobError(problems(error, loaded), loaded.source) from None
        raise


def problems(error: KubeError, loaded: Loaded) -> list[Problem]:
    """What the API server says of each field, in the form of our own checks."""
    found = []
    for cause in error.causes:
        path = str(cause.get("field") or "").replace("<nil>", "")
        text = re.sub(r"^Invalid value: (?:\"[a-z]+\": )?", "", str(cause.get("message", "")))
        text = text.removeprefix(f"{path} in body ").strip()
        found.append(
            Problem(path, f"refused by the API server: {text}", where=_where(path, loaded))
        )
    for field in re.findall(r'unknown field "([^"]+)"', error.message):
        text = "refused by the API server: it does not know this field"
        allowed = "what its version of the custom resource has: upgrade it, or leave the field out"
        found.append(Problem(field, text, allowed, where=_where(field, loaded)))
    return found or [Problem("", f"refused by the API server: {error.message}")]


def _where(path: str, loaded: Loaded) -> str:
    try:
        return loaded.where(split(path)) if path else ""
    except ValueError:
        return ""


def _print_plan(job: LongContextJob, planned: Planned) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text.assemble(
        ("plan ", "bold"), (job.metadata.name, "bold cyan"), "  ", (planned.summary, "bold")
    ))  # fmt: skip
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in plan_lines(planned.plan):
        grid.add_row(f"  {label}", Text(text))
    console.print(grid)


def plan_lines(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The plan in a few lines; all of it is in msa plan."""
    memory, estimate = plan.get("memoryGiB", {}), plan.get("estimate")
    lines = [
        ("step", f"{plan['stepTokens']:,} tokens: micro-batch {plan['microBatch']} x "
                 f"accumulation {plan['accumulation']} on each data rank"),
        ("memory", f"{memory['peak']:.1f} GiB a rank at the peak, {memory['usable']:.1f} usable"),
        ("saved by", ", ".join(plan["memorySwitches"]) or "nothing: everything fits as it is"),
    ]  # fmt: skip
    if (backend := plan.get("attentionBackend", AUTO)) != AUTO:
        lines.append(("attention", f"backend {backend}"))
    if estimate:
        price = estimate.get("dollarsPerHour")
        text = f"about {estimate['tokensPerSecond']:,} tokens/s"
        lines.append(("estimate", text + (f", ${price:,.0f} an hour" if price else "")))
    if pod := plan.get("podResources"):
        lines.append(("worker pod", ", ".join(f"{n}: {v}" for n, v in pod.items())))
    lines += [("note", str(note)) for note in plan["notes"]]
    rejected = plan["rejected"]
    lines += [("not chosen", f"{r['plan']}: {r['reason']}") for r in rejected[:3]]
    if len(rejected) > 3:
        lines.append(("", f"and {len(rejected) - 3} more: msa plan"))
    return lines


def _show_dry_run(
    body: Mapping[str, Any], planned: Planned | None, settings: Settings | None, unchecked: str,
    output: str,
) -> None:  # fmt: skip
    """The plan on stderr, so that the objects on stdout can be piped; JSON and YAML hold both."""
    objects = [dict(body)]
    if planned is not None:
        objects += planned.rendered.children(planned.rendered.name(1))
    notes = []
    if settings is None:
        notes.append("the operator's settings cannot be read: its image and storage are not known")
    notes.append(f"not checked by an API server: {unchecked}" if unchecked
                 else "accepted by the API server (dry run)")  # fmt: skip
    if output != "table":
        emit(
            {"plan": dict(planned.plan) if planned else None, "objects": objects, "notes": notes},
            output,
        )
        return
    from rich.console import Console

    if planned is not None:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"plan {body['metadata']['name']}  {planned.summary}", markup=False)
        for label, text in plan_lines(planned.plan):
            console.print(f"  {label:10}  {text}", markup=False)
    for number, each in enumerate(objects):
        click.echo("---" if number else "", nl=bool(number))
        emit(each, "yaml")
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _answer(at: Connection, name: str, *, loud: bool) -> None:
    """Wait for the operator's first word; a refused plan is a problem of the job."""
    from msa_operator.cli.waiting import wait

    def answered(job: JobView | None) -> bool:
        return job is None or bool(job.condition("Planned")) or job.over

    begun = time.monotonic()
    done, job = wait(at, name, answered, ANSWER_SECONDS)
    if job is None:
        raise Refused(f"{name} was deleted just after it was made", BAD_INPUT)
    if not done:
        waited = time.monotonic() - begun
        raise Refused(f"{name} is created, but after {waited:.0f} s {NO_OPERATOR}", TIMED_OUT)
    planned = job.condition("Planned")
    if planned.get("status") == "False":
        text = f"refused by the operator: {planned.get('message')}"
        report(JobError([Problem("", text, "an edit (kubectl apply), or msa delete and submit")],
                        name))  # fmt: skip
        sys.exit(BAD_INPUT)
    if loud:
        click.echo(f"{name} is submitted: {job.phase}. msa status {name} --watch, "
                   f"msa logs {name} --follow, msa wait {name}")  # fmt: skip

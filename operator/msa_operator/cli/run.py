"""``msa run``: train a job on this machine or on a Ray cluster."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
from msa_kernels.pattern import PerHead
from msa_workloads.heads import Order
from msa_workloads.runspec import RunSpec

from msa_operator import extra
from msa_operator.api import JobError, LongContextJob, Problem
from msa_operator.cli import folders
from msa_operator.cli.options import (
    BAD_INPUT,
    bad_input,
    emit,
    job_argument,
    load,
    load_profiles,
    output_option,
    profile_option,
)
from msa_operator.machine import this_machine
from msa_operator.models import Model, resolve
from msa_operator.planner.hardware import Machine, MachineError
from msa_operator.planner.request import Plan
from msa_operator.planner.runtime import THIS_VERSION
from msa_operator.runs import machines_of, plan_job, run_spec
from msa_operator.sources import check_sources

FAILED = 1
MISSING = 3
NO_CLUSTER = 4
INTERRUPTED = 130


@click.command(short_help="Train, here or on a Ray cluster.")
@job_argument
@click.option("--resume", is_flag=True, help="Go on with the newest run of this job.")
@click.option(
    "--output-dir", type=click.Path(path_type=Path, file_okay=False), default=None,
    help="Folder for results and checkpoints. Default: runs/NAME, or runs/NAME-2 and so on "
    "when that holds an earlier run.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the plan and the RunSpec; start nothing.")
@profile_option
@output_option
def run(
    job: str,
    overrides: tuple[str, ...],
    resume: bool,
    output_dir: Path | None,
    dry_run: bool,
    profiles: tuple[str, ...],
    output: str,
) -> None:
    """Train JOB, with live progress, and leave a report.

    Uses the Ray cluster of RAY_ADDRESS, which is set inside `ray job submit`; otherwise a Ray of
    its own on this machine. Results go to the output folder: runspec.json, metrics.jsonl,
    checkpoints/, summary.json and report.html. With --output json the summary is all that standard
    output gets; plan and progress go to standard error.

    \b
      msa run manifests/samples/stdlib-4k.yaml
      msa run job.yaml --set training.maxSteps=20 --output-dir /tmp/try
      msa run job.yaml --resume
      msa run job.yaml --output json | jq .held_out
      msa run job.yaml --dry-run --output json
      ray job submit --working-dir . -- msa run job.yaml
    """
    with ExitStack() as held:
        with bad_input(output):
            loaded = load(job, overrides)
            try:
                ready, folder = _reserved(
                    loaded.job, profiles, output_dir, resume=resume, dry_run=dry_run, held=held
                )
            except JobError as error:
                raise loaded.located(error) from None
        spec = ready.spec_for(folder.path)
        if dry_run:
            _print_dry_run(loaded.job, ready, spec, output)
            return
        if folder.note:
            click.echo(folder.note, err=True)
        if folder.finished:
            if output != "table":
                emit(json.loads((folder.path / folders.SUMMARY).read_text()), output)
            return
        (folder.path / folders.SPEC).write_text(spec.to_json())
        _launch(spec, resume, loaded.job, ready, folder, output)


@dataclass(frozen=True)
class Ready:
    """A job that can start: what it trains, how it is split, and its RunSpec for any folder."""

    model: Model
    plan: Plan
    spec_for: Callable[[Path], RunSpec]


def _reserved(
    job: LongContextJob,
    profiles: tuple[str, ...],
    output_dir: Path | None,
    *,
    resume: bool,
    dry_run: bool,
    held: ExitStack,
) -> tuple[Ready, folders.Folder]:
    """The job, ready, and its folder, which no other run gets until ``held`` is left.

    Raises :class:`JobError`.
    """
    ready = _prepare(job, profiles)
    folder = _folder(job, ready, output_dir, resume=resume, reserve=not dry_run)
    if folder.hold is not None:
        held.enter_context(folder.hold)
    uri = ready.spec_for(folder.path).checkpoint.uri
    if resume and isinstance(job.spec.attention.pattern, PerHead):
        orders = _saved_orders(uri)
        ready = _prepare(job, profiles, orders) if orders is not None else ready
    # On a Ray cluster the folders of a job are the cluster's.
    if not dry_run and not os.environ.get("RAY_ADDRESS"):
        hold = folders.held_checkpoints(uri, folder.path)
        if hold is not None:
            held.enter_context(hold)
    return ready, folder


def _saved_orders(uri: str) -> dict[int, Order] | None:
    """In which order the checkpoint to go on from stores heads; None where there is none to read,
    which the plan then says as for a run that begins."""
    try:
        from msa_workloads import launch

        return launch.saved_orders(uri)
    except Exception as error:
        click.echo(f"planned without the order of heads in {uri}: {error}", err=True)
        return None


def _prepare(
    job: LongContextJob, profiles: tuple[str, ...], orders: dict[int, Order] | None = None
) -> Ready:  # fmt: skip
    """Plan the job and look for its data; ``orders`` as for ``plan_job``. Raises
    :class:`JobError`."""
    cluster = bool(os.environ.get("RAY_ADDRESS"))
    model = resolve(job.spec.model)
    here = _here()
    machines = _machines(job, profiles, here, cluster)
    plan = plan_job(job, model, machines, THIS_VERSION, orders=orders)
    check_sources(job, local=not cluster)
    # Fixed, because the order of additions, and with it the last bits of a loss, follows it.
    threads = max(1, here.cpus // plan.mesh.world_size) if plan.machine.accelerator is None else 0

    def spec_for(folder: Path) -> RunSpec:
        folder = folder.absolute()
        return run_spec(
            job,
            plan,
            model,
            output=str(folder),
            checkpoint_uri=str(folder / "checkpoints"),
            threads=threads,
        )

    return Ready(model, plan, spec_for)


def _folder(
    job: LongContextJob, ready: Ready, output_dir: Path | None, *, resume: bool, reserve: bool
) -> folders.Folder:
    """Where this run goes. Raises :class:`JobError`."""
    base = output_dir or Path("runs", job.metadata.name)
    explicit = output_dir is not None
    if not resume:
        return folders.fresh(base, explicit=explicit, reserve=reserve)
    return folders.resumed(
        base,
        explicit=explicit,
        reserve=reserve,
        spec_for=ready.spec_for,
        checkpoints=job.spec.checkpoint.uri,
    )


def _here() -> Machine:
    try:
        return this_machine()
    except MachineError as error:
        raise JobError([Problem("spec.hardware.device", str(error))]) from None


def _machines(
    job: LongContextJob, profiles: tuple[str, ...], here: Machine, cluster: bool
) -> tuple[Machine, ...]:
    if job.spec.hardware.device == "cpu":
        return machines_of(job, (), lambda: here)
    if cluster and job.spec.hardware.instance_types:
        return machines_of(job, load_profiles(profiles), lambda: here)
    if here.accelerator is None:
        where = " and hardware.instanceTypes does not say what the cluster has" if cluster else ""
        raise JobError([Problem(
            "spec.hardware.device", f"found gpu, but nvidia-smi shows none on this machine{where}",
            "cpu with workers here, or a Ray cluster (RAY_ADDRESS) with hardware.instanceTypes",
            "hardware: {device: cpu, workers: 2}",
        )])  # fmt: skip
    return (here,)


def _print_dry_run(job: LongContextJob, ready: Ready, spec: RunSpec, output: str) -> None:
    value: dict[str, Any] = json.loads(spec.to_json())
    if output != "table":
        emit(value, output)
        return
    from rich.console import Console

    from msa_operator.cli.show import print_plan

    print_plan(Console(soft_wrap=True, highlight=False), job, ready.model, ready.plan)
    click.echo("\nRunSpec")
    emit({name: part for name, part in value.items() if name != "plan"}, "yaml")


def _launch(
    spec: RunSpec,
    resume: bool,
    job: LongContextJob,
    ready: Ready,
    folder: folders.Folder,
    output: str,
) -> None:
    try:
        from msa_workloads import launch
    except ImportError as error:
        if not resume:
            folders.give_back(folder)
        _give_up(
            f"training needs packages that are not installed ({error.name}): {extra.command()}",
            MISSING,
        )
    from rich.console import Console

    from msa_operator.cli.show import print_plan

    console = Console(highlight=False, stderr=output != "table")
    print_plan(console, job, ready.model, ready.plan)
    try:
        summary = launch.run_on_ray(spec, resume=resume, console=console)
    except KeyboardInterrupt:
        _give_up(f"interrupted; msa run --resume goes on from {spec.checkpoint.uri}", INTERRUPTED)
    except (launch.UnsupportedError, launch.DataError, launch.CheckpointError) as error:
        if not resume:
            folders.give_back(folder)
        if output == "json":
            click.echo(JobError([Problem("", str(error))]).to_json())
        _give_up(str(error), BAD_INPUT)
    except launch.ClusterError as error:
        if not resume:
            folders.give_back(folder)
        _give_up(str(error), NO_CLUSTER)
    except Exception as error:
        if os.environ.get("MSA_DEBUG"):
            raise
        _give_up(f"{error}\nthe run failed; its files are in {spec.output}", FAILED)
    if output != "table":
        emit(summary, output)


def _give_up(text: str, code: int) -> NoReturn:
    click.echo(f"{click.style('error:', fg='red', bold=True)} {text}", err=True)
    sys.exit(code)

"""``msa plan``: how a run would be split over the hardware, and why."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from msa_workloads.heads import Order

from msa_operator.api import JobError, LongContextJob, Problem
from msa_operator.cli import folders
from msa_operator.cli.options import (
    Loaded,
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
from msa_operator.planner.explain import to_dict
from msa_operator.planner.hardware import Machine
from msa_operator.planner.request import Plan
from msa_operator.planner.runtime import EVERYTHING, THIS_VERSION
from msa_operator.runs import machines_of, plan_job


@click.command(short_help="Show how a run would be split, and why.")
@job_argument
@profile_option
@click.option(
    "--resume", is_flag=True,
    help="Plan how the newest run of this job goes on: from its checkpoint, if that is a folder.",
)  # fmt: skip
@output_option
def plan(
    job: str, overrides: tuple[str, ...], profiles: tuple[str, ...], resume: bool, output: str
) -> None:
    """Plan JOB for the hardware that it names, starting nothing.

    CPU jobs are planned for this machine, GPU jobs for the machine types of
    hardware.instanceTypes. The plan is the one that the full design would run; where this
    version's workers cannot run it yet, that is said, with the plan that they can run.

    \b
      msa plan job.yaml
      msa plan job.yaml --set sequence.length=262144 --set hardware.accelerators.max=128
      msa plan job.yaml --output json | jq .degrees
      msa plan job.yaml --profile my-machine.yaml
      msa plan job.yaml --resume --set parallelism.tensor=4
    """
    with bad_input(output):
        loaded = load(job, overrides)
        try:
            model = resolve(loaded.job.spec.model)
            machines = machines_of(loaded.job, load_profiles(profiles), this_machine)
            orders = _orders(loaded.job) if resume else None
            chosen = plan_job(loaded.job, model, machines, EVERYTHING, orders=orders)
        except JobError as error:
            raise loaded.located(error) from None
        missing = THIS_VERSION.missing(
            chosen.mesh, chosen.memory, loaded.job.spec.attention.pattern
        )
        today = _today(loaded, model, machines, orders) if missing else chosen
    if output != "table":
        result = to_dict(chosen) | {"notYetRunnable": list(missing)}
        result["runnableToday"] = None if today is None else to_dict(today)
        emit({"job": loaded.job.metadata.name, "model": model.label, **result}, output)
        return
    from rich.console import Console

    from msa_operator.cli.show import print_plan

    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    print_plan(console, loaded.job, model, chosen, missing)
    if missing:
        text = "no plan" if today is None else f"{today.label}, {_speed(today)}"
        console.print(f"what they can run today: {text}", markup=False)


def _orders(job: LongContextJob) -> dict[int, Order]:
    """In which order the run's checkpoint stores heads. Raises :class:`JobError` where no
    checkpoint can be read from here."""
    uri, base = job.spec.checkpoint.uri, Path("runs", job.metadata.name)
    where = folders.newest_checkpoints(base) if uri is None else folders.local(uri)
    if uri is None and where is None:
        found, allowed = f"found no run in {base}", "a folder with a run, or checkpoint.uri"
    elif where is None:
        found = f"checkpoints in {uri} are not read by msa plan"
        allowed = "a folder; msa run --resume --dry-run reads them, where the run would go on"
    elif (orders := folders.head_orders(Path(where))) is not None:
        return orders
    else:
        found, allowed = f"found no checkpoint in {where}", "a folder with one"
    raise JobError([Problem("", found, allowed, where="--resume")])


def _today(
    loaded: Loaded, model: Model, machines: tuple[Machine, ...], orders: dict[int, Order] | None
) -> Plan | None:
    try:
        return plan_job(loaded.job, model, machines, THIS_VERSION, orders=orders)
    except JobError:
        return None


def _speed(plan: Plan) -> str:
    speed = plan.tokens_per_second
    return "speed not known" if speed is None else f"about {speed:,.0f} tokens/s"

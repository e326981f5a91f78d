"""``msa plan``: how a run would be split over the hardware, and why."""

from __future__ import annotations

import sys

import click

from msa_operator.api import JobError
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
@output_option
def plan(job: str, overrides: tuple[str, ...], profiles: tuple[str, ...], output: str) -> None:
    """Plan JOB for the hardware that it names, starting nothing.

    CPU jobs are planned for this machine, GPU jobs for the machine types of
    hardware.instanceTypes. The plan is the one that the full design would run; where this
    version's workers cannot run it yet, that is said, with the plan that they can run.

    \b
      msa plan job.yaml
      msa plan job.yaml --set sequence.length=262144 --set hardware.accelerators.max=128
      msa plan job.yaml --output json | jq .degrees
      msa plan job.yaml --profile my-machine.yaml
    """
    with bad_input(output):
        loaded = load(job, overrides)
        try:
            model = resolve(loaded.job.spec.model)
            machines = machines_of(loaded.job, load_profiles(profiles), this_machine)
            chosen = plan_job(loaded.job, model, machines, EVERYTHING)
        except JobError as error:
            raise loaded.located(error) from None
        missing = THIS_VERSION.missing(
            chosen.mesh, chosen.memory, loaded.job.spec.attention.pattern
        )
        today = _today(loaded, model, machines) if missing else chosen
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


def _today(loaded: Loaded, model: Model, machines: tuple[Machine, ...]) -> Plan | None:
    try:
        return plan_job(loaded.job, model, machines, THIS_VERSION)
    except JobError:
        return None


def _speed(plan: Plan) -> str:
    speed = plan.tokens_per_second
    return "speed not known" if speed is None else f"about {speed:,.0f} tokens/s"

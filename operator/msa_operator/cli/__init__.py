"""The ``msa`` command. Importing it loads neither torch nor ray nor numpy."""

from __future__ import annotations

import errno
import os
import sys
from importlib import metadata

import click

from msa_operator.cli.delete import delete
from msa_operator.cli.doctor import doctor
from msa_operator.cli.logs import logs
from msa_operator.cli.plan import plan
from msa_operator.cli.run import run
from msa_operator.cli.status import status
from msa_operator.cli.stop import resume, stop
from msa_operator.cli.submit import submit
from msa_operator.cli.uninstall import uninstall
from msa_operator.cli.wait import wait

__all__ = ["cli", "main", "plugin"]


class Commands(click.Group):
    """Ends with 130 on Ctrl-C, as shells expect, where a command does not say more itself."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("error: interrupted", err=True)
            ctx.exit(130)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 99},
    epilog="Exit codes: 0 done; 1 the run or a check failed; 2 the file, a flag or the data "
    "cannot be used; 3 a package is missing; 4 the cluster cannot be used; 124 not in time; 130 "
    "interrupted.",
)
@click.version_option(metadata.version("flash-msa-operator"), prog_name="msa")
def cli() -> None:
    """Train language models on long sequences with exact sparse attention.

    One file says what to train: the model, the text, the context length, the attention pattern
    and the hardware. The same file runs here, on a Ray cluster and on Kubernetes.

    \b
      msa plan job.yaml              how the run would be split, and why
      msa run job.yaml               train, on this machine or the Ray cluster of RAY_ADDRESS
      msa run --resume job.yaml      go on from the newest checkpoint
      ray job submit -- msa run job.yaml
      msa doctor                     is everything there to train on this machine?
      msa doctor --cluster           or in the cluster of the kubeconfig?

    \b
    On a cluster with the operator; kubectl msa is the same command:
      msa submit job.yaml            hand it over, after the plan
      msa status --watch             all jobs, live
      msa logs NAME --follow         what every rank prints
      msa wait NAME                  until it is complete; the exit code says how it ended
      msa stop NAME, msa resume NAME, msa delete NAME

    \b
    The smallest job file:
      apiVersion: flashmsa.dev/v1alpha1
      kind: LongContextJob
      metadata: {name: first}
      spec:
        model:    {preset: tiny-llama}
        data:     {source: "python-stdlib://"}
        sequence: {length: 4096}
        attention: {pattern: {type: SinkWindow, window: 512, sinks: 64}}
        training: {maxSteps: 100, precision: fp32}
        hardware: {device: cpu, workers: 2}
    """


for _command in (
    delete, doctor, logs, plan, resume, run, status, stop, submit, uninstall, wait,
):  # fmt: skip
    cli.add_command(_command)


def main() -> None:
    """Entry point of the ``msa`` script."""
    _run("msa")


def plugin() -> None:
    """Entry point of the ``kubectl-msa`` script, by which ``kubectl msa`` works."""
    _run("kubectl msa")


def _run(name: str) -> None:
    """The command; output that nobody takes any more is not a fault of it to be traced."""
    try:
        cli(prog_name=name)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        # What Python still holds would fail once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

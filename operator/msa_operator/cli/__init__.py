"""The ``msa`` command. Importing it loads neither torch nor ray nor numpy."""

from __future__ import annotations

from importlib import metadata

import click

from msa_operator.cli.doctor import doctor
from msa_operator.cli.plan import plan
from msa_operator.cli.run import run

__all__ = ["cli", "main"]


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 99},
    epilog="Exit codes: 0 done; 1 the run or a check failed; 2 the file, a flag or the data "
    "cannot be used; 3 a package is missing; 130 interrupted.",
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


cli.add_command(doctor)
cli.add_command(plan)
cli.add_command(run)


def main() -> None:
    """Entry point of the ``msa`` script."""
    cli(prog_name="msa")

"""The driver of a run on the Ray cluster around it, with a control endpoint for its owner.

    python -m msa_workloads.driver --spec runspec.json --submission ID [--resume]

This is the entrypoint that the operator submits. Exit codes: 0 all steps are trained; 75 the run
was drained, and its last checkpoint is committed; 1 it failed. The endpoint is described in
:mod:`msa_workloads.control_http`; ``MSA_CONTROL_HOST`` and ``MSA_CONTROL_PORT`` set another
address for it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from msa_workloads.container_log import container_log, copied
from msa_workloads.control import RunState
from msa_workloads.control_http import PORT, ControlServer, cluster_token
from msa_workloads.control_stacks import Watch
from msa_workloads.failures import headline
from msa_workloads.runspec import RunSpec, RunSpecError

DONE, FAILED, DRAINED = 0, 1, 75

LAST_WORD_SECONDS = 20.0
"""How long the endpoint stays after the end, for its owner to read the last progress. Longer than
the 15 s between two reads; it is left at once when that was read."""

KEPT = "report"
"""Folder beside the checkpoints."""

WIDTH = 120
"""Columns of what is printed: a job's log has no terminal to ask."""


def main(arguments: list[str]) -> int:
    """Run until the end; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m msa_workloads.driver",
        description="Train a RunSpec on the Ray cluster around this process.",
        epilog="Exit codes: 0 all steps trained; 75 drained; 1 failed.",
    )
    parser.add_argument("--spec", required=True, type=Path, help="RunSpec as JSON")
    parser.add_argument("--submission", required=True, help="this attempt's name")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        spec = RunSpec.from_json(chosen.spec.read_text())
        host = os.environ.get("MSA_CONTROL_HOST", "0.0.0.0")
        port = int(os.environ.get("MSA_CONTROL_PORT", PORT))
        token = cluster_token()
    except (OSError, RunSpecError, ValueError) as error:
        print(f"error: {chosen.spec}: {error}", file=sys.stderr)
        return FAILED
    state = RunState(spec, chosen.submission)
    watch = Watch(state)
    try:
        server = ControlServer(state, watch.stacks, token=token, port=port, host=host)
    except OSError as error:
        print(f"error: the control endpoint cannot use {host}:{port}: {error}", file=sys.stderr)
        return FAILED
    with copied(container_log(), chosen.submission), server:
        try:
            code = _end(state, lambda: _train(spec, watch, resume=chosen.resume))
        except KeyboardInterrupt:
            # Whoever stops a job kills it a few seconds later.
            print("error: stopped by a signal", file=sys.stderr)
            return FAILED
        if token is not None:
            state.wait_for_last_word(LAST_WORD_SECONDS)
    return code


def _train(spec: RunSpec, watch: Watch, *, resume: bool) -> int:
    """Last step of a run that was trained to its end."""
    from rich.console import Console

    from msa_workloads.launch import run_on_ray

    console = Console(width=WIDTH, highlight=False)
    summary = run_on_ray(spec, resume=resume, console=console, watch=watch)
    _keep_report(spec)
    return summary["last_checkpoint_step"]


def _keep_report(spec: RunSpec) -> None:
    """Copy the run's files to where its checkpoints are: the head goes, and its disk with it.

    The model is trained by now, so a place that cannot be written to is only said.
    """
    from msa_workloads.progress import METRICS
    from msa_workloads.report import REPORT, SUMMARY
    from msa_workloads.storage import open_store

    try:
        store = open_store(spec.checkpoint.uri)
        for name in (SUMMARY, REPORT, METRICS):
            store.write(f"{KEPT}/{name}", (Path(spec.output) / name).read_bytes())
    except Exception as error:
        print(f"the report stays in {spec.output} only: {headline(error)}", file=sys.stderr)
    else:
        print(f"report: {spec.checkpoint.uri.rstrip('/')}/{KEPT}/{REPORT}")


def _end(state: RunState, train: Callable[[], int]) -> int:
    """Train, and tell the state and whoever reads the log how it ended."""
    # PyTorch takes seconds to import: until then a bad spec is refused and the endpoint answers.
    from msa_workloads.launch import Drained, RunFailed

    try:
        state.ended("finished", checkpoint_step=train())
        return DONE
    except Drained as drained:
        print(str(drained), flush=True)
        state.ended("drained", checkpoint_step=drained.step)
        return DRAINED
    except RunFailed as error:
        state.ended("failed", error=str(error))
        print(f"error: {error}", file=sys.stderr)
    except Exception as error:
        logging.getLogger(__name__).exception("the run failed")
        state.ended("failed", error=headline(error))
    return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The door without Ray: one process, or the processes that torchrun starts."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from msa_kernels.backend import BackendError
from rich.console import Console
from rich.text import Text

from msa_workloads.checkpoint import CheckpointError
from msa_workloads.display import Display, print_summary
from msa_workloads.logs import log_to_file, short_traceback
from msa_workloads.parallel.mesh import UnsupportedError
from msa_workloads.progress import MetricsFile, Silent, Sink, Tee
from msa_workloads.report import write_report
from msa_workloads.runspec import RunSpec, RunSpecError
from msa_workloads.sources import DataError
from msa_workloads.space import StorageError
from msa_workloads.train import run

BAD_INPUT = (UnsupportedError, DataError, CheckpointError, BackendError)


def main(arguments: list[str], folder: Path) -> int:
    """Run a RunSpec file; relative paths in it are taken from ``folder``.

    Exit codes: 0 done, 1 the run failed, 2 the spec or the data cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="python -m msa_workloads.train", description="Train one run from a RunSpec file."
    )
    parser.add_argument("--spec", required=True, type=Path, help="RunSpec as JSON")
    chosen = parser.parse_args(arguments)
    faulthandler.enable()  # a crash in a library says where Python was; Ray's workers do so too
    rank = int(os.environ.get("RANK", "0"))
    console = Console(quiet=rank != 0)

    def refuse(error: object) -> None:
        text = Text.assemble(("error: ", "red"), str(error))
        Console(stderr=True, quiet=rank != 0).print(text, soft_wrap=True)

    try:
        spec = RunSpec.from_json((folder / chosen.spec).read_text())
    except (OSError, RunSpecError) as error:
        refuse(f"{chosen.spec}: {error}")
        return 2
    try:
        log_to_file(Path(spec.output), rank)
    except OSError as error:
        refuse(f"{spec.output} cannot be written: {error.strerror}")
        return 2
    try:
        outcome = _run(spec, rank, console)
    except BAD_INPUT as error:
        refuse(error)
        return 2
    except StorageError as error:
        refuse(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        logging.getLogger(__name__).exception("rank %d failed", rank)
        print(f"rank {rank} failed:\n{short_traceback(error)}", file=sys.stderr, flush=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    del outcome
    return 0


def _run(spec: RunSpec, rank: int, console: Console) -> dict[str, Any]:
    started = time.time()
    if rank != 0:
        return run(spec, Silent())
    display = Display(console, spec)
    sink: Sink = Tee(MetricsFile(spec.output), display)
    with display:
        outcome = run(spec, sink)
    summary = write_report(spec, outcome, wall_seconds=time.time() - started, restarts=0)
    print_summary(console, summary)
    return outcome

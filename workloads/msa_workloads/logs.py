"""Logs: one file per rank in the run's folder, and tracebacks short enough to read."""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path

FRAMES = 6
"""Innermost frames of a traceback that are shown; the whole one is in the rank's log."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_path(output: Path, rank: int) -> Path:
    """The log of one rank."""
    return output / "logs" / f"rank-{rank}.log"


def log_to_file(output: Path, rank: int) -> Path:
    """Append this project's log records, from INFO up, to its rank's file; returns the file."""
    path = log_path(output, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    _log_to(logging.FileHandler(path))
    return path


def log_to_driver(rank: int) -> None:
    """Send this worker's log to its stderr, whose lines Ray brings to the driver as ``rank N``."""
    for stream in (sys.stdout, sys.stderr):
        # Ray's log monitor takes such a line as the name of all lines that follow it.
        print(f":actor_name:rank {rank}", file=stream, flush=True)
    _log_to(logging.StreamHandler(sys.stderr))


def _log_to(handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter(_FORMAT))
    for name in ("msa_workloads", "msa_kernels"):
        logger = logging.getLogger(name)
        for old in logger.handlers:
            logger.removeHandler(old)
            old.close()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        # Ray's own handlers on the root logger would write every record a second time.
        logger.propagate = False


def short_traceback(error: BaseException) -> str:
    """The innermost :data:`FRAMES` frames and the message, as Python prints them."""
    summary = traceback.extract_tb(error.__traceback__)
    shown = summary[-FRAMES:]
    left_out = len(summary) - len(shown)
    head = "Traceback (most recent call last):\n"
    if left_out:
        head += f"  ... {left_out} outer frames\n"
    return (
        head
        + "".join(
            [*traceback.format_list(shown), *traceback.format_exception_only(error)]
        ).rstrip()
    )

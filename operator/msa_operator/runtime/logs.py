"""Logs as one JSON object a line, each with the job it is about."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import logging
import sys
from collections.abc import Iterator

_job: contextvars.ContextVar[str] = contextvars.ContextVar("job", default="")


@contextlib.contextmanager
def about(namespace: str, name: str) -> Iterator[None]:
    """Everything logged inside, by this thread, names the job."""
    token = _job.set(f"{namespace}/{name}")
    try:
        yield
    finally:
        _job.reset(token)


class _Job(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.job = _job.get()
        if record.name.startswith("kopf"):
            # Its message names the error; a trace through its reactor helps nobody.
            record.exc_info = record.exc_text = None
            if "failed; will retry" in record.getMessage():
                # An API server that is busy or starts anew: an error is what outlasts the retries.
                record.levelno, record.levelname = logging.WARNING, "WARNING"
            return "OS signals are ignored" not in record.getMessage()  # they are ours
        return True


class Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if job := getattr(record, "job", ""):
            line["job"] = job
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        job = getattr(record, "job", "")
        record.msg, record.args = (
            f"[{job}] {record.getMessage()}" if job else record.msg,
            (None if job else record.args),
        )
        return super().format(record)


def configure(form: str, level: int = logging.INFO) -> None:
    """Log to standard error in ``form``, json or text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Job())
    handler.setFormatter(
        Json() if form == "json" else Text("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # What it says of single objects is said here already; of its own troubles it still tells.
    for name in ("kopf", "kopf.objects", "urllib3", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)

"""The driver's output also in its container's log, where `kubectl logs` and log collectors look.

Ray keeps a submission's output in a file of its own. Every line that goes to the container's log
starts with the submission's name, because the head's container outlives attempts.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CONTAINER_LOG = "/proc/1/fd/1"
"""Standard output of the container's first process."""

READ_BYTES = 1 << 16


def container_log(environment: dict[str, str] | None = None) -> str | None:
    """Where the container's log is written to, or None outside of Kubernetes.

    ``MSA_CONTAINER_LOG`` names another file; empty, it turns this off.
    """
    environment = dict(os.environ) if environment is None else environment
    default = CONTAINER_LOG if environment.get("KUBERNETES_SERVICE_HOST") else ""
    return environment.get("MSA_CONTAINER_LOG", default) or None


@contextmanager
def copied(path: str | None, submission: str) -> Iterator[None]:
    """Copy everything that this process prints meanwhile to ``path``, line by line.

    A file that cannot be written to is said once, and nothing else changes.
    """
    if path is None:
        yield
        return
    try:
        # A pipe is never made: asking for that is refused where it belongs to another user.
        make = 0 if os.path.exists(path) else os.O_CREAT
        log = os.open(path, os.O_WRONLY | os.O_APPEND | make, 0o600)
    except OSError as error:
        print(f"no copy of this output in {path}: {error.strerror}", file=sys.stderr)
        yield
        return
    kept = {stream: os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr)}
    threads = []
    for stream, own in kept.items():
        stream.flush()
        source, sink = os.pipe()
        os.dup2(sink, stream.fileno())
        os.close(sink)
        arguments = (source, own, log, f"{submission} | ".encode())
        threads.append(threading.Thread(target=_copy, args=arguments, daemon=True))
        threads[-1].start()
    try:
        yield
    finally:
        for stream, own in kept.items():
            stream.flush()
            # The pipe's last writer goes, so its reader comes to the end.
            os.dup2(own, stream.fileno())
        for thread in threads:
            thread.join(5)
        for own in (*kept.values(), log):
            os.close(own)


def _copy(source: int, own: int, log: int, prefix: bytes) -> None:
    rest = b""
    while chunk := os.read(source, READ_BYTES):
        _write(own, chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            _write(log, b"".join(prefix + line + b"\n" for line in lines))
    if rest:
        _write(log, prefix + rest + b"\n")
    os.close(source)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]

"""A real Ray head with its dashboard, on loopback, behind a token; shared by a module's tests."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

DEADLINE = 1200.0
"""Seconds after which a polled condition has failed; generous, for a loaded machine."""

START_ATTEMPTS = 4
"""Ray gives its own parts 30 s, too short on a busy machine."""


@dataclass(frozen=True)
class RayHead:
    """``environment`` makes a process its client, ``gcs`` is its address for drivers."""

    environment: dict[str, str]
    gcs: str
    dashboard: str
    token: str
    process: psutil.Process

    def call(self, path: str, body: Any = None) -> Any:
        """A request to the Jobs API; raises HTTPError."""
        request = urllib.request.Request(
            f"{self.dashboard}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def workers(self) -> list[psutil.Process]:
        """Training workers, by what Ray calls their processes."""
        found = []
        for child in self.process.children(recursive=True):
            try:
                if "RayTrainWorker" in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found


@pytest.fixture(scope="module")
def ray_head() -> Iterator[RayHead]:
    """The head, once it takes jobs."""
    with tempfile.TemporaryDirectory(prefix="msa-") as short:
        # Ray's sockets have paths of at most 107 bytes, so pytest's own folders are too deep.
        token, log = Path(short) / "token", Path(short) / "head.log"
        token.write_text(secrets.token_hex(32))
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "OMP_NUM_THREADS": "1",
            "HOME": short,
        }
        process, gcs, port = _start(Path(short), environment, log)
        address = f"http://127.0.0.1:{port}"
        client = {**environment, "RAY_API_SERVER_ADDRESS": address}
        head = RayHead(client, f"127.0.0.1:{gcs}", address, token.read_text(), process)

        def refuses() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{address}/api/jobs/", timeout=5)
            except urllib.error.HTTPError as error:
                return error.code == 401
            except OSError:
                return False
            return False

        try:
            # 401 without the token: it is up, and it asks for one.
            until(refuses, "the dashboard refuses requests without a token")
            yield head
        finally:
            # Ended politely, Ray's processes wait for each other for half a minute.
            family = [process, *process.children(recursive=True)]
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            assert not psutil.wait_procs(family, timeout=DEADLINE)[1], "the head ends"


def _start(folder: Path, environment: dict[str, str], log: Path) -> tuple[psutil.Popen, int, int]:
    """The head's process, its address for drivers, and the dashboard's port."""
    for left in reversed(range(START_ATTEMPTS)):
        # The agent that starts jobs has one port on every machine unless told otherwise, and a
        # second head on it takes none.
        gcs, port, agent = free_port(), free_port(), free_port()
        log.write_text("")
        process = psutil.Popen(
            [
                str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
                "--node-ip-address=127.0.0.1", f"--port={gcs}", "--num-cpus=2",
                "--include-dashboard=true", "--dashboard-host=127.0.0.1",
                f"--dashboard-port={port}", f"--dashboard-agent-listen-port={agent}",
                f"--temp-dir={folder}/ray",
                f"--object-store-memory={128 << 20}", "--disable-usage-stats",
            ],
            env=environment,
            stdout=log.open("ab"),
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        until(
            lambda p=process: p.poll() is not None or "Ray runtime started" in log.read_text(),
            "the head starts or gives up",
        )
        if process.poll() is None:
            return process, gcs, port
        assert left, log.read_text()
    raise AssertionError("the last attempt returns or fails")


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until ``condition()`` is true and return its value; fail with ``what`` at the end."""
    end, pause = time.monotonic() + DEADLINE, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {DEADLINE:g} s: {what}"
        pause.wait(0.05)
    return value


def free_port() -> int:
    """A port of loopback that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

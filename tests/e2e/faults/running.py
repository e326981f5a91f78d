"""The operator as a process of this machine: started, killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ..paths import REPOSITORY
from ..process import Process, free_ports, spawn, wait_for
from .access import NAMESPACE

START_S = 90.0
USUAL: dict[str, Any] = {
    "image": "flash-msa-worker:test",
    "rayVersion": "2.60.0",
    # A run moves on when it is looked at: the more often, the sooner the test is over.
    "progressSeconds": 0.2,
    "resyncSeconds": 5,
    "headMemory": "1Gi",
    "headCpu": "100m",
}


class Zygote:
    """Forks operators; see :mod:`zygote`. All of them end with it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = folder / "clock"
        self.set_clock(0.0)
        argv = [sys.executable, "-m", "e2e.faults.zygote", str(self._clock)]
        path = os.pathsep.join([str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def set_clock(self, seconds: float) -> None:
        """By how much every operator's wall clock is wrong from now on."""
        if self._clock.exists():
            with self._clock.open("r+b") as file:
                file.write(struct.pack("d", seconds))
        else:
            self._clock.write_bytes(struct.pack("d", seconds))

    def spawn(self, argv: list[str], env: dict[str, str], log: Path) -> Process:
        assert self._child.stdin is not None and self._child.stdout is not None
        order = {"argv": argv, "env": env, "log": str(log)}
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()
        pid = int(self._child.stdout.readline())
        started = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(pid).create_time()
        return Process("operator", pid, started, log)

    def stop(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(20)


@dataclass
class Operator:
    """One operator, with what it was installed with."""

    zygote: Zygote | None
    """None starts it from nothing, as a container does."""
    folder: Path
    kubeconfig: Path
    heads: str
    """Where heads are reached: an address with {namespace}, {service} and {port}."""
    settings: dict[str, Any] = field(default_factory=dict)
    namespace: str = NAMESPACE
    name: str = "flash-msa-operator-0"
    starts: int = 0
    port: int = 0
    process: Process | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self, *, ready: bool = True) -> Operator:
        """Starts it; returns when it has read every object, unless told not to wait."""
        # Another one each time: one that was killed may hold its own for a moment more.
        (self.port,) = free_ports(1)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{self.name}.json"
        file.write_text(json.dumps({**USUAL, **self.settings}))
        where = {"settings": file, "kubeconfig": self.kubeconfig, "port": self.port,
                 "head-address": self.heads, "log-format": "text"}  # fmt: skip
        argv = [f"--{name}={value}" for name, value in where.items()]
        env = {"POD_NAMESPACE": self.namespace, "POD_NAME": self.name}
        if self.zygote is None:
            command = [sys.executable, "-m", "msa_operator.main", *argv]
            whole = {**os.environ, **env}
            self.process = spawn("operator", command, self.log, whole, with_parent=True)
        else:
            self.process = self.zygote.spawn(argv, env, self.log)
        self.starts += 1
        if ready:
            wait_for(self.ready, "the operator was ready", START_S, needs=[self.process],
                     log=self.log)  # fmt: skip
        return self

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive()

    def ensure(self) -> None:
        """Starts it again if it has ended, as the kubelet would."""
        if not self.alive:
            self.start(ready=False)

    def kill(self) -> None:
        """SIGKILL, as a machine that ends: nothing is put in order."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop(30)

    def ready(self) -> bool:
        return self.answer("/readyz") == 200

    def healthy(self) -> bool:
        return self.answer("/healthz") == 200

    def answer(self, path: str) -> int:
        """The code of its own HTTP server, 0 when there is none."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def memory_mib(self) -> float:
        """Resident memory now."""
        assert self.process is not None
        return psutil.Process(self.process.pid).memory_info().rss / (1 << 20)

    def cpu_seconds(self) -> float:
        """Processor time since it was started."""
        assert self.process is not None
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

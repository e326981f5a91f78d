"""Many jobs at once: the operator on a real API server, with pods that are faked at its API.

    python benchmarks/operator/scale.py [--jobs 1000] [--workers 4] [--output scale.json]

All jobs are created in a burst and driven to completion by an operator in a process of its own,
with the account and the rights that the chart gives it. KubeRay, kubelets and Ray heads are
simulated (tests/e2e/faults); API server, etcd and the garbage collector are real, on the same
cores. When every job steps, some are edited, and the time from the edit to the status that shows
it is measured too. Requests are counted from the API server's own audit log.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import Any

import audit
import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from e2e import build
from e2e.apiserver import ApiServer
from e2e.faults import access, definitions
from e2e.faults.background import Background
from e2e.faults.client import Client
from e2e.faults.jobs import JOBS, job
from e2e.faults.running import Operator
from e2e.faults.simulator import CLUSTERS, Simulator
from e2e.process import spawn

NAMESPACE = "scale"
STEPS_PER_LOOK = 5
LOOKS = 4
"""Looks at its progress that a run takes to be over."""
EDITS = 200
LIMIT_S = 570.0
"""The whole measurement ends after this, finished or not, and says which."""
CONTROLLERS = ("garbage-collector-controller", "namespace-controller")
FAST = ("--kube-api-qps=400", "--kube-api-burst=800", "--concurrent-gc-syncs=8")
"""The collector's usual 20 requests per second would be what is measured."""


@dataclass
class Follower:
    """When what was seen of each job and its cluster, by one clock."""

    created: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    ready: dict[str, float] = field(default_factory=dict)
    ready_shown: dict[str, float] = field(default_factory=dict)
    edited: list[tuple[str, int, float]] = field(default_factory=list)
    """Jobs that were edited, the generation that made, and when it was asked for."""
    shown: dict[tuple[str, int], float] = field(default_factory=dict)
    """When the status first showed that generation of the job, or a later one."""
    phase: dict[str, str] = field(default_factory=dict)

    async def jobs(self, client: Client) -> None:
        async for _, seen in client.watch(JOBS.format(NAMESPACE)):
            if "metadata" not in seen or "name" not in seen["metadata"]:
                continue
            name, now = seen["metadata"]["name"], time.monotonic()
            status = seen.get("status") or {}
            self.created.setdefault(name, now)
            self.phase[name] = status.get("phase") or ""
            if self.phase[name]:
                self.first.setdefault(name, now)
            conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
            if conditions.get("RayReady") == "True":
                self.ready_shown.setdefault(name, now)
            self.shown.setdefault((name, status.get("observedGeneration", 0)), now)

    async def clusters(self, client: Client) -> None:
        async for _, seen in client.watch(CLUSTERS):
            status = seen.get("status") or {}
            if status.get("state") == "ready":
                owner = seen["metadata"]["labels"]["flashmsa.dev/job"]
                self.ready.setdefault(owner, time.monotonic())

    def answers(self, since: float, until: float) -> list[float]:
        """Seconds from an edit, made between the two times, to the status that shows it."""
        found = []
        for name, generation, asked in self.edited:
            later = [at for (n, g), at in self.shown.items() if n == name and g >= generation]
            if since <= asked < until and later:
                found.append(min(later) - asked)
        return found

    def unanswered(self) -> int:
        return len(self.edited) - len(self.answers(0.0, float("inf")))

    def phases(self) -> Counter[str]:
        return Counter(self.phase.values())


@dataclass
class Measurement:
    jobs: int
    workers: int
    server: ApiServer
    simulator: Simulator
    operator: Operator
    follower: Follower = field(default_factory=Follower)
    began: float = field(default_factory=time.monotonic)
    memory: list[tuple[float, float]] = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)
    stepping: float = float("inf")
    """When every job was stepping, by the clock of the follower."""
    cpu: dict[str, float] = field(default_factory=dict)

    def age(self) -> float:
        return time.monotonic() - self.began

    def mark(self, what: str) -> None:
        self.marks[what] = round(self.age(), 1)
        print(f"{self.age():6.1f} s  {what}", flush=True)

    async def run(self) -> None:
        client = Client(self.server)
        follow = [asyncio.create_task(f(client)) for f in (
            self.follower.jobs, self.follower.clusters)]  # fmt: skip
        sample = asyncio.create_task(self._sample())
        try:
            for run in range(self.jobs):
                self.follower.phase[_name(run)] = ""
            self.began = time.monotonic()
            await asyncio.gather(*(self._create(client, n) for n in range(self.jobs)))
            self.mark("all jobs created")
            early = asyncio.create_task(self._edit_early(client))
            stepped = await self._until(
                "every job steps", lambda p: p["Running"] + p["Complete"]
            )  # fmt: skip
            early.cancel()
            self.stepping = time.monotonic()
            if stepped:
                await self._edit(client)
            self.simulator.hold = False
            if await self._until("every job is complete", lambda p: p["Complete"]):
                await self._emptied(client)
        finally:
            for task in (*follow, sample):
                task.cancel()
            await client.close()

    async def _create(self, client: Client, number: int) -> None:
        changes = {
            "training.maxSteps": STEPS_PER_LOOK * LOOKS,
            "hardware.workers": self.workers,
            "sequence.globalBatchTokens": 4096 * self.workers,
            "cleanup.onSuccess": "DeleteCluster",
        }
        body = job(_name(number), NAMESPACE, changes)
        await client.create(JOBS.format(NAMESPACE), body)

    async def _until(self, what: str, counted: Any) -> bool:
        said = 0.0
        while counted(self.follower.phases()) < self.jobs:
            if self.age() > LIMIT_S:
                print(f"given up: {what}; {dict(self.follower.phases())}", flush=True)
                return False
            if self.age() - said > 15:
                said = self.age()
                print(f"{said:6.1f} s  {dict(self.follower.phases())}", flush=True)
            await asyncio.sleep(0.25)
        self.mark(what)
        return True

    async def _edit(self, client: Client) -> None:
        """Edits of a part that may change at any time, one after another."""
        for number in range(min(EDITS, self.jobs)):
            await self._change(client, _name(number), 7)
            await asyncio.sleep(0.1)
        for _ in range(100):
            if not self.follower.unanswered():
                break
            await asyncio.sleep(0.1)
        self.mark("edits are shown")

    async def _edit_early(self, client: Client) -> None:
        """Edits of jobs that have a status already, while the others are on their way."""
        for number in range(self.jobs):
            name = _name(number)
            while name not in self.follower.first:
                await asyncio.sleep(0.1)
            await self._change(client, name, 6)
            await asyncio.sleep(0.5)

    async def _change(self, client: Client, name: str, restarts: int) -> None:
        path = f"{JOBS.format(NAMESPACE)}/{name}"
        since = time.monotonic()
        changed = await client.patch(path, {"spec": {"failure": {"maxRestarts": restarts}}})
        generation = changed["metadata"]["generation"]
        assert generation > 1, f"maxRestarts was {restarts} before: nothing was edited"
        self.follower.edited.append((name, generation, since))

    async def _emptied(self, client: Client) -> None:
        while self.age() < LIMIT_S:
            left = [await client.get(f"{path}?limit=1") for path in (CLUSTERS, "/api/v1/pods")]
            if not any(found["items"] for found in left):
                self.mark("every cluster and pod is gone")
                return
            await asyncio.sleep(0.5)

    async def _sample(self) -> None:
        while True:
            self.memory.append((round(self.age(), 1), self.operator.memory_mib()))
            await asyncio.sleep(0.5)


def _cpu(server: ApiServer, operator: float) -> dict[str, float]:
    """Processor seconds of each side so far."""
    found = {"operator": operator, "simulator and measurement": sum(os.times()[:2])}
    for process in server.processes:
        times = psutil.Process(process.pid).cpu_times()
        found[process.name] = times.user + times.system
    return {name: round(seconds, 1) for name, seconds in found.items()}


def _name(number: int) -> str:
    return f"job-{number:04d}"


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and the largest, in seconds."""
    if len(seconds) < 2:
        return {}
    cuts = quantiles(seconds, n=100)
    named = {"p50": cuts[49], "p99": cuts[98], "max": max(seconds), "count": len(seconds)}
    return {name: round(value, 3) for name, value in named.items()}


def measure(jobs: int, workers: int, folder: Path) -> dict[str, Any]:
    user = f"system:serviceaccount:{access.NAMESPACE}:{access.ACCOUNT}"
    log = folder / "audit"
    server = ApiServer.start(folder / "server", flags=[
        *audit.flags(log, user), "--max-requests-inflight=800",
        "--max-mutating-requests-inflight=400",
    ])  # fmt: skip
    simulator: Simulator | None = None
    operator: Operator | None = None
    try:
        server.start_controllers(lambda n, a, at: spawn(n, a, at, with_parent=True), CONTROLLERS,
                                 FAST)  # fmt: skip
        definitions.install(server)
        server.apply(f"{{apiVersion: v1, kind: Namespace, metadata: {{name: {NAMESPACE}}}}}")
        simulator = Simulator(server, nodes=8, stride=STEPS_PER_LOOK)
        simulator.hold = True
        config = access.kubeconfig(server, server.url, folder / "operator.conf")
        operator = Operator(None, folder / "operator", config, simulator.heads_url, {
            "progressSeconds": 15, "resyncSeconds": 300})  # fmt: skip
        operator.start()
        idle = operator.memory_mib()
        measurement = Measurement(jobs, workers, server, simulator, operator)
        loop = Background("measurement")
        try:
            loop.call(measurement.run(), LIMIT_S + 60)
        finally:
            loop.stop()
        healthy, cpu = operator.healthy(), operator.cpu_seconds()
        measurement.cpu = _cpu(server, cpu)
        operator.stop()
        return report(measurement, idle, cpu, healthy, log)
    finally:
        if operator is not None:
            operator.stop()
        if simulator is not None:
            simulator.stop()
        server.stop()


def report(m: Measurement, idle: float, cpu: float, healthy: bool, log: Path) -> dict[str, Any]:
    counts, seen = audit.count(log), m.follower
    refused = Counter(code for (_, _, code), n in counts.items() for _ in range(n) if code >= 400)
    return {
        "jobs": m.jobs,
        "pods": m.jobs * (m.workers + 1),
        "complete": m.follower.phases()["Complete"],
        "seconds_to": m.marks,
        "event_to_status_seconds": {
            "created, in the burst": spread([
                seen.first[n] - seen.created[n] for n in seen.first]),
            "cluster ready, in the burst": spread([
                max(0.0, seen.ready_shown[n] - seen.ready[n])
                for n in seen.ready_shown if n in seen.ready]),
            "edited, in the burst": spread(seen.answers(0.0, m.stepping)),
            "edited, while every job steps": spread(seen.answers(m.stepping, float("inf"))),
        },
        "operator_memory_mib": {
            "idle": round(idle), "peak": round(max(mib for _, mib in m.memory))},
        "operator_cpu_seconds_per_job": round(cpu / m.jobs, 3),
        "cpu_seconds": m.cpu,
        "operator_healthy": healthy,
        "requests_per_job": audit.per_job(counts, m.jobs),
        "writes_per_job": audit.writes_per_job(counts, m.jobs),
        "answers_above_400": {str(code): n for code, n in sorted(refused.items())},
        "violations": m.simulator.violations,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=4, help="worker pods of each job")
    parser.add_argument("--output", type=Path, help="write the record here")
    arguments = parser.parse_args()
    folder, load = Path(tempfile.mkdtemp(prefix="flash-msa-scale-")), os.getloadavg()[0]
    try:
        found = measure(arguments.jobs, arguments.workers, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} x {_processor()}, {platform.system()} {platform.release()}",
        "load_average": {"before": round(load), "after": round(os.getloadavg()[0])},
        "versions": {
            "flash-msa-operator": version("flash-msa-operator"),
            "python": platform.python_version(),
            "kubernetes": build.version("kubernetes"),
            "etcd": build.version("etcd"),
            "kubernetes client": version("kubernetes"),
        },
        **found,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    return 0 if found["complete"] == arguments.jobs and not found["violations"] else 1


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())

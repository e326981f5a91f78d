"""The operator's process: `python -m msa_operator.main`.

Ends by itself, with exit code 1, when it loses its Lease or its watches: whatever started it
starts another. SIGTERM ends it after the rounds that are going on.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.config import ConfigException

from msa_operator import settings as settings_file
from msa_operator.api import JobError
from msa_operator.metrics import Metrics
from msa_operator.runtime import logs, views
from msa_operator.runtime.act import Actor
from msa_operator.runtime.capacity import ExistingNodes
from msa_operator.runtime.clock import SteadyClock
from msa_operator.runtime.cluster import ClusterFacts
from msa_operator.runtime.contact import Contacts
from msa_operator.runtime.controller import Controller
from msa_operator.runtime.events import Recorder
from msa_operator.runtime.gate import Gate
from msa_operator.runtime.head import ADDRESS, Heads
from msa_operator.runtime.health import Health
from msa_operator.runtime.kube import (
    CLUSTERS,
    JOBS,
    PODS,
    Kube,
    KubeError,
    Resource,
    configuration,
)
from msa_operator.runtime.lease import Lease
from msa_operator.runtime.look import Observer
from msa_operator.runtime.planning import Planner, own_version
from msa_operator.runtime.plans import Plans
from msa_operator.runtime.queue import WorkQueue
from msa_operator.runtime.store import Store
from msa_operator.runtime.views import Key
from msa_operator.runtime.watch import WATCHED, Watches
from msa_operator.settings import Settings

STARVED_S = 120.0
"""A job that is due for this long, or a round that takes as long, is not normal: /healthz says so.
Every call within a round has a limit well below."""
SETTLED_S = 30.0
"""After the start, for the watches to have listed what the first read has listed too."""
RELISTED_S = 5.0
"""Between a watch's new list and ours: it may go on for a while."""
CRDS_S = 5.0
"""Between two looks for kinds that the API server does not know yet."""
GRACE_S = 20.0
"""For rounds that are going on at SIGTERM; Kubernetes kills after 30 s unless told."""
SWITCH_S = 0.001
"""Threads that wait for answers go on after so much computing of another."""
LABELLED = {CLUSTERS: "flashmsa.dev/job", PODS: "flashmsa.dev/job"}

_log = logging.getLogger("msa_operator")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How one process is run; what it does is in its settings."""

    settings: Settings
    namespace: str
    """Its own: where the Lease is."""
    name: str
    """Its pod's: what events say."""
    holder: str = ""
    """What the Lease says; by default the name and something that no other process has."""
    port: int = settings_file.PORT
    kubeconfig: str | None = None
    kube_url: str | None = None
    """Address of the API server instead of the configured one: a proxy in between."""
    retries: int = 0
    """Silent retries of the HTTP clients."""
    head_address: str = ADDRESS


class Operator:
    """Everything of one process, so that tests can run it, or two, inside their own."""

    def __init__(self, options: Options, clock: Callable[[], float] | None = None) -> None:
        clock = clock or SteadyClock()
        self._options, settings = options, options.settings
        self.metrics = Metrics()
        self.metrics.started(own_version())
        limits = settings.timeouts
        where = options.kubeconfig, options.kube_url
        self._config = configuration(*where, options.retries, settings.concurrency + 4)
        gate = Gate()
        self._kube = Kube(self._config, limits.api_seconds, self.metrics.requested, gate)
        # Of its own, so that whatever the workers do, renewals are not held up.
        patience = min(limits.api_seconds, settings.lease.renew_seconds / 2)
        leases = Kube(configuration(*where, connections=2), patience, self.metrics.requested)
        self.lease = Lease(
            leases, options.namespace, settings_file.LEASE,
            options.holder or f"{options.name}_{uuid.uuid4().hex[:8]}", settings.lease,
            self.metrics.renewed,
        )  # fmt: skip
        self.store = Store()
        self.queue: WorkQueue[Key] = WorkQueue()
        heads = Heads(
            limits.head_seconds, options.head_address, self.metrics.asked_head, options.retries,
            gate,
        )  # fmt: skip
        facts = ClusterFacts(self._kube)
        planner = Planner(settings, options.namespace, facts.profiles, facts.largest_node, gate)
        poll = settings.progress_seconds
        provider = ExistingNodes()
        recorder = Recorder(self._kube, options.name, clock)
        self._controller = Controller(
            self.store,
            Observer(
                self.store, Plans(self._kube, planner, facts), Contacts(self._kube, heads, poll),
                facts, provider, clock,
            ),
            Actor(
                self.store, self._kube, heads, recorder, self.metrics, provider,
                self.lease.check, poll,
            ),
            self.queue, self.metrics, self.stop, poll, gate,
        )  # fmt: skip
        self._watches = Watches(
            self._config, limits, settings.namespaces, self._received, self.metrics.heard
        )
        self.health = Health(options.port, self.unhealthy, self.unready, self._metrics)
        self._stopping = threading.Event()
        self._relisted = threading.Event()
        self._watching_since = 0.0
        self._synced = False
        self._working = False
        self._waiting_for: list[str] = []

    def stop(self, *_: Any) -> None:
        """Have :meth:`run` end."""
        self._stopping.set()

    def run(self) -> int:
        """Runs until told to stop, or until it must not go on; the process's exit code."""
        self.health.start()
        code = 1
        try:
            if not self._await_kinds():
                return 0
            self._watches.start()
            self._watching_since = time.monotonic()
            if not self._first_sync():
                return 0
            self.lease.start()
            while not self.lease.acquired(0.2):
                if self._stopping.is_set():
                    return 0
                if not self._watches.alive:
                    return 1
            self.metrics.leads(True)
            for key in self.store.known():
                self.queue.add(key)
            self._controller.start(self._options.settings.concurrency)
            self._working = True
            _log.info("working on %d jobs", len(self.store.known()))
            code = self._supervise()
        finally:
            self._end()
        return code

    def unhealthy(self) -> list[str]:
        """What a restart might mend."""
        problems = [
            f"the watch of {name} has been silent for {seconds:.0f} s"
            for name, seconds in (self._watches.silent() if self._synced else {}).items()
        ]
        if self._synced and not self._watches.alive:
            problems.append("the watches have ended")
        load = self.queue.load()
        if self._working and load.overdue > STARVED_S:
            problems.append(f"a job has waited {load.overdue:.0f} s for a worker")
        if load.longest > STARVED_S:
            problems.append(f"a round has been going on for {load.longest:.0f} s")
        if self._working and not self._controller.alive:
            problems.append("a worker has ended")
        if self.lease.lost.is_set():
            problems.append("the Lease is lost")
        return problems

    def unready(self) -> list[str]:
        if self._waiting_for:
            return [f"the API server does not serve {name}" for name in self._waiting_for]
        return [] if self._synced else ["objects are being read"]

    def resync(self) -> None:
        """Lists everything anew and has every job looked at: what a watch missed is found."""
        for resource in WATCHED:
            self._list(resource)
        for key in self.store.known():
            # Spread, so that the API server does not feel it.
            self.queue.add(key, random.uniform(0, min(30.0, self._every() / 4)))

    def _every(self) -> float:
        return self._options.settings.resync_seconds

    def _list(self, resource: Resource) -> None:
        inside = self._options.settings.namespaces
        labels, began = LABELLED.get(resource, ""), time.monotonic()
        found = (
            each
            for namespace in inside or ("",)
            for each in self._kube.list(resource, namespace, labels)
        )
        for key in self.store.replace(resource, found, began, inside):
            self.queue.add(key, news=True)

    def _await_kinds(self) -> bool:
        """Waits until the API server serves what is watched; False when told to stop."""
        told: list[str] = []
        while not self._stopping.is_set():
            try:
                missing = [r for r in (JOBS, CLUSTERS) if not self._kube.served(r)]
                self._waiting_for = [f"{r.plural}.{r.group}/{r.version}" for r in missing]
                if not missing:
                    return True
                if told != self._waiting_for:
                    told = self._waiting_for
                    _log.warning(
                        "waiting for %s: install the flash-msa-crds chart, and KubeRay 1.5.1 or "
                        "newer", " and ".join(told),
                    )  # fmt: skip
            except KubeError as error:
                _log.warning("the API server does not answer: %s", error)
            self._stopping.wait(CRDS_S)
        return False

    def _first_sync(self) -> bool:
        """Reads everything once, before anything is decided; False when told to stop."""
        wait = 1.0
        while not self._stopping.is_set():
            try:
                for resource in WATCHED:
                    self._list(resource)
                self._synced = True
                return True
            except KubeError as error:
                _log.warning("objects cannot be read: %s", error)
                self._stopping.wait(max(wait, error.retry_after or 0.0))
                wait = min(30.0, wait * 2)
        return False

    def _supervise(self) -> int:
        due = time.monotonic() + self._every()
        while not self._stopping.wait(1.0):
            load = self.queue.load()
            self.metrics.queued(load.waiting, load.busy)
            if not self.lease.held:
                _log.error("the Lease is not held any more: another operator may act")
                return 1
            if not self._watches.alive:
                return 1
            if self._relisted.is_set():
                # What was deleted before a watch listed anew, no watch tells.
                due = min(due, time.monotonic() + RELISTED_S)
                self._relisted.clear()
            if time.monotonic() >= due:
                try:
                    self.resync()
                    due = time.monotonic() + self._every()
                except KubeError as error:
                    _log.warning("resync failed: %s", error)
                    due = time.monotonic() + max(5.0, error.retry_after or 0.0)
        return 1 if self.lease.lost.is_set() else 0

    def _end(self) -> None:
        _log.info("ending")
        idle = self._controller.stop(GRACE_S)
        self._watches.stop()
        self.metrics.leads(False)
        # A round that is still going on may act until the process is gone.
        self.lease.stop(release=idle)
        self.health.stop()

    def _received(self, resource: Resource, kind: str | None, raw: Any) -> None:
        self.metrics.event(resource.plural, kind or "LISTED")
        if kind is None and time.monotonic() - self._watching_since > SETTLED_S:
            self._relisted.set()
        key = self.store.event(resource, kind, raw)
        if key is not None and key[1]:
            self.queue.add(key, news=True, asked=resource is JOBS and views.asks(raw))

    def _metrics(self) -> bytes:
        return self.metrics.render()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Exit codes: 0 told to stop, 1 has to be started again, 2 cannot run so."""
    parser = argparse.ArgumentParser(
        prog="python -m msa_operator.main", description="Run the operator until SIGTERM."
    )
    parser.add_argument("--settings", type=Path, default=settings_file.PATH, metavar="FILE")
    parser.add_argument(
        "--namespace", action="append", default=[], metavar="NS",
        help="run jobs of this namespace only; may be repeated",
    )  # fmt: skip
    parser.add_argument("--log-format", choices=("json", "text"), default="json")
    parser.add_argument("--port", type=int, default=settings_file.PORT)
    parser.add_argument("--kubeconfig", help="outside of a cluster; default: KUBECONFIG")
    parser.add_argument(
        "--kube-url", default=os.environ.get("MSA_KUBE_URL"),
        help="address of the API server, for a proxy in between (MSA_KUBE_URL)",
    )  # fmt: skip
    parser.add_argument(
        "--head-address",
        default=os.environ.get("MSA_HEAD_ADDRESS", ADDRESS),
        help=f"form of a head's address (MSA_HEAD_ADDRESS); default: {ADDRESS}",
    )
    parser.add_argument("--retries", type=int, default=0, help="silent retries of HTTP clients")
    chosen = parser.parse_args(arguments)
    logs.configure(chosen.log_format)
    try:
        given = settings_file.with_namespaces(
            settings_file.load(chosen.settings), tuple(chosen.namespace)
        )
        operator = Operator(Options(
            settings=given, namespace=os.environ.get("POD_NAMESPACE", "flash-msa-system"),
            name=os.environ.get("POD_NAME", socket.gethostname()), port=chosen.port,
            # A pod has one such container at a time: one that was killed need not be waited for.
            holder=os.environ.get("POD_NAME", ""),
            kubeconfig=chosen.kubeconfig, kube_url=chosen.kube_url, retries=chosen.retries,
            head_address=chosen.head_address,
        ))  # fmt: skip
    except (JobError, ConfigException, OSError) as error:
        _log.error("%s", error)
        return 2
    sys.setswitchinterval(SWITCH_S)
    signal.signal(signal.SIGTERM, operator.stop)
    signal.signal(signal.SIGINT, operator.stop)
    return operator.run()


if __name__ == "__main__":
    sys.exit(main())

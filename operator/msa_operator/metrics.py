"""Prometheus metrics of the operator and of the jobs it runs, in a registry of their own.

Series of a job end with it: :meth:`Metrics.forget` removes them, so that their number follows the
jobs that exist. Durations are given by the caller, who owns the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from msa_operator.reconcile.intent import HOLDING, PHASES

CONTENT_TYPE = CONTENT_TYPE_LATEST
disable_created_metrics()  # a time of birth beside every counter would double the series

_SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30)
_LONG = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 14_400, 86_400)

RUN = (
    "msa_run_step", "msa_run_loss", "msa_run_tokens_per_second", "msa_run_mfu",
    "msa_run_checkpoint_step", "msa_run_memory_bytes",
)  # fmt: skip
"""What a run's head serves on its control port; labelled ``job``, memory by ``rank`` too."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a job last said of itself; what it did not say is None and has no series."""

    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    """Model FLOP utilization, 0 to 1."""
    eta_seconds: float | None = None
    checkpoint_step: int | None = None
    accelerators: int | None = None
    """Held by the job now."""
    workers: int | None = None
    """Ready worker pods."""
    received: float | None = None
    """Unix time, by the operator's clock, at which this was received."""


class Metrics:
    """Every metric; one per process, made with a registry of its own unless one is given."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._phases: dict[tuple[str, str], str] = {}

        self._build = Info("msa_operator_build", "Version.", registry=self.registry)
        self._leader = self._gauge(
            "msa_operator_leader", "1 while this process holds the Lease.")  # fmt: skip
        self._renewals = self._counter(
            "msa_operator_lease_renewals",
            "Renewals of the Lease by result: ok, other (it is another's) or error.",
            "result")  # fmt: skip
        self._depth = self._gauge(
            "msa_operator_queue_depth", "Jobs that wait for a worker.")  # fmt: skip
        self._busy = self._gauge(
            "msa_operator_workers_busy", "Workers that are reconciling a job.")  # fmt: skip
        self._rounds = self._counter(
            "msa_operator_reconciles", "Rounds of observe, decide and act by result.",
            "result")  # fmt: skip
        self._round = self._histogram(
            "msa_operator_reconcile_seconds", "Time of one round.", _SHORT)  # fmt: skip
        self._latency = self._histogram(
            "msa_operator_event_to_status_seconds",
            "From an event's arrival to the status written because of it.", _SHORT)  # fmt: skip
        self._requests = self._counter(
            "msa_operator_api_requests", "Calls of the API server by verb, resource and code.",
            "verb", "resource", "code")  # fmt: skip
        self._request = self._histogram(
            "msa_operator_api_request_seconds", "Time of a call of the API server.", _SHORT,
            "verb")  # fmt: skip
        self._head = self._counter(
            "msa_operator_head_requests", "Calls of runs' heads by what was asked and result.",
            "call", "result")  # fmt: skip
        self._events = self._counter(
            "msa_operator_watch_events", "Watch events by resource and type.",
            "resource", "type")  # fmt: skip
        self._heard = self._gauge(
            "msa_operator_watch_heard_timestamp_seconds",
            "When each watch last gave a sign of life, in Unix time.", "resource")  # fmt: skip
        self._actions = self._counter(
            "msa_operator_actions", "Actions carried out, by kind and result.",
            "action", "result")  # fmt: skip

        self._jobs = self._gauge(
            "msa_jobs", "Jobs by phase and namespace.", "namespace", "phase")  # fmt: skip
        self._phase = self._histogram(
            "msa_job_phase_seconds", "Time that jobs spent in a phase they left.", _LONG,
            "phase")  # fmt: skip
        self._attempts = self._counter(
            "msa_job_attempts_ended", "Attempts that ended, by reason.",
            "namespace", "reason")  # fmt: skip
        self._progress = {
            name: self._gauge(f"msa_job_{metric}", text, "namespace", "job")
            for name, (metric, text) in _PROGRESS.items()
        }

    def render(self) -> bytes:
        """The text that /metrics answers with; its type is ``CONTENT_TYPE``."""
        return generate_latest(self.registry)

    def started(self, version: str) -> None:
        self._build.info({"version": version})

    def leads(self, leader: bool) -> None:
        self._leader.set(leader)

    def renewed(self, result: str) -> None:
        self._renewals.labels(result).inc()

    def queued(self, waiting: int, busy: int) -> None:
        """How many jobs wait, and how many are being worked on."""
        self._depth.set(waiting)
        self._busy.set(busy)

    def reconciled(self, result: str, seconds: float) -> None:
        """One round ended: ``ok``, ``conflict`` or ``error``."""
        self._rounds.labels(result).inc()
        self._round.observe(seconds)

    def shown(self, seconds: float) -> None:
        """A status was written this long after the event that caused it."""
        self._latency.observe(seconds)

    def requested(self, verb: str, resource: str, code: int | str, seconds: float) -> None:
        """One call of the API server; ``code`` is the HTTP status or a word such as timeout."""
        self._requests.labels(verb, resource, str(code)).inc()
        self._request.labels(verb).observe(seconds)

    def asked_head(self, call: str, result: str) -> None:
        """One call of a head: submit, list, progress, drain, stacks, stop."""
        self._head.labels(call, result).inc()

    def event(self, resource: str, kind: str) -> None:
        self._events.labels(resource, kind).inc()

    def heard(self, resource: str, now: float) -> None:
        """A watch is alive: an event, a bookmark or a new connection."""
        self._heard.labels(resource).set(now)

    def acted(self, action: str, result: str) -> None:
        self._actions.labels(action, result).inc()

    def phase(self, namespace: str, job: str, phase: str) -> None:
        """The job is in this phase; one in which no nodes are held ends the series of its run."""
        if phase not in HOLDING:
            for name in _HELD:
                self._progress[name].remove(namespace, job)
        before = self._phases.get((namespace, job))
        if before == phase:
            return
        if before is None:
            for each in PHASES:  # a series that appears at 1 hides its first change
                self._jobs.labels(namespace, each).inc(0)
        else:
            self._jobs.labels(namespace, before).dec()
        self._jobs.labels(namespace, phase).inc()
        self._phases[namespace, job] = phase

    def left(self, phase: str, seconds: float) -> None:
        """A job has left a phase in which it was for this long."""
        self._phase.labels(phase).observe(seconds)

    def attempt_ended(self, namespace: str, reason: str) -> None:
        self._attempts.labels(namespace, reason).inc()

    def progress(self, namespace: str, job: str, progress: Progress) -> None:
        """Replace what is known of a job's progress."""
        for name, gauge in self._progress.items():
            value = getattr(progress, name)
            if value is None:
                gauge.remove(namespace, job)
            else:
                gauge.labels(namespace, job).set(value)

    def forget(self, namespace: str, job: str) -> None:
        """The job object is gone: so are its series."""
        before = self._phases.pop((namespace, job), None)
        if before is not None:
            self._jobs.labels(namespace, before).dec()
        for gauge in self._progress.values():
            gauge.remove(namespace, job)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


_PROGRESS = {
    "step": ("step", "Optimizer steps done."),
    "max_steps": ("max_steps", "Optimizer steps asked for."),
    "loss": ("loss", "Training loss, nats per token."),
    "tokens_per_second": ("tokens_per_second", "Tokens trained on per second."),
    "mfu": ("mfu", "Model FLOP utilization, 0 to 1."),
    "eta_seconds": ("eta_seconds", "Time left at the present speed."),
    "checkpoint_step": ("checkpoint_step", "Step of the newest complete checkpoint."),
    "accelerators": ("accelerators", "Accelerators that the job holds."),
    "workers": ("workers_ready", "Worker pods that are ready."),
    "received": ("progress_received_timestamp_seconds", "When progress last came, in Unix time."),
}
_HELD = ("tokens_per_second", "mfu", "eta_seconds", "accelerators", "workers", "received")
"""What is so only while a run holds nodes; how far it came stays true."""
assert set(_PROGRESS) == {f.name for f in fields(Progress)}

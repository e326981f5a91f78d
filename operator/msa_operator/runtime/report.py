"""A run's progress in the status and in the metrics: where it is news, and not too often."""

from __future__ import annotations

import time
from typing import Any

from msa_operator.api.values import duration
from msa_operator.metrics import Metrics, Progress
from msa_operator.reconcile import status
from msa_operator.runtime.kube import JOBS, JSON_PATCH, PROGRESS_MANAGER, Kube
from msa_operator.runtime.look import Look
from msa_operator.runtime.memory import Memory, Seen
from msa_operator.runtime.store import Store


class Reporter:
    def __init__(self, kube: Kube, store: Store, metrics: Metrics, every: float) -> None:
        self._kube = kube
        self._store = store
        self._metrics = metrics
        self._every = every
        """Seconds between two writes for one job."""

    def report(self, look: Look, memory: Memory, *, complete: bool) -> float | None:
        """Write what the open attempt's run last said, under a field manager of its own; not in
        the round that found the run complete, which has written the end already.

        Returns the seconds after which news that was held back may be written. Raises
        :class:`~msa_operator.runtime.kube.KubeError`.
        """
        job, seen, attempt = look.job, memory.seen, look.state.intent.attempt
        if seen is None or attempt is None or seen.report.submission != attempt.submission_id:
            return None
        self._measure(look, seen)
        if complete:
            return None
        shown = progress_of(seen)
        old = (job.raw.get("status") or {}).get("progress") or {}
        if not status.difference(old, shown).keys() - {"updated"}:
            return None
        left = memory.progress_written + self._every - time.monotonic()
        if left > 0:
            return left
        # Whatever else of the object changed; but not of a namesake that was made meanwhile: a
        # merge patch of a status has no say on the uid.
        body = [
            {"op": "test", "path": "/metadata/uid", "value": job.meta.uid},
            {"op": "add", "path": "/status/progress", "value": shown},
        ]
        answer = self._kube.patch(
            JOBS, job.meta.namespace, job.meta.name, body, subresource="status", kind=JSON_PATCH,
            manager=PROGRESS_MANAGER,
        )  # fmt: skip
        self._store.wrote(JOBS, answer)
        memory.progress_written = time.monotonic()
        return None

    def _measure(self, look: Look, seen: Seen) -> None:
        report, planned = seen.report, look.planned
        self._metrics.progress(look.owner.namespace, look.owner.name, Progress(
            step=report.step, max_steps=report.max_steps, loss=report.loss,
            tokens_per_second=report.tokens_per_second, mfu=report.mfu,
            eta_seconds=report.eta_seconds, checkpoint_step=report.checkpoint_step,
            accelerators=planned.accelerators if planned else None,
            workers=sum(p.ready for p in look.state.workers), received=seen.received,
        ))  # fmt: skip


def progress_of(seen: Seen) -> dict[str, Any]:
    """``status.progress``."""
    report = seen.report
    eta, speed = report.eta_seconds, report.tokens_per_second
    shown = {
        "step": report.step,
        "maxSteps": report.max_steps,
        "loss": report.loss,
        "tokensPerSecond": None if speed is None else max(0, round(speed)),
        "mfu": None if report.mfu is None else min(10.0, max(0.0, round(report.mfu, 4))),
        "eta": "" if eta is None else duration(round(max(0.0, eta))),
        "checkpointStep": report.checkpoint_step,
        "checkpointUri": report.checkpoint_uri,
        "updated": status.time_text(seen.received),
    }
    return {name: value for name, value in shown.items() if value is not None}

"""Attempts: why they end, which ends count, how many are allowed, and when the next one starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from msa_operator.reconcile.intent import ATTEMPTS_KEPT, Attempt, Intent

Reason = Literal[
    "SubmissionFailed", "TrainingFailed", "HeadLost", "NodeLost", "WorkerLost", "Hang",
    "StartTimeout", "Preempted", "DeadlineExceeded", "Suspended", "Succeeded",
]  # fmt: skip

WINDOW_H = 24
"""Hours in which failures are counted: a run of weeks may meet more faults than a bad one does
in a day. The job's active deadline bounds all attempts together."""
BACKOFF_S = 10.0
"""Before the first retry: enough for a pod that is being replaced to be seen gone."""
BACKOFF_MAX_S = 300.0
"""Nodes are held meanwhile, so waiting longer costs more than trying."""


@dataclass(frozen=True)
class Kind:
    """What the end of an attempt means."""

    counts: bool
    """Against ``failure.maxRestarts``."""
    retried: bool
    replaced: bool
    """The next attempt needs another cluster."""
    why: str


KINDS: dict[Reason, Kind] = {
    "SubmissionFailed": Kind(True, True, True, "the driver never started: no verdict on training"),
    "TrainingFailed": Kind(True, True, False, "the driver ended with an error"),
    "HeadLost": Kind(True, True, True, "the head's store is empty in a new pod or container"),
    "NodeLost": Kind(True, True, False, "KubeRay makes new pods; onNodeLoss says for how long"),
    "WorkerLost": Kind(True, True, False, "KubeRay makes a new pod on nodes that are still held"),
    "Hang": Kind(True, True, False, "no step for too long; stacks are dumped first"),
    "StartTimeout": Kind(True, True, True, "nodes were ready and no step came"),
    "Preempted": Kind(False, True, False, "a queue took the nodes; the cluster keeps its place"),
    "DeadlineExceeded": Kind(False, False, False, "the job's own limit on time"),
    "Suspended": Kind(False, True, True, "asked for; nodes are given back"),
    "Succeeded": Kind(False, False, False, "all steps are trained"),
}


def begin(
    intent: Intent, submission_id: str, head: str, workers: str, now: float
) -> tuple[Attempt, ...]:
    """The attempts with one more, which starts from the newest checkpoint."""
    attempt = Attempt(
        number=intent.number + 1, submission_id=submission_id, head=head, workers=workers,
        started=now, from_step=intent.checkpoint_step, to_step=intent.checkpoint_step,
        checkpoint_step=intent.checkpoint_step,
    )  # fmt: skip
    return (*intent.attempts, attempt)[-ATTEMPTS_KEPT:]


def end(
    intent: Intent, reason: Reason, message: str, now: float, step: int = 0, checkpoint: int = 0
) -> Intent:
    """The intent after its attempt ended: counted, with the time of the next one.

    Without an attempt that is open, only what follows is set: a cluster may be lost before one.
    """
    kind = KINDS[reason]
    attempts, gained = intent.attempts, False
    if (open_ := intent.attempt) is not None:
        closed = replace(
            open_, ended=now, reason=reason, message=message, to_step=max(open_.to_step, step),
            checkpoint_step=max(open_.checkpoint_step, checkpoint),
        )  # fmt: skip
        attempts = (*attempts[:-1], closed)
        gained = closed.checkpoint_step > closed.from_step
    row = (0 if gained else intent.in_a_row) + kind.counts
    return replace(
        intent,
        attempts=attempts,
        failures=_count(intent.failures, now) if kind.counts else intent.failures,
        in_a_row=row if kind.counts else 0,
        retry_at=now + backoff(row) if kind.counts else now,
        replace=intent.replace or kind.replaced,
    )


def backoff(in_a_row: int) -> float:
    """Seconds before the next attempt: doubled with every failure that gained no checkpoint."""
    return min(BACKOFF_MAX_S, BACKOFF_S * 2 ** min(max(in_a_row, 1) - 1, 16))


def counted(intent: Intent, now: float) -> int:
    """Failed attempts that count now; an hour counts until all of it is out of the window."""
    return sum(n for hour, n in intent.failures if hour >= _hour(now) - WINDOW_H)


def exhausted(intent: Intent, max_restarts: int, now: float) -> bool:
    """No attempt is left."""
    return counted(intent, now) > max_restarts


def _hour(now: float) -> int:
    return int(now // 3600)


def _count(failures: tuple[tuple[int, int], ...], now: float) -> tuple[tuple[int, int], ...]:
    hours = {h: n for h, n in failures if h >= _hour(now) - WINDOW_H}
    hours[_hour(now)] = hours.get(_hour(now), 0) + 1
    return tuple(sorted(hours.items()))

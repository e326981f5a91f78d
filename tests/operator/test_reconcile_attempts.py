"""Restarts: what counts, for how long, and how long the next one waits."""

from __future__ import annotations

from dataclasses import replace

from msa_operator.reconcile.attempts import KINDS, backoff, begin, counted, end, exhausted
from msa_operator.reconcile.intent import ATTEMPTS_KEPT, Intent

HOUR = 3600.0
NOON = 500_000 * HOUR


def begun(intent: Intent, now: float = NOON) -> Intent:
    made = begin(intent, f"c-{intent.number + 1}", "h", "w", now)
    return replace(intent, attempts=made)


def failed(intent: Intent, reason="TrainingFailed", now=NOON, **got) -> Intent:
    return end(begun(intent, now), reason, "", now, **got)


def test_an_attempt_starts_where_the_newest_checkpoint_is():
    intent = begun(failed(Intent(), step=17, checkpoint=10))
    attempt = intent.attempt
    assert attempt is not None
    assert (attempt.number, attempt.from_step, attempt.submission_id) == (2, 10, "c-2")
    assert (intent.attempts[0].to_step, intent.attempts[0].checkpoint_step) == (17, 10)


def test_what_was_asked_for_does_not_count():
    intent = Intent()
    for reason in ("Suspended", "Suspended", "DeadlineExceeded"):
        intent = failed(intent, reason)
    assert counted(intent, NOON) == 0 and not exhausted(intent, 0, NOON)
    assert {r for r, k in KINDS.items() if not k.counts} == {
        "Suspended", "Preempted", "DeadlineExceeded", "Succeeded",
    }  # fmt: skip


def test_max_restarts_is_attempts_after_the_first():
    intent = failed(Intent())
    assert exhausted(intent, 0, NOON) and not exhausted(intent, 1, NOON)
    assert exhausted(failed(intent), 1, NOON)


def test_old_failures_are_forgotten_and_new_ones_are_not():
    intent = failed(failed(Intent()), now=NOON + HOUR)
    assert counted(intent, NOON + 24 * HOUR) == 2
    assert counted(intent, NOON + 25 * HOUR) == 1
    assert counted(intent, NOON + 26 * HOUR) == 0


def test_the_limit_holds_beyond_the_attempts_that_are_kept():
    intent = Intent()
    for _ in range(ATTEMPTS_KEPT + 10):
        intent = failed(intent)
    assert len(intent.attempts) == ATTEMPTS_KEPT
    assert intent.number == counted(intent, NOON) == ATTEMPTS_KEPT + 10
    assert len(intent.failures) == 1


def test_backoff_doubles_until_a_checkpoint_is_gained():
    waits, intent = [], Intent()
    for step in (0, 0, 0, 5, 5):
        intent = failed(intent, step=step, checkpoint=step)
        waits.append(intent.retry_at - NOON)
    assert waits == [10, 20, 40, 10, 20]
    assert backoff(10_000) == 300


def test_only_some_ends_need_another_cluster():
    assert {r for r, k in KINDS.items() if k.replaced} == {
        "SubmissionFailed", "HeadLost", "StartTimeout", "Suspended",
    }  # fmt: skip
    assert failed(Intent(), "HeadLost").replace
    assert not failed(Intent(), "WorkerLost").replace

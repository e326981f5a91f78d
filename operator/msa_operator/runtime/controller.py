"""Rounds of observe, decide and act over every job, by a few workers that share a queue.

A job whose round fails waits by itself: what is wrong with one never delays another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from msa_operator.api import JobError
from msa_operator.metrics import Metrics
from msa_operator.reconcile.decide import decide
from msa_operator.reconcile.intent import Intent
from msa_operator.runtime import logs
from msa_operator.runtime.act import Actor, Again
from msa_operator.runtime.gate import Gate
from msa_operator.runtime.kube import KubeError
from msa_operator.runtime.lease import LeaseLost
from msa_operator.runtime.look import Observer
from msa_operator.runtime.memory import Memory
from msa_operator.runtime.planning import explain
from msa_operator.runtime.queue import WorkQueue
from msa_operator.runtime.store import Store
from msa_operator.runtime.views import Key

LAST_WORD_S = 2.0
"""A driver that was asked for its last word ends within moments."""
_log = logging.getLogger(__name__)


class Controller:
    def __init__(
        self, store: Store, observer: Observer, actor: Actor, queue: WorkQueue[Key],
        metrics: Metrics, lost: Callable[[], None], poll: float = 15.0,
        gate: Gate | None = None,
    ) -> None:  # fmt: skip
        self._gate = gate or Gate()
        self._store = store
        self._observer = observer
        self._actor = actor
        self._queue = queue
        self._metrics = metrics
        self._lost = lost
        """Called when the Lease turns out not to be ours."""
        self._poll = poll
        self._memories: dict[Key, Memory] = {}
        self._threads: list[threading.Thread] = []

    def start(self, workers: int) -> None:
        for n in range(workers):
            thread = threading.Thread(target=self._work, name=f"worker-{n}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, seconds: float) -> bool:
        """Ends after the rounds that are going on; False when some take longer than that."""
        self._queue.close()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (taken := self._queue.get()) is not None:
            key, news = taken
            began, result = time.monotonic(), "error"
            after: float | None = None
            failed = True
            try:
                with logs.about(*key), self._gate.computing():
                    try:
                        after = self.round(key, news)
                        result, failed = "ok", False
                    except Again as again:
                        after, failed = again.after, again.failed
                        result = "error" if failed else "conflict"
                        _log.log(logging.WARNING if failed else logging.INFO, "%s", again)
                    except KubeError as error:
                        after = error.retry_after
                        _log.warning("%s", error)
                    except LeaseLost as lost:
                        _log.error("%s", lost)
                        self._lost()
                    except Exception:
                        _log.exception("the round failed")
            finally:
                self._queue.done(key, after, failed=failed)
                self._metrics.reconciled(result, time.monotonic() - began)

    def round(self, key: Key, news: float | None = None) -> float | None:
        """Look at a job, decide, act; seconds until the next round, None for when it has news."""
        job = self._store.job(key)
        if job is None:
            if self._memories.pop(key, None) is not None:
                self._store.forget(key)
                self._metrics.forget(*key)
            return None
        memory = self._memories.get(key)
        if memory is None or memory.uid != job.meta.uid:
            memory = self._memories[key] = Memory(job.meta.uid)
        try:
            look = self._observer.look(job, memory)
        except JobError as error:
            raise Again(f"the status cannot be read: {explain(error)}", failed=True) from None
        decision = decide(look.state, self._poll)
        self._metrics.phase(*key, decision.phase)
        written = memory.status_written
        held_back = self._actor.carry_out(look, decision, memory)
        if news is not None and memory.status_written != written:
            self._metrics.shown(time.monotonic() - news)
        soon = LAST_WORD_S if decision.requeue_after and _over(memory, decision.intent) else None
        # No event will tell that a node has been silent for long enough.
        stuck = self._poll if memory.silent else None
        waits = (decision.requeue_after, held_back, soon, stuck, self._store.unsettled(key))
        return min((w for w in waits if w is not None), default=None)


def _over(memory: Memory, intent: Intent) -> bool:
    """The run has said that it is over, and its driver is about to end."""
    seen, attempt = memory.seen, intent.attempt
    if seen is None or attempt is None or seen.report.submission != attempt.submission_id:
        return False
    return seen.report.state in ("drained", "finished", "failed")

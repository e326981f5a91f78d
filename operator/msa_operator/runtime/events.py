"""Kubernetes events of jobs: what ``kubectl describe`` shows. Losing one never fails a round."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable

from msa_operator.api.job import API_VERSION
from msa_operator.reconcile.status import time_text
from msa_operator.runtime.kube import EVENTS, FIELD_MANAGER, Kube, KubeError
from msa_operator.runtime.store import JobObject

BYTES = 1024
"""Longest message that the API server takes."""
_log = logging.getLogger(__name__)


class Recorder:
    def __init__(self, kube: Kube, instance: str, clock: Callable[[], float] = time.time) -> None:
        self._kube = kube
        self._instance = instance
        self._clock = clock

    def record(self, job: JobObject, kind: str, reason: str, message: str) -> None:
        """One event about the job; ``kind`` is Normal or Warning."""
        now = time_text(self._clock()).split(".")[0] + "Z"
        body = {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {
                "name": f"{job.meta.name}.{uuid.uuid4().hex[:16]}",
                "namespace": job.meta.namespace,
            },
            "involvedObject": {
                "apiVersion": API_VERSION, "kind": "LongContextJob", "name": job.meta.name,
                "namespace": job.meta.namespace, "uid": job.meta.uid,
            },
            "type": kind, "reason": reason or "Changed", "message": _short(message or reason),
            "firstTimestamp": now, "lastTimestamp": now, "count": 1,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER, "reportingInstance": self._instance,
        }  # fmt: skip
        try:
            self._kube.create(EVENTS, job.meta.namespace, body)
        except KubeError as error:
            _log.warning("event %s was not recorded: %s", reason, error)


def _short(text: str) -> str:
    raw = text.encode()
    return text if len(raw) <= BYTES else raw[: BYTES - 3].decode(errors="ignore") + "..."

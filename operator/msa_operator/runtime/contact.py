"""Asking a run's head: what its Jobs API lists, and what the run says of itself.

A head is asked at most every few seconds, however many events come, and less often while it does
not answer. Another head pod, or another container in it, is asked anew.
"""

from __future__ import annotations

import base64
import binascii
import logging
import time
from dataclasses import replace

from msa_operator.reconcile import status
from msa_operator.reconcile.intent import TERMINAL
from msa_operator.reconcile.observe import JobsApi, Progress, State, Submission
from msa_operator.runtime import views
from msa_operator.runtime.head import Head, HeadError, Heads
from msa_operator.runtime.kube import SECRETS, Kube
from msa_operator.runtime.memory import Contact, Memory, Seen
from msa_operator.runtime.store import JobObject
from msa_operator.runtime.views import RayCluster, RayPod

GAP_S = 5.0
"""Between two exchanges with one head."""
CONTACT_MAX_S = 60.0
"""Longest wait between two tries of a head that does not answer."""

_log = logging.getLogger(__name__)


class Contacts:
    def __init__(self, kube: Kube, heads: Heads, poll: float) -> None:
        self._kube = kube
        self._heads = heads
        self._gap = min(GAP_S, poll / 2)

    def observe(
        self, s: State, job: JobObject, clusters: list[RayCluster], pods: list[RayPod],
        memory: Memory,
    ) -> tuple[State, str, Head | None]:  # fmt: skip
        """The state with what the head says, the head's Service, and where it can be asked."""
        service, contact = self._contact(s, clusters, pods, memory)
        if memory.reached is not None:
            reachable, since = memory.reached
            submissions = _told(contact, memory.seen) if contact and reachable else ()
            api = JobsApi(reachable=reachable, since=since, submissions=submissions)
            s = replace(s, api=api)
        # After the head was asked, and whether it answered or not: a head that is gone says
        # nothing, and how far its run had come must not be lost with it.
        if memory.seen is None:
            memory.seen = _recalled(job, s)
        return replace(s, progress=_progress(memory.seen)), service, contact and contact.head

    def _contact(
        self, s: State, clusters: list[RayCluster], pods: list[RayPod], memory: Memory
    ) -> tuple[str, Contact | None]:
        """The head's service, and what its Jobs API said, if this is a time to ask it."""
        mine = next((c for c in clusters if s.cluster and c.meta.uid == s.cluster.uid), None)
        service = mine.head_service if mine else ""
        phase = s.intent.phase
        asks = phase in ("Starting", "Running", "Recovering", "Draining") or phase in TERMINAL
        seen = s.head
        if not asks:
            memory.contact = memory.reached = None
            return service, None
        if not service or seen is None or seen.phase != "Running":
            memory.contact = None
            _reached(memory, False, s.now)
            return service, None
        contact = memory.contact
        if contact is None or contact.identity != seen.identity or contact.head.service != service:
            pod = next(p for p in pods if p.meta.uid == seen.uid)
            head = Head(pod.meta.namespace, service, self._token(pod))
            contact = memory.contact = Contact(seen.identity, head)
        wait = min(CONTACT_MAX_S, self._gap * 2 ** min(contact.failures, 8))
        if contact.stale or time.monotonic() - contact.asked >= wait:
            self._ask(contact, s, memory)
        return service, contact

    def _ask(self, contact: Contact, s: State, memory: Memory) -> None:
        contact.stale = False
        try:
            contact.submissions = self._heads.submissions(contact.head)
            contact.reachable, contact.failures = True, 0
        except HeadError as error:
            contact.reachable, contact.failures = False, contact.failures + 1
            _log.info("the head does not answer: %s", error)
            if error.code in (401, 403):
                memory.contact = None  # its token is another one by now
        contact.asked = time.monotonic()
        _reached(memory, contact.reachable, s.now)
        if not contact.reachable or s.intent.phase not in ("Starting", "Running", "Draining"):
            return
        try:
            report = self._heads.report(contact.head)
        except HeadError as error:
            _log.debug("no progress: %s", error)
            return
        last = memory.seen
        same = last is not None and last.report.submission == report.submission
        grew = not same or last is None or report.step > last.report.step
        stepped = s.now if grew or last is None else last.stepped
        memory.seen = Seen(report, stepped, s.now)

    def _token(self, pod: RayPod) -> str | None:
        """Ray's token, of the Secret from which the head itself has it."""
        if pod.token_secret is None:
            return None
        name, key = pod.token_secret
        secret = self._kube.find(SECRETS, pod.meta.namespace, name)
        data = (secret or {}).get("data") or {}
        try:
            return base64.b64decode(data[key], validate=True).decode()
        except (KeyError, TypeError, ValueError, binascii.Error):
            _log.warning("Secret %s holds no token under %s", name, key)
            return None


def _told(contact: Contact, seen: Seen | None) -> tuple[Submission, ...]:
    """The head's submissions; what the run itself said of its end is better than a log's end."""
    said = seen.report if seen and seen.report.error else None
    return tuple(
        replace(s, message=said.error) if said and said.submission == s.id else s
        for s in contact.submissions
    )


def _reached(memory: Memory, reachable: bool, now: float) -> None:
    if memory.reached is None or memory.reached[0] != reachable:
        memory.reached = reachable, now


def _recalled(job: JobObject, s: State) -> Seen | None:
    """What the status says of the attempt that is open: an operator before this one wrote it.

    Its step counts as made now: how long none was made, this operator has not seen.
    """
    shown = (job.raw.get("status") or {}).get("progress")
    attempt = s.intent.attempt
    if attempt is None or not isinstance(shown, dict):
        return None
    try:
        received = status.seconds_of(str(shown.get("updated")))
    except ValueError:
        return None
    if received < attempt.started:
        return None  # of the attempt before
    found = views.report({**shown, "submission": attempt.submission_id})
    return None if found is None else Seen(found, s.now, received)


def _progress(seen: Seen | None) -> Progress | None:
    if seen is None:
        return None
    report = seen.report
    return Progress(
        submission_id=report.submission, step=report.step, checkpoint_step=report.checkpoint_step,
        stepped=seen.stepped, drained=report.drained,
    )  # fmt: skip

"""Heads of runs: Ray's Jobs API and the run's own control endpoint, over HTTP.

A call either answers or raises :class:`HeadError`; nothing is tried again in here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import urllib3

from msa_operator.reconcile.observe import Submission
from msa_operator.reconcile.pods import CONTROL_PORT, RUNSPEC_FOLDER
from msa_operator.runtime import views
from msa_operator.runtime.gate import Gate
from msa_operator.runtime.lookup import Lookups, Resolve, bound, first_address
from msa_operator.runtime.views import Report

DASHBOARD_PORT = 8265
ADDRESS = "http://{service}.{namespace}.svc:{port}"
"""Where a head's ports are; a proxy or a test may give another form."""
CONNECT_S = 3.0
"""Within a cluster a connection takes milliseconds; a longer wait holds up other jobs."""
STACKS_S = 40.0
"""The run answers when the stacks are written, also those of ranks that answer nothing."""
LARGEST = 8 << 20
"""Bytes read of an answer: a head that talks without end must not fill our memory."""

Asked = Callable[[str, str], None]
"""Told of every call: what was asked, and ok, error or refused."""


class HeadError(Exception):
    """The head did not answer, or refused. ``code`` is 0 when no answer came."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Head:
    """Where one run's head is, and the token that KubeRay gave it."""

    namespace: str
    service: str
    token: str | None


class Heads:
    """Calls of heads, by any number of threads at once."""

    def __init__(
        self, timeout: float = 5.0, address: str = ADDRESS, asked: Asked = lambda *_: None,
        retries: int = 0, gate: Gate | None = None, resolve: Resolve = first_address,
    ) -> None:  # fmt: skip
        self._gate = gate or Gate()
        self._address = address
        self._timeout = urllib3.Timeout(connect=min(CONNECT_S, timeout), read=timeout)
        self._asked = asked
        # A head per job: more pools than that would only keep dead connections.
        self._pool = urllib3.PoolManager(
            num_pools=64, maxsize=2, retries=urllib3.Retry(retries) if retries else False
        )
        bound(self._pool, Lookups(min(CONNECT_S, timeout), resolve))

    def submissions(self, head: Head) -> tuple[Submission, ...]:
        """Every submission that the head knows."""
        _, answer = self._call("list", head, DASHBOARD_PORT, "GET", "/api/jobs/")
        found = views.submissions(answer)
        if found is None:
            raise HeadError(0, "the Jobs API answered with no list")
        return found

    def knows(self, head: Head, submission: str) -> bool:
        """Whether the head knows a submission of that id."""
        path = f"/api/jobs/{quote(submission)}"
        code, _ = self._call("get", head, DASHBOARD_PORT, "GET", path, fine=(404,))
        return code != 404

    def submit(self, head: Head, submission: str, resume: bool, job: str) -> None:
        """GET, POST, and GET again after any error: a duplicate is answered by a plain 500."""
        if self.knows(head, submission):
            return
        body = {
            "entrypoint": entrypoint(submission, resume),
            "submission_id": submission,
            "metadata": {"flashmsa.dev/job": job},
        }
        try:
            self._call("submit", head, DASHBOARD_PORT, "POST", "/api/jobs/", body)
        except HeadError:
            if not self.knows(head, submission):
                raise

    def stop(self, head: Head, submission: str) -> None:
        """Ends a submission; one that is over or unknown is left as it is."""
        path = f"/api/jobs/{quote(submission)}/stop"
        self._call("stop", head, DASHBOARD_PORT, "POST", path, {}, fine=(404,))

    def report(self, head: Head) -> Report:
        """What the run says of itself."""
        _, answer = self._call("progress", head, CONTROL_PORT, "GET", "/progress")
        found = views.report(answer)
        if found is None:
            raise HeadError(0, "the control endpoint answered with no progress")
        return found

    def drain(self, head: Head) -> None:
        """Asks the run for a checkpoint and to stop."""
        self._call("drain", head, CONTROL_PORT, "POST", "/drain", {})

    def stacks(self, head: Head) -> tuple[str, str]:
        """Has the stacks of all ranks written; the folder, and the rank that lags, in words."""
        _, answer = self._call(
            "stacks", head, CONTROL_PORT, "POST", "/stacks", {}, seconds=STACKS_S
        )
        told = answer if isinstance(answer, dict) else {}
        lagging = told.get("lagging")
        words = ""
        if isinstance(lagging, dict):
            words = f"rank {lagging.get('rank')} on {lagging.get('node')} is at step " \
                    f"{lagging.get('step')}"  # fmt: skip
        return str(told.get("folder") or "")[:1024], words[:200]

    def _call(
        self, what: str, head: Head, port: int, method: str, path: str, body: Any = None,
        fine: tuple[int, ...] = (), seconds: float | None = None,
    ) -> tuple[int, Any]:  # fmt: skip
        base = self._address.format(service=head.service, namespace=head.namespace, port=port)
        headers = {"Accept": "application/json"}
        if head.token:
            headers["Authorization"] = f"Bearer {head.token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        limit = urllib3.Timeout(connect=CONNECT_S, read=seconds) if seconds else self._timeout
        result = "error"
        try:
            with self._gate.waiting():
                answer = self._pool.request(
                    method, f"{base}{path}", headers=headers, timeout=limit, redirect=False,
                    body=None if body is None else json.dumps(body), preload_content=False,
                )  # fmt: skip
                try:
                    raw = answer.read(LARGEST, decode_content=True)
                finally:
                    answer.drain_conn()
                    answer.release_conn()
            good = 200 <= answer.status < 300
            result = "ok" if good or answer.status in fine else "refused"
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise HeadError(0, f"{method} {path}: {error}") from None
        finally:
            self._asked(what, result)
        if not good and answer.status not in fine:
            words = raw[:300].decode(errors="replace").strip()
            raise HeadError(answer.status, f"{method} {path}: {answer.status} {words}")
        try:
            return answer.status, json.loads(raw) if raw.strip() else None
        except ValueError:
            return answer.status, None


def entrypoint(submission: str, resume: bool) -> str:
    """What the head runs for one attempt."""
    words = f"python -m msa_workloads.driver --spec {RUNSPEC_FOLDER}/runspec.json"
    return f"{words} --submission {submission}{' --resume' if resume else ''}"

"""Calls of a head over real HTTP: what counts as submitted, and answers that are none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from msa_operator.runtime.head import Head, HeadError, Heads, entrypoint

Answer = tuple[int, bytes]


class Ray:
    """A head whose answers a test sets, by method and path; None drops the connection."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], list[Answer | None]] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        ray = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                self.rfile.read(length)
                ray.asked.append((self.command, self.path, self.headers.get("Authorization")))
                planned = ray.answers.get((self.command, self.path)) or [(404, b"{}")]
                found = planned.pop(0) if len(planned) > 1 else planned[0]
                if found is None:
                    self.connection.close()
                    return
                self.send_response(found[0])
                self.send_header("Content-Length", str(len(found[1])))
                self.end_headers()
                self.wfile.write(found[1])

            do_GET = do_POST = answer

            def log_message(self, format: str, *args: object) -> None:
                """Tests say enough."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def says(self, method: str, path: str, *answers: Any) -> None:
        self.answers[method, path] = [
            None if a is None else (a[0], a[1] if isinstance(a[1], bytes) else
                                    json.dumps(a[1]).encode()) for a in answers
        ]  # fmt: skip


@pytest.fixture
def ray() -> Iterator[Ray]:
    found = Ray()
    yield found
    found.server.shutdown()
    found.server.server_close()


HEAD = Head("team", "head-svc", "secret")
ONE = "/api/jobs/c-1"


def heads(ray: Ray) -> Heads:
    return Heads(2.0, ray.url)


def posts(ray: Ray) -> int:
    return sum(method == "POST" for method, _, _ in ray.asked)


def test_what_is_known_is_not_submitted_again(ray: Ray):
    ray.says("GET", ONE, (200, {"submission_id": "c-1"}))
    heads(ray).submit(HEAD, "c-1", False, "small")
    assert posts(ray) == 0
    assert {token for _, _, token in ray.asked} == {"Bearer secret"}


@pytest.mark.parametrize("answer", [(500, b"Traceback ... already exists"), None])
def test_an_error_of_the_submission_counts_for_nothing_when_it_is_known_after_all(
    ray: Ray, answer: Any
):
    ray.says("GET", ONE, (404, b""), (200, {}))
    ray.says("POST", "/api/jobs/", answer)
    heads(ray).submit(HEAD, "c-1", True, "small")
    assert posts(ray) == 1


def test_a_submission_that_failed_is_an_error_with_the_heads_words(ray: Ray):
    ray.says("GET", ONE, (404, b""))
    ray.says("POST", "/api/jobs/", (500, b"no agent yet"))
    with pytest.raises(HeadError, match="500 no agent yet"):
        heads(ray).submit(HEAD, "c-1", False, "small")


def test_whether_it_is_known_must_be_said_before_anything_is_submitted(ray: Ray):
    ray.says("GET", ONE, (503, b"starting"))
    with pytest.raises(HeadError, match="503"):
        heads(ray).submit(HEAD, "c-1", False, "small")
    assert posts(ray) == 0


@pytest.mark.parametrize("answer", [
    (200, b"<html>"), (200, {"jobs": []}), (302, b""), (401, b"Unauthorized"), None, (200, b""),
])  # fmt: skip
def test_what_is_no_list_of_submissions_is_an_error(ray: Ray, answer: Any):
    ray.says("GET", "/api/jobs/", answer)
    with pytest.raises(HeadError):
        heads(ray).submissions(HEAD)


def test_drivers_that_are_no_submissions_are_left_out(ray: Ray):
    ray.says("GET", "/api/jobs/", (200, [
        {"submission_id": "c-1", "status": "RUNNING", "message": None},
        {"submission_id": None, "status": "RUNNING", "type": "DRIVER"},
        {"submission_id": "c-2", "status": "ASLEEP"}, "x", None,
        {"submission_id": "c-3", "status": "FAILED", "message": "x" * 9000},
    ]))  # fmt: skip
    found = heads(ray).submissions(HEAD)
    assert [(s.id, s.status) for s in found] == [("c-1", "Running"), ("c-3", "Failed")]
    assert len(found[1].message) == 500


def test_a_submission_that_is_gone_is_stopped_already(ray: Ray):
    ray.says("POST", f"{ONE}/stop", (404, b""))
    heads(ray).stop(HEAD, "c-1")


def test_stacks_name_the_rank_that_lags(ray: Ray):
    lagging = {"rank": 3, "step": 7, "node": "n-2"}
    ray.says("POST", "/stacks", (202, {"folder": "s3://b/stacks", "lagging": lagging}))
    assert heads(ray).stacks(HEAD) == ("s3://b/stacks", "rank 3 on n-2 is at step 7")
    ray.says("POST", "/stacks", (202, {"folder": "s3://b/stacks", "lagging": None}))
    assert heads(ray).stacks(HEAD) == ("s3://b/stacks", "")


def test_progress_is_read_field_by_field(ray: Ray):
    ray.says("GET", "/progress", (200, {
        "submission": "c-1", "state": "running", "step": 12, "maxSteps": 20, "loss": None,
        "tokensPerSecond": 1e400, "mfu": "much", "etaSeconds": -3.5, "checkpointStep": True,
        "drained": "yes",
    }))  # fmt: skip
    found = heads(ray).report(HEAD)
    assert (found.step, found.max_steps, found.loss, found.mfu) == (12, 20, None, None)
    assert (found.tokens_per_second, found.checkpoint_step, found.drained) == (None, 0, False)


def test_the_entrypoint_is_the_drivers():
    assert entrypoint("c-2", True) == (
        "python -m msa_workloads.driver --spec /etc/flash-msa/runspec.json --submission c-2 "
        "--resume"
    )
    assert "--resume" not in entrypoint("c-1", False)

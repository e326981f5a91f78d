"""msa logs: through a real API server, from a kubelet of the test's own that holds the logs."""

from __future__ import annotations

import importlib
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from cli_cluster import Bench, install, running
from e2e.apiserver import ApiServer
from msa_operator.cli.logs import NEVER, Lines, stamped
from msa_operator.runtime.kube import NODES, PODS
from operator_jobs import job

HEAD = """\
2026-11-30 Ray runtime started.
small-1 | tiny: starting
small-1 | (rank 0 pid=412) step 1
small-1 | (rank 1 pid=77, ip=10.0.3.8) step 1
small-1 | (rank 10 pid=78, ip=10.0.3.9) step 1
small-1 | error: rank 1 ended without a Python error
small-2 | resumed from the checkpoint of step 1
small-2 | (rank 1 pid=80, ip=10.0.3.8) NCCL WARN (rank 0 says no)
"""


def stamp(number: int) -> str:
    """Of a line, as kubelets write them: zeros at the end of the fraction are left out."""
    return f"2026-11-30T01:00:00.{100_000_000 + number * 50:09}".rstrip("0") + "+01:00"


class Kubelet:
    """Serves the logs of containers as a kubelet does; ``more`` lines come while one follows."""

    def __init__(self, server: ApiServer) -> None:
        self.logs: dict[str, str] = {}
        self.more: list[str] = []
        self.asked: list[str] = []
        kubelet = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                kubelet.asked.append(self.path)
                text = kubelet.logs.get(path.removeprefix("/containerLogs/"))
                self.send_response(404 if text is None else 200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                follow = "follow=true" in query
                parts = [text or "no log", *(kubelet.more if follow else ())]
                if "timestamps=true" in query:
                    lines = "".join(parts).splitlines(keepends=True)
                    parts = [f"{stamp(number)} {line}" for number, line in enumerate(lines)]
                for part in parts:
                    # Cut anywhere: a line may come in two parts.
                    for piece in (part[:7], part[7:]):
                        if piece:
                            data = piece.encode()
                            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                            self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate = server.authority.folder / "apiserver.crt"
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        self.port = self._http.server_address[1]

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def bench(api_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    install(api_server)
    # Its name in the package is the command's.
    monkeypatch.setattr(importlib.import_module("msa_operator.cli.logs"), "LOOK_SECONDS", 0.2)
    made = Bench.make(api_server)
    yield made
    api_server.kubectl("delete", "namespace", made.namespace, "--wait=false")


@pytest.fixture
def kubelet(bench: Bench) -> Iterator[Kubelet]:
    """A node whose kubelet is the test's."""
    made = Kubelet(bench.server)
    kube, name = bench.at.kube, f"node-{bench.namespace}"
    kube.create(NODES, "", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    kube.patch(NODES, "", name, {"status": {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": made.port}},
    }}, subresource="status")  # fmt: skip
    yield made
    bench.server.kubectl("delete", "node", name, "--wait=false")
    made.stop()


def pod(bench: Bench, uid: str, name: str, kind: str, phase: str = "Running") -> None:
    """A pod of the job's cluster on the test's node."""
    body = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {
            "flashmsa.dev/job": "small", "flashmsa.dev/job-uid": uid,
            "ray.io/cluster": "small-abcde-12345678", "ray.io/node-type": kind,
        }},
        "spec": {
            "nodeName": f"node-{bench.namespace}",
            "containers": [{"name": f"ray-{kind}", "image": "none"}],
        },
    }  # fmt: skip
    bench.at.kube.create(PODS, bench.namespace, body)
    status = {"status": {"phase": phase}}
    bench.at.kube.patch(PODS, bench.namespace, name, status, subresource="status")


@pytest.fixture
def job_uid(bench: Bench) -> str:
    uid = bench.create(job())["metadata"]["uid"]
    bench.says("small", running())
    return uid


def test_logs_of_all_ranks_of_one_and_of_an_attempt(
    bench: Bench, kubelet: Kubelet, job_uid: str
) -> None:
    pod(bench, job_uid, "head", "head")
    kubelet.logs[f"{bench.namespace}/head/ray-head"] = HEAD
    ours = [line.partition(" | ")[2] for line in HEAD.splitlines()[1:]]
    done = bench.msa("logs", "small")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [*ours[:5], "--- attempt 2", *ours[5:]]
    done = bench.msa("logs", "small", "--rank", 1)
    assert done.stdout.splitlines() == [
        "step 1", "--- attempt 2", "NCCL WARN (rank 0 says no)",
    ]  # fmt: skip
    done = bench.msa("logs", "small", "--rank", 1, "--attempt", 2)
    assert done.stdout.splitlines() == ["NCCL WARN (rank 0 says no)"]
    done = bench.msa("logs", "small", "--rank", 5)
    assert (done.stdout, "nothing printed yet; small is Running" in done.stderr) == ("", True)
    done = bench.msa("logs", "small", "--pods", "--follow")
    assert done.exit_code == 2


def test_logs_of_every_pod(bench: Bench, kubelet: Kubelet, job_uid: str) -> None:
    pod(bench, job_uid, "worker", "worker")
    pod(bench, job_uid, "head", "head")
    kubelet.logs[f"{bench.namespace}/head/ray-head"] = "started\nblocks"
    done = bench.msa("logs", "small", "--pods")
    assert done.stdout.splitlines() == ["head/ray-head: started", "head/ray-head: blocks"]
    assert "worker/ray-worker: no log: " in done.stderr


def test_following_goes_on_over_a_lost_stream_and_ends_with_the_job(
    bench: Bench, kubelet: Kubelet, job_uid: str
) -> None:
    bench.says("small", {"phase": "Starting"})
    opened: list[int] = []

    def goes_on(found: dict[str, Any]) -> bool:
        if not opened:
            pod(bench, job_uid, "head", "head")
            kubelet.logs[f"{bench.namespace}/head/ray-head"] = HEAD
            opened.append(1)
        # Each stream has all lines of those before it; the later ones have two more.
        followed = sum("follow=true" in path for path in kubelet.asked)
        if followed and not kubelet.more:
            kubelet.more = ["small-2 | again\n", "small-2 | last\n"]
            opened.append(followed)
        if not kubelet.more or followed < opened[-1] + 2:
            return False
        bench.says("small", {"phase": "Complete"})
        return True

    thread = bench.later("small", goes_on)
    done = bench.msa("logs", "small", "--follow")
    thread.join()
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines.count("tiny: starting") == 1
    assert lines[-2:] == ["again", "last"]
    assert len(lines) == len(set(lines)), "no line comes twice"
    followed = [path for path in kubelet.asked if "follow=true" in path]
    assert "sinceSeconds" not in followed[0]
    assert all("sinceSeconds=6" in path for path in followed[1:])
    assert "small is Complete" in done.stderr


def test_a_job_without_a_head_says_where_its_logs_are(bench: Bench, job_uid: str) -> None:
    done = bench.msa("logs", "small")
    assert (done.exit_code, "small has no head yet: Running" in done.stderr) == (2, True)
    bench.says("small", {"phase": "Complete"})
    for words in ((), ("--follow",), ("--pods",)):
        done = bench.msa("logs", "small", *words)
        assert done.exit_code == 2
        assert "its cluster is gone, with the logs" in done.stderr
        assert "s3://ckpt/small" in done.stderr


def test_a_head_that_goes_while_it_is_asked_is_no_raw_error(
    bench: Bench, kubelet: Kubelet, job_uid: str
) -> None:
    pod(bench, job_uid, "head", "head")  # the kubelet knows no log of it any more
    done = bench.msa("logs", "small")
    assert done.exit_code == 2
    assert "the head of small is gone; small is Running" in done.stderr
    bench.says("small", {"phase": "Complete"})
    done = bench.msa("logs", "small")
    assert (done.exit_code, "its cluster is gone, with the logs" in done.stderr) == (2, True)


def test_times_of_lines_are_compared_whatever_their_form() -> None:
    texts = ["", ".0000001", ".1", ".10000005", ".999999999"]
    found = [stamped(f"2026-11-30T01:00:00{text}Z a line")[0] for text in texts]
    assert found == sorted(set(found))
    assert stamped("2026-11-30T02:00:00.1+01:00 x") == stamped("2026-11-30T01:00:00.1Z x")
    assert stamped("no time at all") == (NEVER, "no time at all")


def test_lines_that_are_not_ours_are_left_out() -> None:
    lines = Lines(None, None)
    for line in ("ray start", "(rank 0 pid=1) no submission", "", "a | b"):
        assert list(lines.shown(line)) == (["b"] if line == "a | b" else [])

"""A name server that says nothing holds up no more than the call that needed it."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest
from msa_operator.runtime.head import Head, HeadError, Heads
from msa_operator.runtime.lookup import Lookups


class Jobs(http.server.BaseHTTPRequestHandler):
    hosts: list[str | None]

    def do_GET(self):
        self.server.hosts.append(self.headers["Host"])  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Jobs)
    made.hosts = []  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def silence() -> Iterator[threading.Event]:
    """Until it is set, the name server answers nothing about names with "silent"."""
    over = threading.Event()
    yield over
    over.set()


def head(service: str) -> Head:
    return Head("team", service, token="t")


def test_one_silent_name_holds_up_its_call_only(server, silence: threading.Event):
    def resolve(name: str) -> str:
        if name.startswith("silent"):
            silence.wait(60)
        return "127.0.0.1"

    port = server.server_port
    heads = Heads(
        0.2, address=f"http://{{service}}.{{namespace}}.svc:{port}", resolve=resolve
    )  # fmt: skip
    with pytest.raises(HeadError, match=r"silent-svc\.team\.svc: no name server answered"):
        heads.submissions(head("silent-svc"))
    assert heads.submissions(head("a-svc")) == ()
    # The head is told its name, not the address that it was reached at.
    assert server.hosts == [f"a-svc.team.svc:{port}"]
    silence.set()
    assert heads.submissions(head("silent-svc")) == ()


def test_a_name_that_does_not_exist_is_an_answer():
    def resolve(name: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(HeadError, match="Name or service not known"):
        Heads(1.0, resolve=resolve).submissions(head("gone-svc"))


def test_a_name_is_looked_up_once_at_a_time_and_few_wait(silence: threading.Event):
    asked: list[str] = []

    def resolve(name: str) -> str:
        asked.append(name)
        silence.wait(60)
        return "127.0.0.1"

    lookups = Lookups(0.05, resolve, most=2)
    for name in ("a", "a", "b", "a"):
        with pytest.raises(TimeoutError, match="no name server"):
            lookups.address(name)
    with pytest.raises(TimeoutError, match="2 lookups"):
        lookups.address("c")
    assert asked == ["a", "b"]

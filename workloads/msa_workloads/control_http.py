"""The control endpoint of a run: progress, drain, stacks and metrics over HTTP.

``GET /progress``, ``POST /drain`` and ``POST /stacks`` ask for the cluster's token; ``GET
/metrics`` does not. Without a token nothing is asked for, and it listens on loopback only.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from msa_workloads.control import RunState

PORT = 8267
"""The default; 8265 and 8266 are Ray's."""

LOOPBACK = "127.0.0.1"

SLOW_CLIENT_SECONDS = 30
"""A client that sends its request slower than this is dropped."""

HEADERS = ("Authorization", "X-Ray-Authorization")
"""Where the token is looked for. The API server's proxy drops the first, as Ray knows."""

log = logging.getLogger(__name__)


def cluster_token(environment: dict[str, str] | None = None) -> str | None:
    """The Ray cluster's own access token, as KubeRay hands it to pods; None without one."""
    environment = dict(os.environ) if environment is None else environment
    if token := environment.get("RAY_AUTH_TOKEN", "").strip():
        return token
    if path := environment.get("RAY_AUTH_TOKEN_PATH"):
        return Path(path).read_text().strip() or None
    return None


class ControlServer:
    """Serves one run until it is closed; use it as a context manager.

    ``stacks`` dumps the stacks of all ranks and returns the folder's address and the lagging
    rank. ``host`` counts only with a token. Raises OSError when the port is taken.
    """

    def __init__(
        self,
        state: RunState,
        stacks: Callable[[], dict[str, Any]],
        *,
        token: str | None,
        port: int = PORT,
        host: str = "0.0.0.0",
    ) -> None:
        host = host if token else LOOPBACK

        served = {"state": state, "stacks": staticmethod(stacks), "token": token}
        handler = type("Handler", (_Handler,), served)
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="msa-control-http", daemon=True
        )
        self.address: tuple[str, int] = (host, self._server.server_address[1])

    def __enter__(self) -> ControlServer:
        self._thread.start()
        log.info("control endpoint on %s:%d", *self.address)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: RunState
    stacks: Callable[[], dict[str, Any]]
    token: str | None

    server_version = "msa-control"
    sys_version = ""
    timeout = SLOW_CLIENT_SECONDS

    def do_GET(self) -> None:
        if self.path == "/metrics":
            text = self.state.metrics().encode()
            self._send(200, text, "text/plain; version=0.0.4; charset=utf-8")
        elif self.path == "/progress":
            if self._allowed():
                progress = self.state.progress()
                self._json(200, progress)
                self.state.was_read(progress)
        else:
            self._unknown()

    def do_POST(self) -> None:
        if self.path == "/drain":
            if self._allowed():
                self.state.drain()
                self._json(202, {"state": self.state.progress()["state"]})
        elif self.path == "/stacks":
            if self._allowed():
                self._stacks()
        else:
            self._unknown()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _stacks(self) -> None:
        try:
            answer = self.stacks()
        except Exception as error:
            log.exception("stacks could not be dumped")
            self._json(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self._json(202, answer)

    def _allowed(self) -> bool:
        if self.token is None:
            return True
        wanted = f"Bearer {self.token}".encode()
        given = [self.headers.get(name, "").encode() for name in HEADERS]
        if any(hmac.compare_digest(value, wanted) for value in given):
            return True
        self._json(401, {"error": "give the cluster's token: Authorization: Bearer TOKEN"})
        return False

    def _unknown(self) -> None:
        known = "GET /progress, GET /metrics, POST /drain, POST /stacks"
        self._json(404, {"error": f"{self.command} {self.path}: known are {known}"})

    def _json(self, code: int, value: dict[str, Any]) -> None:
        self._send(code, json.dumps(value).encode(), "application/json")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

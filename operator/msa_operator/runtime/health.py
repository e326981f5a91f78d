"""/healthz, /readyz and /metrics, served by threads of their own.

They answer from what is known and ask nobody, so that a slow API server or a stuck worker is
reported and not shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from msa_operator.metrics import CONTENT_TYPE

Checks = Callable[[], list[str]]
"""What is wrong, a line each; nothing when all is well."""


class Health:
    def __init__(
        self, port: int, healthy: Checks, ready: Checks, metrics: Callable[[], bytes],
        host: str = "",
    ) -> None:  # fmt: skip
        pages: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/healthz": lambda: _verdict(healthy()),
            "/readyz": lambda: _verdict(ready()),
            "/metrics": lambda: (200, CONTENT_TYPE, metrics()),
        }

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                page = pages.get(self.path.split("?")[0])
                code, kind, body = page() if page else (404, "text/plain", b"not found\n")
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes are not worth a line each."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="health", daemon=True
        )

    @property
    def port(self) -> int:
        """Where it listens; chosen by the system when 0 was asked for."""
        return self._server.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


def _verdict(problems: list[str]) -> tuple[int, str, bytes]:
    text = "".join(f"{p}\n" for p in problems) or "ok\n"
    return (503 if problems else 200), "text/plain", text.encode()

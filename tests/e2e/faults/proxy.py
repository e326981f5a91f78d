"""Stands between the operator and the real API server, and does harm by rules.

It passes on whose request it is: a bearer token as it came, and without one it asks as
administrator. Everything that passes is written down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from ..apiserver import ApiServer
from ..certificates import kubeconfig
from .background import Background
from .client import LINE_BYTES, admin_tls
from .rules import Answer, Call, Delay, Expired, Fault, Lost, Moment, Reset, Rule, Silent

_HOP = {"connection", "transfer-encoding", "content-length", "host", "content-encoding",
        "accept-encoding"}  # fmt: skip
UNTOLD_S = 120.0
"""A silent watch is let go after this, should a test forget to."""


@dataclass(frozen=True)
class Record:
    """One request that came, and how it ended: a code, or 0 for a dropped connection."""

    call: Call
    code: int
    fault: Fault | None
    came: float
    """By the monotonic clock."""


class Proxy:
    """Listens on loopback until `stop`. Rules and moments may be changed at any time."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self._server = server
        self.rules: list[Rule] = []
        self.records: list[Record] = []
        self.before: Moment | None = None
        self.after: Moment | None = None
        self._spoken = asyncio.Event()
        self._open_calls: set[asyncio.Task[Any]] = set()
        self._loop = Background("proxy")
        server.authority.sign("faults", "faults", hosts=["127.0.0.1"])
        port = self._loop.call(self._start())
        self.url = f"https://127.0.0.1:{port}"
        authority = server.authority.folder
        self.kubeconfig = kubeconfig(folder / "proxied.conf", authority, "admin", self.url)

    def stop(self) -> None:
        self.speak()
        self._loop.call(self._end())
        self._loop.stop()

    def speak(self) -> None:
        """Silent watches end; new ones are silent as long as their rule stands."""
        self._loop.loop.call_soon_threadsafe(self._spoken.set)

    def clear(self) -> None:
        """No more harm."""
        self.rules, self.before, self.after = [], None, None
        self.speak()

    def count(self) -> Counter[str]:
        """Requests so far by verb and resource."""
        return Counter(f"{r.call.verb} {r.call.resource}" for r in self.records)

    async def _start(self) -> int:
        connector = aiohttp.TCPConnector(ssl=admin_tls(self._server), limit=0)
        self._admin = aiohttp.ClientSession(connector=connector, read_bufsize=LINE_BYTES)
        plain = aiohttp.TCPConnector(ssl=admin_tls(self._server, identity=False), limit=0)
        self._other = aiohttp.ClientSession(connector=plain, read_bufsize=LINE_BYTES)
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificate = self._server.authority.folder / "faults.crt"
        tls.load_cert_chain(certificate, certificate.with_suffix(".key"))
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        return self._runner.addresses[0][1]

    async def _end(self) -> None:
        for task in self._open_calls:
            task.cancel()
        await asyncio.gather(*self._open_calls, return_exceptions=True)
        await self._runner.cleanup()
        await self._admin.close()
        await self._other.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch", "").lower() in ("1", "true")
        call = Call.of(request.method, request.path, watch)
        fault = next((rule.fault for rule in self.rules if rule.takes(call)), None)
        came, code, task = time.monotonic(), 0, asyncio.current_task()
        assert task is not None
        self._open_calls.add(task)
        try:
            answer = await self._pass(request, call, fault)
            code = 0 if isinstance(answer, _Dropped) else answer.status
            return answer
        finally:
            self._open_calls.discard(task)
            self.records.append(Record(call, code, fault, came))

    async def _pass(
        self, request: web.Request, call: Call, fault: Fault | None
    ) -> web.StreamResponse:
        if isinstance(fault, Delay):
            await asyncio.sleep(fault.seconds)
        if isinstance(fault, Reset):
            return _Dropped(request)
        if isinstance(fault, Answer):
            return _refusal(fault)
        if call.verb == "watch":
            return await self._stream(request, fault)
        body = await request.read()
        # What a dry run asks for is not done, and a Lease is not part of a job's life.
        counts = call.write and call.resource != "leases" and "dryRun" not in request.query
        if counts and self.before is not None and not await self.before(call, body):
            return _Dropped(request)
        # Asked for to the end, whoever goes away meanwhile: the server has heard it.
        asked = asyncio.shield(asyncio.ensure_future(self._ask(request, body)))
        status, headers, text = await asked
        if counts and self.after is not None and not await self.after(call, body):
            return _Dropped(request)
        if isinstance(fault, Lost):
            return _Dropped(request)
        return web.Response(status=status, headers=headers, body=text)

    async def _ask(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        async with self._open(request, body) as answer:
            return answer.status, _headers(answer.headers), await answer.read()

    def _open(self, request: web.Request, body: bytes | None = None) -> Any:
        session = self._other if "Authorization" in request.headers else self._admin
        return session.request(
            request.method, self._server.url + request.raw_path, data=body or None,
            headers=_headers(request.headers), timeout=aiohttp.ClientTimeout(total=None),
        )  # fmt: skip

    async def _stream(self, request: web.Request, fault: Fault | None) -> web.StreamResponse:
        async with self._open(request) as answer:
            out = web.StreamResponse(status=answer.status, headers=_headers(answer.headers))
            await out.prepare(request)
            if isinstance(fault, Expired):
                status = _status(Answer(410, "Expired"))
                await out.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                return out
            if isinstance(fault, Silent):
                self._spoken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._spoken.wait(), UNTOLD_S)
                return _Dropped(request)
            try:
                async for piece in answer.content.iter_any():
                    await out.write(piece)
            except (ConnectionError, aiohttp.ClientError):
                return _Dropped(request)
            return out


def _headers(headers: Any) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key.lower() not in _HOP}


class _Dropped(web.Response):
    """Resets the connection; what is written to it afterwards goes nowhere."""

    def __init__(self, request: web.Request) -> None:
        super().__init__()
        if request.transport is not None:
            request.transport.abort()


def _status(fault: Answer) -> dict[str, Any]:
    return {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": fault.code,
        "reason": fault.reason or "Unknown", "message": f"the proxy says {fault.code}",
        "metadata": {},
        **({"details": {"retryAfterSeconds": fault.retry_after_s}} if fault.retry_after_s else {}),
    }  # fmt: skip


def _refusal(fault: Answer) -> web.Response:
    headers = {"Retry-After": str(fault.retry_after_s)} if fault.retry_after_s else {}
    return web.json_response(_status(fault), status=fault.code, headers=headers)

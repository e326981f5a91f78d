"""A small asynchronous client of the API server: objects are the JSON that the server gives."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from ..apiserver import ApiServer

AT_ONCE = 24
"""Requests in flight: the server works on no more at a time on two cores."""
LINE_BYTES = 8 << 20
"""An event of a watch is one line."""
MERGE = "application/merge-patch+json"
Object = dict[str, Any]


class Refused(Exception):
    """An answer that is no success, with the server's words."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{code} {words}")
        self.code = code


def admin_tls(server: ApiServer, *, identity: bool = True) -> ssl.SSLContext:
    """Trusts the server; with `identity`, speaks as administrator."""
    context = ssl.create_default_context(cafile=str(server.authority.ca))
    if identity:
        certificate = server.authority.folder / "admin.crt"
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context


class Client:
    """Made and used within one event loop."""

    def __init__(self, server: ApiServer) -> None:
        self._url = server.url
        connector = aiohttp.TCPConnector(ssl=admin_tls(server), limit=0)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=LINE_BYTES)
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str) -> Object:
        return await self._request("GET", path)

    async def create(self, path: str, body: Object) -> Object:
        return await self._request("POST", path, body)

    async def patch(self, path: str, body: Object) -> Object:
        """A merge patch: lists are replaced whole."""
        return await self._request("PATCH", path, body, MERGE)

    async def delete(self, path: str, uid: str = "", grace_s: int | None = None) -> None:
        """Deletes the object of that uid; one that is gone or another is none of our business."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            await self._request("DELETE", path, options)
        except Refused as refused:
            if refused.code not in (404, 409):
                raise

    async def watch(self, path: str, selector: str = "") -> AsyncIterator[tuple[str, Object]]:
        """Every object that is there, then every change, for ever: (type, object).

        After a lost connection everything is told again, so that the reader only has to compare.
        """
        query = f"labelSelector={selector}&" if selector else ""
        while True:
            try:
                listed = await self.get(f"{path}?{query}limit=0")
                kind = {"apiVersion": listed["apiVersion"], "kind": listed["kind"][: -len("List")]}
                yield "LISTED", listed
                for found in listed["items"]:
                    yield "ADDED", {**kind, **found}
                version = listed["metadata"]["resourceVersion"]
                url = f"{self._url}{path}?{query}watch=true&resourceVersion={version}"
                forever = aiohttp.ClientTimeout(total=None)
                async with self._session.get(url, timeout=forever) as answer:
                    async for line in answer.content:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        yield event["type"], event["object"]
            except (aiohttp.ClientError, Refused, TimeoutError):
                await asyncio.sleep(0.2)

    async def _request(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json"
    ) -> Object:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": kind} if data else {}
        async with (
            self._slots,
            self._session.request(method, self._url + path, data=data, headers=headers) as answer,
        ):
            text = await answer.text()
            if answer.status >= 300:
                raise Refused(answer.status, text[:500])
            return json.loads(text)

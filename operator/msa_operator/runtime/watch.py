"""Watches by kopf: it delivers events and nothing more.

No finalizer, no annotation, no daemon of kopf's: every handler is an ``on.event`` that hands the
object on. kopf lists and watches anew after 410, after silence, and at the latest when the server
ends the watch; each sign of life is noted, so that a watch that is silent for good can be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import kopf
from kubernetes import client

from msa_operator.reconcile import names
from msa_operator.runtime.kube import CLUSTERS, FIELD_MANAGER, JOBS, PODS, Resource, jitter
from msa_operator.settings import Timeouts

WATCHED: tuple[Resource, ...] = (JOBS, CLUSTERS, PODS)
INACTIVE_S = 70.0
"""The API server sends a bookmark every minute: without one for this long the watch is dead."""
IDLE_S = 0.5
"""kopf keeps a task for each object until it was quiet for this long."""
Received = Callable[[Resource, str | None, Any], None]

_log = logging.getLogger(__name__)


class Watches:
    """kopf in a thread of its own. ``received`` is called there and must not wait."""

    def __init__(
        self, config: client.Configuration, timeouts: Timeouts, namespaces: tuple[str, ...],
        received: Received, heard: Callable[[str, float], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self._config = config
        self._timeouts = timeouts
        self._namespaces = namespaces
        self._received = received
        self._tell = heard
        self._signs: dict[str, float] = {}
        self._stop = threading.Event()
        self._end_round: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)

    def start(self) -> None:
        now = time.monotonic()
        inside = self._namespaces or ("",)
        self._signs = {r.path(namespace): now for r in WATCHED for namespace in inside}
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._end_round()
        if self._thread.is_alive():
            self._thread.join(10)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def silent(self) -> dict[str, float]:
        """Watches without a sign of life for too long, by path, and for how many seconds."""
        now, most = time.monotonic(), self._timeouts.silence_seconds
        return {name: now - at for name, at in self._signs.items() if now - at > most}

    def _run(self) -> None:
        wait = 1.0
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                asyncio.run(self._operate())
            except Exception as error:
                # kopf gives up after some tries, on what an outage brings too. What is missed
                # meanwhile, its next list brings.
                _log.warning("the watches have ended and begin again: %s", error)
            wait = 1.0 if time.monotonic() - began > 60 else min(30.0, wait * 2)
            self._stop.wait(jitter(wait))

    async def _operate(self) -> None:
        registry = kopf.OperatorRegistry()
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.peering.standalone = True
        settings.scanning.disabled = True
        settings.watching.server_timeout = int(max(1, self._timeouts.watch_seconds))
        settings.watching.client_timeout = self._timeouts.watch_seconds + 30
        settings.watching.connect_timeout = min(10.0, self._timeouts.api_seconds)
        settings.watching.inactivity_timeout = min(INACTIVE_S, self._timeouts.silence_seconds)
        settings.watching.chunk_size = 500
        settings.networking.request_timeout = self._timeouts.api_seconds * 4
        settings.networking.enforce_retry_after = True
        settings.queueing.idle_timeout = IDLE_S
        settings.persistence.consistency_timeout = 0
        settings.persistence.diffbase_storage = _NoDifferences()
        settings.persistence.progress_storage = _NoProgress()
        settings.process.ultimate_exiting_timeout = None
        for resource in (CLUSTERS, PODS):
            settings.watching.label_selectors[resource.plural] = names.JOB

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            return kopf.AiohttpSession(
                server=self._config.host, aiohttp_session=self._session()
            )  # fmt: skip

        for resource in WATCHED:
            self._subscribe(registry, resource)
        # Not the threads' own event: kopf would wait for that in a thread of the loop's pool,
        # and a loop does not close before its threads have ended.
        loop, flag = asyncio.get_running_loop(), asyncio.Event()
        self._end_round = lambda: _from_thread(loop, flag)
        if self._stop.is_set():
            return
        await kopf.operator(
            registry=registry, settings=settings, standalone=True,
            clusterwide=not self._namespaces, namespaces=list(self._namespaces),
            stop_flag=flag,
        )  # fmt: skip

    def _subscribe(self, registry: kopf.OperatorRegistry, resource: Resource) -> None:
        async def handler(event: Any, **_: Any) -> None:
            found = event.get("object") or {}
            namespace = (found.get("metadata") or {}).get("namespace") or ""
            self._sign(resource.path(namespace if self._namespaces else ""))
            try:
                self._received(resource, event.get("type"), found)
            except Exception:
                _log.exception("an event of %s could not be taken in", resource.plural)

        kopf.on.event(
            resource.group, resource.version, resource.plural, registry=registry,
            id=resource.plural,
        )(handler)  # fmt: skip

    def _sign(self, path: str) -> None:
        if path in self._signs:
            self._signs[path] = time.monotonic()
            self._tell(path.rsplit("/", 1)[-1], time.time())

    def _session(self) -> aiohttp.ClientSession:
        """As the official client would connect; every new watch is a sign of life."""
        headers = {"User-Agent": FIELD_MANAGER}
        settings: dict[str, Any] = dict(self._config.auth_settings())
        for setting in settings.values():
            headers[setting["key"]] = setting["value"]
        trace = aiohttp.TraceConfig()

        async def answered(_session: Any, _context: Any, told: Any) -> None:
            if told.response.status == 200:
                self._sign(told.url.path)

        trace.on_request_end.append(answered)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls()), headers=headers,
            trace_configs=[trace],
        )  # fmt: skip

    def _tls(self) -> ssl.SSLContext | bool:
        config = self._config
        if not config.host.startswith("https"):
            return False
        context = ssl.create_default_context(
            cafile=config.ssl_ca_cert or None, cadata=getattr(config, "ca_cert_data", None)
        )
        if not config.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if config.cert_file:
            context.load_cert_chain(config.cert_file, config.key_file)
        return context


class _NoDifferences(kopf.DiffBaseStorage):
    """kopf compares every object with what it was before, for handlers that are not used here.

    Copying objects for that was most of what the operator did in a burst.
    """

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is left on objects."""


class _NoProgress(kopf.ProgressStorage):
    """No handler of ours is one that kopf tries again."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is left on objects."""

    def purge(self, **_: Any) -> None:
        """Nothing was."""

    def touch(self, **_: Any) -> None:
        """Nothing is left on objects."""

    def clear(self, *, essence: Any) -> Any:
        return essence


def _from_thread(loop: asyncio.AbstractEventLoop, flag: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
        loop.call_soon_threadsafe(flag.set)

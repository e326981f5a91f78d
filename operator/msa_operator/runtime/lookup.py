"""Connections whose name is looked up within a limit, however long the resolver takes.

The C library waits for a name server that says nothing as long as ``resolv.conf`` says, for each
search domain again: most of a minute, in which the thread cannot be interrupted.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError

MOST = 32
"""Lookups that may wait at once; with more the resolver is as good as gone."""

Resolve = Callable[[str], str]
"""The first address of a name; raises :class:`socket.gaierror`."""


def first_address(name: str) -> str:
    """As the C library has it, in its order of preference."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


class Lookups:
    """Lookups in threads of their own: whoever asks waits no longer than its limit."""

    def __init__(self, seconds: float, resolve: Resolve = first_address, most: int = MOST) -> None:
        self._seconds = seconds
        self._resolve = resolve
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[str, Future[str]] = {}

    def address(self, name: str) -> str:
        """An address; raises :class:`TimeoutError`, or what the resolver raises.

        A name that is being looked up is not looked up a second time.
        """
        with self._lock:
            asked = self._waiting.get(name)
            if asked is None:
                if len(self._waiting) >= self._most:
                    raise TimeoutError(f"{self._most} lookups of names wait for an answer")
                asked = self._waiting[name] = Future()
                threading.Thread(
                    target=self._look, args=(name, asked), name="lookup", daemon=True
                ).start()
        try:
            return asked.result(self._seconds)
        except TimeoutError:
            raise TimeoutError(f"no name server answered in {self._seconds:g} s") from None

    def _look(self, name: str, asked: Future[str]) -> None:
        try:
            found = self._resolve(name)
        except BaseException as error:
            self._answered(name)
            asked.set_exception(error)
        else:
            self._answered(name)
            asked.set_result(found)

    def _answered(self, name: str) -> None:
        with self._lock:
            del self._waiting[name]


def bound(pool: urllib3.PoolManager, lookups: Lookups) -> None:
    """Has the plain connections of a pool, such as those to heads, look names up that way.

    Those with TLS are left alone: a proxy outside of the cluster, by a name that must stay.
    """

    class Connection(HTTPConnection):
        def connect(self) -> None:
            name = self.host
            try:
                self.host = lookups.address(name)
            except TimeoutError as late:
                raise ConnectTimeoutError(self, f"{name}: {late}") from None
            except OSError as error:
                unknown = error if isinstance(error, socket.gaierror) else socket.gaierror(error)
                raise NameResolutionError(name, self, unknown) from None
            try:
                super().connect()
            finally:
                self.host = name

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls: Any = Connection

    pool.pool_classes_by_scheme = {**pool.pool_classes_by_scheme, "http": Pool}

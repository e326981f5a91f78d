"""One operator at a time: a Lease, held and renewed by a thread with a client of its own.

Whether another's Lease has run out is judged by how long it was seen unchanged here, never by the
times in it: clocks differ. A Lease fences nothing, so :meth:`Lease.check` reads it again before
anything destructive, and whoever loses it ends its process.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from msa_operator.runtime.kube import LEASES, Kube, KubeError
from msa_operator.settings import Lease as Timing

_log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """Another operator acts now, or this one cannot know whether it does."""


class Lease:
    def __init__(
        self, kube: Kube, namespace: str, name: str, holder: str, timing: Timing,
        renewed: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._kube, self._namespace, self._name = kube, namespace, name
        self.holder = holder
        self._timing = timing
        self._renewed = renewed
        self._clock = clock
        self._stop = threading.Event()
        self._held = threading.Event()
        self.lost = threading.Event()
        self._last = 0.0
        """When it was last renewed."""
        self._other: tuple[str, float] = ("", 0.0)
        """Version in which another's was last seen to change, and when."""
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def acquired(self, timeout: float | None = None) -> bool:
        """Waits until it is held; False when it was not in time."""
        return self._held.wait(timeout)

    @property
    def held(self) -> bool:
        """As far as this process knows by itself."""
        fresh = self._clock() - self._last < self._timing.renew_seconds
        return self._held.is_set() and not self.lost.is_set() and fresh

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def check(self) -> None:
        """Reads the Lease; raises :class:`LeaseLost` unless it is ours, :class:`KubeError`."""
        found = self._kube.find(LEASES, self._namespace, self._name)
        if not self.held or _holder(found) != self.holder:
            self.lost.set()
            raise LeaseLost(f"the Lease is held by {_holder(found) or 'nobody'}")

    def stop(self, release: bool = True) -> None:
        """Stops renewing; with ``release`` the next operator need not wait until it runs out."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._timing.retry_seconds + 20)
        if not release or not self._held.is_set() or self.lost.is_set():
            return
        try:
            found = self._kube.find(LEASES, self._namespace, self._name)
            if found is not None and _holder(found) == self.holder:
                found["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._kube.update(LEASES, self._namespace, self._name, found)
        except KubeError as error:
            _log.warning("the Lease could not be given back and runs out by itself: %s", error)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._clock()
            try:
                mine = self._try()
                self._renewed("ok" if mine else "other")
            except KubeError as error:
                mine = False
                self._renewed("error")
                level = logging.WARNING if self._held.is_set() else logging.INFO
                _log.log(level, "the Lease could not be renewed: %s", error)
            if mine:
                # Counted from before the call: the server may have taken it as early.
                self._last = began
                if not self._held.is_set():
                    _log.info("holding the Lease %s as %s", self._name, self.holder)
                    self._held.set()
            elif self._held.is_set() and not self.held:
                _log.error("the Lease is lost")
                self.lost.set()
                return
            self._stop.wait(self._timing.retry_seconds)

    def _try(self) -> bool:
        """Take or renew it, once; False while another holds it."""
        found = self._kube.find(LEASES, self._namespace, self._name)
        if found is None:
            body = {
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._spec({}),
            }  # fmt: skip
            return self._wins(lambda: self._kube.create(LEASES, self._namespace, body))
        holder, now = _holder(found), self._clock()
        if holder and holder != self.holder:
            if self._held.is_set():
                _log.error("the Lease is held by %s now", holder)
                self.lost.set()
                self._stop.set()
                return False
            version = str(found["metadata"].get("resourceVersion"))
            if self._other[0] != version:
                self._other = version, now
                _log.info("waiting: the Lease is held by %s", holder)
            if now - self._other[1] < _duration(found, self._timing.duration_seconds):
                return False
            _log.info("taking the Lease: %s has not renewed it", holder)
        found["spec"] = self._spec(found.get("spec") or {})
        return self._wins(lambda: self._kube.update(LEASES, self._namespace, self._name, found))

    def _wins(self, write: Callable[[], Any]) -> bool:
        try:
            write()
        except KubeError as error:
            if error.conflict:
                return False
            raise
        return True

    def _spec(self, old: dict[str, Any]) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        now = now.replace("+00:00", "Z")
        spec = {
            **old, "holderIdentity": self.holder, "renewTime": now,
            "leaseDurationSeconds": max(1, round(self._timing.duration_seconds)),
        }  # fmt: skip
        if old.get("holderIdentity") != self.holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(old.get("leaseTransitions") or 0) + bool(old)
        return spec


def _holder(found: dict[str, Any] | None) -> str:
    return str(((found or {}).get("spec") or {}).get("holderIdentity") or "")


def _duration(found: dict[str, Any], least: float) -> float:
    told = (found.get("spec") or {}).get("leaseDurationSeconds")
    return float(told) if isinstance(told, int) and told > 0 else least

"""Facts of the Kubernetes cluster that all jobs share: nodes and HardwareProfiles, asked rarely.

Where the operator may not read them, they are unknown: that is said once, and never an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from msa_operator.api import HardwareProfile
from msa_operator.api.job import API_VERSION
from msa_operator.api.read import Reader
from msa_operator.runtime import views
from msa_operator.runtime.kube import NODES, PROFILES, Kube, KubeError

PROFILES_S = 30.0
NODES_S = 300.0
"""Only the largest node's memory is wanted, for plans of CPU jobs."""
NODE_S = 5.0
"""One node's state, when a pod on it is in trouble."""

_log = logging.getLogger(__name__)
T = TypeVar("T")
_SUFFIXES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6,
             "G": 10**9, "T": 10**12, "m": 1e-3, "": 1}  # fmt: skip


class ClusterFacts:
    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Any]] = {}
        self._denied: set[str] = set()

    def node(self, name: str) -> Literal["there", "silent", "gone"]:
        """Whether a node's machine runs. One that cannot be read is taken to."""

        def ask() -> Literal["there", "silent", "gone"]:
            found = self._kube.find(NODES, "", name)
            return "gone" if found is None else views.node_state(found)

        return self._cached(f"node/{name}", NODE_S, ask, "there")

    def largest_node(self) -> int | None:
        """Bytes of memory that pods can be given on the largest node; None when not known."""

        def ask() -> int | None:
            sizes = [_allocatable(node) for node in self._kube.list(NODES)]
            return max(sizes, default=0) or None

        return self._cached("nodes", NODES_S, ask, None)

    def profiles(self) -> tuple[HardwareProfile, ...]:
        """Every HardwareProfile that can be read."""

        def ask() -> tuple[HardwareProfile, ...]:
            found = []
            for raw in self._kube.list(PROFILES):
                reader = Reader(lambda _: "")
                name = (raw.get("metadata") or {}).get("name")
                profile = reader.read(HardwareProfile, {
                    "apiVersion": API_VERSION, "kind": "HardwareProfile",
                    "metadata": {"name": name}, "spec": raw.get("spec"),
                })  # fmt: skip
                if profile is None:
                    _log.warning("HardwareProfile %s: %s", name, reader.problems[0])
                else:
                    found.append(profile)
            return tuple(found)

        return self._cached("profiles", PROFILES_S, ask, ())

    def edition(self) -> Any:
        """Equal as long as plans would be made from the same facts."""
        return self.largest_node(), self.profiles()

    def _cached(self, what: str, seconds: float, ask: Callable[[], T], unknown: T) -> T:
        with self._lock:
            known = self._known.get(what)
            if known is not None and self._clock() - known[0] < seconds:
                return known[1]
        try:
            value = ask()
        except KubeError as error:
            if error.code not in (403, 404):
                raise
            if what not in self._denied:
                self._denied.add(what)
                _log.warning("%s cannot be read: %s", what, error)
            value = unknown
        with self._lock:
            self._known[what] = self._clock(), value
        return value


def _allocatable(node: dict[str, Any]) -> int:
    text = ((node.get("status") or {}).get("allocatable") or {}).get("memory")
    if not isinstance(text, str):
        return 0
    number = text.rstrip("KMGTikm")
    try:
        return int(float(number) * _SUFFIXES[text[len(number) :]])
    except (KeyError, ValueError):
        return 0

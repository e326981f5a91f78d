"""What the watches brought: the newest known state of jobs, their clusters and their pods.

After a write of ours the written object is what is known, until the watch has caught up with it:
what it brings in between is older. An index by job makes a look at one job cheap however many
there are, and of each object only what is needed is kept.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from msa_operator.runtime import views
from msa_operator.runtime.kube import CLUSTERS, JOBS, PODS, Resource
from msa_operator.runtime.views import Key, Meta, RayCluster, RayPod

REMEMBERED = 8
"""Versions of one object that may come within the time of one answer."""
CATCH_UP_S = 5.0
"""A watch that has not brought our own write for this long will not: what it brought counts."""


@dataclass(frozen=True)
class JobObject:
    """A job object, kept as a text: a tenth of the memory that its mappings take."""

    meta: Meta
    packed: bytes
    finalizers: tuple[str, ...]
    deletion: str | None
    """When its deletion was asked for, as the API server writes it."""

    @property
    def key(self) -> Key:
        return self.meta.namespace, self.meta.name

    @cached_property
    def raw(self) -> dict[str, Any]:
        """Its spec, status and what else is needed of it."""
        return json.loads(self.packed)


T = TypeVar("T", JobObject, RayCluster, RayPod)


@dataclass(slots=True)
class _Slot(Generic[T]):
    value: T
    touched: float
    expected: str = ""
    """The version of our own write, until the watch brings it."""
    until: float = 0.0
    late: T | None = None
    """The newest that the watch brought meanwhile."""
    brought: tuple[str, ...] = ()
    """Versions that the watch brought last: it may be faster than the answer to our write."""


@dataclass
class _Shelf(Generic[T]):
    """Objects of one kind by uid."""

    read: Callable[[Any], T | None]
    owner: Callable[[T], Key]
    slots: dict[str, _Slot[T]] = field(default_factory=dict)
    index: dict[Key, set[str]] = field(default_factory=dict)

    def put(self, value: T, now: float, expected: str = "") -> None:
        slot = self.slots.get(value.meta.uid)
        if slot is None:
            slot = self.slots[value.meta.uid] = _Slot(value, now, brought=(value.meta.version,))
            self.index.setdefault(self.owner(value), set()).add(value.meta.uid)
        slot.value, slot.touched, slot.late = value, now, None
        slot.expected, slot.until = expected, now + CATCH_UP_S if expected else 0.0

    def watch(self, value: T, now: float) -> None:
        slot = self.slots.get(value.meta.uid)
        if slot is not None:
            slot.brought = (*slot.brought, value.meta.version)[-REMEMBERED:]
        waits = slot is not None and slot.expected and now < slot.until
        if slot is not None and waits and value.meta.version != slot.expected and not _newer(
            value.meta, slot.value.meta
        ):  # fmt: skip
            # Events that come together are told as the last of them, so the version that is
            # waited for may never come: an edit or a deletion shows by itself that it is newer.
            slot.late = value
            return
        self.put(value, now)

    def drop(self, uid: str) -> Key | None:
        slot = self.slots.pop(uid, None)
        if slot is None:
            return None
        key = self.owner(slot.value)
        uids = self.index.get(key, set())
        uids.discard(uid)
        if not uids:
            self.index.pop(key, None)
        return key

    def unsettled(self, key: Key, now: float) -> float | None:
        """Seconds until something of the job's that came late counts."""
        slots = (self.slots[uid] for uid in self.index.get(key, ()))
        left = [slot.until - now for slot in slots if slot.expected and slot.late is not None]
        return max(0.0, min(left)) if left else None

    def of(self, key: Key, now: float) -> list[T]:
        found = []
        for uid in sorted(self.index.get(key, ())):
            slot = self.slots[uid]
            if slot.expected and now >= slot.until:
                slot.value, slot.late, slot.expected = slot.late or slot.value, None, ""
            found.append(slot.value)
        return found


class Store:
    """Thread-safe. Reads give values that nobody changes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: _Shelf[JobObject] = _Shelf(job, lambda j: j.key)
        self._clusters: _Shelf[RayCluster] = _Shelf(views.cluster, lambda c: c.meta.key)
        self._pods: _Shelf[RayPod] = _Shelf(views.pod, lambda p: p.meta.key)
        self._shelves: dict[str, _Shelf[Any]] = {
            JOBS.plural: self._jobs, CLUSTERS.plural: self._clusters, PODS.plural: self._pods,
        }  # fmt: skip
        self._strangers: dict[Key, dict[str, RayCluster]] = {}

    def event(self, resource: Resource, kind: str | None, raw: Any) -> Key | None:
        """Take in what a watch brought; the job that it concerns, if any."""
        shelf = self._shelves[resource.plural]
        with self._lock:
            if kind == "DELETED":
                found = views.meta(raw)
                return None if found is None else shelf.drop(found.uid)
            value = shelf.read(raw)
            if value is None:
                return None
            shelf.watch(value, self._clock())
            return shelf.owner(value)

    def wrote(self, resource: Resource, raw: Any) -> None:
        """Take in the answer to our own write, or a read that was made because of a conflict."""
        shelf = self._shelves[resource.plural]
        value = shelf.read(raw)
        if value is None:
            return
        with self._lock:
            slot = shelf.slots.get(value.meta.uid)
            known = () if slot is None else (slot.value.meta.version, *slot.brought)
            if value.meta.version not in known:
                shelf.put(value, self._clock(), value.meta.version)

    def removed(self, resource: Resource, uid: str) -> None:
        """The object is known to be gone."""
        with self._lock:
            self._shelves[resource.plural].drop(uid)

    def stranger(self, key: Key, found: RayCluster) -> None:
        """A cluster that is not ours has the name that the job wanted."""
        with self._lock:
            self._strangers.setdefault(key, {})[found.meta.name] = found

    def replace(
        self, resource: Resource, found: Iterable[Any], began: float, inside: Iterable[str] = ()
    ) -> set[Key]:
        """Take in a whole list that was begun at ``began``; the jobs of which something was news.

        What changed here since then is newer than the list. ``inside`` names the namespaces that
        were listed, when it was not all of them.
        """
        shelf, changed, listed = self._shelves[resource.plural], set[Key](), set[str]()
        within = set(inside)
        for raw in found:
            value = shelf.read(raw)
            if value is None:
                continue
            listed.add(value.meta.uid)
            with self._lock:
                slot = shelf.slots.get(value.meta.uid)
                if slot is None or (
                    slot.touched < began and slot.value.meta.version != value.meta.version
                ):
                    shelf.put(value, self._clock())
                    changed.add(shelf.owner(value))
        with self._lock:
            gone = [
                uid for uid, slot in shelf.slots.items()
                if uid not in listed and slot.touched < began
                and (not within or slot.value.meta.namespace in within)
            ]  # fmt: skip
            changed |= {key for uid in gone if (key := shelf.drop(uid)) is not None}
        return changed

    def known(self) -> list[Key]:
        """Every job."""
        with self._lock:
            return list(self._jobs.index)

    def job(self, key: Key) -> JobObject | None:
        with self._lock:
            found = self._jobs.of(key, self._clock())
            # A namesake that was deleted may still be there; the newer one is not being deleted.
            newest = min(found, key=lambda j: j.meta.deleting, default=None)
        # A copy, so that what is unpacked of it goes when whoever asked has done with it.
        return None if newest is None else replace(newest)

    def clusters(self, key: Key) -> list[RayCluster]:
        with self._lock:
            known = self._clusters.of(key, self._clock())
            names = {c.meta.name for c in known}
            others = self._strangers.get(key, {}).values()
            return known + [c for c in others if c.meta.name not in names]

    def pods(self, key: Key) -> list[RayPod]:
        with self._lock:
            return self._pods.of(key, self._clock())

    def unsettled(self, key: Key) -> float | None:
        """Seconds after which a job is to be looked at again: what the watch brought may count
        by then. None when there is nothing like that."""
        with self._lock:
            now = self._clock()
            left = [shelf.unsettled(key, now) for shelf in self._shelves.values()]
        return min((seconds for seconds in left if seconds is not None), default=None)

    def forget(self, key: Key) -> None:
        with self._lock:
            self._strangers.pop(key, None)

    def counts(self) -> dict[str, int]:
        """How many objects of each kind are known."""
        with self._lock:
            return {name: len(shelf.slots) for name, shelf in self._shelves.items()}


def _newer(found: Meta, known: Meta) -> bool:
    return found.generation > known.generation or (found.deleting and not known.deleting)


def job(raw: Any) -> JobObject | None:
    """A job object, without what nobody reads of it."""
    found = views.meta(raw)
    if found is None:
        return None
    inside = raw["metadata"]
    deletion = inside.get("deletionTimestamp")
    kept = {
        "apiVersion": raw.get("apiVersion"), "kind": raw.get("kind"),
        "metadata": {"name": found.name, "namespace": found.namespace},
        "spec": raw.get("spec"), "status": raw.get("status"),
    }  # fmt: skip
    marks = inside.get("finalizers")
    return JobObject(
        found, json.dumps(kept, separators=(",", ":")).encode(),
        tuple(f for f in marks if isinstance(f, str)) if marks else (),
        deletion if isinstance(deletion, str) else None,
    )  # fmt: skip

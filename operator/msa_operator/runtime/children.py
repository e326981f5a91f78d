"""A job's children on the API server: created in order, adopted only when ours, deleted by uid."""

from __future__ import annotations

from typing import Any

from msa_operator.reconcile import names
from msa_operator.reconcile.desired import Owner, Rendered
from msa_operator.runtime import views
from msa_operator.runtime.kube import (
    CLUSTERS,
    CONFIGMAPS,
    JSON_PATCH,
    POLICIES,
    Kube,
    KubeError,
    Resource,
)
from msa_operator.runtime.store import Store
from msa_operator.runtime.views import RayCluster

_KINDS = {"ConfigMap": CONFIGMAPS, "NetworkPolicy": POLICIES, "RayCluster": CLUSTERS}


class NameTaken(Exception):
    """An object of that name is not ours."""

    def __init__(self, kind: str, found: RayCluster) -> None:
        super().__init__(f"another owner has a {kind} named {found.meta.name}")
        self.found = found


class Children:
    def __init__(self, kube: Kube, store: Store) -> None:
        self._kube = kube
        self._store = store

    def create(self, rendered: Rendered, name: str, owner: Owner, *, first: bool) -> None:
        """ConfigMap, NetworkPolicy and RayCluster; those that exist and are ours are left alone.

        Unless it is the job's ``first`` cluster, what earlier ones left is swept. Raises
        :class:`NameTaken` and :class:`KubeError`.
        """
        for body in rendered.children(name):
            resource = _KINDS[body["kind"]]
            try:
                made = self._kube.create(resource, owner.namespace, body)
            except KubeError as error:
                if not error.conflict:
                    raise
                made = self._adopt(resource, body["kind"], name, owner, error)
            if resource is CLUSTERS:
                self._store.wrote(CLUSTERS, made)
        if not first:
            self._sweep(owner, name)

    def delete_cluster(self, owner: Owner, name: str, uid: str) -> None:
        """Its pods and Services go with it. The ConfigMap stays: it is the record of the run."""
        if self._kube.delete(CLUSTERS, owner.namespace, name, uid):
            found = self._kube.find(CLUSTERS, owner.namespace, name)
            if found is not None and (seen := views.meta(found)) and seen.uid == uid:
                self._store.wrote(CLUSTERS, found)
                return
        self._store.removed(CLUSTERS, uid)

    def release_workers(self, owner: Owner, name: str, uid: str) -> None:
        """The cluster without workers; nothing else of it is touched."""
        patch: list[dict[str, Any]] = [{"op": "test", "path": "/metadata/uid", "value": uid}]
        for field in ("replicas", "minReplicas"):
            path = f"/spec/workerGroupSpecs/0/{field}"
            patch.append({"op": "replace", "path": path, "value": 0})
        answer = self._kube.patch(CLUSTERS, owner.namespace, name, patch, kind=JSON_PATCH)
        self._store.wrote(CLUSTERS, answer)

    def _adopt(
        self, resource: Resource, kind: str, name: str, owner: Owner, error: KubeError
    ) -> dict[str, Any]:
        """The object that exists already, if the job owns it."""
        found = self._kube.find(resource, owner.namespace, name)
        if found is None:
            raise error  # it has gone since: created in the next round
        seen = views.meta(found)
        if seen is None or seen.owner != owner.uid:
            stranger = views.cluster(found)
            if stranger is None:
                raise error
            raise NameTaken(kind, stranger)
        return found

    def _sweep(self, owner: Owner, name: str) -> None:
        """What clusters before this one left: their records, and policies for no pod."""
        mark = f"{names.JOB_UID}={owner.uid}"
        for resource in (CONFIGMAPS, POLICIES):
            for old in self._kube.list(resource, owner.namespace, mark):
                seen = views.meta(old)
                if seen is not None and seen.owner == owner.uid and seen.name != name:
                    self._kube.delete(resource, owner.namespace, seen.name, seen.uid)

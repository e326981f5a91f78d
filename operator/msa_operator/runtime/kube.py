"""The API server by way of the official client: plain mappings in and out, one kind of error.

Nothing is tried again in here: a call either answers or raises :class:`KubeError`, and whoever
called looks at the world anew. Every call has a time limit on both sides.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from msa_operator.runtime.gate import Gate

FIELD_MANAGER = "flash-msa-operator"
PROGRESS_MANAGER = "flash-msa-operator-progress"
"""Of progress alone, so that one can see in managedFields who wrote what."""
CONNECT_S = 5.0
"""A server that does not take a connection for this long is tried again later."""
PAGE = 500
"""Objects per page of a list: a few megabytes of pods at most."""
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

Requested = Callable[[str, str, int | str, float], None]
"""Told of every call: verb, resource, status code or a word, seconds."""


class KubeError(Exception):
    """A call that did not succeed. ``code`` is 0 when no answer came."""

    def __init__(
        self, code: int, reason: str, message: str, retry_after: float | None,
        causes: tuple[Mapping[str, Any], ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(f"{code} {reason}: {message}" if code else message)
        self.code = code
        self.reason = reason
        """As the API server names it: NotFound, Conflict, AlreadyExists and so on."""
        self.message = message
        self.retry_after = retry_after
        """Seconds that the server asks to wait."""
        self.causes = causes
        """Of a refused object: field, reason and message of each fault."""

    @property
    def gone(self) -> bool:
        return self.code == 404

    @property
    def conflict(self) -> bool:
        """Something changed since it was read, or exists already: look again."""
        return self.code == 409

    @property
    def refused(self) -> bool:
        """The request itself is wrong: sent again it would be refused again."""
        return self.code in (400, 403, 413, 422)


@dataclass(frozen=True)
class Resource:
    """Where objects of one kind are."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        inside = f"/namespaces/{quote(namespace)}" if self.namespaced and namespace else ""
        parts = "".join(f"/{quote(p)}" for p in (name, subresource) if p)
        return f"{root}{inside}/{self.plural}{parts}"

    @property
    def root(self) -> str:
        """What answers 200 when the kind's group and version are served."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


JOBS = Resource("flashmsa.dev", "v1alpha1", "longcontextjobs")
PROFILES = Resource("flashmsa.dev", "v1alpha1", "hardwareprofiles", namespaced=False)
CLUSTERS = Resource("ray.io", "v1", "rayclusters")
PODS = Resource("", "v1", "pods")
NODES = Resource("", "v1", "nodes", namespaced=False)
CONFIGMAPS = Resource("", "v1", "configmaps")
SECRETS = Resource("", "v1", "secrets")
EVENTS = Resource("", "v1", "events")
TEMPLATES = Resource("", "v1", "podtemplates")
POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies")
LEASES = Resource("coordination.k8s.io", "v1", "leases")


def configuration(
    kubeconfig: str | None = None, url: str | None = None, retries: int = 0, connections: int = 32
) -> client.Configuration:
    """How to reach the API server: in a pod by its service account, else by a kubeconfig.

    ``url`` replaces the address, for a proxy in between. ``retries`` is the HTTP client's own
    number of silent retries. Raises :class:`kubernetes.config.ConfigException`.
    """
    found = client.Configuration()
    if kubeconfig is None:
        try:
            config.load_incluster_config(client_configuration=found)
        except config.ConfigException:
            config.load_kube_config(client_configuration=found)
    else:
        config.load_kube_config(kubeconfig, client_configuration=found)
    if url:
        found.host = url.rstrip("/")
    found.retries = urllib3.Retry(retries) if retries else False  # type: ignore[assignment]
    found.connection_pool_maxsize = connections
    return found


class Kube:
    """Calls of the API server, by any number of threads at once."""

    def __init__(
        self, found: client.Configuration, timeout: float = 15.0,
        requested: Requested = lambda *_: None, gate: Gate | None = None,
    ) -> None:  # fmt: skip
        self._config = found
        self._gate = gate or Gate()
        self._rest = client.ApiClient(found).rest_client
        self._timeout = timeout
        self._requested = requested

    def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any]:
        return self.call("GET", resource.path(namespace, name), resource.plural)

    def find(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """The object, or None when there is none of that name."""
        try:
            return self.get(resource, namespace, name)
        except KubeError as error:
            if error.gone:
                return None
            raise

    def list(
        self, resource: Resource, namespace: str = "", labels: str = ""
    ) -> Iterator[dict[str, Any]]:
        """Every object, page by page; all namespaces' where none is given."""
        query: dict[str, Any] = {"limit": PAGE}
        if labels:
            query["labelSelector"] = labels
        while True:
            answer = self.call(
                "GET", resource.path(namespace), resource.plural, query=query, verb="LIST"
            )
            items = answer.get("items")
            yield from items if isinstance(items, list) else ()
            token = (answer.get("metadata") or {}).get("continue")
            if not token:
                return
            query["continue"] = token

    def create(
        self, resource: Resource, namespace: str, body: dict[str, Any], *, dry_run: bool = False
    ) -> dict[str, Any]:
        query = {"fieldManager": FIELD_MANAGER}
        if dry_run:
            query |= {"dryRun": "All", "fieldValidation": "Strict"}
        return self.call(
            "POST", resource.path(namespace), resource.plural, body=body, query=query,
            verb="DRYRUN" if dry_run else "CREATE",
        )  # fmt: skip

    def update(
        self, resource: Resource, namespace: str, name: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        """Replaces the object; refused when its resourceVersion is not the newest."""
        return self.call("PUT", resource.path(namespace, name), resource.plural, body=body)

    def patch(
        self, resource: Resource, namespace: str, name: str, body: Any, *,
        subresource: str = "", kind: str = MERGE, manager: str = FIELD_MANAGER,
        dry_run: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        path = resource.path(namespace, name, subresource)
        what = f"{resource.plural}/{subresource}" if subresource else resource.plural
        query = {"fieldManager": manager}
        if dry_run:
            query["dryRun"] = "All"
        return self.call(
            "PATCH", path, what, body=body, query=query, content=kind,
            verb="DRYRUN" if dry_run else "",
        )  # fmt: skip

    def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, *, grace: int | None = None
    ) -> bool:
        """Deletes the object with that uid; False when it is not there any more."""
        body: dict[str, Any] = {
            "apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }  # fmt: skip
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            self.call("DELETE", resource.path(namespace, name), resource.plural, body=body)
        except KubeError as error:
            # A conflict says that the uid is another one: ours is gone.
            if error.gone or error.conflict:
                return False
            raise
        return True

    def served(self, resource: Resource) -> bool:
        """Whether the API server knows the kind."""
        try:
            answer = self.call("GET", resource.root, "discovery")
        except KubeError as error:
            if error.gone:
                return False
            raise
        found = answer.get("resources")
        return any(
            isinstance(r, Mapping) and r.get("name") == resource.plural
            for r in (found if isinstance(found, list) else ())
        )

    def call(
        self, method: str, path: str, what: str, *, body: Any = None,
        query: Mapping[str, Any] | None = None, content: str = "application/json", verb: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """One request. Raises :class:`KubeError`, also for an answer that is no JSON object."""
        limits = {"timeout": f"{max(1, int(self._timeout))}s", **(query or {})}
        headers = {"Accept": "application/json", "User-Agent": FIELD_MANAGER}
        if body is not None:
            headers["Content-Type"] = content
        settings: dict[str, Any] = dict(self._config.auth_settings())
        for setting in settings.values():
            headers[setting["key"]] = setting["value"]
        began, code = time.monotonic(), "error"
        try:
            with self._gate.waiting():
                answer = self._rest.request(
                    method, f"{self._config.host}{path}?{urlencode(limits)}", headers=headers,
                    body=body, _request_timeout=(CONNECT_S, self._timeout + CONNECT_S),
                )  # fmt: skip
            raw = answer.data if answer.data is not None else answer.read()
            code = answer.status
        except ApiException as error:
            code = error.status or 0
            raise _refusal(error) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            code = "timeout" if isinstance(error, urllib3.exceptions.TimeoutError) else "error"
            raise KubeError(0, "", f"{method} {path}: {error}", None) from None
        finally:
            self._requested(verb or method, what, code, time.monotonic() - began)
        if not 200 <= answer.status < 300:
            raise _refusal(ApiException(http_resp=answer))
        try:
            found = json.loads(raw)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise KubeError(0, "", f"{method} {path}: the answer is no JSON object", None)
        return found


def _refusal(error: ApiException) -> KubeError:
    reason, message, wait = str(error.reason or ""), "", None
    causes: tuple[Mapping[str, Any], ...] = ()
    try:
        told = json.loads(error.body or "")
        reason, message = str(told.get("reason") or reason), str(told.get("message") or "")
        details = told.get("details") or {}
        wait = details.get("retryAfterSeconds")
        causes = tuple(c for c in details.get("causes") or () if isinstance(c, Mapping))
    except (ValueError, TypeError, AttributeError):
        message = str(error.body or "")[:500]
    header = (error.headers or {}).get("Retry-After")
    for text in (header, wait):
        try:
            wait = max(0.0, float(str(text)))
            return KubeError(error.status or 0, reason, message, wait, causes)
        except ValueError:
            continue
    return KubeError(error.status or 0, reason, message, None, causes)


def jitter(seconds: float, rng: Callable[[], float] = random.random) -> float:
    """Between 75 % and 125 % of it, so that what failed together is not tried together."""
    return seconds * (0.75 + rng() / 2)

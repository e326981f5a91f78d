"""What a proxy may do to requests, as values: which ones, how often, and what."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_PATH = re.compile(
    r"^/(?:api/[^/]+|apis/(?P<group>[^/]+)/[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)


@dataclass(frozen=True)
class Call:
    """A request, in the words of Kubernetes' access rules."""

    verb: str
    resource: str
    """With its subresource, as ``longcontextjobs/status``."""
    namespace: str = ""
    name: str = ""

    @classmethod
    def of(cls, method: str, path: str, watch: bool) -> Call:
        """What a method and a path ask for; requests that name no resource are ``get PATH``."""
        found = _PATH.match(path)
        if found is None:
            return cls(method.lower(), path)
        resource, name, sub = (found[key] or "" for key in ("resource", "name", "sub"))
        if resource == "namespaces" and sub not in ("", "status", "finalize"):
            raise AssertionError(f"{path} names a resource of a namespace")
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(method, "")
        if method == "DELETE":
            verb = "delete" if name else "deletecollection"
        elif method == "GET":
            verb = "get" if name else "watch" if watch else "list"
        return cls(verb, f"{resource}/{sub}" if sub else resource, found["namespace"] or "", name)

    @property
    def write(self) -> bool:
        return self.verb in WRITES

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.namespace}/{self.name}".rstrip("/ ")


@dataclass(frozen=True)
class Answer:
    """This code in place of the server's answer; the server never hears of the request."""

    code: int
    reason: str = ""
    retry_after_s: int | None = None


@dataclass(frozen=True)
class Reset:
    """The connection is reset; the server never hears of the request."""


@dataclass(frozen=True)
class Lost:
    """The server does what was asked, and the connection is reset in place of its answer."""


@dataclass(frozen=True)
class Delay:
    """The request reaches the server so much later."""

    seconds: float


@dataclass(frozen=True)
class Expired:
    """A watch that is told at once, by an ERROR event, that its version is too old."""


@dataclass(frozen=True)
class Silent:
    """A watch that stays open and says nothing, until `Proxy.speak`."""


Moment = Callable[[Call, bytes], Awaitable[bool]]
"""Told of a write and its body; False drops the connection in place of going on."""

Fault = Answer | Reset | Lost | Delay | Expired | Silent


@dataclass
class Rule:
    """Does `fault` to requests of those verbs and resources, the first ``times`` of them."""

    fault: Fault
    verbs: frozenset[str]
    resources: frozenset[str] = frozenset()
    """All but leases, when empty: a lost lease is a fault of its own."""
    times: int | None = None
    share: float = 1.0
    """By chance, only this part of them: what is regular can keep step with those who retry."""
    chance: random.Random = field(default_factory=lambda: random.Random(1), init=False)
    met: int = field(default=0, init=False)
    done: int = field(default=0, init=False)

    def takes(self, call: Call) -> bool:
        """Counts the request, and says whether it is one to be harmed."""
        named = call.resource in self.resources
        if call.verb not in self.verbs or not (named or not self.resources):
            return False
        if not named and call.resource == "leases":
            return False
        self.met += 1
        if self.times is not None and self.done >= self.times:
            return False
        if self.chance.random() >= self.share:
            return False
        self.done += 1
        return True


def on(
    fault: Fault, verbs: str, resources: str = "", times: int | None = None, share: float = 1.0
) -> Rule:
    """A rule from words: ``on(Reset(), "patch create", "pods")``; "write" is all writes."""
    chosen = frozenset(verbs.split())
    if "write" in chosen:
        chosen = (chosen - {"write"}) | WRITES
    return Rule(fault, chosen, frozenset(resources.split()), times, share)

"""Whether pods may connect under given NetworkPolicies; pure.

By the rules of networking.k8s.io/v1: policies only add up; a pod that none selects for a direction
is open in that direction, one that any selects accepts what at least one rule allows. Not known
here: whether the network plugin enforces policies at all, host networking, and the node's own
traffic to its pods, which is always let through.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["Ingress", "Egress"]
Policy = Mapping[str, Any]
"""A NetworkPolicy object as an API server gives it."""
NAME_LABEL = "kubernetes.io/metadata.name"
"""The API server puts it on every namespace."""


@dataclass(frozen=True)
class Pod:
    """One end of a connection."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    """Named container ports, which policies may use in place of numbers."""
    ip: str = ""


@dataclass(frozen=True)
class Address:
    """An end outside the cluster's pods, such as the API server."""

    ip: str

    @property
    def name(self) -> str:
        return self.ip


End = Pod | Address


@dataclass(frozen=True)
class Verdict:
    allowed: bool
    why: str
    """Which policies decided, and in which direction."""


def may_reach(
    source: End, target: End, port: int, policies: Sequence[Policy],
    namespaces: Mapping[str, Mapping[str, str]] | None = None, protocol: str = "TCP",
) -> Verdict:  # fmt: skip
    """Whether ``source`` may open a connection to ``port`` of ``target``.

    ``namespaces`` gives the labels of namespaces; the label that every namespace has need not be
    in it.
    """
    world = _World(namespaces or {})
    if isinstance(source, Pod):
        leaving = _direction(source, target, target, port, protocol, "Egress", policies, world)
        if not leaving.allowed:
            return leaving
    if isinstance(target, Pod):
        return _direction(target, source, target, port, protocol, "Ingress", policies, world)
    return Verdict(True, f"{source.name} may leave, and {target.name} is outside of all policies")


@dataclass(frozen=True)
class _World:
    namespaces: Mapping[str, Mapping[str, str]]

    def labels(self, namespace: str) -> Mapping[str, str]:
        return {**self.namespaces.get(namespace, {}), NAME_LABEL: namespace}


def _direction(
    subject: Pod, peer: End, target: End, port: int, protocol: str, direction: Direction,
    policies: Iterable[Policy], world: _World,
) -> Verdict:  # fmt: skip
    """What the policies that select ``subject`` say of its connection with ``peer``."""
    selecting = [p for p in policies if _selects(p, subject, direction)]
    if not selecting:
        return Verdict(True, f"no policy selects {subject.name} for {direction.lower()}")
    for policy in selecting:
        home = policy["metadata"]["namespace"]
        for rule in policy["spec"].get(direction.lower()) or ():
            peers = rule.get("from" if direction == "Ingress" else "to")
            if _any_peer(peers, peer, home, world) and _any_port(
                rule.get("ports"), target, port, protocol
            ):
                return Verdict(True, f"{_name(policy)} allows it")
    closed = ", ".join(map(_name, selecting))
    return Verdict(False, f"{direction.lower()} of {subject.name} is closed by {closed}")


def _name(policy: Policy) -> str:
    return f"{policy['metadata']['namespace']}/{policy['metadata']['name']}"


def _selects(policy: Policy, pod: Pod, direction: Direction) -> bool:
    spec = policy["spec"]
    # Without types a policy is about ingress, and about egress when it has rules for it.
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    same = policy["metadata"]["namespace"] == pod.namespace
    return same and direction in types and matches(spec.get("podSelector") or {}, pod.labels)


def _any_peer(
    peers: Sequence[Mapping[str, Any]] | None, end: End, home: str, world: _World
) -> bool:
    """Nothing given lets all in."""
    return not peers or any(_is_peer(peer, end, home, world) for peer in peers)


def _is_peer(peer: Mapping[str, Any], end: End, home: str, world: _World) -> bool:
    if "ipBlock" in peer:
        return _inside(peer["ipBlock"], end.ip)
    if not isinstance(end, Pod):
        return False
    if (selector := peer.get("namespaceSelector")) is not None:
        if not matches(selector, world.labels(end.namespace)):
            return False
    elif end.namespace != home:
        return False
    return matches(peer.get("podSelector") or {}, end.labels)


def _inside(block: Mapping[str, Any], ip: str) -> bool:
    if not ip:
        return False
    address = ipaddress.ip_address(ip)
    excluded = (ipaddress.ip_network(cidr) for cidr in block.get("except") or ())
    return address in ipaddress.ip_network(block["cidr"]) and not any(
        address in network for network in excluded
    )


def _any_port(
    ports: Sequence[Mapping[str, Any]] | None, target: End, port: int, protocol: str
) -> bool:
    return not ports or any(_is_port(each, target, port, protocol) for each in ports)


def _is_port(given: Mapping[str, Any], target: End, port: int, protocol: str) -> bool:
    if given.get("protocol", "TCP") != protocol:
        return False
    first = given.get("port")
    if first is None:
        return True
    if isinstance(first, str):
        return isinstance(target, Pod) and target.ports.get(first) == port
    return first <= port <= given.get("endPort", first)


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector selects these labels; an empty one selects everything.

    Raises :class:`ValueError` for an operator that Kubernetes does not have.
    """
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _expression(each, labels) for each in selector.get("matchExpressions") or ()
    )


def _expression(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case other:
            raise ValueError(f"{other!r} is no operator of a label selector")

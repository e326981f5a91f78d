"""The network of one cluster: three namespaces, joined by links that exist only inside them.

    control  10.89.0.1    bridge with a link to each node; etcd and the API server listen here
    node-1   10.89.0.11   its pods 10.89.1.0/24
    node-2   10.89.0.12   its pods 10.89.2.0/24
    Services 10.89.128.0/24, of which .10 is the cluster's DNS

No namespace has a default route, nothing has an address outside 10.89.0.0/16, and the machine's
own namespace gets no interface: a packet has no way out. What a test reaches from outside, it
reaches through a forwarder that listens on loopback (forward.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine

ALL = "10.89.0.0/16"
PODS = "10.89.0.0/17"
"""Nodes and pods; Services lie above."""
SERVICES = "10.89.128.0/24"
DNS = "10.89.128.10"
CONTROL = "10.89.0.1"
API_PORT = 6443


@dataclass(frozen=True)
class Place:
    """Where a node is in the network; nodes count from 1."""

    index: int

    @property
    def name(self) -> str:
        return f"node-{self.index}"

    @property
    def address(self) -> str:
        return f"10.89.0.{10 + self.index}"

    @property
    def pods(self) -> str:
        return f"10.89.{self.index}.0/24"


def prepare_control(control: Machine) -> None:
    """Makes the bridge that the nodes are joined to."""
    control.shell(
        f"""
        ip link set lo up
        ip link add nodes type bridge
        ip address add {CONTROL}/24 dev nodes
        ip link set nodes up
        """
    )


def join(control: Machine, node: Machine, place: Place, places: list[Place]) -> None:
    """Links a node to the bridge, with a route to every pod and Service of the cluster.

    A Service's address needs a route to be looked up at all, before kube-proxy's rules rewrite
    it; one that no rule knows ends at the control namespace, which forwards nothing.
    """
    control.in_network(
        f"""
        ip link delete {place.name} 2>/dev/null || true
        ip link add {place.name} type veth peer name uplink netns {node.init.pid}
        ip link set {place.name} master nodes up
        ip route replace {place.pods} via {place.address}
        """
    )
    routes = [f"ip route add {SERVICES} via {CONTROL}"] + [
        f"ip route add {other.pods} via {other.address}" for other in places if other != place
    ]
    node.shell(
        f"""
        ip link set lo up
        ip address add {place.address}/24 dev uplink
        ip link set uplink up
        echo 1 > /proc/sys/net/ipv4/ip_forward
        """
        + "\n".join(routes)
    )


def cni_config(place: Place) -> dict[str, object]:
    """Point-to-point links: every packet is routed, so that Services work on one node too.

    On a bridge, a reply between two pods of a node would skip the rules that rewrote the request.
    """
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": place.pods}]],
        "routes": [{"dst": ALL}],
        "dataDir": "/run/cni",
    }
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [{"type": "ptp", "ipMasq": False, "mtu": 1500, "ipam": ipam}],
    }

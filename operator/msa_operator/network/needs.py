"""The connections that the operator and its runs need, and those that must stay closed; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msa_operator.network.policies import Address, End, Pod, Policy, Verdict, may_reach
from msa_operator.reconcile import names, pods

NCCL = (1024, 29500, 43210, 65535)
"""NCCL, gloo and Ray's workers listen on ports that the kernel chooses: samples of all of them."""
DASHBOARD, GCS, RAY_METRICS = 8265, 6379, 8080


@dataclass(frozen=True)
class Ends:
    """The pods of one installation and one of its jobs; those that do not exist are None."""

    operator: Pod
    head: Pod
    workers: tuple[Pod, ...]
    scraper: Pod | None = None
    """A Prometheus in ``settings.metricsNamespace``."""


@dataclass(frozen=True)
class Connection:
    source: End
    target: End
    ports: tuple[int, ...]
    why: str
    protocol: str = "TCP"


@dataclass(frozen=True)
class Closed:
    """A needed connection that policies do not let through."""

    connection: Connection
    port: int
    verdict: Verdict


def installation(
    cluster: str, namespace: str, marks: Mapping[str, str], workers: int, operator: Pod,
    scraper: Pod | None = None,
) -> Ends:  # fmt: skip
    """The ends of one job: pods carry the labels that KubeRay and the operator give them."""

    def pod(kind: str, name: str, ports: Mapping[str, int]) -> Pod:
        labels = {
            **marks, "ray.io/cluster": cluster, "ray.io/node-type": kind,
            "ray.io/is-ray-node": "yes", "app.kubernetes.io/name": "kuberay",
            "ray.io/group": "headgroup" if kind == "head" else "workers",
            "app.kubernetes.io/created-by": "kuberay-operator",
        }  # fmt: skip
        return Pod(name, namespace, labels, ports)

    head = pod("head", "head", {"control": pods.CONTROL_PORT, "dashboard": DASHBOARD, "gcs": GCS,
                                "metrics": RAY_METRICS})  # fmt: skip
    rest = tuple(pod("worker", f"worker-{n}", {}) for n in range(workers))
    return Ends(operator, head, rest, scraper)


def operator_pod(namespace: str, release: str = names.OPERATOR) -> Pod:
    """The operator as its chart labels it."""
    labels = {"app.kubernetes.io/name": names.OPERATOR, "app.kubernetes.io/instance": release}
    return Pod("operator", namespace, labels, {"http": 8080})


def needed(ends: Ends, api_server: Address, api_port: int = 443) -> tuple[Connection, ...]:
    """Everything that has to get through for jobs to run and to be seen."""
    head, workers = ends.head, ends.workers
    found = [
        Connection(ends.operator, api_server, (api_port,), "the operator watches and writes"),
        Connection(ends.operator, head, (DASHBOARD,), "the operator submits by the Jobs API"),
        Connection(ends.operator, head, (pods.CONTROL_PORT,), "the operator asks for progress"),
    ]
    for worker in workers:
        found += [
            Connection(worker, head, (GCS, *NCCL), "a worker joins its head"),
            Connection(head, worker, NCCL, "the head starts actors on a worker"),
        ]
        found += [
            Connection(worker, other, NCCL, "workers exchange gradients and keys")
            for other in workers if other is not worker
        ]  # fmt: skip
    if ends.scraper is not None:
        found += [
            Connection(ends.scraper, ends.operator, (8080,), "metrics of the operator"),
            Connection(ends.scraper, head, (RAY_METRICS, pods.CONTROL_PORT), "metrics of the run"),
        ]
    return tuple(found)


def closed(
    connections: Sequence[Connection], policies: Sequence[Policy],
    namespaces: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[Closed, ...]:  # fmt: skip
    """The needed connections that these policies do not let through."""
    found = []
    for c in connections:
        for port in c.ports:
            verdict = may_reach(c.source, c.target, port, policies, namespaces, c.protocol)
            if not verdict.allowed:
                found.append(Closed(c, port, verdict))
    return tuple(found)

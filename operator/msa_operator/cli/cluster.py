"""How commands reach a cluster, and what they say when they cannot; loads the client when used."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

from msa_operator.api.problems import closest

if TYPE_CHECKING:
    from msa_operator.runtime.kube import Kube, KubeError

FAILED = 1
BAD_INPUT = 2
NO_CLUSTER = 4
TIMED_OUT = 124
"""As coreutils' timeout has it."""

FIELD_MANAGER = "msa"
CALL_SECONDS = 15.0
RETRIED = frozenset({0, 429, 500, 502, 503, 504})
"""Codes of calls that may go well a moment later; 0 is no answer."""


@dataclass(frozen=True)
class Connection:
    """A cluster and the namespace that a command works in."""

    kube: Kube
    namespace: str
    server: str
    settings: Any
    """The client's own Configuration, for streams."""
    kubeconfig: str | None = None
    context: str | None = None
    """As they were given, for other programs."""


class Refused(Exception):
    """A command cannot do what was asked; the message says what to do."""

    def __init__(self, message: str, code: int = NO_CLUSTER) -> None:
        super().__init__(message)
        self.code = code


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--kubeconfig, --context and --namespace, as kubectl has them; passes a Connection."""

    @click.option("--kubeconfig", type=click.Path(dir_okay=False), help="Another kubeconfig file.")
    @click.option("--context", "context", help="Another context of it.")
    @click.option("-n", "--namespace", help="Default: the context's namespace.")
    @functools.wraps(command)
    def wrapped(
        *arguments: Any, kubeconfig: str | None, context: str | None, namespace: str | None,
        **options: Any,
    ) -> Any:  # fmt: skip
        with explained():
            return command(
                *arguments, connect=lambda: connect(kubeconfig, context, namespace), **options
            )

    return wrapped


def connect(
    kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
) -> Connection:
    """The cluster of a kubeconfig, or of the pod around this process. Raises :class:`Refused`."""
    from kubernetes import client, config

    from msa_operator.runtime.kube import Kube

    settings = client.Configuration()
    own = ""
    try:
        try:
            config.load_kube_config(kubeconfig, context, client_configuration=settings)
            contexts, active = config.list_kube_config_contexts(kubeconfig)
            named: dict[str, Any] = {c["name"]: c["context"] for c in [*contexts, active]}
            own = named[context or active["name"]].get("namespace") or ""
        except config.ConfigException:
            if kubeconfig or context or os.environ.get("KUBECONFIG"):
                raise
            config.load_incluster_config(client_configuration=settings)
    except (config.ConfigException, OSError, KeyError, TypeError) as error:
        raise Refused(
            f"no cluster: {error}\nGive a kubeconfig (--kubeconfig, KUBECONFIG or "
            "~/.kube/config), or train here with msa run."
        ) from None
    settings.retries = False  # type: ignore[assignment]
    kube = Kube(settings, timeout=CALL_SECONDS)
    where = namespace or own or "default"
    return Connection(kube, where, settings.host, settings, kubeconfig, context)


@contextmanager
def explained() -> Iterator[None]:
    """Turn what goes wrong with a cluster into one message and an exit code."""
    try:
        yield
    except Refused as refused:
        give_up(str(refused), refused.code)
    except Exception as error:
        from msa_operator.runtime.kube import KubeError

        if not isinstance(error, KubeError):
            raise
        give_up(explain(error), NO_CLUSTER)


def give_up(text: str, code: int) -> NoReturn:
    """Say why on stderr and end."""
    click.echo(f"{click.style('error:', fg='red', bold=True)} {text}", err=True)
    sys.exit(code)


def explain(error: KubeError) -> str:
    """What an error of the API server means here, and what to do."""
    if error.code == 0:
        return (
            f"the cluster does not answer: {error.message}\n"
            "Is it up, and is the context right? kubectl cluster-info"
        )
    if error.code == 401:
        return f"the cluster does not know you: {error.message}\nLog in again; try kubectl get ns."
    if error.code == 403:
        return (
            f"not allowed: {error.message}\n"
            "Ask for the role flash-msa-operator's chart makes for users (rbac.aggregate), or for "
            "edit rights in the namespace."
        )
    if error.code == 404 and "page not found" in error.message:
        return (
            "this cluster does not know LongContextJob: the custom resources are not installed.\n"
            "helm install flash-msa-crds charts/flash-msa-crds, then the operator; see "
            "docs/install.md and msa doctor --cluster."
        )
    return f"the API server refused: {error}"


def find_job(at: Connection, name: str) -> dict[str, Any]:
    """The job of that name. Raises :class:`Refused` with the name that was likely meant."""
    from msa_operator.runtime.kube import JOBS, KubeError

    try:
        return at.kube.get(JOBS, at.namespace, name)
    except KubeError as error:
        if not error.gone or "page not found" in error.message:
            raise
    known = [job["metadata"]["name"] for job in at.kube.list(JOBS, at.namespace)]
    near = closest(name, known)
    text = f"no job {name!r} in namespace {at.namespace}"
    if near:
        text += f"; did you mean {near}?"
    elif known:
        text += f"; there are {', '.join(sorted(known)[:10])}"
    else:
        text += ": it has none. Another namespace? msa status --all-namespaces"
    raise Refused(text, BAD_INPUT)


def patch_spec(at: Connection, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Change fields of a job's spec; returns the object."""
    from msa_operator.runtime.kube import JOBS

    return at.kube.patch(JOBS, at.namespace, name, {"spec": spec}, manager=FIELD_MANAGER)

"""Fixtures of the test cluster. A machine that cannot run it says why; CI must not skip."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from . import charts
from .apiserver import ApiServer
from .cluster import Cluster
from .faults import definitions
from .paths import Unavailable


def not_here(reason: Unavailable) -> None:
    """Skips the test with the reason, or fails it where CI is set."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI has to run this: {reason}", pytrace=False)
    pytest.skip(f"cannot run here: {reason}")


def needs_helm() -> None:
    """Builds helm before a test that uses it is timed, or skips the test with the reason."""
    try:
        charts.helm("version")
    except Unavailable as reason:
        not_here(reason)


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real API server on loopback, with the custom resources, garbage collection and the
    deletion of namespaces.

    Shared by the session: use a namespace of your own. Pods stay as they are made, since nothing
    schedules or runs them.
    """
    try:
        server = definitions.serving(tmp_path_factory.mktemp("api-server"))
    except Unavailable as reason:
        not_here(reason)
        raise
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of two nodes with DNS, Services and KubeRay, for the tests marked `cluster`.

    Shared by the session: use a namespace of your own, and start again a node that you stop.
    """
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        # Shown as it happens: this is the part of a test run in which nothing else is said.
        with capture.global_and_fixture_disabled():
            print(f"\n  cluster: {text}", end="", flush=True, file=sys.stderr)

    try:
        made = Cluster.up(f"test-{os.getpid()}", with_parent=True, say=say)
    except Unavailable as reason:
        not_here(reason)
        raise
    try:
        yield made
    finally:
        made.down()

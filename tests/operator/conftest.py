"""Lets the tests here share modules, since pytest imports by path and adds none by itself; and has
what lives of jobs on a real API server share."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.apiserver import ApiServer
from e2e.faults.simulator import Simulator
from e2e.faults.world import World
from msa_operator.reconcile import attempts

sys.path.insert(0, str(Path(__file__).parent))
from runtime_operator import Running


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between attempts no simulated pod needs the usual time."""
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.5)


@pytest.fixture
def world(api_server: ApiServer, simulator: Simulator) -> World:
    """A namespace; the module says which simulator makes its pods."""
    simulator.hold = False
    return World(api_server, simulator, f"t-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def operator(api_server: ApiServer, simulator: Simulator, world: World) -> Iterator[Running]:
    """An operator of that namespace."""
    with Running(api_server, simulator.heads_url, world.namespace) as running:
        yield running

"""An operator inside the test's own process, against a real API server and simulated pods."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.apiserver import ApiServer
from e2e.faults.simulator import Simulator
from e2e.faults.world import World
from msa_operator.api.read import Reader
from msa_operator.main import Operator, Options
from msa_operator.reconcile import attempts
from msa_operator.settings import Settings

SETTINGS: dict[str, Any] = {
    "image": "flash-msa-worker:test", "rayVersion": "2.60.0", "progressSeconds": 0.4,
    "resyncSeconds": 20, "headMemory": "1Gi", "headCpu": "100m", "concurrency": 8,
    "lease": {"durationSeconds": 6, "renewSeconds": 4, "retrySeconds": 0.5},
}  # fmt: skip


def settings(**changes: Any) -> Settings:
    found = Reader(lambda _: "").read(Settings, {**SETTINGS, **changes})
    assert found is not None
    return found


class Running:
    """Starts on entering; ends by SIGTERM's way on leaving."""

    def __init__(
        self, server: ApiServer, heads: str, namespace: str, *, name: str = "operator-0",
        clock: Callable[[], float] | None = None, kube_url: str | None = None, **changes: Any,
    ) -> None:  # fmt: skip
        options = Options(
            settings=settings(namespaces=[namespace], **changes), namespace=namespace, name=name,
            port=0, kubeconfig=str(server.kubeconfig), kube_url=kube_url, head_address=heads,
        )  # fmt: skip
        self.operator = Operator(options, **({"clock": clock} if clock else {}))
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.code = self.operator.run()

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int | None:
        self.operator.stop()
        self._thread.join(40)
        assert not self._thread.is_alive(), "the operator did not end"
        return self.code

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()


__all__ = ["Path", "Running", "settings"]


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between attempts no pod of these tests needs the usual time."""
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.5)


@pytest.fixture(name="world")
def world_of_jobs(api_server: ApiServer, simulator: Simulator) -> World:
    simulator.hold = False
    return World(api_server, simulator, f"t-{uuid.uuid4().hex[:8]}")


@pytest.fixture(name="operator")
def running_operator(
    api_server: ApiServer, simulator: Simulator, world: World
) -> Iterator[Running]:
    with Running(api_server, simulator.heads_url, world.namespace) as running:
        yield running

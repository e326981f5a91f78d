"""An operator inside the test's own process, against a real API server and simulated pods."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from e2e.apiserver import ApiServer
from msa_operator.api.read import Reader
from msa_operator.main import Operator, Options
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

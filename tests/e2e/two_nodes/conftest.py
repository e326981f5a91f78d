"""The operator, installed once for all tests that use this cluster."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from e2e import charts, images
from e2e.cluster import Cluster
from e2e.installed import CLAIM, NAMESPACE, SYSTEM_NODE, Installed


@pytest.fixture(scope="session")
def installed(
    cluster: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n  operator: {text}", end="", flush=True, file=sys.stderr)

    server = cluster.server
    began = time.monotonic()
    repository, tag = images.OPERATOR.split(":")
    values = {
        "image": {"repository": repository, "tag": tag},
        "nodeSelector": {"kubernetes.io/hostname": SYSTEM_NODE},
        "settings": {
            "image": images.WORKER, "headMemory": "4Gi", "headCpu": "200m",
            "checkpoint": {"claim": CLAIM}, "progressSeconds": 2,
        },
    }  # fmt: skip
    file = tmp_path_factory.mktemp("values") / "values.json"
    file.write_text(json.dumps(values))
    place = [f"--namespace={charts.NAMESPACE}", "--create-namespace", "--wait", "--timeout=90s"]
    for chart, given in ((charts.CRDS, []), (charts.OPERATOR, [f"--values={file}"])):
        charts.helm("install", chart.name, str(chart), *place, *given,
                    kubeconfig=server.kubeconfig)  # fmt: skip
    say(f"{time.monotonic() - began:6.1f} s  both charts installed, the operator's pod is ready")
    server.apply(f"{{apiVersion: v1, kind: Namespace, metadata: {{name: {NAMESPACE}}}}}")
    folder = cluster.claim(NAMESPACE, CLAIM)
    made = Installed(cluster, say, folder)
    made.times["helm install of both charts, until ready"] = round(time.monotonic() - began, 1)
    yield made
    say(f"times in seconds: {json.dumps(made.times)}")

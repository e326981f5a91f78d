"""An API server alone: starts on ports that are free, and serves what tests build on."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path

import pytest

from e2e import apiserver
from e2e.apiserver import ApiServer
from e2e.process import wait_for


def test_a_port_that_was_taken_is_not_the_end(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        good = apiserver.loopback()
        bad = dataclasses.replace(good, etcd_port=taken.getsockname()[1])
        addresses = iter([bad, good])
        monkeypatch.setattr(apiserver, "loopback", lambda: next(addresses))
        server = ApiServer.start(tmp_path)
    try:
        assert server.address == good
        assert json.loads(server.get("/version"))["major"] == "1"
    finally:
        started = list(server.processes)
        server.stop()
    assert len(started) == 2 and not any(process.alive() for process in started)


def test_children_of_deleted_owners_and_namespaces_go(api_server: ApiServer):
    def config_map(name: str, **metadata: object) -> str:
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"namespace": "owned", "name": name} | metadata,
            }
        )

    api_server.apply("{apiVersion: v1, kind: Namespace, metadata: {name: owned}}")
    api_server.apply(config_map("owner"))
    path = "/api/v1/namespaces/owned/configmaps"
    uid = json.loads(api_server.get(f"{path}/owner"))["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    api_server.apply(config_map("child", ownerReferences=[owner]))
    api_server.kubectl("delete", "configmap", "owner", "--namespace=owned")

    def names() -> set[str]:
        items = json.loads(api_server.get(path))["items"]
        return {item["metadata"]["name"] for item in items}

    wait_for(lambda: "child" not in names(), "the child was collected", 30)
    api_server.kubectl("delete", "namespace", "owned", "--timeout=30s")

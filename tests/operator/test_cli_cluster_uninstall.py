"""msa uninstall, on an API server of its own: it looks at every namespace."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cluster import Bench, install, running
from e2e.apiserver import ApiServer
from e2e.fixtures import not_here
from e2e.paths import Unavailable
from msa_operator.runtime.kube import CONFIGMAPS, JOBS, Resource
from operator_jobs import job

MANIFEST = Path(__file__).parents[2] / "manifests" / "install.yaml"
SELECTOR = "app.kubernetes.io/name=flash-msa-operator"
DEPLOYMENTS = Resource("apps", "v1", "deployments")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "clusterroles", namespaced=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    try:
        made = ApiServer.start(
            tmp_path_factory.mktemp("uninstall"), controllers=("garbage-collector-controller",)
        )
    except Unavailable as reason:
        not_here(reason)
        raise
    yield made
    made.stop()


@pytest.fixture
def bench(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Bench:
    # Its name in the package is the command's.
    monkeypatch.setattr(importlib.import_module("msa_operator.cli.uninstall"), "LOOK_SECONDS", 0.1)
    return Bench.make(server)


def test_a_cluster_without_anything(bench: Bench) -> None:
    done = bench.msa("status")
    assert done.exit_code == 4
    assert "the custom resources are not installed" in done.stderr
    done = bench.msa("uninstall")
    assert (done.exit_code, "no operator is installed" in done.stderr) == (1, True)


def test_jobs_that_live_come_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    install(bench.server)
    bench.server.apply(MANIFEST)
    bench.create(job())
    bench.create(job({"metadata.name": "over"}))
    bench.says("small", running())
    bench.says("over", {"observedGeneration": 1, "phase": "Complete"})
    done = bench.msa("uninstall")
    assert done.exit_code == 1
    assert "1 jobs live:" in done.stderr
    assert f"{bench.namespace}/small: Running, 2/2 nodes" in done.stderr
    done = bench.msa("uninstall", "--stop-jobs", "--timeout", "1s")
    assert (done.exit_code, "nothing is removed" in done.stderr) == (124, True)
    assert list(bench.at.kube.list(DEPLOYMENTS, labels=SELECTOR))

    def drains(found: dict[str, Any]) -> bool:
        if not found["spec"].get("suspend"):
            return False
        bench.says("small", {"phase": "Suspended"})
        return True

    thread = bench.later("small", drains)
    done = bench.msa("uninstall", "--stop-jobs")
    thread.join()
    assert done.exit_code == 0, done.output
    assert "kubectl delete crd longcontextjobs.flashmsa.dev" in done.stdout
    for resource in (DEPLOYMENTS, CONFIGMAPS, ROLES):
        assert not list(bench.at.kube.list(resource, labels=SELECTOR)), resource
    assert len(list(bench.at.kube.list(JOBS, bench.namespace))) == 2


def test_what_helm_installed_is_left_to_helm(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(bench.server)
    bench.server.apply(MANIFEST)
    at = bench.at.kube
    (found,) = at.list(DEPLOYMENTS, labels=SELECTOR)
    meta = found["metadata"]
    note = {"metadata": {"annotations": {"meta.helm.sh/release-name": "ours"}}}
    at.patch(DEPLOYMENTS, meta["namespace"], meta["name"], note)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = bench.msa("uninstall")
    assert done.exit_code == 1
    assert f"helm uninstall ours --namespace {meta['namespace']}" in done.stderr
    helm = tmp_path / "helm"
    helm.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho uninstalled\n')
    helm.chmod(0o755)
    done = bench.msa("uninstall")
    assert done.exit_code == 0, done.output
    asked = (
        f"uninstall ours --namespace {meta['namespace']} --kubeconfig={bench.server.kubeconfig}"
    )
    assert (tmp_path / "asked").read_text().strip() == asked
    assert list(at.list(DEPLOYMENTS, labels=SELECTOR)), "helm's part is helm's"

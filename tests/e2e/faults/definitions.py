"""The custom resources that a test of the operator needs: ours, and KubeRay's RayCluster."""

from __future__ import annotations

import json
from pathlib import Path

from ..apiserver import ApiServer
from ..build import tool
from ..paths import REPOSITORY
from ..process import spawn, wait_for

SERVED = {
    "/apis/flashmsa.dev/v1alpha1": {"longcontextjobs", "hardwareprofiles"},
    "/apis/ray.io/v1": {"rayclusters"},
}


CONTROLLERS = ("garbage-collector-controller", "namespace-controller")


def serving(folder: Path) -> ApiServer:
    """An API server with the custom resources, and with controllers that know them.

    In this order: the garbage collector looks for new kinds every half minute only, and until then
    the pods of a RayCluster stay when it is deleted. Raises Unavailable.
    """
    server = ApiServer.start(folder)
    try:
        install(server)
        server.start_controllers(
            lambda name, argv, log: spawn(name, argv, log, with_parent=True), CONTROLLERS
        )
    except BaseException:
        server.stop()
        raise
    return server


def install(server: ApiServer) -> None:
    """Returns once they are served; installing twice changes nothing."""
    bases = tool("kuberay-operator").parent / "config" / "crd" / "bases"
    server.apply(REPOSITORY / "manifests" / "crds")
    server.apply(bases / "ray.io_rayclusters.yaml")
    wait_for(lambda: _served(server), "the custom resources were served", 60)


def _served(server: ApiServer) -> bool:
    try:
        for path, wanted in SERVED.items():
            found = json.loads(server.get(path))["resources"]
            if not wanted <= {resource["name"] for resource in found}:
                return False
    except OSError:
        return False
    return True

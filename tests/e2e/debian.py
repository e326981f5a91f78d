"""The node's runtime: containerd, runc, CNI plugins and nft, from PATH or from Debian's packages.

Packages are unpacked into the cache, never installed: no daemon starts, no file of the machine
changes, and nothing has to be undone.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from .machine import PATH
from .paths import Unavailable, cache, fresh, locked
from .process import run

PACKAGES = {
    "containerd": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "nft": "nftables",
}
PLUGINS = ("ptp", "host-local", "loopback")
PLUGIN_FOLDERS = ("/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni")
PLUGIN_PACKAGE = "containernetworking-plugins"


@dataclass(frozen=True)
class Runtime:
    """Where the parts are, and the environment in which they find each other."""

    plugins: Path
    path: str
    libraries: str

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": self.path} | (
            {"LD_LIBRARY_PATH": self.libraries} if self.libraries else {}
        )

    def find(self, name: str) -> str:
        found = shutil.which(name, path=self.path)
        assert found, f"{name} was there a moment ago"
        return found


def runtime() -> Runtime:
    """The runtime, its packages fetched now if they have to be.

    Unavailable when parts are missing and there is no apt-get to fetch them with.
    """
    path = f"{os.environ.get('PATH', '')}:{PATH}"
    missing = {package for name, package in PACKAGES.items() if not shutil.which(name, path=path)}
    plugins = next((folder for folder in map(Path, PLUGIN_FOLDERS) if _complete(folder)), None)
    if plugins is None:
        missing.add(PLUGIN_PACKAGE)
    if not missing:
        assert plugins
        return Runtime(plugins, path, "")
    root = _unpacked(sorted(missing))
    programs = [root / folder for folder in ("usr/sbin", "usr/bin", "sbin", "bin")]
    libraries = [*root.glob("usr/lib/*-linux-gnu*"), *root.glob("lib/*-linux-gnu*")]
    return Runtime(
        plugins or root / "usr/lib/cni",
        ":".join([*map(str, programs), path]),
        ":".join(map(str, libraries)),
    )


def _complete(folder: Path) -> bool:
    return all((folder / name).exists() for name in PLUGINS)


def _unpacked(packages: list[str]) -> Path:
    target = cache() / "debian" / "-".join(packages)
    with locked("debian"):
        if not target.exists():
            if not shutil.which("apt-get"):
                raise Unavailable(
                    f"missing: {', '.join(packages)}; there is no apt-get to fetch them with"
                )
            archives = fresh(target.with_name(f"{target.name}.archives"))
            (archives / "partial").mkdir()
            try:
                _download(packages, archives)
            except RuntimeError:
                run(["apt-get", "update", "--quiet"], timeout_s=300)
                _download(packages, archives)
            part = fresh(target.with_name(f"{target.name}.part"))
            for archive in sorted(archives.glob("*.deb")):
                run(["dpkg-deb", "--extract", str(archive), str(part)])
            shutil.rmtree(archives)
            part.rename(target)
    return target


def _download(packages: list[str], archives: Path) -> None:
    # Resolves what they depend on and this machine lacks, and fetches all of it.
    options = ["--yes", "--quiet", "--no-install-recommends", "--download-only"]
    folder = ["-o", f"Dir::Cache::archives={archives}"]
    run(["apt-get", *folder, "install", *options, *packages], timeout_s=300)

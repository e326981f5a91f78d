"""Container images made here: a folder or a few files become an OCI archive that containerd loads.

`pause` and the static Go programs hold just their executable. The *thin* images of worker and
operator hold users and empty folders; their programs are this machine's: /usr and the project's
Python environment, mounted read-only by the runtime class `borrowed`. So several gigabytes of
PyTorch need not be packed for every change of a line.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .paths import REPOSITORY, cache

PAUSE = "flash-msa-pause:e2e"
COREDNS = "flash-msa-coredns:e2e"
KUBERAY = "flash-msa-kuberay-operator:e2e"
WORKER = "flash-msa-worker:e2e"
OPERATOR = "flash-msa-operator:e2e"
THIN = (WORKER, OPERATOR)
RUNTIME_CLASS = "borrowed"
USER = 1000

_ETC = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nray:x:1000:1000::/home/ray:/bin/bash\n",
    "etc/group": "root:x:0:\nray:x:1000:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}


@dataclass(frozen=True)
class Image:
    """What an image holds: files by path (text, or a file here), links, folders with a mode."""

    name: str
    files: Mapping[str, str | Path] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, int] = field(default_factory=dict)
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""

    def archive(self) -> Path:
        """The OCI archive, written now if nothing current is in the cache."""
        identity = hashlib.sha256(repr(self).encode())
        for source in self.files.values():
            if isinstance(source, Path):
                # A tool's path names its pins: size and path tell two builds apart.
                identity.update(f"{source} {source.stat().st_size}".encode())
        name = self.name.replace(":", "-")
        path = cache() / "images" / f"{name}-{identity.hexdigest()[:12]}.tar"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            self._write(part)
            part.rename(path)
        return path

    def _write(self, path: Path) -> None:
        layer = self._layer()
        config = {
            "architecture": "arm64" if os.uname().machine == "aarch64" else "amd64",
            "os": "linux",
            "config": {
                "User": self.user,
                "Env": [f"{key}={value}" for key, value in self.environment.items()],
                "Entrypoint": list(self.command),
                "WorkingDir": "/home/ray" if self.user else "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
        blobs = {_digest(layer): layer}
        kind = "application/vnd.oci.image"
        config_blob = _add(blobs, config, f"{kind}.config.v1+json")
        layer_blob = {
            "mediaType": f"{kind}.layer.v1.tar",
            "digest": _digest(layer),
            "size": len(layer),
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": config_blob,
            "layers": [layer_blob],
        }
        entry = _add(blobs, manifest, f"{kind}.manifest.v1+json")
        # What the kubelet asks for: a bare name means this registry and folder.
        entry["annotations"] = {"io.containerd.image.name": f"docker.io/library/{self.name}"}
        index = {"schemaVersion": 2, "manifests": [entry]}
        with tarfile.open(path, "w") as out:
            _file(out, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            _file(out, "index.json", json.dumps(index).encode())
            for digest, content in blobs.items():
                _file(out, f"blobs/{digest.replace(':', '/')}", content)

    def _layer(self) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as out:
            for name, mode in self.folders.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, mode
                if name.startswith("home/"):
                    entry.uid = entry.gid = USER
                out.addfile(entry)
            for name, target in self.links.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                out.addfile(entry)
            for name, source in self.files.items():
                program = isinstance(source, Path)
                content = source.read_bytes() if program else source.encode()
                _file(out, name, content, 0o755 if program else 0o644)
        return buffer.getvalue()


def program(name: str, executable: Path) -> Image:
    """An image of one static executable."""
    files = {"app": executable, **_ETC}
    return Image(name, files, folders={"tmp": 0o1777}, command=["/app"], user="65532")


def thin(name: str) -> Image:
    """An image whose programs are this machine's; see `borrowed`."""
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/home/ray",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        # There is nobody to report to.
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    links = {
        entry: os.readlink(f"/{entry}")
        for entry in ("bin", "sbin", "lib", "lib64", "lib32")
        if os.path.islink(f"/{entry}")
    }
    folders = {"tmp": 0o1777, "home/ray": 0o755, "root": 0o755, "usr": 0o755}
    return Image(name, _ETC, links, folders, environment=environment, user=str(USER))


def borrowed() -> list[Path]:
    """The folders of this machine in which thin images find their programs."""
    wanted = [Path("/usr"), REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)]
    wanted += [Path(f"/{name}") for name in ("bin", "sbin", "lib", "lib64")]
    wanted += [Path("/etc/ssl"), Path("/etc/alternatives"), Path("/etc/ld.so.cache")]
    chosen: list[Path] = []
    for path in wanted:
        if not path.exists() or path.is_symlink():
            continue
        if not any(path.is_relative_to(other) for other in chosen):
            chosen.append(path)
    return chosen


def borrow(spec: dict[str, object]) -> dict[str, object]:
    """The runtime specification with those folders mounted read-only."""
    mounts = spec["mounts"]
    assert isinstance(mounts, list)
    added = [
        {
            "destination": str(path),
            "source": str(path),
            "type": "bind",
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }
        for path in borrowed()
    ]
    return spec | {"mounts": [*mounts, *added]}


def _add(blobs: dict[str, bytes], document: object, kind: str) -> dict[str, object]:
    content = json.dumps(document).encode()
    blobs[_digest(content)] = content
    return {"mediaType": kind, "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _file(out: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    out.addfile(entry, io.BytesIO(content))

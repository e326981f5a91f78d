"""The parts of the harness that need no cluster."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from pathlib import Path

import pytest

from e2e import build, images
from e2e.fixtures import not_here
from e2e.images import Image, borrow
from e2e.machine import require_linux_root
from e2e.paths import Unavailable
from e2e.process import free_ports, spawn, wait_for


def test_skips_say_why_and_ci_does_not_skip(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no root"):
        not_here(Unavailable("no root"))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no root"):
        not_here(Unavailable("no root"))


def test_nodes_name_what_they_lack(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(Unavailable, match="nodes need root"):
        require_linux_root()
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(Unavailable, match="need Linux"):
        require_linux_root()


@pytest.mark.parametrize("module", build.MODULES, ids=lambda module: module.name)
def test_tools_are_pinned(module: build.Module):
    assert build.version(module.name).startswith("v")
    assert (module.folder / "go.mod").exists()
    assert not module.version_of or (module.folder / "go.sum").exists()


def test_assets_that_lack_a_tool_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    with pytest.raises(Unavailable, match=r"holds no kube-apiserver"):
        build.tool("kube-apiserver")
    (tmp_path / "kube-apiserver").touch()
    assert build.tool("kube-apiserver") == tmp_path / "kube-apiserver"


def test_an_archive_is_what_containerd_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FLASH_MSA_CACHE", str(tmp_path))
    image = Image("some:tag", {"etc/hello": "hello"}, folders={"tmp": 0o1777}, user="5")
    with tarfile.open(image.archive()) as archive:

        def blob(name: str) -> bytes:
            file = archive.extractfile(name)
            assert file
            return file.read()

        (entry,) = json.loads(blob("index.json"))["manifests"]
        assert entry["annotations"]["io.containerd.image.name"] == "docker.io/library/some:tag"
        manifest = json.loads(blob(f"blobs/{entry['digest'].replace(':', '/')}"))
        config = json.loads(blob(f"blobs/{manifest['config']['digest'].replace(':', '/')}"))
        assert config["config"]["User"] == "5"
        assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
    assert image.archive() == image.archive()


def test_borrowed_folders_are_read_only_and_none_holds_another():
    spec = borrow({"mounts": []})
    mounts = spec["mounts"]
    assert isinstance(mounts, list)
    assert all("ro" in mount["options"] for mount in mounts)
    paths = images.borrowed()
    assert not any(a != b and a.is_relative_to(b) for a in paths for b in paths)


def test_waiting_ends_with_what_it_needs(tmp_path: Path):
    log = tmp_path / "log"
    process = spawn("brief", ["sh", "-c", "echo it broke; exit 1"], log)
    with pytest.raises(RuntimeError, match=r"brief ended before the port answered(.|\n)*it broke"):
        wait_for(lambda: False, "the port answered", 30, needs=[process], log=log)
    with pytest.raises(TimeoutError, match="before never"):
        wait_for(lambda: False, "never", 0.1)


def test_a_process_is_stopped_by_identity(tmp_path: Path):
    process = spawn("sleep", ["sleep", "1000"], tmp_path / "log")
    other = dataclasses.replace(process, started=process.started - 60)
    other.stop()
    assert process.alive(), "another process that had this pid is not ours to end"
    process.stop()
    assert not process.alive()


def test_ports_differ():
    assert len(set(free_ports(50))) == 50

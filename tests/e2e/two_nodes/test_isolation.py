"""Whatever happens to it, a cluster leaves this machine as it found it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e import cluster as clusters
from e2e.cluster import Cluster
from e2e.fixtures import not_here
from e2e.machine import GROUPS, Machine, require_linux_root
from e2e.node import KERNEL
from e2e.paths import Unavailable
from e2e.process import run, wait_for

pytestmark = pytest.mark.cluster
TESTS = Path(__file__).parents[2]


def state() -> dict[str, object]:
    """What a cluster could change on this machine."""
    return {
        "mounts": Path("/proc/self/mounts").read_text(),
        "links": run(["ip", "-oneline", "link"]),
        "routes": run(["ip", "route"]),
        "kernel": {name: Path("/proc/sys", name).read_text() for name in KERNEL},
        "forwarding": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
    }


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    try:
        require_linux_root()
    except Unavailable as reason:
        not_here(reason)
    before = state()
    yield
    assert state() == before


def test_a_machine_has_no_way_out_and_is_gone_in_one_step(tmp_path: Path):
    setup = "mount -t tmpfs tmpfs /mnt; ip link set lo up; echo 1 > /proc/sys/net/ipv4/ip_forward"
    machine = Machine.start("alone", tmp_path, setup, with_parent=True)
    inside = machine.spawn("sleep", ["sleep", "1000"], tmp_path / "log")
    assert machine.shell("hostname").strip() == "alone"
    assert machine.shell("ip route show table main").strip() == ""
    assert "/mnt" in machine.shell("mount")
    machine.stop()
    wait_for(lambda: not inside.alive(), "what ran inside was gone", 10)


OWNER = """
import sys
sys.path.insert(0, sys.argv[1])
from e2e.cluster import Cluster
Cluster.up(sys.argv[2], with_parent=True, say=lambda text: print(text, flush=True))
"""


def test_a_killed_run_leaves_nothing_that_the_next_does_not_sweep():
    name = f"killed-{os.getpid()}"
    folder = clusters._folder(name)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(TESTS), name], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout
        # Killed in the midst of things: the API server answers, nodes are starting.
        for line in owner.stdout:
            if "API server" in line:
                break
        started = [
            inside
            for process in clusters._processes(folder)
            for inside in psutil.process_iter()
            if _space(inside.pid) == _space(process.pid) != _space(os.getpid())
        ]
        assert {"etcd", "kube-apiserver"} <= {process.name() for process in started}
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        # Nobody cleans up: the kernel ends the machines with their owner.
        wait_for(lambda: not clusters._processes(folder), "its machines were gone", 20)
        wait_for(lambda: not any(_runs(p) for p in started), "their processes were gone", 20)
        assert name in clusters.sweep()
        assert not folder.exists()
        assert not list(GROUPS.glob(f"*/flash-msa/{name}"))
    finally:
        owner.kill()
        clusters.down(name)


def test_a_name_is_taken_once(cluster: Cluster):
    with pytest.raises(Unavailable, match="is up"):
        Cluster.up(cluster.name, with_parent=True)
    assert cluster.list("/api/v1/nodes")


def _space(pid: int) -> str | None:
    """The process's pid namespace."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

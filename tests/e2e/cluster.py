"""A whole cluster: up and down in one call each, by name, each in namespaces of its own.

Everything that a cluster has is found again from its folder alone: its machines and forwarders
carry the folder in their command lines, its control groups carry its name. So `down` works after
a crash at any point, and whoever is left of an ended test run is swept by the next one.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from . import debian, images, kuberay, machine, network
from .apiserver import Address, ApiServer
from .build import tool
from .images import Image
from .machine import INIT, Machine
from .network import Place
from .node import Node
from .paths import MANIFESTS, Unavailable, cache, locked
from .process import Process, spawn, wait_for

FORWARD = Path(__file__).with_name("forward.py")
NODES = 2
SYSTEM = Place(1)
"""Where DNS and KubeRay run, by their manifests; a test stops the other one."""
GROUP = "flash-msa"
MEMORY_MIB = 3072
"""What a cluster with a small Ray cluster on it takes; less than that free is refused."""
MEMORY_LIMIT_MIB = 8192
"""All pods of a cluster together may take this much, whatever their own limits add up to."""
Say = Callable[[str], None]


@dataclass
class Cluster:
    """A running cluster. `server` is its API server, reached on loopback."""

    name: str
    folder: Path
    control: Machine
    server: ApiServer
    nodes: dict[str, Node]
    runtime: debian.Runtime
    with_parent: bool
    forwards: list[Process] = field(default_factory=list)

    @classmethod
    def up(cls, name: str, *, with_parent: bool, say: Say = lambda _: None) -> Cluster:
        """Brings the cluster up, or leaves nothing behind.

        with_parent: it belongs to this process and ends with it; otherwise it stays until `down`.
        Unavailable when this machine cannot run it, or a cluster of this name runs.
        """
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
            raise Unavailable(f"a cluster's name has a-z, 0-9 and '-', up to 31; found {name!r}")
        machine.require_linux_root()
        sweep()
        with locked(f"cluster-{name}"):
            folder = _folder(name)
            if _processes(folder):
                raise Unavailable(f"a cluster named {name} is up; take it down first")
            _remove(name)
            free = psutil.virtual_memory().available >> 20
            if free < MEMORY_MIB:
                raise Unavailable(f"{free} MiB of memory are free; a cluster takes {MEMORY_MIB}")
            folder.mkdir(parents=True)
            _write_owner(folder, with_parent)
            try:
                return cls._up(name, folder, with_parent, say)
            except BaseException:
                _keep_logs(folder)
                _remove(name)
                raise

    @classmethod
    def _up(cls, name: str, folder: Path, with_parent: bool, say: Say) -> Cluster:
        step = _Steps(say)
        runtime = debian.runtime()
        loaded = _images()
        for image in loaded:
            image.archive()
        for binary in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"):
            tool(binary)
        step("tools and images")
        machine.make_groups(f"{GROUP}/{name}")
        machine.limit_groups(f"{GROUP}/{name}", MEMORY_LIMIT_MIB << 20)
        control = Machine.start("control", folder / "control", with_parent=with_parent)
        network.prepare_control(control)
        address = Address(
            network.CONTROL, network.API_PORT, 2379, 2380, network.SERVICES, published=True
        )
        forward, port = _forward(
            folder, control.init.pid, network.CONTROL, network.API_PORT, with_parent
        )
        server = ApiServer.start(
            folder / "control",
            address,
            url=f"https://127.0.0.1:{port}",
            launch=control.spawn,
        )
        (folder / "kubeconfig").symlink_to(server.kubeconfig)
        step("API server")
        server.start_controllers(control.spawn, ["*"], _CONTROLLERS)
        _start_scheduler(server, control)
        server.apply(MANIFESTS)
        definitions = ThreadPoolExecutor(1).submit(kuberay.install_definitions, server)
        cluster = cls(name, folder, control, server, {}, runtime, with_parent, [forward])
        for index in range(1, NODES + 1):
            cluster.start_node(f"node-{index}", ready=False)
        step("nodes started")
        cluster.wait_nodes(list(cluster.nodes))
        step("nodes ready")
        wait = ["wait", "--for=condition=Available", "--timeout=60s"]
        server.kubectl(*wait, "--namespace=kube-system", "deployment/coredns", timeout_s=70)
        step("DNS")
        cluster.wait_borrowed()
        step("admission policy")
        definitions.result()
        kuberay.install(server)
        step(kuberay.describe())
        return cluster

    def start_node(self, name: str, *, ready: bool = True) -> None:
        """Starts a node that is not running, the first time or after `stop_node`."""
        place = Place(int(name.removeprefix("node-")))
        folder = self.folder / name
        # A node comes back without containers; its object and its pods are still with the server.
        shutil.rmtree(folder, ignore_errors=True)
        self.nodes[name] = Node.start(
            place,
            [Place(index) for index in range(1, NODES + 1)],
            folder,
            f"{GROUP}/{self.name}/{name}",
            self.control,
            self.server,
            self.runtime,
            _images() if place == SYSTEM else _images(system=False),
            with_parent=self.with_parent,
        )
        if ready:
            self.wait_nodes([name])

    def stop_node(self, name: str) -> None:
        """Cuts a node's power: every container on it is gone, and nobody is told."""
        self.nodes.pop(name).stop()

    def wait_nodes(self, names: Sequence[str], timeout_s: float = 90) -> None:
        """Returns once those nodes are Ready."""

        def ready() -> bool:
            found = {node["metadata"]["name"]: node for node in self.list("/api/v1/nodes")}
            return all(name in found and _condition(found[name], "Ready") for name in names)

        needs = [process for name in names for process in self.nodes[name].processes]
        log = self.nodes[names[0]].log("kubelet")
        wait_for(ready, f"{', '.join(names)} were Ready", timeout_s, needs=needs, log=log)

    def wait_borrowed(self) -> None:
        """Returns once pods of thin images are given their programs."""
        pod = json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "probe", "namespace": "default"},
                "spec": {"containers": [{"name": "probe", "image": images.WORKER}]},
            }
        )

        def seen() -> bool:
            command = ["create", "--dry-run=server", "-f", "-", "-o"]
            with contextlib.suppress(RuntimeError):
                made = self.server.kubectl(
                    *command, "jsonpath={.spec.runtimeClassName}", stdin=pod
                )
                return made == images.RUNTIME_CLASS
            return False

        wait_for(seen, "the admission policy was in force", 30)

    def list(self, path: str) -> list[dict]:
        """The items of a list of the API, or nothing while it cannot be read."""
        try:
            return json.loads(self.server.get(path))["items"]
        except OSError:
            return []

    def forward(self, host: str, port: int) -> int:
        """A loopback port from here to a pod, a Service's address or a node, by address."""
        node = next(iter(self.nodes.values()))
        process, local = _forward(self.folder, node.machine.init.pid, host, port, self.with_parent)
        self.forwards.append(process)
        return local

    def claim(self, namespace: str, name: str) -> Path:
        """Makes a claim that pods of both nodes can mount for writing; its folder out here."""
        folder = self.folder / "volumes" / namespace / name
        self.server.apply(claim(folder, namespace, name))
        return folder

    def down(self) -> None:
        down(self.name)


def claim(folder: Path, namespace: str, name: str) -> str:
    """A claim and its volume, which is that folder of this machine: both nodes are on it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    common = {
        "storageClassName": "",
        "accessModes": ["ReadWriteMany"],
        "volumeMode": "Filesystem",
    }
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{name}"},
        "spec": common
        | {
            "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": namespace, "name": name},
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"namespace": namespace, "name": name},
        "spec": common
        | {"volumeName": f"{namespace}-{name}", "resources": {"requests": {"storage": "1Gi"}}},
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [volume, claim]})


def down(name: str) -> bool:
    """Takes the cluster away, whatever state it is in; False when there was none."""
    with locked(f"cluster-{name}"):
        there = _folder(name).exists()
        _remove(name)
        return there


def sweep() -> list[str]:
    """Takes away what ended processes have left; the names of those clusters."""
    swept: list[str] = []
    for folder in sorted(_folder("x").parent.glob("*")):
        if _owner_is_gone(folder):
            with locked(f"cluster-{folder.name}"):
                if _owner_is_gone(folder):
                    _remove(folder.name)
                    swept.append(folder.name)
    return swept


def running() -> list[str]:
    """Names of the clusters that have processes."""
    return [f.name for f in sorted(_folder("x").parent.glob("*")) if _processes(f)]


def kubeconfig(name: str) -> Path:
    """An administrator's kubeconfig; Unavailable when there is no such cluster."""
    path = _folder(name) / "kubeconfig"
    if not path.exists():
        raise Unavailable(f"no cluster named {name}; running: {', '.join(running()) or 'none'}")
    return path.resolve()


def _folder(name: str) -> Path:
    return cache() / "clusters" / name


def _remove(name: str) -> None:
    folder = _folder(name)
    for process in _processes(folder):
        process.stop(grace_s=0)
    machine.remove_groups(f"{GROUP}/{name}")
    shutil.rmtree(folder, ignore_errors=True)


def _processes(folder: Path) -> list[Process]:
    """Machines and forwarders of the cluster in that folder, by what they were started with."""
    found: list[Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            argv = process.cmdline()
            ours = str(INIT) in argv or str(FORWARD) in argv
            if ours and any(word.startswith(f"{folder}/") for word in argv):
                found.append(Process(process.name(), process.pid, process.create_time()))
    return found


def _write_owner(folder: Path, with_parent: bool) -> None:
    me = psutil.Process()
    owner = {"pid": me.pid, "started": me.create_time()} if with_parent else None
    (folder / "owner.json").write_text(json.dumps(owner))


def _owner_is_gone(folder: Path) -> bool:
    try:
        owner = json.loads((folder / "owner.json").read_text())
    except (OSError, ValueError):
        return False
    return owner is not None and not Process("owner", owner["pid"], owner["started"]).alive()


def _keep_logs(folder: Path) -> None:
    kept = cache() / "failed" / folder.name
    shutil.rmtree(kept, ignore_errors=True)
    for log in folder.rglob("*.log"):
        target = kept / log.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(log, target)


def _forward(
    folder: Path, pid: int, host: str, port: int, with_parent: bool
) -> tuple[Process, int]:
    file = folder / "forwards" / f"{host}-{port}-{time.monotonic_ns()}"
    file.parent.mkdir(exist_ok=True)
    argv = [sys.executable, "-I", "-S", str(FORWARD), str(pid), host, str(port), str(file)]
    log = file.with_name(f"{file.name}.log")
    process = spawn("forward", argv, log, with_parent=with_parent)
    wait_for(file.exists, f"{host}:{port} was forwarded", 20, needs=[process], log=log)
    return process, int(file.read_text())


def _start_scheduler(server: ApiServer, control: Machine) -> None:
    from .certificates import kubeconfig as write

    access = write(
        server.folder / "scheduler.conf",
        server.authority.folder,
        "scheduler",
        server.address.server,
    )
    argv = [str(tool("kube-scheduler")), f"--kubeconfig={access}", "--leader-elect=false"]
    log = server.folder / "logs" / "kube-scheduler.log"
    server.processes.append(control.spawn("kube-scheduler", [*argv, "--secure-port=0"], log))


def _images(*, system: bool = True) -> list[Image]:
    programs = {images.PAUSE: "pause"}
    if system:
        programs |= {images.COREDNS: "coredns", images.KUBERAY: "kuberay-operator"}
    return [
        *(images.program(image, tool(name)) for image, name in programs.items()),
        *(images.thin(image) for image in images.THIN),
    ]


def _condition(thing: dict, kind: str) -> bool:
    conditions = thing.get("status", {}).get("conditions", ())
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


class _Steps:
    """Says how long each step took."""

    def __init__(self, say: Say) -> None:
        self._say, self._from, self._last = say, time.monotonic(), time.monotonic()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        self._say(f"{now - self._last:6.1f} s  {what}  ({now - self._from:.1f} s in all)")
        self._last = now


_CONTROLLERS = (
    # With the nodes' leases of 8 s: a node that is lost is NotReady after 16 s, not after 50.
    "--node-monitor-grace-period=16s",
    "--node-monitor-period=2s",
    "--allocate-node-cidrs=false",
)

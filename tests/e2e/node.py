"""A node: a machine with containerd, kubelet and kube-proxy, as three processes of ours.

Settings are those that also work without CAP_SYS_RESOURCE (no process may lower its OOM score)
and on either version of control groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import network
from .apiserver import ApiServer
from .build import tool
from .certificates import kubeconfig
from .debian import Runtime
from .images import PAUSE, RUNTIME_CLASS, Image, borrow
from .machine import Machine, make_groups, remove_groups
from .network import Place
from .paths import Unavailable
from .process import Process, wait_for

SOCKET = "/run/containerd/containerd.sock"
# The kubelet's folders have fixed names, so each node sees folders of its own there.
HIDDEN = ("/run", "/var/lib", "/var/log")
# What the kubelet sets on the whole machine unless it already reads so: it reads it here.
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


@dataclass
class Node:
    """One node. `stop` is a power cut; `start` after it is the same node coming back, empty."""

    place: Place
    folder: Path
    group: str
    machine: Machine
    processes: list[Process]

    @property
    def name(self) -> str:
        return self.place.name

    @classmethod
    def start(
        cls,
        place: Place,
        places: list[Place],
        folder: Path,
        group: str,
        control: Machine,
        server: ApiServer,
        runtime: Runtime,
        images: Sequence[Image],
        *,
        with_parent: bool,
    ) -> Node:
        """Starts the machine and its parts; that it becomes Ready is awaited elsewhere."""
        if any(folder.is_relative_to(hidden) for hidden in HIDDEN):
            raise Unavailable(f"{folder} is hidden inside a node; set FLASH_MSA_CACHE elsewhere")
        make_groups(group)
        machine = Machine.start(place.name, folder, _setup(folder), with_parent=with_parent)
        node = cls(place, folder, group, machine, [])
        try:
            network.join(control, machine, place, places)
            node._start_containerd(runtime, images)
            node._start_kubelet(server, runtime)
            node._start_proxy(server, runtime)
        except BaseException:
            node.stop()
            raise
        return node

    def stop(self) -> None:
        """Cuts the power. Containers, mounts and links are gone; the API server is not told."""
        self.machine.stop()
        remove_groups(self.group)

    def log(self, part: str) -> Path:
        return self.folder / "logs" / f"{part}.log"

    def _start_containerd(self, runtime: Runtime, images: Sequence[Image]) -> None:
        ctr = [runtime.find("ctr"), "--address", SOCKET]
        spec = json.loads(self.machine.run([*ctr, "oci", "spec"]))
        # Limits of the caller hold; raising them needs a capability that may be missing.
        spec["process"].pop("rlimits", None)
        plain, borrowing = self.folder / "spec.json", self.folder / "spec-borrowed.json"
        plain.write_text(json.dumps(spec))
        borrowing.write_text(json.dumps(borrow(spec)))
        cni = self.folder / "cni"
        cni.mkdir(exist_ok=True)
        (cni / "10-pods.conflist").write_text(json.dumps(network.cni_config(self.place)))
        config = self.folder / "containerd.toml"
        runc = runtime.find("runc")
        handlers = "".join(
            _HANDLER.format(name=name, spec=path, runc=runc)
            for name, path in (("runc", plain), (RUNTIME_CLASS, borrowing))
        )
        config.write_text(
            _CONTAINERD.format(plugins=runtime.plugins, cni=cni, pause=PAUSE, handlers=handlers)
        )
        argv = [runtime.find("containerd"), "--config", str(config)]
        self._spawn("containerd", argv, runtime)

        def answers() -> bool:
            try:
                self.machine.run([*ctr, "version"], timeout_s=10)
            except RuntimeError:
                return False
            return True

        what = "containerd answered"
        wait_for(answers, what, 60, needs=self.processes, log=self.log("containerd"))
        for image in images:
            load = ["--namespace", "k8s.io", "images", "import", str(image.archive())]
            self.machine.run([*ctr, *load], timeout_s=120)

    def _start_kubelet(self, server: ApiServer, runtime: Runtime) -> None:
        user = f"system:node:{self.name}"
        hosts = [self.name, self.place.address]
        server.authority.sign(self.name, user, ["system:nodes"], hosts)
        certificates = server.authority.folder
        access = kubeconfig(
            self.folder / "kubelet.conf", certificates, self.name, server.address.server
        )
        resolver = self.folder / "resolv.conf"
        resolver.write_text("")
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.place.address,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(server.authority.ca)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(certificates / f"{self.name}.crt"),
            "tlsPrivateKeyFile": str(certificates / f"{self.name}.key"),
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.group}",
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "clusterDNS": [network.DNS],
            "clusterDomain": "cluster.local",
            "resolvConf": str(resolver),
            "volumePluginDir": str(self.folder / "volume-plugins"),
            # Lost nodes are noticed within seconds, so that tests of loss stay short.
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 8,
            # The disk is shared with everything else on this machine: its filling is not ours.
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "shutdownGracePeriod": "0s",
            "serializeImagePulls": False,
        }
        file = self.folder / "kubelet.json"
        file.write_text(json.dumps(config))
        argv = [
            str(tool("kubelet")),
            f"--config={file}",
            f"--kubeconfig={access}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.place.address}",
            "--root-dir=/var/lib/kubelet",
        ]
        self._spawn("kubelet", argv, runtime)

    def _start_proxy(self, server: ApiServer, runtime: Runtime) -> None:
        access = kubeconfig(
            self.folder / "proxy.conf", server.authority.folder, "proxy", server.address.server
        )
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "bindAddress": self.place.address,
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clientConnection": {"kubeconfig": str(access)},
            "hostnameOverride": self.name,
            "detectLocalMode": "ClusterCIDR",
            "clusterCIDR": network.PODS,
            "oomScoreAdj": 0,
            # Sizes of connection tracking belong to the whole machine: left as they are.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }
        file = self.folder / "proxy.json"
        file.write_text(json.dumps(config))
        self._spawn("kube-proxy", [str(tool("kube-proxy")), f"--config={file}"], runtime)

    def _spawn(self, part: str, argv: Sequence[str], runtime: Runtime) -> None:
        process = self.machine.spawn(part, argv, self.log(part), runtime.environment)
        self.processes.append(process)


def _setup(folder: Path) -> str:
    lines: list[str] = []
    for hidden in HIDDEN:
        lines.append(f"mount -t tmpfs -o mode=755,size=256m tmpfs {hidden}")
    for name in ("kubelet", "containerd"):
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        lines.append(f"mkdir /var/lib/{name}; mount --bind {own} /var/lib/{name}")
    kernel = folder / "kernel"
    kernel.mkdir(exist_ok=True)
    for name, value in KERNEL.items():
        file = kernel / name.replace("/", "-")
        file.write_text(f"{value}\n")
        lines.append(f"mount --bind {file} /proc/sys/{name}")
    return "\n".join(lines)


_CONTAINERD = """version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/library/{pause}"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
{handlers}"""

_HANDLER = """
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{spec}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}.options]
      BinaryName = "{runc}"
      SystemdCgroup = false
"""

"""etcd and kube-apiserver, and those controllers that a test asks for: what most tests need.

On loopback it needs neither root nor Linux. The cluster starts the same parts inside its own
network namespace.
"""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .build import tool
from .certificates import Authority, kubeconfig
from .paths import fresh
from .process import Process, free_ports, run, spawn, wait_for

START_TIMEOUT_S = 120.0
"""Idle cores need 6 s; a machine that builds something beside us needs ten times that."""

PORT_ATTEMPTS = 3

Launch = Callable[[str, Sequence[str], Path], Process]
"""Starts a named command with its log somewhere: here, or in a cluster's namespaces."""


@dataclass(frozen=True)
class Address:
    """Where the parts listen; service_range gives cluster Services their addresses."""

    host: str
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    service_range: str
    published: bool = False
    """True when pods reach it: it is then the kubernetes Service, and pods have accounts."""

    @property
    def server(self) -> str:
        return f"https://{self.host}:{self.api_port}"

    @property
    def service_ip(self) -> str:
        """The address of the kubernetes Service: the server takes the first of the range."""
        return self.service_range.rsplit(".", 1)[0] + ".1"


def loopback() -> Address:
    """An address of this machine that no other machine reaches."""
    api, etcd, peer = free_ports(3)
    return Address("127.0.0.1", api, etcd, peer, "10.89.128.0/24")


@dataclass
class ApiServer:
    """A running API server. `kubeconfig` is a cluster administrator's."""

    folder: Path
    address: Address
    url: str
    authority: Authority
    kubeconfig: Path
    processes: list[Process] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        folder: Path,
        address: Address | None = None,
        *,
        url: str | None = None,
        launch: Launch | None = None,
        controllers: Sequence[str] = (),
        flags: Sequence[str] = (),
        with_parent: bool = True,
    ) -> ApiServer:
        """Starts it and returns when it is ready; nothing is left behind when it cannot start.

        url: where clients on this machine reach it, when that is not its own address.
        controllers: names that kube-controller-manager runs, such as garbage-collector-controller
        and namespace-controller; without any, owners' children and namespaces stay.
        """

        def here(name: str, argv: Sequence[str], log: Path) -> Process:
            return spawn(name, argv, log, with_parent=with_parent)

        for left in reversed(range(1 if address else PORT_ATTEMPTS)):
            at = address or loopback()
            authority = _identities(folder / "certificates", at)
            admin = kubeconfig(folder / "admin.conf", authority.folder, "admin", url or at.server)
            server = cls(folder, at, url or at.server, authority, admin)
            try:
                server._start(launch or here, flags)
                if controllers:
                    server.start_controllers(launch or here, controllers)
                return server
            except BaseException as problem:
                server.stop()
                # Between the choice of a port and its use, any connection here may take it.
                if not left or "address already in use" not in str(problem):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def start_controllers(
        self, launch: Launch, controllers: Sequence[str], flags: Sequence[str] = ()
    ) -> None:
        """Starts kube-controller-manager with those controllers ('*' is its default set)."""
        config = kubeconfig(
            self.folder / "controller-manager.conf",
            self.authority.folder,
            "controller-manager",
            self.address.server,
        )
        argv = [
            str(tool("kube-controller-manager")),
            f"--kubeconfig={config}",
            f"--controllers={','.join(controllers)}",
            "--secure-port=0",
            "--leader-elect=false",
            "--use-service-account-credentials=false",
            f"--root-ca-file={self.authority.ca}",
            f"--service-account-private-key-file={self.authority.folder / 'accounts.key'}",
            *flags,
        ]
        log = self.folder / "logs" / "kube-controller-manager.log"
        self.processes.append(launch("kube-controller-manager", argv, log))

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """The output of kubectl as administrator; RuntimeError with the server's words."""
        argv = [str(tool("kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments]
        return run(argv, stdin=stdin, timeout_s=timeout_s)

    def apply(self, manifest: Path | str, timeout_s: float = 60) -> None:
        """Server-side apply of a file, a folder or YAML text."""
        command = ["apply", "--server-side", "--field-manager=test-cluster", "-f"]
        if isinstance(manifest, Path):
            self.kubectl(*command, str(manifest), timeout_s=timeout_s)
        else:
            self.kubectl(*command, "-", stdin=manifest, timeout_s=timeout_s)

    def get(self, path: str, timeout_s: float = 5.0) -> bytes:
        """The body of a GET as administrator; OSError when there is no answer or not 200."""
        context = ssl.create_default_context(cafile=str(self.authority.ca))
        certificate = self.authority.folder / "admin.crt"
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        # No proxy: the address is ours.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(self.url + path, timeout=timeout_s) as answer:
            return answer.read()

    def stop(self) -> None:
        """Ends the processes, dependents first."""
        for process in reversed(self.processes):
            process.stop()
        self.processes.clear()

    def _start(self, launch: Launch, flags: Sequence[str]) -> None:
        at, logs = self.address, self.folder / "logs"
        client, peer = (f"http://127.0.0.1:{port}" for port in (at.etcd_port, at.etcd_peer_port))
        etcd = [
            str(tool("etcd")),
            f"--data-dir={fresh(self.folder / 'etcd')}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # The data lives as long as the processes do.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]
        folder = self.authority.folder
        api = [
            str(tool("kube-apiserver")),
            f"--etcd-servers={client}",
            f"--bind-address={at.host}",
            f"--advertise-address={at.host}",
            f"--secure-port={at.api_port}",
            f"--service-cluster-ip-range={at.service_range}",
            f"--client-ca-file={folder / 'ca.crt'}",
            f"--tls-cert-file={folder / 'apiserver.crt'}",
            f"--tls-private-key-file={folder / 'apiserver.key'}",
            f"--kubelet-client-certificate={folder / 'kubelet-client.crt'}",
            f"--kubelet-client-key={folder / 'kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'accounts.pub'}",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            "--enable-aggregator-routing=true",
            "--profiling=false",
            *([] if at.published else _ALONE),
            *flags,
        ]
        self.processes.append(launch("etcd", etcd, logs / "etcd.log"))
        log = logs / "kube-apiserver.log"
        self.processes.append(launch("kube-apiserver", api, log))
        what = "the API server was ready"
        wait_for(self._ready, what, START_TIMEOUT_S, needs=self.processes, log=log)

    def _ready(self) -> bool:
        try:
            return self.get("/readyz") == b"ok"
        except (OSError, urllib.error.URLError):
            return False


_ALONE = (
    # A loopback address may not be published as an endpoint, and nobody would follow it.
    "--endpoint-reconciler-type=none",
    # No controller makes the default service accounts that this admission waits for.
    "--disable-admission-plugins=ServiceAccount",
)


def _identities(folder: Path, address: Address) -> Authority:
    authority = Authority(folder)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
    hosts = [*names, "127.0.0.1", address.host, address.service_ip]
    authority.sign("apiserver", "kube-apiserver", hosts=hosts)
    authority.sign("kubelet-client", "kube-apiserver-kubelet-client", ["system:masters"])
    authority.sign("admin", "admin", ["system:masters"])
    # With use-service-account-credentials off, every controller acts by this identity.
    authority.sign("controller-manager", "system:kube-controller-manager", ["system:masters"])
    authority.sign("scheduler", "system:kube-scheduler")
    authority.sign("proxy", "system:kube-proxy")
    authority.key_pair("accounts")
    return authority

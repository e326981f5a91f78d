"""KubeRay and the kubelets, faked at the API of a real server: ready pods that run nothing.

What they would write is written: secrets, pods, their status and that of the clusters. What they
would run is :mod:`rayhead`. Everything is level-triggered from two watches, as the real ones are.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from aiohttp import web

from ..apiserver import ApiServer
from .background import Background
from .client import Client, Object, Refused
from .rayhead import SERVICE, Head, Heads, work

CLUSTER, KIND = "ray.io/cluster", "ray.io/node-type"
JOB_UID = "flashmsa.dev/job-uid"
CLUSTERS = "/apis/ray.io/v1/rayclusters"
TOKEN = "simulated"
LEASE_S = 0.05
"""Between a change and the work on it: changes that come together are worked on once."""
Key = tuple[str, str]
T = TypeVar("T")


class Simulator:
    """Runs until `stop`. Its methods may be called from any thread."""

    def __init__(self, server: ApiServer, nodes: int = 2, stride: int = 5) -> None:
        self._server = server
        self.heads = Heads(stride)
        self.nodes = [f"sim-{n + 1}" for n in range(nodes)]
        """Machines that run; a pod without one waits."""
        self.paused = False
        """Pods stay Pending: nothing is scheduled."""
        self.writes: Counter[str] = Counter()
        self.clusters: dict[Key, Object] = {}
        self.pods: dict[Key, Object] = {}
        self.url = ""
        self._members: dict[Key, set[str]] = defaultdict(set)
        self._work: dict[Key, Any] = {}
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._serial = itertools.count(1)
        self._placed = itertools.count()
        self._loop = Background("simulator")
        self._loop.call(self._start())

    def stop(self) -> None:
        self._loop.call(self._end())
        self._loop.stop()

    @property
    def heads_url(self) -> str:
        """Where the operator reaches heads: with {namespace}, {service} and {port} to fill in."""
        return f"{self.url}/{{namespace}}/{{service}}/{{port}}"

    @property
    def hold(self) -> bool:
        """Runs make their first steps and no more."""
        return self.heads.hold

    @hold.setter
    def hold(self, hold: bool) -> None:
        self.heads.hold = hold

    @property
    def violations(self) -> list[str]:
        """What must never be so, and was; empty when all is well."""
        return self.heads.violations

    def kick(self) -> None:
        """Looks at every cluster again, as after a change of `nodes` or `paused`."""

        def all_() -> None:
            for key in self.clusters:
                self._touch(key)

        self._loop.loop.call_soon_threadsafe(all_)

    def delete(self, path: str) -> None:
        """Deletes an object, as administrator; one that is gone is none."""
        self._loop.call(self.api.delete(path))

    def lose_node(self, name: str) -> None:
        """A machine ends: its heads and runs with it; its pods stay, and so does its Node object
        until `forget_node`."""

        async def lose() -> None:
            self.nodes.remove(name)
            for pod in list(self.pods.values()):
                if pod["spec"].get("nodeName") == name:
                    self._died(pod)
                    # What the taint manager does when the toleration is over.
                    with contextlib.suppress(Refused):
                        await self.api.delete(_path(pod), pod["metadata"]["uid"])

        self._loop.call(lose())

    def forget_node(self, name: str) -> None:
        """The cloud confirms that the machine is gone: its Node object is deleted."""
        self.delete(f"/api/v1/nodes/{name}")

    def add_node(self, name: str) -> None:
        self._loop.call(self._node(name))
        self.nodes.append(name)
        self.kick()

    def delete_pod(self, namespace: str, cluster: str, kind: str) -> str:
        """Somebody deletes one pod of a cluster, `head` or `worker`; its name."""
        pod = self._pods(namespace, cluster, kind)[0]
        self._loop.call(self.api.delete(_path(pod), pod["metadata"]["uid"]))
        return pod["metadata"]["name"]

    def restart_head(self, namespace: str, cluster: str) -> None:
        """The head's container is another one, in the same pod."""
        pod = self._pods(namespace, cluster, "head")[0]

        async def restart() -> None:
            self.heads.end(namespace, cluster)
            count = pod["status"]["containerStatuses"][0]["restartCount"] + 1
            await self._run(pod, restarts=count)

        self._loop.call(restart())

    def _pods(self, namespace: str, cluster: str, kind: str) -> list[Object]:
        names = self._members[namespace, cluster]
        pods = [self.pods[namespace, n] for n in sorted(names)]
        return [p for p in pods if p["metadata"]["labels"][KIND] == kind]

    async def _start(self) -> None:
        self.api = Client(self._server)
        for name in self.nodes:
            await self._node(name)
        self._runner = web.AppRunner(self.heads.application(), access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        self._loop.begin(self._follow_clusters())
        self._loop.begin(self._follow_pods())

    async def _end(self) -> None:
        await self._runner.cleanup()
        for name in self.nodes:
            await self.api.delete(f"/api/v1/nodes/{name}")
        await self.api.close()

    async def _node(self, name: str) -> None:
        with contextlib.suppress(Refused):
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            await self.api.create("/api/v1/nodes", node)
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {"status": {"conditions": [ready]}}
        await self.api.patch(f"/api/v1/nodes/{name}/status", status)

    async def _follow_clusters(self) -> None:
        async for kind, cluster in self.api.watch(CLUSTERS):
            if kind == "LISTED":
                self.clusters.clear()
                continue
            key = _key(cluster)
            if kind == "DELETED":
                self.clusters.pop(key, None)
                self._work.pop(key, None)
                self.heads.end(*key)
                self._touch(key)
                continue
            if kind == "ADDED":
                self._alone(cluster)
            self.clusters[key] = cluster
            self._touch(key)

    def _alone(self, cluster: Object) -> None:
        """No two clusters of one job, whatever state the first is in."""
        uid = cluster["metadata"].get("labels", {}).get(JOB_UID)
        for other in self.clusters.values():
            same = other["metadata"].get("labels", {}).get(JOB_UID) == uid
            if uid and same and other["metadata"]["uid"] != cluster["metadata"]["uid"]:
                names = [c["metadata"]["name"] for c in (other, cluster)]
                self.violations.append(f"two clusters of job {uid}: {names}")

    async def _follow_pods(self) -> None:
        async for kind, pod in self.api.watch("/api/v1/pods", CLUSTER):
            if kind == "LISTED":
                self.pods.clear()
                self._members.clear()
                continue
            key, owner = _key(pod), _owner(pod)
            if kind == "DELETED":
                self.pods.pop(key, None)
                self._members[owner].discard(key[1])
                self._died(pod)
                if not self._members[owner]:
                    del self._members[owner]
            else:
                self._see(pod)
            self._touch(owner)

    def _died(self, pod: Object) -> None:
        """A pod's containers are no more."""
        owner = _owner(pod)
        if pod["metadata"]["labels"][KIND] == "head":
            head = self.heads.heads.get(owner)
            if head is not None and head.identity.split("/")[0] == pod["metadata"]["uid"]:
                self.heads.end(*owner)
        else:
            self.heads.worker_died(*owner)

    def _touch(self, key: Key) -> None:
        """One worker per cluster; what changes while it works is seen in its next round."""
        if key in self._busy:
            self._again.add(key)
        elif key in self.clusters or key in self._members:
            self._busy.add(key)
            self._loop.begin(self._tend(key))

    async def _tend(self, key: Key) -> None:
        try:
            await asyncio.sleep(LEASE_S)
            self._again.discard(key)
            if (cluster := self.clusters.get(key)) is not None:
                await self._reconcile(key, cluster)
            else:
                await self._let_go(key)
        except Refused as refused:
            # The object changed or went under us: its event brings us back.
            if refused.code not in (404, 409, 403):
                raise
        finally:
            self._busy.discard(key)
            if key in self._again:
                self._touch(key)

    async def _let_go(self, key: Key) -> None:
        """Orphans: kubelets work on when KubeRay has nothing more to do."""
        pods = [self.pods[key[0], name] for name in sorted(self._members.get(key, ()))]
        going = [p for p in pods if p["metadata"].get("deletionTimestamp")]
        await asyncio.gather(*(self._kubelet(pod) for pod in going))

    async def _reconcile(self, key: Key, cluster: Object) -> None:
        """KubeRay's round, then the kubelets'."""
        members = [self.pods[key[0], name] for name in sorted(self._members.get(key, ()))]
        if cluster["metadata"].get("deletionTimestamp"):
            await asyncio.gather(*(self._kubelet(pod) for pod in members))
            return
        if key not in self._work:
            await self._prepare(key, cluster)
        spec = cluster["spec"]
        group = spec["workerGroupSpecs"][0]
        wanted = {"head": 1, "worker": group["replicas"]}
        if spec.get("suspend"):
            wanted = {"head": 0, "worker": 0}
        creations, ready = [], Counter()
        for kind, count in wanted.items():
            there = [p for p in members if p["metadata"]["labels"][KIND] == kind]
            template = (spec["headGroupSpec"] if kind == "head" else group)["template"]
            # As KubeRay counts: a pod that is being deleted holds its place until it is gone.
            for _ in range(len(there), count):
                creations.append(self._create(cluster, kind, template))
            going = there[count:]
            ended = [p for p in there[:count] if p["status"].get("phase") in ("Failed",)]
            for pod in (*going, *ended):
                await self.api.delete(_path(pod), pod["metadata"]["uid"])
            ready[kind] = sum(1 for p in there if _ready(p))
        await asyncio.gather(*creations, *(self._kubelet(pod) for pod in members))
        await self._status(key, cluster, ready, wanted)

    async def _prepare(self, key: Key, cluster: Object) -> None:
        namespace, name = key
        secret = {
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": name, "ownerReferences": [_reference(cluster)],
                         "labels": {CLUSTER: name}},
            "data": {"auth_token": base64.b64encode(TOKEN.encode()).decode()},
        }  # fmt: skip
        with _there_already():
            await self._write("create secrets", self.api.create(
                f"/api/v1/namespaces/{namespace}/secrets", secret))  # fmt: skip
        volumes = cluster["spec"]["headGroupSpec"]["template"]["spec"]["volumes"]
        source = next(v["configMap"]["name"] for v in volumes if v["name"] == "runspec")
        config = await self.api.get(f"/api/v1/namespaces/{namespace}/configmaps/{source}")
        uid = cluster["metadata"]["labels"][JOB_UID]
        self._work[key] = work(config["data"]["runspec.json"], uid)

    async def _create(self, cluster: Object, kind: str, template: Object) -> None:
        namespace, name = _key(cluster)
        suffix = "" if kind == "head" else f"-{next(self._serial):05d}"
        meta = template.get("metadata") or {}
        labels = {
            **(meta.get("labels") or {}), CLUSTER: name, KIND: kind, "ray.io/is-ray-node": "yes",
            "ray.io/group": "headgroup" if kind == "head" else "workers",
        }  # fmt: skip
        pod = {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": f"{name[:50]}-{kind}{suffix}", "labels": labels,
                         "annotations": meta.get("annotations") or {},
                         "ownerReferences": [_reference(cluster)]},
            "spec": {**_with_token(template["spec"], name), **self._place()},
        }  # fmt: skip
        with _there_already():
            path = f"/api/v1/namespaces/{namespace}/pods"
            # Known at once: a round that came before its event would make another.
            self._see(await self._write("create pods", self.api.create(path, pod)))

    def _see(self, pod: Object) -> None:
        key, owner = _key(pod), _owner(pod)
        self.pods[key] = pod
        self._members[owner].add(key[1])

    def _place(self) -> Object:
        """The scheduler's choice, or none."""
        if self.paused or not self.nodes:
            return {}
        return {"nodeName": self.nodes[next(self._placed) % len(self.nodes)]}

    async def _kubelet(self, pod: Object) -> None:
        meta, node = pod["metadata"], pod["spec"].get("nodeName", "")
        if meta.get("deletionTimestamp"):
            if node in self.nodes or not node:
                self._died(pod)
                await self._write("delete pods", self.api.delete(_path(pod), meta["uid"], 0))
            return
        if not node:
            await self._schedule(pod)
        elif node in self.nodes and not pod["status"].get("containerStatuses"):
            await self._run(pod)
        if _ready(pod) and meta["labels"][KIND] == "head":
            self._head(pod)

    async def _schedule(self, pod: Object) -> None:
        place = self._place()
        if place:
            binding = {
                "apiVersion": "v1", "kind": "Binding",
                "metadata": {"name": pod["metadata"]["name"]},
                "target": {"kind": "Node", "name": place["nodeName"]},
            }  # fmt: skip
            await self._write("create bindings", self.api.create(f"{_path(pod)}/binding", binding))
        elif not pod["status"].get("conditions"):
            message = f"0/{len(self.nodes)} nodes are available"
            unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                        "message": message}  # fmt: skip
            body = {"status": {"conditions": [unplaced]}}
            await self._write("patch pods/status", self.api.patch(f"{_path(pod)}/status", body))

    async def _run(self, pod: Object, restarts: int = 0) -> None:
        kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        container = pod["spec"]["containers"][0]
        running = {
            "name": container["name"], "image": container["image"], "imageID": "", "ready": True,
            "started": True, "restartCount": restarts,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "lastState": {},
        }  # fmt: skip
        status = {
            "phase": "Running", "podIP": "127.0.0.1", "hostIP": "127.0.0.1",
            "startTime": "2026-01-01T00:00:00Z",
            "conditions": [{"type": kind, "status": "True"} for kind in kinds],
            "containerStatuses": [running],
        }  # fmt: skip
        path = f"{_path(pod)}/status"
        self._see(await self._write("patch pods/status", self.api.patch(path, {"status": status})))

    def _head(self, pod: Object) -> None:
        owner = _owner(pod)
        if owner in self._work:
            restarts = pod["status"]["containerStatuses"][0]["restartCount"]
            identity = f"{pod['metadata']['uid']}/{restarts}"
            self.heads.begin(*owner, Head(identity, TOKEN, self._work[owner]))

    async def _status(
        self, key: Key, cluster: Object, ready: Counter[str], wanted: dict[str, int]
    ) -> None:
        namespace, name = key
        all_ready = bool(ready["head"]) and ready["worker"] == wanted["worker"]
        before = cluster.get("status") or {}
        suspended = bool(cluster["spec"].get("suspend"))
        state = "suspended" if suspended else "ready" if all_ready else before.get("state", "")
        status = {
            "state": state,
            "desiredWorkerReplicas": wanted["worker"],
            "readyWorkerReplicas": ready["worker"],
            "availableWorkerReplicas": ready["worker"],
            "head": {"serviceName": f"{SERVICE}{name}", "podIP": "127.0.0.1"},
            "observedGeneration": cluster["metadata"]["generation"],
        }
        if any(before.get(k) != v for k, v in status.items()):
            path = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{name}/status"
            await self._write("patch rayclusters/status", self.api.patch(path, {"status": status}))

    async def _write(self, what: str, request: Coroutine[Any, Any, T]) -> T:
        self.writes[what] += 1
        return await request


def _with_token(spec: Object, secret: str) -> Object:
    """The template with Ray's token from the cluster's Secret, as KubeRay adds it."""
    first, *others = spec["containers"]
    source = {"secretKeyRef": {"name": secret, "key": "auth_token"}}
    token = {"name": "RAY_AUTH_TOKEN", "valueFrom": source}
    return {**spec, "containers": [{**first, "env": [*first.get("env", []), token]}, *others]}


def _key(thing: Object) -> Key:
    return thing["metadata"]["namespace"], thing["metadata"]["name"]


def _owner(pod: Object) -> Key:
    return pod["metadata"]["namespace"], pod["metadata"]["labels"][CLUSTER]


def _path(pod: Object) -> str:
    namespace, name = _key(pod)
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    going = pod["metadata"].get("deletionTimestamp")
    return not going and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _reference(cluster: Object) -> Object:
    return {
        "apiVersion": "ray.io/v1", "kind": "RayCluster", "name": cluster["metadata"]["name"],
        "uid": cluster["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip


@contextlib.contextmanager
def _there_already() -> Iterator[None]:
    """What is created twice is there once."""
    try:
        yield
    except Refused as refused:
        if refused.code != 409:
            raise

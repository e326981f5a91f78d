"""Plans of jobs on a cluster: made once, kept with what runs, and read back rather than remade.

A plan belongs to the spec that it was made from. While a job holds a cluster, its plan is the one
in that cluster's ConfigMap, whatever the spec or this version of the planner say by then.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msa_operator.api import JobError, LongContextJob, Problem, parse_job, values
from msa_operator.api.job import API_VERSION, Accelerators
from msa_operator.api.profile import HardwareProfile
from msa_operator.models import Model, resolve
from msa_operator.planner.hardware import GIB, MIB, Machine
from msa_operator.planner.memory import HOST_SHARE
from msa_operator.planner.request import Plan
from msa_operator.planner.runtime import THIS_VERSION
from msa_operator.reconcile import desired, names
from msa_operator.reconcile.desired import Owner, Rendered
from msa_operator.runs import machines_of, plan_job, run_spec
from msa_operator.runtime.gate import Gate
from msa_operator.settings import Settings

OUTPUT = "/tmp/flash-msa"
"""Results of a run whose checkpoints are in a bucket; metrics and summary go there too."""
LARGE = 1 << 50
"""Bytes of a CPU worker's node where nodes cannot be listed: the scheduler has the last word."""


def own_version() -> str:
    """Version of this distribution."""
    try:
        return version("flash-msa-operator")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with everything that is created for it, packed: it is read again once or never."""

    owner: Owner
    content: str
    """Hash of everything that is created."""
    pods: int
    summary: str
    machines: int
    accelerators: int
    """Of all workers together; 0 on CPUs."""
    packed: bytes
    shown: bytes

    @classmethod
    def of(cls, rendered: Rendered, plan: Mapping[str, Any]) -> Planned:
        """``plan`` as :func:`msa_operator.planner.explain.to_dict` has it.

        Raises what a mapping that is no such plan raises: it may come from an object that anybody
        could have written.
        """
        groups = rendered.cluster["workerGroupSpecs"]
        return cls(
            owner=rendered.owner, content=rendered.content,
            pods=sum(int(g["replicas"]) for g in groups), summary=str(plan.get("summary", "")),
            machines=int(plan.get("machines", 1)),
            accelerators=sum(
                int(g["replicas"]) * int(g["rayStartParams"]["num-gpus"]) for g in groups
            ),
            packed=_pack(rendered.record()), shown=_pack(_status(plan, rendered.content)),
        )  # fmt: skip

    @property
    def rendered(self) -> Rendered:
        return desired.from_record(self.owner, _unpack(self.packed))

    @property
    def plan(self) -> Mapping[str, Any]:
        """As :func:`msa_operator.planner.explain.to_dict` has it."""
        return json.loads(self.rendered.config[desired.RUNSPEC])["plan"]

    def name(self, epoch: int) -> str:
        """The cluster's name in this epoch."""
        return names.cluster_name(self.owner.name, self.owner.uid, self.content, epoch)

    def status(self) -> dict[str, Any]:
        """``status.plan``."""
        return _unpack(self.shown)


def _pack(found: Any) -> bytes:
    return zlib.compress(json.dumps(found, separators=(",", ":")).encode(), 1)


def _unpack(packed: bytes) -> Any:
    return json.loads(zlib.decompress(packed))


def _status(plan: Mapping[str, Any], content: str) -> dict[str, Any]:
    degrees, memory = plan.get("degrees", {}), plan.get("memoryGiB", {})
    rejected = [f"{r['plan']}: {r['reason']}" for r in plan.get("rejected", [])]
    return {
        "summary": str(plan.get("summary", ""))[:1024],
        "hash": content[:16],
        "version": str(plan.get("version", ""))[:64],
        "degrees": {
            name: int(degrees.get(name, 1))
            for name in ("tensor", "context", "dataShard", "dataReplicate")
        },
        "machine": str(plan.get("machine", ""))[:63],
        "machines": int(plan.get("machines", 1)),
        "memoryGiB": float(memory.get("peak", 0.0)),
        "rejected": [text[:512] for text in rejected[:32]],
        "notes": [str(text)[:1024] for text in plan.get("notes", [])[:32]],
    }


class Planner:
    """Makes plans. Pure but for a model's config, which may be read from the Hub or a folder."""

    def __init__(
        self, settings: Settings, namespace: str,
        profiles: Callable[[], Sequence[HardwareProfile]] = tuple,
        largest_node: Callable[[], int | None] = lambda: None, gate: Gate | None = None,
    ) -> None:  # fmt: skip
        self._gate = gate or Gate()
        self._settings = settings
        self._pods = settings.for_pods(namespace)
        self._profiles = profiles
        self._largest_node = largest_node

    def plan(self, job: LongContextJob, owner: Owner, machines: int | None = None) -> Planned:
        """The plan of a job, on at most so many machines; raises :class:`JobError`."""
        _check_capacity(job)
        with self._gate.waiting():  # it may be read from the Hub
            model = resolve(job.spec.model)
        profiles = () if job.spec.hardware.device == "cpu" else tuple(self._profiles())
        every = machines_of(job, profiles, lambda: self._cpu_nodes(job))
        if machines is None or job.spec.hardware.device == "cpu":
            found = plan_job(job, model, every, THIS_VERSION)
        else:
            found = _smaller(job, model, every, machines)
        labels = {p.spec.instance_type: p.spec.node_labels for p in profiles}
        return self._render(job, model, found, owner, labels.get(found.machine.name))

    def fewer(self, job: LongContextJob, owner: Owner, planned: Planned) -> Planned | None:
        """The plan with the most machines below those of ``planned``, if there is one."""
        if job.spec.hardware.device == "cpu":
            return None  # workers are given, not chosen
        for machines in range(planned.machines - 1, 0, -1):
            try:
                return self.plan(job, owner, machines)
            except JobError:
                continue
        return None

    def _render(
        self, job: LongContextJob, model: Model, plan: Plan, owner: Owner,
        labels: Mapping[str, str] | None,
    ) -> Planned:  # fmt: skip
        own = f"{owner.name}-{owner.uid[:5]}"
        folder = self._settings.checkpoint.default_uri(owner.namespace, own)
        claimed = folder is not None and folder.startswith("file://")
        output = f"{folder.removeprefix('file://')}/output" if folder and claimed else OUTPUT
        run = run_spec(
            job,
            plan,
            model,
            output=output,
            owner="operator",
            threads=_threads(job),
            checkpoint_uri=folder or f"file://{OUTPUT}/checkpoints",
        )
        run = replace(run, plan={**run.plan, "version": own_version()})
        return Planned.of(desired.render(job, plan, run, owner, self._pods, labels), run.plan)

    def _cpu_nodes(self, job: LongContextJob) -> Machine:
        """As much memory as all workers may have together; the planner divides it again."""
        spec = job.spec
        workers = spec.hardware.workers or 1
        if spec.pod.memory:
            # Part of it is Ray's and shared memory's, as on a machine of one's own.
            each = values.quantity(spec.pod.memory)
        else:
            # A worker asks for what its rank needs and 1 GiB more.
            node = self._largest_node() or LARGE
            each = max(0, node - self._pods.daemonsets_mib * MIB - GIB) / HOST_SHARE
        cpus = max(1, int(values.quantity(spec.pod.cpu or "1"))) * workers
        memory = max(1, int(each * workers / MIB))
        return Machine("the cluster", None, 0, cpus, memory, shared=True)


def read_record(owner: Owner, data: Any) -> tuple[Planned, LongContextJob]:
    """What a ConfigMap of ours holds: the plan, and the job that was accepted for it.

    Raises :class:`ValueError` when it is not one of ours.
    """
    if not isinstance(data, Mapping):
        raise ValueError("no record of a run: no data")
    rendered = desired.from_record(owner, data)
    try:
        plan = json.loads(rendered.config[desired.RUNSPEC])["plan"]
        accepted = parse_job({
            **json.loads(rendered.config[desired.JOB]), "apiVersion": API_VERSION,
            "kind": "LongContextJob", "metadata": {"name": owner.name},
        })  # fmt: skip
        planned = Planned.of(rendered, plan if isinstance(plan, dict) else {})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no record of a run: {error!r}") from None
    return planned, accepted


def explain(error: JobError) -> str:
    """Every problem of a job on one line, for a condition."""
    return "; ".join(str(p) for p in error.problems) or str(error)


def _threads(job: LongContextJob) -> int:
    """CPU threads per worker: what its pod is given, fixed, because sums depend on it."""
    if job.spec.hardware.device != "cpu":
        return 0
    return max(1, int(values.quantity(job.spec.pod.cpu or "1")))


def _smaller(
    job: LongContextJob, model: Model, every: Sequence[Machine], machines: int
) -> Plan:  # fmt: skip
    """The fastest plan on at most so many machines of one type; raises :class:`JobError`."""
    limits = job.spec.hardware.accelerators or Accelerators()
    found: list[Plan] = []
    refused: JobError | None = None
    for machine in every:
        most = min(limits.max, machines * machine.count)
        if most < limits.min:
            continue  # fewer than the job may start with
        given = limits.model_copy(update={"max": most})
        hardware = job.spec.hardware.model_copy(update={"accelerators": given})
        spec = job.spec.model_copy(update={"hardware": hardware})
        try:
            plan = plan_job(job.model_copy(update={"spec": spec}), model, (machine,), THIS_VERSION)
        except JobError as error:
            refused = error
            continue
        if plan.machines <= machines:
            found.append(plan)
    if not found:
        raise refused or JobError([Problem(
            "spec.hardware.accelerators", f"no plan fits {machines} machines"
        )])  # fmt: skip
    return max(found, key=lambda p: p.tokens_per_second or 0.0)


def _check_capacity(job: LongContextJob) -> None:
    """Refuse what only nodes made for the job would give: this version uses nodes that exist."""
    capacity, problems = job.spec.capacity, []
    maker = capacity.provisioner
    if job.spec.hardware.device == "gpu" and maker not in ("Auto", "Existing"):
        problems.append(Problem(
            "spec.capacity.provisioner",
            f"{maker}: this version makes no nodes, it uses those that exist or that the cluster "
            "(Karpenter, an autoscaler) brings for waiting pods by itself; for these, write "
            "capacity: {provisioner: Existing}, or leave the line out",
            "Auto, Existing", "Existing",
        ))  # fmt: skip
    if capacity.reservation.ids:
        problems.append(Problem(
            "spec.capacity.reservation.ids", f"found {', '.join(capacity.reservation.ids)}",
            "none: nodes in a reservation are chosen by pod.nodeSelector in this version",
        ))  # fmt: skip
    if problems:
        raise JobError(problems)

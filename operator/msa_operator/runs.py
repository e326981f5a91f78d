"""From a job to a plan, and from a job and its plan to the RunSpec that workers are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msa_kernels.capabilities import LIMITS
from msa_workloads.heads import Order
from msa_workloads.runspec import (
    AttentionSpec,
    CheckpointSpec,
    DataSpec,
    ModelSpec,
    RecoverySpec,
    RunSpec,
    SequenceSpec,
    TrainingSpec,
)

from msa_operator.api import values
from msa_operator.api.job import Accelerators, LongContextJob
from msa_operator.api.problems import JobError, Problem
from msa_operator.api.profile import HardwareProfile
from msa_operator.models import Model
from msa_operator.planner import explain
from msa_operator.planner.degrees import PlanError
from msa_operator.planner.hardware import (
    DEFAULT_TYPES,
    MIB,
    Accelerator,
    Machine,
    MachineError,
    check_memory_request,
    machine,
    of_model,
)
from msa_operator.planner.request import Plan, Request
from msa_operator.planner.runtime import Runtime
from msa_operator.planner.search import plan as search


def plan_job(
    job: LongContextJob, model: Model, machines: Sequence[Machine], runtime: Runtime,
    *, orders: Mapping[int, Order] | None = None,
) -> Plan:  # fmt: skip
    """The plan of a job on these machines. Raises :class:`JobError` when there is none.

    ``orders`` are those in which the checkpoint of a run that goes on stores its heads, by layer;
    None is for a run that begins.
    """
    asked = request(job, model, machines)
    if orders is not None:
        layers = (n for n in range(model.shape.layers) if n not in asked.dense_layers)
        asked = replace(asked, goes_on=True, order=orders.get(next(layers, -1)))
    try:
        found = search(asked, runtime)
    except PlanError as error:
        raise JobError([
            Problem(f"spec.{r.field}", r.found, r.allowed, r.nearest) for r in error.refusals
        ]) from error  # fmt: skip
    _check_pod(job, found)
    return replace(found, notes=(*found.notes, *_checkpoint_notes(job, found)))


def _checkpoint_notes(job: LongContextJob, plan: Plan) -> list[str]:
    """Where checkpoints of a run over several machines would not be seen by all of them."""
    uri = job.spec.checkpoint.uri
    if plan.machines == 1 or (uri is not None and not uri.startswith("file://")):
        return []
    if uri is None:
        return ["checkpoint.uri is not given: on Kubernetes the cluster's default is used"]
    path = uri.removeprefix("file://")
    mounts = [volume.mount_path.rstrip("/") for volume in job.spec.pod.volumes]
    if any(path == mount or path.startswith(f"{mount}/") for mount in mounts):
        return []
    return [
        f"checkpoint.uri {uri} lies on no volume of pod.volumes: Kubernetes will refuse it for "
        f"{plan.machines} machines; use s3:// or a volume that all pods share"
    ]


def _check_pod(job: LongContextJob, plan: Plan) -> None:
    """Refuse memory that no pod on the plan's machine can ever be given."""
    memory = job.spec.pod.memory
    if memory is None or plan.machine.shared:
        return
    try:
        check_memory_request(plan.machine, values.quantity(memory) / MIB)
    except MachineError as error:
        text, _, nearest = str(error).partition("; nearest: ")
        raise JobError([Problem("spec.pod.memory", text, nearest=nearest)]) from None


def request(job: LongContextJob, model: Model, machines: Sequence[Machine]) -> Request:
    """What the planner is asked for this job."""
    spec = job.spec
    limits = spec.hardware.accelerators or Accelerators()
    degrees = spec.parallelism
    return Request(
        shape=model.shape,
        pattern=spec.attention.pattern,
        length=spec.sequence.length,
        machines=tuple(machines),
        global_batch_tokens=spec.sequence.global_batch_tokens,
        dense_layers=spec.attention.dense_layers,
        backend=spec.attention.backend,
        precision=spec.training.precision,
        workers=spec.hardware.workers,
        least=limits.min,
        most=limits.max,
        tensor=degrees.tensor,
        context=degrees.context,
        data_shard=degrees.data_shard,
        data_replicate=degrees.data_replicate,
        fixed=degrees.policy == "Fixed",
    )


def machines_of(
    job: LongContextJob, profiles: Sequence[HardwareProfile], here: Callable[[], Machine]
) -> tuple[Machine, ...]:
    """The machines that a job may use: this one for CPU jobs, else the types that it names.

    Raises :class:`JobError` for types that nobody describes.
    """
    if job.spec.hardware.device == "cpu":
        host = here()
        return (replace(host, accelerator=None, count=0, domain=1),)
    known = {p.spec.instance_type: described(p) for p in profiles}
    names = job.spec.hardware.instance_types or (*known, *DEFAULT_TYPES)
    found, problems = [], []
    for n, name in enumerate(names):
        try:
            found.append(machine(name, known))
        except MachineError as error:
            text, _, nearest = str(error).partition("; nearest: ")
            problems.append(Problem(f"spec.hardware.instanceTypes[{n}]", text, nearest=nearest))
    if problems:
        raise JobError(problems)
    return tuple(found)


def described(profile: HardwareProfile) -> Machine:
    """The machine that a HardwareProfile describes."""
    spec = profile.spec
    gpu = Accelerator(
        spec.accelerator.name, spec.accelerator.memory_mib, spec.accelerator.peak_tflops,
        spec.accelerator.memory_gbps, spec.accelerator.link_gbps,
        next((a.capability for a in of_model(spec.accelerator.name)), None),
    )  # fmt: skip
    linked = spec.accelerator.domain or spec.accelerator.count
    return Machine(
        spec.instance_type, gpu, spec.accelerator.count, spec.cpus, spec.memory_mib,
        domain=linked if spec.accelerator.link_gbps else 1,
        efa=spec.network.efa,
        network_gbps=spec.network.gbps,
        gpudirect=spec.network.rdma == "GPUDirect",
        dollars_per_hour=spec.dollars_per_hour,
        allocatable_mib=spec.allocatable_memory_mib or int(spec.memory_mib * 0.925) - 2048,
    )  # fmt: skip


def run_spec(
    job: LongContextJob,
    plan: Plan,
    model: Model,
    *,
    output: str,
    checkpoint_uri: str,
    owner: str = "ray",
    threads: int = 0,
) -> RunSpec:
    """Everything that the workers of this job are told; pure.

    ``output`` and ``checkpoint_uri`` are where this door keeps them; a ``checkpoint.uri`` in the
    job wins. ``owner`` restarts failed attempts, up to the job's ``failure.maxRestarts``.
    """
    spec, training = job.spec, job.spec.training
    warmup = training.warmup_steps
    return RunSpec(
        name=job.metadata.name,
        model=ModelSpec(
            config=_config(model, spec.sequence.length),
            source=model.source,
            tokenizer=model.tokenizer,
        ),
        data=DataSpec(
            source=spec.data.source,
            text_field=spec.data.text_field,
            packing=spec.data.packing,
            holdout_fraction=spec.data.holdout_fraction,
        ),
        sequence=SequenceSpec(
            length=spec.sequence.length,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
        ),
        attention=AttentionSpec(
            pattern=spec.attention.pattern.to_dict(),
            dense_layers=spec.attention.dense_layers,
            backend=spec.attention.backend,
        ),
        training=TrainingSpec(
            max_steps=training.max_steps,
            learning_rate=training.learning_rate,
            min_learning_rate_ratio=training.min_learning_rate_ratio,
            warmup_steps=training.max_steps // 20 if warmup is None else warmup,
            weight_decay=training.weight_decay,
            beta1=training.beta1,
            beta2=training.beta2,
            clip_norm=training.clip_norm,
            precision=training.precision,
            seed=training.seed,
            evaluate_every=training.evaluate_every,
            evaluate_sequences=training.evaluate_sequences,
        ),
        checkpoint=CheckpointSpec(
            uri=spec.checkpoint.uri or checkpoint_uri,
            every_steps=spec.checkpoint.every_steps,
            keep=spec.checkpoint.keep,
            resume=spec.checkpoint.resume,
        ),
        output=output,
        device=spec.hardware.device,
        threads=threads,
        mesh=plan.mesh,
        context=plan.context.spec,
        memory=plan.memory,
        recovery=RecoverySpec(
            owner="ray" if owner == "ray" else "operator",
            max_restarts=spec.failure.max_restarts,
        ),
        plan=explain.to_dict(plan),
    )


def _config(model: Model, length: int) -> dict[str, Any]:
    """The model's config with room for ``length`` positions; the plan notes an extension."""
    if model.shape.positions >= length:
        return model.config
    return {**model.config, "max_position_embeddings": length}


def same_run(a: RunSpec, b: RunSpec) -> str:
    """Empty when ``b`` may continue ``a``'s checkpoints, else the first field that forbids it.

    Steps, where files go, and how work is split may change; what is learned and in which order
    may not.
    """
    parts = (
        ("model", a.model, b.model),
        ("data", a.data, b.data),
        ("sequence.length", a.sequence.length, b.sequence.length),
        ("tokens of a step", step_tokens(a), step_tokens(b)),
        ("attention", _plain(a.attention), _plain(b.attention)),
        ("attention.backend", _rounds(a.attention), _rounds(b.attention)),
        ("training.seed", a.training.seed, b.training.seed),
        ("training.precision", a.training.precision, b.training.precision),
        ("training.learningRate", a.training.learning_rate, b.training.learning_rate),
    )
    return next((name for name, x, y in parts if x != y), "")


def step_tokens(spec: RunSpec) -> int:
    """Tokens of one optimizer step over all ranks."""
    per_rank = spec.sequence.length * spec.sequence.micro_batch * spec.sequence.accumulation
    return per_rank * spec.mesh.data_ranks


def _plain(attention: AttentionSpec) -> Any:
    return attention.pattern, attention.dense_layers


def _rounds(attention: AttentionSpec) -> str:
    """Backends agree to rounding, and ``auto`` takes another one on another machine; what rounds
    further is another computation, as another precision is."""
    limits = LIMITS.get(attention.backend)
    return "" if limits is None or limits.exact else attention.backend

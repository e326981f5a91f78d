"""``status`` of a LongContextJob: what the operator found and did, bounded in size."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from msa_operator.api.fields import Switch
from msa_operator.api.schema import Choice, Each, Int, Map, Model, Number, Rule, Text

PHASES = (
    "Pending", "Planned", "Suspended", "Queued", "Provisioning", "Starting", "Running",
    "Recovering", "Draining", "Complete", "Failed",
)  # fmt: skip
CONDITIONS = (
    "Planned", "CapacityReady", "RayReady", "Running", "Degraded", "CheckpointFresh", "Suspended",
    "Complete", "Failed", "Ready", "Reconciling", "Stalled",
)  # fmt: skip

Count = Annotated[int, Int(0)]
Line = Annotated[str, Text(1024)]
Time = Annotated[
    str,
    Text(
        40, r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+(Z|[+-][0-9]{2}:[0-9]{2})$", "an RFC 3339 time"
    ),
]


class Condition(Model):
    type: Annotated[str, Text(64, r"^[A-Z][A-Za-z]*$", shortest=1)]
    status: Annotated[str, Choice(("True", "False", "Unknown"))]
    reason: Annotated[str, Text(128, r"^[A-Z][A-Za-z0-9]*$", shortest=1)]
    message: Annotated[str, Text(4096)] = ""
    last_transition_time: Time
    observed_generation: Count = 0


class Degrees(Model):
    tensor: Count = 1
    context: Count = 1
    data_shard: Count = 1
    data_replicate: Count = 1


class PlanStatus(Model):
    summary: Line = ""
    """As shown by kubectl: ``tp2 cp4 fsdp8 on 8 x p5.48xlarge``."""
    hash: Annotated[str, Text(64)] = ""
    version: Annotated[str, Text(64)] = ""
    """Version of the planner that made it; a newer one never replans a running job."""
    degrees: Degrees = Field(default_factory=Degrees)
    machine: Annotated[str, Text(63)] = ""
    machines: Count = 0
    memory_gib: Annotated[float, Number(0, 1e6)] = Field(default=0.0, alias="memoryGiB")
    """Estimated peak of one accelerator."""
    rejected: Annotated[tuple[str, ...], Each(Text(512), 32)] = ()
    """Alternatives that were considered, each with its reason in numbers."""
    notes: Annotated[tuple[str, ...], Each(Text(1024), 32)] = ()


class Attempt(Model):
    number: Count
    submission_id: Annotated[str, Text(128)] = ""
    state: Annotated[str, Choice(("Open", "Over"))] = "Open"
    reason: Annotated[str, Text(128)] = ""
    message: Annotated[str, Text(4096)] = ""
    started: Time | None = None
    ended: Time | None = None
    from_step: Count = 0
    to_step: Count = 0
    checkpoint_step: Count = 0
    head: Annotated[str, Text(128)] = ""
    """Uid and restarts of the head that it runs on; with another one it is lost."""
    workers: Annotated[str, Text(64)] = ""
    """Digest of the same of all workers."""


class Failures(Model):
    hour: Count
    """Since 1970."""
    count: Count


class Intent(Model):
    """What was decided, so that an operator that dies anywhere goes on where it was."""

    since: Time | None = None
    """When the phase was entered."""
    reason: Annotated[str, Text(128)] = ""
    message: Line = ""
    failures: Annotated[tuple[Failures, ...], Field(max_length=32)] = ()
    """Failed attempts by the hour, for failure.maxRestarts."""
    in_a_row: Count = 0
    """Failed attempts since the last that wrote a checkpoint, for the wait before the next."""
    retry_at: Time | None = None
    replace: Switch = False
    """The next attempt needs a new cluster."""
    losses_tried: Count = 0
    """Entries of failure.onNodeLoss that are used up."""
    machines: Annotated[int | None, Int(1)] = None
    """The most machines of the next plan, after a replan."""
    after: Annotated[str, Choice(PHASES)] = "Suspended"
    """What Draining ends in."""
    active_seconds: Annotated[float, Number(0, 1e12)] = 0.0
    """Time that nodes were held, up to activeSince."""
    active_since: Time | None = None
    ended: Time | None = None
    accepted: Annotated[dict[str, str], Map(64, 64)] = Field(default_factory=dict)
    """Hash of every part of the spec that the run was planned from."""


class Progress(Model):
    step: Count = 0
    max_steps: Count = 0
    loss: Annotated[float | None, Number(-1e9, 1e9)] = None
    tokens_per_second: Annotated[int | None, Int(0)] = None
    """Over the last steps; not there until one was measured."""
    mfu: Annotated[float | None, Number(0, 10)] = None
    """Model FLOP utilization, 0 to 1."""
    eta: Annotated[str, Text(32)] = ""
    checkpoint_step: Count = 0
    checkpoint_uri: Annotated[str, Text(1024)] = ""
    updated: Time | None = None


class Nodes(Model):
    summary: Annotated[str, Text(32)] = ""
    """``ready/wanted``."""
    ready: Count = 0
    wanted: Count = 0
    names: Annotated[tuple[str, ...], Each(Text(253), 1024)] = ()


class Cost(Model):
    node_hours: Annotated[float, Number(0, 1e12)] = 0.0
    dollars: Annotated[float | None, Number(0, 1e12)] = None


class Ray(Model):
    cluster: Annotated[str, Text(63)] = ""
    head_service: Annotated[str, Text(63)] = ""
    dashboard: Annotated[str, Text(1024)] = ""
    epoch: Count = 0


class JobStatus(Model):
    observed_generation: Count = 0
    phase: Annotated[str | None, Choice(PHASES)] = None
    conditions: Annotated[tuple[Condition, ...], Field(max_length=32)] = ()
    plan: PlanStatus | None = None
    attempts: Annotated[tuple[Attempt, ...], Field(max_length=64)] = ()
    intent: Intent | None = None
    progress: Progress | None = None
    nodes: Nodes | None = None
    cost: Cost | None = None
    ray: Ray | None = None

    rules: ClassVar[tuple[Rule, ...]] = ()

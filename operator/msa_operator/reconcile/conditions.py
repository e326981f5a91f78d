"""Conditions of a job, each owned by one function, from the state alone.

Their messages say what to do next where a person has to do it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from msa_operator.reconcile.intent import HOLDING, TERMINAL
from msa_operator.reconcile.lifecycle import edited
from msa_operator.reconcile.observe import State

Status = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, kw_only=True)
class Condition:
    type: str
    status: Status
    reason: str
    message: str = ""
    observed_generation: int = 0
    changed: float = 0.0
    """When ``status`` last became what it is."""


Found = tuple[Status, str, str]


def of(s: State) -> tuple[Condition, ...]:
    """Every condition of the job, in a fixed order."""
    return tuple(
        Condition(
            type=name, status=status, reason=reason, message=message,
            observed_generation=s.job.generation, changed=s.now,
        )
        for name, owner in _OWNERS.items()
        for status, reason, message in [owner(s)]
    )  # fmt: skip


def merge(old: tuple[Condition, ...], new: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """``new`` with the times of ``old`` where a status is as it was."""
    before = {c.type: c for c in old}
    return tuple(
        replace(c, changed=before[c.type].changed)
        if c.type in before and before[c.type].status == c.status
        else c
        for c in new
    )


def _planned(s: State) -> Found:
    phase = s.intent.phase
    if phase in HOLDING and (changed := edited(s)):
        fields = ", ".join(f"spec.{name}" for name in changed)
        return "True", "EditRefused", (
            f"{fields} changed while the job runs and is not used: set suspend, wait for "
            "Suspended, then unset it to plan again"
        )  # fmt: skip
    if phase in HOLDING or phase in TERMINAL:
        return "True", "Planned", s.planning.summary
    if s.planning.content:
        return "True", "Planned", s.planning.summary
    if s.planning.refused:
        return "False", "Refused", s.planning.refused
    return "Unknown", "Planning", "no plan yet"


def _capacity_ready(s: State) -> Found:
    cluster = s.cluster
    if s.intent.phase not in HOLDING:
        return "False", "NotNeeded", "no nodes are held"
    if s.name_taken:
        return "False", "NameTaken", f"another owner's RayCluster is named {s.intent.cluster}"
    if cluster is not None and cluster.suspended:
        return "False", "Queued", "the queue has not admitted the cluster"
    wanted = cluster.workers_wanted if cluster else s.planning.pods
    placed = sum(1 for p in s.workers if p.node)
    if cluster is not None and wanted and placed >= wanted:
        return "True", "NodesReady", f"{placed}/{wanted} workers have a node"
    why = next((p.message for p in s.members if p.message), s.capacity.message)
    return "False", "Waiting", f"{placed}/{wanted} workers have a node{': ' + why if why else ''}"


def _ray_ready(s: State) -> Found:
    if s.cluster is None:
        return "False", "NoCluster", ""
    if s.complete:
        return "True", "AllReady", f"head and {s.cluster.workers_wanted} workers"
    ready = sum(1 for p in s.workers if p.ready)
    return "False", "Incomplete", f"{ready}/{s.cluster.workers_wanted} workers are ready"


def _running(s: State) -> Found:
    if s.intent.phase == "Running":
        # No step here: progress says it, and a condition is written far less often.
        return "True", "Stepping", f"attempt {s.intent.number}"
    return "False", s.intent.phase, s.intent.message


def _degraded(s: State) -> Found:
    if s.intent.phase == "Recovering":
        return "True", s.intent.reason or "Recovering", s.intent.message
    if s.intent.machines is not None and s.intent.phase in HOLDING:
        return "True", "FewerMachines", f"replanned to {s.intent.machines} machines"
    return "False", "AsPlanned", ""


def _checkpoint_fresh(s: State) -> Found:
    run, every = s.run, s.job.spec.checkpoint.every_steps
    if run is None or s.intent.phase not in ("Running", "Draining"):
        return "Unknown", "NotRunning", f"newest known: step {s.intent.checkpoint_step}"
    # One interval is due, another is being written. progress says which step it is.
    if run.step - run.checkpoint_step <= 2 * every:
        return "True", "Fresh", f"at most {2 * every} steps would be repeated"
    return "False", "Late", (
        f"more than {2 * every} steps since the newest checkpoint: see that checkpoint.uri can be "
        "written to and is fast enough"
    )  # fmt: skip


def _suspended(s: State) -> Found:
    if s.intent.phase != "Suspended":
        return "False", "NotSuspended", ""
    if s.ours:
        return "False", "FreeingNodes", "the cluster is being deleted"
    return "True", "Suspended", s.intent.message


def _complete(s: State) -> Found:
    done = s.intent.phase == "Complete"
    return ("True" if done else "False"), (s.intent.reason if done else "NotComplete"), ""


def _failed(s: State) -> Found:
    if s.intent.phase == "Failed":
        return "True", s.intent.reason, s.intent.message
    return "False", "NotFailed", ""


def _ready(s: State) -> Found:
    """kstatus: what was asked for is so. A run counts when it steps, a suspended job when idle."""
    phase = s.intent.phase
    idle = phase == "Suspended" and not s.ours
    good = s.job.deleted is None and (phase in ("Running", "Complete") or idle)
    return ("True" if good else "False"), phase, s.intent.message


def _reconciling(s: State) -> Found:
    if s.job.deleted is not None:
        return "True", "Deleting", "returning what the job holds"
    moving = _ready(s)[0] == "False" and _stalled(s)[0] == "False"
    return ("True" if moving else "False"), s.intent.phase, s.intent.message


def _stalled(s: State) -> Found:
    """Only a person can help."""
    if s.intent.phase == "Failed":
        return "True", s.intent.reason, s.intent.message
    if s.intent.phase == "Pending" and s.planning.refused:
        return "True", "Refused", s.planning.refused
    return "False", "Progressing", ""


_OWNERS: dict[str, Callable[[State], Found]] = {
    "Planned": _planned, "CapacityReady": _capacity_ready, "RayReady": _ray_ready,
    "Running": _running, "Degraded": _degraded, "CheckpointFresh": _checkpoint_fresh,
    "Suspended": _suspended, "Complete": _complete, "Failed": _failed, "Ready": _ready,
    "Reconciling": _reconciling, "Stalled": _stalled,
}  # fmt: skip

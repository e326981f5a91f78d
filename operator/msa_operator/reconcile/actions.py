"""Side effects as values. Each may be carried out twice without harm; order is what matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msa_operator.reconcile.intent import Intent


@dataclass(frozen=True)
class PersistIntent:
    """Write the intent to the job's status, refused if the object changed since it was read."""

    intent: Intent


@dataclass(frozen=True)
class AddFinalizer:
    """Before the first thing outside the namespace is made."""


@dataclass(frozen=True)
class RemoveFinalizer:
    """Nothing outside is left, or the deadline for returning it has passed."""


@dataclass(frozen=True)
class PrepareCapacity:
    """Make what the nodes need outside the namespace."""


@dataclass(frozen=True)
class ReturnCapacity:
    """Give back one thing outside the namespace."""

    name: str


@dataclass(frozen=True)
class CreateCluster:
    """Create ConfigMap, NetworkPolicy and RayCluster of this name; what exists is left alone."""

    name: str


@dataclass(frozen=True)
class DeleteCluster:
    """With a precondition on the uid: a namesake that came later is not ours to delete."""

    name: str
    uid: str


@dataclass(frozen=True)
class ReleaseWorkers:
    """Keep the head for its logs and dashboard; set the worker group to none."""

    name: str
    uid: str


@dataclass(frozen=True)
class Submit:
    """GET, POST, and GET again after any error."""

    id: str
    resume: bool


@dataclass(frozen=True)
class RequestDrain:
    """Ask the run for a checkpoint, its marker, and to stop at a step boundary."""

    id: str


@dataclass(frozen=True)
class DumpStacks:
    """Write the stacks of every rank beside the checkpoints."""

    id: str


@dataclass(frozen=True)
class StopSubmission:
    id: str


@dataclass(frozen=True)
class ForceDeletePod:
    """With grace 0 and a precondition on the uid: its node is gone and cannot confirm."""

    name: str
    uid: str


@dataclass(frozen=True)
class DeleteJob:
    """The finished job's ttl has passed."""


@dataclass(frozen=True)
class RecordEvent:
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


Action = (
    PersistIntent | AddFinalizer | RemoveFinalizer | PrepareCapacity | ReturnCapacity
    | CreateCluster | DeleteCluster | ReleaseWorkers | Submit | RequestDrain | DumpStacks
    | StopSubmission | ForceDeletePod | DeleteJob | RecordEvent
)  # fmt: skip

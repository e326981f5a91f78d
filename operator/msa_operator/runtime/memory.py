"""What the operator remembers of a job between two looks: answers and times, never decisions.

All of it may be lost with the process: it is asked for again, and waits that count from it start
anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msa_operator.api import JobSpec, LongContextJob
from msa_operator.reconcile.intent import Intent
from msa_operator.reconcile.observe import Submission
from msa_operator.runtime.head import Head
from msa_operator.runtime.planning import Planned
from msa_operator.runtime.views import Report

NEVER = float("-inf")


@dataclass(slots=True)
class Contact:
    """The last exchange with one head."""

    identity: str
    """Uid and restarts of the head pod: another one is asked anew."""
    head: Head
    reachable: bool = False
    asked: float = NEVER
    """By the monotonic clock."""
    failures: int = 0
    submissions: tuple[Submission, ...] = ()
    stale: bool = False
    """We did something since it was asked."""


@dataclass(slots=True)
class Seen:
    """What a run last reported, and when its step last grew."""

    report: Report
    stepped: float
    received: float


@dataclass(frozen=True, slots=True)
class Made:
    """A plan as it was last made, or why there is none."""

    inputs: Any
    """What it was made from."""
    job: LongContextJob
    plan: Planned | None
    refused: str
    at: float


@dataclass(frozen=True, slots=True)
class Read:
    """A job object as it was read, for as long as the object is the same."""

    version: str
    generation: int
    told: bytes
    """Digest of what the intent was read from."""
    job: LongContextJob | None
    spec: JobSpec
    problem: str
    """Why the spec cannot be read; ``spec`` is then what it was accepted as."""
    parts: tuple[tuple[str, str], ...]
    intent: Intent


@dataclass(slots=True)
class Memory:
    """Of one job object, by its uid; used by one worker at a time."""

    uid: str
    read: Read | None = None
    planned: Made | None = None
    held: tuple[Any, Planned] | None = None
    """For which intent, and the plan that the job's cluster was made from."""
    accepted: LongContextJob | None = None
    """The job as it was accepted for what runs, read by this version."""
    checked: tuple[str, str, float] | None = None
    """Content whose pod templates the API server was asked about, its refusal, and when."""
    contact: Contact | None = None
    reached: tuple[bool, float] | None = None
    """Whether the head answers, and since when by the wall clock; None while nobody asks."""
    seen: Seen | None = None
    silent: dict[str, float] = field(default_factory=dict)
    """Pods that end on a node that says nothing, by uid, and since when."""
    trouble: str = ""
    """Why something could not be created."""
    status_written: float = NEVER
    progress_written: float = NEVER
    told: set[tuple[str, str]] = field(default_factory=set)
    """Warnings that were made an event already."""

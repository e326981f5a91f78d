"""What the operator has decided to do, as it is kept in a job's status: written before it is done.

Everything here survives a crash of the operator; everything else is observed anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "Pending", "Planned", "Suspended", "Queued", "Provisioning", "Starting", "Running",
    "Recovering", "Draining", "Complete", "Failed",
]  # fmt: skip
PHASES: tuple[Phase, ...] = Phase.__args__  # type: ignore[attr-defined]
HOLDING: frozenset[Phase] = frozenset({"Queued", "Provisioning", "Starting", "Running",
                                       "Recovering", "Draining"})  # fmt: skip
"""Phases in which a cluster may exist for the run."""
TERMINAL: frozenset[Phase] = frozenset({"Complete", "Failed"})

ATTEMPTS_KEPT = 64
"""Status is bounded; older attempts are counted in ``failures`` and in the number."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One submission. Times in seconds of the operator's clock; steps are optimizer steps."""

    number: int
    submission_id: str
    head: str
    """Uid and restart count of the head that it runs on: another one has lost it."""
    workers: str
    """Digest of the same of all workers."""
    started: float
    from_step: int = 0
    to_step: int = 0
    checkpoint_step: int = 0
    ended: float | None = None
    reason: str = ""
    message: str = ""

    @property
    def over(self) -> bool:
        return self.ended is not None


@dataclass(frozen=True, kw_only=True)
class Intent:
    phase: Phase = "Pending"
    since: float = 0.0
    """When the phase was entered; what deadlines count from."""
    epoch: int = 0
    """Grows when a cluster must be replaced; part of its name."""
    cluster: str = ""
    """The one cluster that may exist; none when empty."""
    attempts: tuple[Attempt, ...] = ()
    failures: tuple[tuple[int, int], ...] = ()
    """Failed attempts as (hour, count), for the limit on restarts."""
    in_a_row: int = 0
    """Failed attempts since the last one that wrote a checkpoint, for the backoff."""
    retry_at: float = 0.0
    replace: bool = False
    """The next attempt needs a new cluster."""
    losses_tried: int = 0
    """How many of ``failure.onNodeLoss`` have been used up since nodes were last complete."""
    machines: int | None = None
    """The most machines that the next plan may use, after a replan."""
    after: Phase = "Suspended"
    """What Draining ends in."""
    reason: str = ""
    message: str = ""
    """Why the phase was entered, and what to do about it."""
    active_used: float = 0.0
    """Seconds that nodes were held, up to ``since_active``."""
    since_active: float | None = None
    ended: float | None = None
    accepted: tuple[tuple[str, str], ...] = ()
    """Hash of every part of the spec that the run was planned from."""

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that is not over."""
        return self.attempts[-1] if self.attempts and not self.attempts[-1].over else None

    @property
    def number(self) -> int:
        """Number of the last attempt; 0 before the first."""
        return self.attempts[-1].number if self.attempts else 0

    @property
    def checkpoint_step(self) -> int:
        return max((a.checkpoint_step for a in self.attempts), default=0)

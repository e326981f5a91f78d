"""What a run's driver knows of the run at any moment, and what was asked of it; thread-safe.

The driver feeds it events and rank reports, the control endpoint reads it. It knows no Ray and no
torch, and judges time by the driver's own clock only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from msa_workloads.runspec import RunSpec

State = Literal["starting", "running", "draining", "drained", "finished", "failed"]

OVER = ("drained", "finished", "failed")

RECENT_STEPS = 20
"""Steps over which speed, utilisation and the remaining time are averaged."""

SILENT_SECONDS = 15.0
"""A rank that reports nothing for so long is said to be silent; ranks report every second."""

PLACES = ("starting", "reading data", "training", "evaluating", "saving a checkpoint")
"""What a rank does within one step, in this order."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank says of itself. ``waits`` when it is in a collective with other ranks.

    ``node`` is the address of its machine, ``node_id`` Ray's name for it; ``dump`` the file that
    the stack dump signal writes to; ``memory_bytes`` its peak.
    """

    rank: int
    pid: int
    node: str
    node_id: str = ""
    step: int = 0
    doing: str = PLACES[0]
    waits: bool = False
    checkpoint_step: int = 0
    memory_bytes: int = 0
    dump: str = ""

    @property
    def place(self) -> tuple[int, int, bool]:
        """How far it is; the least of all ranks' places is where a run hangs."""
        order = PLACES.index(self.doing) if self.doing in PLACES else len(PLACES)
        return self.step, order, self.waits


@dataclass(frozen=True)
class Heard:
    """A report and when it was heard, on the driver's clock."""

    report: RankReport
    at: float


class RunState:
    """The state of one attempt, fed as a sink of rows and by the driver."""

    def __init__(
        self, spec: RunSpec, submission: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self.submission = submission
        self._clock = clock
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        self._state: State = "starting"
        self._begun = False
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._step = 0
        self._loss: float | None = None
        self._checkpoint_step = 0
        self._error = ""
        self._ranks: dict[int, Heard] = {}
        self._stacks: dict[int, tuple[int, str]] = {}
        self._last_word_read = False

    # Events of the run, as the driver hears them.

    def begin(self, rows: list[dict[str, Any]], plan: dict[str, Any]) -> None:
        """The workers start after ``rows``, which a checkpoint holds."""
        del plan
        with self._lock:
            self._begun = True
            self._ranks.clear()
            if self._state == "starting":
                self._state = "running"
            self._recent.clear()
            self._step = rows[-1]["step"] if rows else 0
            self._loss = rows[-1]["loss"] if rows else None
            self._checkpoint_step = self._step

    def add(self, row: dict[str, Any]) -> None:
        """One step is done."""
        with self._lock:
            self._recent.append(row)
            self._step, self._loss = row["step"], row["loss"]

    def heard(self, report: RankReport) -> None:
        """A rank has reported."""
        with self._lock:
            self._ranks[report.rank] = Heard(report, self._clock())
            self._checkpoint_step = max(self._checkpoint_step, report.checkpoint_step)

    def stacks(self, rank: int, number: int, text: str) -> None:
        """A rank has dumped its stacks for request ``number``."""
        with self._told:
            self._stacks[rank] = (number, text)
            self._told.notify_all()

    def restored(self, step: int) -> None:
        """The newest checkpoint before this attempt is of ``step``."""
        with self._lock:
            self._checkpoint_step = max(self._checkpoint_step, step)

    def ended(self, state: State, *, checkpoint_step: int | None = None, error: str = "") -> None:
        """The attempt is over."""
        with self._lock:
            self._state, self._error = state, error
            if checkpoint_step is not None:
                self._checkpoint_step = max(0, checkpoint_step)

    # What the control endpoint asks.

    def drain(self) -> None:
        """Checkpoint and stop before the next step; asking again changes nothing."""
        with self._lock:
            if self._state in ("starting", "running"):
                self._state = "draining"

    @property
    def draining(self) -> bool:
        with self._lock:
            return self._state == "draining"

    @property
    def begun(self) -> bool:
        """Whether the workers have got as far as their first step."""
        with self._lock:
            return self._begun

    @property
    def checkpoint_step(self) -> int:
        """Step of the newest whole checkpoint, 0 without one."""
        with self._lock:
            return self._checkpoint_step

    @property
    def checkpoint_uri(self) -> str:
        return self._spec.checkpoint.uri

    def reports(self) -> dict[int, RankReport]:
        """The newest report of every rank."""
        with self._lock:
            return {rank: heard.report for rank, heard in sorted(self._ranks.items())}

    def wait_for_stacks(self, number: int, ranks: set[int], seconds: float) -> dict[int, str]:
        """Dumps of request ``number``, as many as came within ``seconds``."""

        def there() -> dict[int, str]:
            return {r: text for r, (n, text) in self._stacks.items() if n == number}

        with self._told:
            self._told.wait_for(lambda: ranks <= there().keys(), seconds)
            return there()

    def was_read(self, progress: dict[str, Any]) -> None:
        """Whoever owns the run has this progress."""
        with self._told:
            self._last_word_read = progress["state"] in OVER
            self._told.notify_all()

    def wait_for_last_word(self, seconds: float) -> bool:
        """Whether whoever owns the run has its final progress after at most ``seconds``."""
        with self._told:
            return self._told.wait_for(lambda: self._last_word_read, seconds)

    def progress(self) -> dict[str, Any]:
        """``GET /progress``: JSON-ready; what is not known is null."""
        with self._lock:
            speed = self._speed()
            seconds = None if speed is None else speed[0]
            over = self._state in OVER
            steps = self._spec.training.max_steps
            return {
                "submission": self.submission,
                "state": self._state,
                "step": self._step,
                "maxSteps": steps,
                "loss": self._loss,
                "tokensPerSecond": None if speed is None else speed[1],
                "mfu": self._mfu(seconds),
                "etaSeconds": None if seconds is None or over else seconds * (steps - self._step),
                "checkpointStep": self._checkpoint_step,
                "checkpointUri": self._spec.checkpoint.uri,
                "drained": self._state == "drained",
                "ranks": [self._rank(heard) for _, heard in sorted(self._ranks.items())],
                "error": self._error,
            }

    def lagging(self) -> dict[str, Any] | None:
        """The rank that the others wait for: rank, step and node; None when none stands out.

        A silent rank is one. Otherwise it is the one furthest behind: by its step, then by what
        it does, then because it is not in the collective that its peers wait in.
        """
        with self._lock:
            ranks = [heard for _, heard in sorted(self._ranks.items())]
            silent = [h for h in ranks if self._silence(h) > SILENT_SECONDS]
            places = {h.report.place for h in ranks}
            if silent and len(silent) < len(ranks):
                last = silent[0]
            elif len(places) > 1:
                last = min(ranks, key=lambda h: h.report.place)
            else:
                return None
            report = last.report
            return {"rank": report.rank, "step": report.step, "node": report.node}

    def metrics(self) -> str:
        """``GET /metrics``: Prometheus text; what is not known is left out."""
        now = self.progress()
        memory = {rank: report.memory_bytes for rank, report in self.reports().items()}
        job = _label(self._spec.name)
        lines: list[str] = []
        for name, about, value in (
            ("step", "Last finished step.", now["step"]),
            ("loss", "Loss of the last step, nats per token.", now["loss"]),
            ("tokens_per_second", "Tokens per second over all ranks.", now["tokensPerSecond"]),
            ("mfu", "Model FLOP/s over the peak of all ranks, from 0 to 1.", now["mfu"]),
            ("checkpoint_step", "Step of the newest whole checkpoint.", now["checkpointStep"]),
        ):
            if value is not None:
                lines += [*_head(name, about), f'msa_run_{name}{{job="{job}"}} {value}']
        if memory:
            lines += _head("memory_bytes", "Peak memory of a rank.")
            lines += [
                f'msa_run_memory_bytes{{job="{job}",rank="{rank}"}} {size}'
                for rank, size in memory.items()
            ]
        return "\n".join(lines) + "\n"

    def _speed(self) -> tuple[float, float] | None:
        """Seconds of a step and tokens per second, over the recent steps."""
        seconds = sum(row["seconds"] for row in self._recent)
        if not seconds:
            return None
        tokens = sum(row["tokens_per_second"] * row["seconds"] for row in self._recent)
        return seconds / len(self._recent), tokens / seconds

    def _mfu(self, seconds: float | None) -> float | None:
        flops = self._spec.plan.get("flops") or {}
        work, peak = flops.get("step"), flops.get("peak")
        return work / (peak * seconds) if work and peak and seconds else None

    def _silence(self, heard: Heard) -> float:
        return self._clock() - heard.at

    def _rank(self, heard: Heard) -> dict[str, Any]:
        report, silence = heard.report, self._silence(heard)
        doing = report.doing + (", waiting for other ranks" if report.waits else "")
        if silence > SILENT_SECONDS:
            doing = f"silent for {silence:.0f} s; before: {doing}"
        return {"rank": report.rank, "step": report.step, "node": report.node, "doing": doing}


def _head(name: str, about: str) -> list[str]:
    return [f"# HELP msa_run_{name} {about}", f"# TYPE msa_run_{name} gauge"]


def _label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

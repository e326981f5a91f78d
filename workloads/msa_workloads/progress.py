"""Metrics as rows: one JSON object per step, the same on disk, in checkpoints and on screen.

``metrics.jsonl`` always is one unbroken history. When a run resumes at step 100, rows after step
100 are dropped and rows before it come from the checkpoint, also where the file itself was lost
with its machine.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One optimizer step.

    ``loss`` is in nats per valid token of all ranks. ``samples`` is the range of global samples
    read, end excluded, and ``digest`` sums a hash of each sample's number and tokens over all
    ranks: equal digests mean equal data. ``seconds`` is the step's own time, ``elapsed`` that of
    all steps so far, lost attempts excluded. ``memory_bytes`` is rank 0's peak (device memory on
    GPUs, resident memory on CPUs).
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    seconds: float
    elapsed: float
    memory_bytes: int
    samples: tuple[int, int]
    digest: int
    time: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**asdict(self), "samples": list(self.samples)}


class Sink(Protocol):
    """Where rank 0 sends its rows."""

    def begin(self, rows: list[dict[str, Any]], plan: dict[str, Any]) -> None:
        """An attempt starts after ``rows``, which replace all earlier ones."""
        ...

    def add(self, row: dict[str, Any]) -> None:
        """One more row."""
        ...


class Control(Protocol):
    """How a rank is watched and asked to stop; every rank has one. No method may block."""

    def enters(self, step: int, doing: str) -> None:
        """From now on the rank does ``doing`` for ``step``."""
        ...

    def saved(self, step: int) -> None:
        """A checkpoint of ``step`` is committed."""
        ...

    def stop_requested(self) -> bool:
        """Whether to checkpoint and stop before the next step."""
        ...


class Alone:
    """The control of a rank that nobody watches."""

    def enters(self, step: int, doing: str) -> None:
        """Nobody asks."""

    def saved(self, step: int) -> None:
        """Nobody asks."""

    def stop_requested(self) -> bool:
        return False


ALONE = Alone()


class MetricsFile:
    """``metrics.jsonl`` in a folder."""

    def __init__(self, output: str | os.PathLike[str]) -> None:
        self.path = Path(output) / METRICS

    def begin(self, rows: list[dict[str, Any]], plan: dict[str, Any]) -> None:
        del plan
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        temporary.replace(self.path)

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows; a last line that a killed writer left half written is not one."""
        return read_rows(self.path.read_text()) if self.path.exists() else []


def read_rows(text: str) -> list[dict[str, Any]]:
    """Rows of a metrics file's text, without a half-written last line."""
    lines = text.split("\n")
    return [json.loads(line) for line in lines[:-1]]


class Tee:
    """Sends every row to several sinks."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def begin(self, rows: list[dict[str, Any]], plan: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.begin(rows, plan)

    def add(self, row: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.add(row)


class Silent:
    """A sink that keeps nothing: ranks other than 0 have it."""

    def begin(self, rows: list[dict[str, Any]], plan: dict[str, Any]) -> None:
        """Nothing to do."""

    def add(self, row: dict[str, Any]) -> None:
        """Nothing to do."""

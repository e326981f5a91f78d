"""A run that is asked to stop, on real ranks: where it stops, and what a resume then gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msa_workloads.checkpoint import newest_complete
from msa_workloads.progress import ALONE, Silent
from msa_workloads.runspec import RunSpec
from msa_workloads.storage import open_store
from msa_workloads.train import run

pytestmark = pytest.mark.slow


class StopsAt:
    """Asks to stop on one rank only, from the moment at which that rank enters a place."""

    def __init__(self, step: int, doing: str) -> None:
        self.place, self.stop, self.saves = (step, doing), False, []

    def enters(self, step: int, doing: str) -> None:
        self.stop = self.stop or (step, doing) == self.place

    def saved(self, step: int) -> None:
        self.saves.append(step)

    def stop_requested(self) -> bool:
        return self.stop


def drained_and_resumed(specs: list[list[Any]]) -> list[Any]:
    """Per spec: the outcome when stopped at a place, what was saved, and the resumed outcome."""
    import os

    found = []
    for text, step, doing in specs:
        spec = RunSpec.from_json(text)
        control = StopsAt(step, doing) if os.environ["RANK"] == "1" else ALONE
        first = run(spec, Silent(), control)
        saved = newest_complete(open_store(spec.checkpoint.uri))
        again = replace(spec, checkpoint=replace(spec.checkpoint, resume="Latest"))
        found.append((first, saved and saved.step, run(again, Silent())))
    return found


def test_all_ranks_stop_before_the_same_step(
    make_spec: Callable[..., RunSpec], on_ranks: Callable[..., Any]
) -> None:
    places = [
        ("peace", 99, "reading data"),
        ("middle", 4, "reading data"),
        ("before-step-5", 4, "training"),
        ("in-a-checkpoint", 2, "saving a checkpoint"),
        ("before-the-first", 1, "reading data"),
        ("in-the-last", 6, "training"),
    ]
    specs = [
        (make_spec(name, mesh={"data_shard": 2}, sequence={"micro_batch": 1}).to_json(), *place)
        for name, *place in places
    ]
    ranks = on_ranks(drained_and_resumed, 2, specs=specs)
    assert [first["steps"] for first, _, _ in ranks[0]] == [f["steps"] for f, _, _ in ranks[1]]
    found = dict(zip([name for name, *_ in places], ranks[0], strict=True))
    peace = found["peace"][0]
    assert (peace["drained"], peace["steps"]) == (False, 6)
    expected = {
        "middle": (True, 3, 3),
        "before-step-5": (True, 4, 4),
        "in-a-checkpoint": (True, 2, 2),
        "before-the-first": (True, 0, None),
        "in-the-last": (False, 6, 6),
    }
    for name, (drained, steps, saved) in expected.items():
        first, on_disk, again = found[name]
        assert (first["drained"], first["steps"], on_disk) == (drained, steps, saved), name
        assert first["last_checkpoint_step"] == (-1 if saved is None else saved)
        assert (first["held_out"] is None) == drained
        assert again["resumed_from_step"] == saved
        assert [r["loss"] for r in again["history"]] == [r["loss"] for r in peace["history"]], name
        assert [r["digest"] for r in again["history"]] == [r["digest"] for r in peace["history"]]
        assert again["held_out"] == peace["held_out"]

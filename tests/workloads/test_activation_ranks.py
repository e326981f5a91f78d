"""Memory switches over ranks: sharded weights, split sequences and split heads change nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from msa_workloads.runspec import MemorySpec, RunSpec

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks
from mesh_cases import Case, errors_of

TOLERANCE = 1e-5
"""Of the largest value of the single process that keeps everything, in fp32."""


@dataclass(frozen=True)
class Saving(Case):
    """A case whose ranks save memory; its reference, a :class:`Case`, does not."""

    memory: MemorySpec = field(default_factory=MemorySpec)

    def spec(self) -> RunSpec:
        return replace(super().spec(), memory=self.memory)


KEPT = MemorySpec(checkpointing="selective", keep_projections=1, mlp_chunk=20, loss_chunk=17)
SEGMENTS = MemorySpec(
    checkpointing="full", checkpoint_layers=2, offload_checkpoints=True, mlp_chunk=33,
    loss_chunk=40, offload_optimizer=True,
)  # fmt: skip
CASES = {
    2: [
        Saving((1, 2, 1, 1), "llama", "sinks", memory=SEGMENTS),
        Saving((1, 1, 2, 1), "qwen3", "window", memory=KEPT),
        Saving((1, 1, 2, 1), "llama", "sinks", layout="zigzag", memory=SEGMENTS),
        Saving((1, 1, 1, 2), "llama", "dense", memory=KEPT),
        Saving((1, 1, 1, 2), "qwen3", "per head", micro_batch=2, memory=SEGMENTS),
    ],
    4: [
        Saving((1, 1, 2, 2), "llama", "sinks", memory=KEPT),
        Saving((2, 2, 1, 1), "qwen3", "union", packing="masked rank", memory=SEGMENTS),
    ],
}


def errors(ranks: int) -> list[tuple[float, str]]:
    return [(error, str(case)) for error, case in errors_of(list(CASES[ranks]))]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CASES)
def test_ranks_that_save_memory_give_what_one_process_gives(ranks: int) -> None:
    found = on_forks(errors, ranks, ranks)[0]
    assert len(found) == len(CASES[ranks])
    for error, case in found:
        assert error <= TOLERANCE, case

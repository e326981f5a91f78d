"""Ranks that have a GPU each, over NCCL: the steps of one process, and accumulation in shards.

On a machine without the packages of the control plane:
``pytest -m gpu --confcutdir=tests/workloads/gpu tests/workloads/gpu``. What asks for more GPUs
than there are is skipped, and says so.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import test_accumulation
from mesh_cases import Case, errors_of
from spawned import needs, on_gpus
from test_mesh_invariance import CORNERS

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-4
"""Of the largest reference value, in fp32: kernels on a GPU add up in other orders than one
another, and matrix products of other sizes do."""

PAIRS = [
    Case((1, 1, 2, 1)),
    Case((1, 1, 2, 1), pattern="window", layout="contiguous", length=97),
    Case((1, 1, 2, 1), pattern="window", method="ring", layout="contiguous"),
    Case((1, 1, 2, 1), method="ring", layout="zigzag", model="qwen3"),
    Case((1, 1, 2, 1), method="p2p", layout="zigzag", packing="masked rank"),
    Case((1, 1, 2, 1), pattern="dilated", layout="residues", packing="whole"),
    Case((1, 1, 2, 1), pattern="sinks", dense_layers=(0,), heads=2, model="qwen3"),
    Case((1, 1, 2, 1), pattern="union", checkpointing="full", loss_chunk=17),
    Case((1, 1, 2, 1), pattern="per head", dense_layers=(1,), layout="balanced"),
    Case((1, 1, 2, 1), pattern="listed", layout="rotated", method="ring", length=91),
    Case((1, 2, 1, 1), pattern="dilated window", model="qwen3"),
    Case((2, 1, 1, 1), packing="masked rank", micro_batch=2),
    Case((1, 1, 1, 2), pattern="per head", length=91),
    Case((1, 1, 1, 2), pattern="columns", model="qwen3", loss_chunk=13),
]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_step_is_that_of_one_process(ranks: int) -> None:
    needs(ranks)
    cases = PAIRS if ranks == 2 else CORNERS[ranks]
    found = on_gpus(errors_of, ranks, [replace(case, device="gpu") for case in cases])[0]
    assert len(found) == len(cases)
    assert not [pair for pair in found if not pair[0] <= TOLERANCE]


def test_between_micro_batches_gradients_are_shards_that_add_up_in_fp32() -> None:
    needs(2)
    test_accumulation.check(on_gpus(test_accumulation.every, 2, "gpu"))

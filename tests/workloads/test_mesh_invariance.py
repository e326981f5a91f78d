"""On every mesh the loss, the gradients and the clipping of one process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks
from mesh_cases import PACKINGS, PATTERNS, Case, errors_of

TOLERANCE = 1e-5
"""Of the largest reference value, in fp32."""

CORNERS = {
    3: [
        Case((1, 1, 3, 1), length=97, layout="contiguous", pattern="window"),
        Case((1, 1, 3, 1), length=95, layout="zigzag", packing="masked rank", model="qwen3"),
        Case((1, 1, 3, 1), layout="balanced", method="p2p", pattern="union"),
    ],
    4: [
        Case((1, 1, 4, 1), pattern="dilated", layout="residues", packing="whole"),
        Case((1, 1, 4, 1), pattern="per head", layout="residues", model="qwen3"),
        Case((1, 1, 4, 1), pattern="sinks", dense_layers=(0,), heads=4, model="qwen3"),
        Case((1, 1, 4, 1), pattern="listed", layout="rotated", method="ring", length=91),
        Case((1, 1, 4, 1), layout="contiguous", packing="masked rank", heads=2, method="ring"),
        Case((1, 1, 4, 1), pattern="per head", dense_layers=(1,), checkpointing="full"),
        Case((1, 2, 2, 1), pattern="per head", dense_layers=(2,), model="qwen3", loss_chunk=17),
        Case((2, 1, 2, 1), pattern="columns", micro_batch=2, model="qwen3"),
        Case((2, 2, 1, 1), pattern="dilated window"),
        Case((1, 1, 2, 2), pattern="per head", dense_layers=(1,), model="qwen3"),
        Case((1, 2, 1, 2), pattern="sinks", model="qwen3", loss_chunk=17),
        Case((2, 1, 1, 2), packing="masked rank", micro_batch=2),
        Case((1, 1, 2, 2), pattern="union", heads=2, packing="masked rank", length=71),
        Case((1, 1, 1, 4), pattern="per head", length=91),
    ],
    8: [
        Case((2, 2, 2, 1), pattern="per head", dense_layers=(0,), model="qwen3"),
        Case((1, 2, 4, 1), pattern="union", layout="zigzag", heads=2),
        Case((2, 1, 4, 1), packing="masked rank", layout="contiguous", micro_batch=2),
        Case((2, 1, 2, 2), pattern="per head", model="qwen3", method="ring"),
        Case((1, 2, 2, 2), pattern="dilated", layout="residues", checkpointing="full"),
        Case((1, 1, 4, 2), packing="masked rank", layout="zigzag", loss_chunk=13),
        Case((1, 1, 8, 1), pattern="block", length=61),
        Case((1, 1, 8, 1), pattern="dilated", layout="residues", length=97, heads=2),
    ],
}
"""What random draws would seldom meet, by number of ranks: more ranks than key/value heads, than
residues and than documents; lengths that nothing divides; mixed patterns on all layouts."""


def run_cases(cases: list[Case]) -> list[tuple[float, Case]]:
    dist.init_process_group("gloo")
    return errors_of(cases)


def check(cases: Sequence[Case], ranks: int) -> None:
    found = on_forks(run_cases, ranks, list(cases))[0]
    assert len(found) == len(cases)
    worst, case = max(found, key=lambda pair: pair[0])
    assert worst <= TOLERANCE, case


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CORNERS)
def test_corners_of_the_space(ranks: int):
    assert all(case.ranks == ranks for case in CORNERS[ranks])
    check(CORNERS[ranks], ranks)


def layouts(case: Case) -> list[str]:
    """Layouts that this case can have."""
    steps = {"dilated": 4, "dilated window": 3, "union": 4, "per head": 4, "columns": 1}
    sharing = case.mesh[2] // case.heads
    step = steps.get(case.pattern, 1)
    fits = ["residues"] if any(sharing % n == step % n == 0 for n in (2, 3)) else []
    return ["auto", "contiguous", "rotated", "zigzag", "balanced", *fits]


@st.composite
def cases_of(draw: st.DrawFn, ranks: int) -> Case:
    meshes = [m for m in MESHES if m[0] * m[1] * m[2] * m[3] == ranks]
    mesh = draw(st.sampled_from(meshes))
    # Of four query heads each tensor rank has its part.
    degrees = [n for n in (1, 2, 4) if mesh[2] % n == 0 and 4 // mesh[3] % n == 0]
    case = Case(
        mesh=mesh,
        model=draw(st.sampled_from(["llama", "qwen3"])),
        pattern=draw(st.sampled_from(sorted(PATTERNS))),
        dense_layers=draw(st.sampled_from([(), (1,), (0, 2)])),
        method=draw(st.sampled_from(["all_to_all", "p2p", "ring"])),
        heads=draw(st.sampled_from(degrees)),
        length=draw(st.integers(64, 110)),
        packing=draw(st.sampled_from(PACKINGS)),
        micro_batch=draw(st.sampled_from([1, 4 // (mesh[0] * mesh[1])])),
        loss_chunk=draw(st.sampled_from([0, 13])),
    )
    return replace(case, layout=draw(st.sampled_from(layouts(case))))


MESHES = [
    mesh
    for mesh in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2))
    if 1 < mesh[0] * mesh[1] * mesh[2] * mesh[3] <= 8
]
"""Degrees in the mesh's order; with more than one rank, and at most 8."""


@pytest.mark.slow
@settings(max_examples=2, phases=[Phase.generate], deadline=None, derandomize=True)
@given(drawn=st.one_of(st.just(()), st.tuples(*[cases_of(4)] * 12)))
def test_a_sample_of_the_space(drawn: tuple[Case, ...]):
    # Hypothesis tries the simplest example first: the empty one, so that ranks start but once.
    if drawn:
        check(drawn, 4)


@pytest.mark.full
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_whole_space(mesh: tuple[int, int, int, int], packing: str):
    """Every mesh with every pattern on three layouts, both models, all packings."""
    cases = []
    numbered = itertools.product(PATTERNS, ("contiguous", "zigzag", "auto"))
    for n, (pattern, layout) in enumerate(numbered, PACKINGS.index(packing)):
        cases.append(
            Case(
                mesh,
                ("llama", "qwen3")[n % 2],
                pattern,
                ((), (1,))[n // 2 % 2],
                layout,
                ("all_to_all", "p2p", "ring")[n % 3],
                length=(93, 110, 64, 71)[n % 4],
                packing=packing,
                loss_chunk=(0, 13)[n // 3 % 2],
            )
        )
    check(cases, cases[0].ranks)

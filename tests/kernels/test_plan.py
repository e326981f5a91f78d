"""Plans: folded parts see exactly the pattern's pairs, views where possible, a bounded cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels import engine
from msa_kernels import plan as plans
from msa_kernels.blocks import Runs
from msa_kernels.fused import row_delta
from msa_kernels.pattern import Block, Columns, Dense, Dilated, Pattern, PerHead, Union, Window
from msa_kernels.placement import Placement
from msa_kernels.plan import PartPlan, packed, plan, varlen, whole
from msa_kernels.rules import FARTHEST
from msa_kernels.testing import patterns, placed, seen_pairs
from msa_kernels.tiled import TorchTiles

CPU = torch.device("cpu")


def pairs_of_part(part: PartPlan, shape: tuple[int, int]) -> np.ndarray:
    """The part's pairs in the caller's rows, through the layout that its kernel is given."""
    seen = seen_pairs(part.part.allows, part.queries, part.keys)
    count = np.zeros(shape, int)
    fold = part.part.fold
    if part.folds_as_view:
        for residue in range(fold):
            count[residue::fold, residue::fold] += seen
        return count
    q = np.arange(shape[0]) if part.q_order is None else part.q_order
    k = np.arange(shape[1]) if part.k_order is None else part.k_order
    assert np.array_equal(np.sort(q), np.arange(shape[0]))
    count[np.ix_(q, k)] += seen
    return count


@settings(deadline=None, max_examples=200)
@given(st.data(), placed())
def test_parts_add_up_to_the_pattern(data: st.DataObject, where: tuple[Runs, Runs]) -> None:
    pattern = data.draw(patterns(140, per_head=False))
    queries, keys = where
    total = np.zeros((queries.rows, keys.rows), int)
    for part in plan(pattern, queries, keys):
        total += pairs_of_part(part, total.shape)
    assert np.array_equal(total, seen_pairs(pattern.allows, queries, keys).astype(int))


@pytest.mark.parametrize(
    ("where", "view"),
    [
        (whole(64, 64), True),
        (whole(32, 64), True),
        (whole(63, 63), False),
        (whole(62, 64), False),
        (packed(np.repeat([[0, 1, 2]], [8, 16, 4], axis=1)), True),
        (packed(np.repeat([[0, 1, 2]], [8, 15, 5], axis=1)), False),
    ],
)
def test_a_fold_is_a_view_where_everything_divides(where: object, view: bool) -> None:
    queries, keys = where if isinstance(where, tuple) else (where, where)
    (part,) = plan(Dilated(4), queries, keys)
    assert part.folds_as_view is view


def test_a_plan_without_documents_needs_no_maps() -> None:
    (part,) = plan(Window(4), *whole(10, 16))
    assert part.simple
    assert (part.q_start, part.k_start) == (6, 0)
    (part,) = plan(Window(4), *varlen(np.array([0, 3, 9]), np.array([0, 2, 4])))
    assert not part.simple
    maps = part.maps(CPU)
    assert maps.q_position.tolist() == [-1, 0, 1, -4, -3, -2, -1, 0, 1]
    assert maps.k_document.tolist() == [0, 0, 1, 1]


def test_rows_beyond_32_bit_offsets_keep_their_place() -> None:
    """Row 262,144 at stride 8,192 starts at element 2**31: the last row that 32 bits reach."""
    rows, stride = 262_145, 8_192
    lists = plan(Window(128), *whole(rows, rows))[0].tiles(128, 128)
    last = int(lists.index[-1]) * lists.block_k
    assert last == 262_144
    assert last * stride == 1 << 31
    offset = torch.tensor(int(lists.index[-1])) * lists.block_k * stride
    assert offset.dtype == torch.int64


def test_plans_are_shared_and_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    small = plan(Window(5), *whole(10, 10))
    for n in range(1, 3 * plans.PLANS_KEPT):
        plan(Dense(), *whole(n, n))
    assert plan(Window(5), *whole(10, 10)) is small, "small plans are many, as in a ring"
    monkeypatch.setattr(plans, "ROWS_KEPT", 0)
    first = plan(Window(7), *whole(50, 50))
    assert plan(Window(7), *whole(50, 50)) is first
    for n in range(1, plans.PLANS_KEPT + 5):
        plan(Dense(), *whole(n, n))
    assert len(plans._plans) <= plans.PLANS_KEPT
    assert plan(Window(7), *whole(50, 50)) is not first


def test_threads_share_one_list() -> None:
    (part,) = plan(Union((Window(9), Dilated(3))), *whole(4096, 4096))[:1]
    with ThreadPoolExecutor(8) as pool:
        lists = list(pool.map(lambda _: part.tiles(64, 64), range(32)))
    assert all(found is lists[0] for found in lists)


def test_a_changed_id_tensor_is_read_again() -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    where = Placement(ids)
    assert len(where.runs(8, 8)[0].begin) == 1
    assert where.runs(8, 8)[0] is where.runs(8, 8)[0]
    ids[:, 4:] = 1
    assert len(where.runs(8, 8)[0].begin) == 2


@pytest.mark.parametrize(
    ("bounds", "says"),
    [([1, 8], "start at 0"), ([0, 5, 3, 8], "never fall"), ([0, 7], "7 but the tensor has 8")],
)
def test_bounds_must_cover_the_rows(bounds: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Placement(None, torch.tensor(bounds), torch.tensor([0, 8])).runs(8, 8)


def test_batch_rows_never_share_a_document() -> None:
    runs = packed(np.zeros((3, 5), int))
    assert runs.length.tolist() == [5, 5, 5]


def test_masks_of_all_plans_stay_within_their_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    from msa_kernels import tiled
    from msa_kernels.attention import msa_attention

    made = []
    make = tiled._make_masks
    monkeypatch.setattr(tiled, "_make_masks", lambda *args: made.append(args[0]) or make(*args))
    monkeypatch.setattr(tiled, "_shelf", tiled._Shelf())
    monkeypatch.setattr(tiled, "MASK_BYTES", 40_000)
    monkeypatch.setattr(tiled, "MASKS_BYTES", 100_000)
    q = torch.randn(1, 512, 1, 8)

    def attend(cut: int) -> torch.Tensor:
        ids = (torch.arange(512) >= cut).int()[None]
        out = msa_attention(q, q, q, Columns(32, 8), documents=ids)
        assert isinstance(out, torch.Tensor)
        return out

    first = [attend(cut) for cut in range(100, 400, 30)]
    seen = list(dict.fromkeys(made))
    assert len(seen) == 10, "every step has other documents, so another plan"
    kept = [masks for part in seen if (masks := part.kept("masks", tiled._Masks)).by_chunk]
    sizes = [sum(m.nbytes for some in one.by_chunk.values() for m in some) for one in kept]
    assert sizes == [one.bytes for one in kept]
    assert sum(sizes) == tiled._shelf.bytes <= 100_000
    assert all(size <= 40_000 for size in sizes)
    # Of the plan used last a part is kept and serves again; results are the same either way.
    made.clear()
    assert torch.equal(attend(370), first[-1])
    again, all_of_it = len(made), len(seen[-1].kept("masks", tiled._Masks).by_chunk)
    assert again > 0 and all_of_it > 0
    made.clear()
    assert torch.equal(attend(100), first[0])
    assert len(made) == again + all_of_it, "that of the first plan had to go"


@pytest.mark.parametrize(
    "pattern",
    [
        Window(20),
        Union((Block(16), Dilated(4))),
        PerHead((Window(9), Dense())),
        PerHead((Union((Block(8), Dilated(4))), Window(3))),
    ],
    ids=["one part", "parts that are added", "heads apart", "heads apart, parts added"],
)
def test_dq_is_rounded_once_whatever_dk_and_dv_are(pattern: Pattern) -> None:
    make = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(1, 64, 4, 8, generator=make).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 64, 2, 8, generator=make).bfloat16() for _ in range(2))
    kernel, runs = TorchTiles(), (Runs.whole(64), Runs.whole(64))
    out, lse = engine.forward(kernel, q, k, v, pattern, *runs, 0.3)
    inputs = (kernel, q, k, v, out, dout, lse, row_delta(dout, out, None), pattern, *runs, 0.3)
    wide = engine.backward(*inputs, torch.float32)
    mixed = engine.backward(*inputs, torch.float32, torch.bfloat16)
    assert torch.equal(mixed[0], wide[0].bfloat16())
    assert mixed[1].dtype == torch.float32
    assert torch.equal(mixed[1], wide[1])
    assert torch.equal(mixed[2], wide[2])


@pytest.mark.parametrize("where", [whole(4, FARTHEST + 1), (Runs.whole(2, -FARTHEST),) * 2])
def test_positions_that_kernels_cannot_count_are_refused(where: tuple[Runs, Runs]) -> None:
    with pytest.raises(ValueError, match="longer than kernels count"):
        plan(Window(3), *where)
    assert plan(Window(3), *whole(4, FARTHEST))


WRITERS = {
    "numpy": lambda tensor, values: np.copyto(tensor.numpy(), values.numpy()),
    "data": lambda tensor, values: tensor.data.copy_(values),
    "storage": lambda tensor, values: (
        torch.empty(0, dtype=tensor.dtype)
        .set_(tensor.untyped_storage(), 0, tensor.shape)
        .copy_(values)
    ),
    "replaced": lambda tensor, values: setattr(tensor, "data", values),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_documents_are_those_of_the_call_whoever_wrote_them(
    write: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    """What fills a batch in place need not be PyTorch, nor this process."""
    first = torch.tensor([[0, 0, 0, 1, 1, 2]]), torch.tensor([0, 4, 6])
    other = torch.tensor([[0, 1, 1, 1, 1, 1]]), torch.tensor([0, 1, 6])
    ids, bounds = (tensor.clone() for tensor in first)

    def lengths() -> list[list[int]]:
        both = Placement(ids).runs(6, 6), Placement(None, bounds, bounds).runs(6, 6)
        return [runs[0].length.tolist() for runs in both]

    assert lengths() == lengths() == [[3, 2, 1], [4, 2]]
    before = ids._version
    write(ids, other[0])
    write(bounds, other[1])
    assert lengths() == lengths() == [[1, 5], [1, 5]]
    assert ids._version == before


def test_documents_of_inference_mode_are_read_once() -> None:
    with torch.inference_mode():
        ids = torch.tensor([[0, 0, 1]])
        first = Placement(ids).runs(3, 3)
        assert Placement(ids).runs(3, 3)[0] is first[0]
        ids.fill_(0)
        assert Placement(ids).runs(3, 3)[0].length.tolist() == [3]


@pytest.mark.parametrize("rate", [7, 10**9, sys.maxsize])
def test_a_rate_beyond_every_document_lists_only_residues_that_occur(rate: int) -> None:
    """Queries see themselves; a plan has no more runs than rows, and its numbers fit 32 bits."""
    lengths = np.repeat(np.arange(400), 5)[None]
    packed_runs = packed(lengths)
    shifted = varlen(np.array([0, 3, 9]), np.array([0, 5, 9]))
    for queries, keys in ((packed_runs, packed_runs), whole(5, 5), shifted):
        parts = plan(Dilated(rate), queries, keys)
        total = np.zeros((queries.rows, keys.rows), int)
        for part in parts:
            assert len(part.queries.begin) <= queries.rows
            assert part.queries.document.max() < queries.rows + keys.rows
            total += pairs_of_part(part, total.shape)
        seen = seen_pairs(Dilated(rate).allows, queries, keys)
        assert np.array_equal(total, seen.astype(int))

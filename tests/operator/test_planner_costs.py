"""FLOPs, memory and bytes: exact where they can be, and against published runs where not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels.pattern import (
    Block,
    BlockList,
    BlockTopK,
    Dense,
    Dilated,
    Pattern,
    PerHead,
    SinkWindow,
    Window,
)
from msa_operator.planner.comm import step_bytes
from msa_operator.planner.context import Heads, choose, price_layouts
from msa_operator.planner.exchange import NONE, Ranks, held
from msa_operator.planner.flops import head_pairs, layer_pairs, step_flops
from msa_operator.planner.hardware import machine
from msa_operator.planner.memory import ALLOCATOR, rank_memory
from msa_operator.planner.modelspec import model_shape
from msa_operator.planner.presets import PRESETS
from msa_operator.planner.timing import step_seconds
from msa_workloads.runspec import ContextSpec, MemorySpec, MeshSpec

LLAMA = model_shape(PRESETS["llama-3.1-8b"])
TINY = model_shape(PRESETS["tiny-llama"])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 80), st.integers(0, 90), st.integers(1, 200))
def test_closed_forms_count_every_pair(window: int, sinks: int, length: int):
    pattern = SinkWindow(window, sinks)
    assert head_pairs(pattern, length, 1) == pattern.pairs(length)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_block_lists_are_counted_block_by_block(data: st.DataObject):
    block = data.draw(st.integers(1, 9))
    causal = data.draw(st.booleans())
    count = data.draw(st.integers(1, 8))
    rows = tuple(
        tuple(sorted(data.draw(st.sets(st.integers(0, q if causal else count), max_size=4))))
        for q in range(count)
    )
    pattern = BlockList(block, rows, causal)
    length = data.draw(st.integers(1, 80))
    brute = sum(bool(pattern.allows(i, j)) for i in range(length) for j in range(length))
    assert head_pairs(pattern, length, 1) == brute


def test_pairs_of_heads_and_layers():
    mixed = PerHead((Window(4), Dense()))
    assert head_pairs(mixed, 10, 4) == (Window(4).pairs(10) + 55) / 2
    assert head_pairs(BlockTopK(4, 2), 16, 1) == BlockTopK(4, 2).pairs_bound(16)
    assert layer_pairs(TINY, Window(4), (0, 3), 10) == 2 * 55 + 2 * Window(4).pairs(10)


def test_flops_of_dense_attention_are_the_textbook_formula():
    length = 8192
    pairs = layer_pairs(LLAMA, Dense(), (), length)
    flops = step_flops(LLAMA, pairs, length, 2)
    per_token = 6 * (LLAMA.parameters - LLAMA.embedding_parameters)
    assert flops.matrices == per_token * 2 * length
    textbook = 6 * LLAMA.layers * LLAMA.query_size * length  # per token, half of a full square
    assert flops.attention / (2 * length) == pytest.approx(textbook, rel=1 / length * 1.01)


def test_recomputation_repeats_the_layers_forward():
    pairs = layer_pairs(LLAMA, Dense(), (), 4096)
    again = step_flops(LLAMA, pairs, 4096, 1, checkpointing="full")
    assert again.recompute_attention == again.attention / 3
    assert again.recompute_matrices == 2 * 4096 * LLAMA.layers * LLAMA.layer_parameters
    assert again.model == step_flops(LLAMA, pairs, 4096, 1).model
    kept = step_flops(LLAMA, pairs, 4096, 1, checkpointing="selective")
    assert kept == replace(again, recompute_attention=0.0)


FULL = MemorySpec(checkpointing="full", loss_chunk=4096)
SELECTIVE, TILES = replace(FULL, checkpointing="selective"), replace(FULL, mlp_chunk=16_384)
FSDP, TENSOR, CONTEXT = MeshSpec(data_shard=2), MeshSpec(tensor=2), MeshSpec(context=2)

# Steps of a Llama of 8B's width and four layers on two H200 (benchmarks/training/memory.json):
# mesh, switches, length, and GiB that were allocated and reserved at most.
MEASURED = [
    (FSDP, MemorySpec(loss_chunk=4096), 16_384, 21.10, 31.74),
    (TENSOR, MemorySpec(loss_chunk=4096), 16_384, 19.04, 25.83),
    (FSDP, SELECTIVE, 65_536, 32.58, 41.06), (TENSOR, SELECTIVE, 65_536, 22.96, 31.00),
    (FSDP, FULL, 65_536, 31.57, 41.06), (TENSOR, FULL, 65_536, 22.77, 30.12),
    (CONTEXT, FULL, 131_072, 31.57, 41.06),
    (FSDP, TILES, 65_536, 25.22, 35.31), (TENSOR, TILES, 131_072, 23.20, 29.20),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "memory", "length", "allocated", "reserved"), MEASURED)
def test_peak_memory_of_measured_steps(
    mesh: MeshSpec, memory: MemorySpec, length: int, allocated: float, reserved: float
):
    shape, exchange = replace(LLAMA, layers=4), NONE
    if mesh.context > 1:
        heads = ((Window(4096), 8),)
        ranks = Ranks(length, mesh.context, ContextSpec(), "rotated", ((Window(4096), 32),))
        exchange = held(ranks, ((heads, 4),), (32, 8), 128, 2)
        assert exchange.work > exchange.layer > 0
    rank = rank_memory(
        shape, mesh, memory, tokens=length // mesh.context, precision="bf16", exchange=exchange
    )
    expected = rank.total / (1 << 30)
    assert 1.0 <= expected / ALLOCATOR / allocated <= 1.14
    assert expected <= reserved


def test_copied_key_value_weights_are_counted_whole():
    few = replace(LLAMA, kv_heads=2)
    ranks = [
        rank_memory(few, MeshSpec(tensor=t), FULL, tokens=1024, precision="bf16").states
        for t in (2, 4)
    ]
    copied = 2 * few.layers * few.hidden * few.kv_size * 16
    assert ranks[1] == pytest.approx((ranks[0] * 2 - copied) / 4 + copied)


def test_offloaded_states_leave_weights_and_gradients_on_the_device():
    away = replace(FULL, offload_optimizer=True)
    rank = rank_memory(LLAMA, MeshSpec(), away, tokens=1024, precision="fp32")
    assert rank.states == rank.host == 8 * LLAMA.parameters
    assert rank.update == 2 * 256 * 2**20 * 8


def test_gradients_of_earlier_micro_batches_are_there_when_backward_begins():
    narrow = replace(FULL, parameters="bf16", optimizer_states="bf16")
    for memory, sums in ((FULL, 0), (narrow, 4)):
        one, more = (
            rank_memory(
                LLAMA, FSDP, memory, tokens=8192, precision="bf16", accumulates=accumulates
            )
            for accumulates in (False, True)
        )  # fmt: skip
        assert one.gradients > 0 == more.gradients
        assert more.states - one.states == sums * LLAMA.parameters / 2


def test_a_layer_that_receives_more_counts_as_much_as_if_all_did():
    """Its keys are there at one time or another, however few such layers there are."""
    dense, window = ((Dense(), 8),), ((Window(4096), 8),)
    ranks = Ranks(131_072, 4, ContextSpec(), "zigzag", (*dense, *window))
    few, most = (
        held(ranks, kinds, (32, 8), 128, 2)
        for kinds in (((dense, 1), (window, 31)), ((dense, 31), (window, 1)))
    )
    assert few.work == most.work and few.layer == most.layer


def test_backends_that_round_hold_less_of_what_travels():
    ranks = Ranks(131_072, 2, ContextSpec(), "zigzag", ((Dense(), 8),))
    wide, narrow = (
        held(ranks, ((((Dense(), 8),), 4),), (32, 8), 128, 2, **kind)
        for kind in ({}, {"merges": False, "rounds": True})
    )
    assert narrow.layer == wide.layer and narrow.work < wide.work


def test_inputs_that_leave_are_counted_on_the_host():
    away = replace(TILES, offload_checkpoints=True)
    there = rank_memory(LLAMA, MeshSpec(), away, tokens=1 << 20, precision="bf16")
    here = rank_memory(LLAMA, MeshSpec(), TILES, tokens=1 << 20, precision="bf16")
    assert there.host == here.kept == 32 * 4096 * 2 * 2**20
    assert there.kept == 2 * 4096 * 2 * 2**20
    some = replace(away, checkpoints_on_device=5)
    five = rank_memory(LLAMA, MeshSpec(), some, tokens=1 << 20, precision="bf16")
    assert five.host + five.kept == there.host + there.kept
    sparse = replace(TILES, checkpoint_layers=4)
    fourth = rank_memory(LLAMA, MeshSpec(), sparse, tokens=1 << 20, precision="bf16")
    assert (fourth.kept, fourth.last) == (8 * 4096 * 2 * 2**20, 4 * 4096 * 2 * 2**20)


# Published tokens per second and GPU, and the error of this version: a first model, whose one
# efficiency lies between eager and compiled runs, power-limited and not.
SPEEDS = {
    "torchtitan 8B fsdp8, 500 W, eager": (LLAMA, MeshSpec(data_shard=8), 2, 1, 5762, 0.33),
    "torchtitan 8B fsdp8, 500 W, compiled": (LLAMA, MeshSpec(data_shard=8), 2, 1, 6667, 0.15),
    "torchtitan 8B fsdp128, 500 W, compiled": (LLAMA, MeshSpec(data_shard=128), 2, 1, 6514, 0.17),
    "NeMo Automodel 70B fsdp32 cp2": (
        model_shape(PRESETS["llama-3.1-70b"]), MeshSpec(data_shard=32, context=2), 1, 4,
        128 * 8192 / 18.9 / 64, 0.03),
}  # fmt: skip


@pytest.mark.parametrize("run", SPEEDS)
def test_speed_of_published_runs(run: str):
    shape, mesh, micro, accumulation, published, tolerance = SPEEDS[run]
    length, sequences = 8192, mesh.data_ranks * micro * accumulation
    work = step_flops(shape, layer_pairs(shape, Dense(), (), length), length, sequences)
    moved = step_bytes(
        shape, mesh, tokens=micro * length // mesh.context, micro_batches=accumulation,
        halo=choose(((Dense(), 1),), length, mesh.context, Heads(8, 1), 2).halo,
        micro_batch=micro, width=2,
        recompute=False,
    )  # fmt: skip
    seconds = step_seconds(machine("p5.48xlarge"), mesh, work, moved, precision="bf16")
    assert seconds is not None
    speed = sequences * length / seconds / mesh.world_size
    assert speed == pytest.approx(published, rel=tolerance)


def test_gradients_travel_in_every_micro_batch():
    """Kept whole until the last they would be four bytes for every parameter on every rank."""

    def data(shards: int, micro_batches: int) -> float:
        return step_bytes(
            model_shape(PRESETS["llama-3.1-8b"]), MeshSpec(data_shard=shards), tokens=8192,
            micro_batches=micro_batches, halo=0, micro_batch=1, width=2, recompute=False,
        ).data  # fmt: skip

    assert data(8, 4) == 4 * data(8, 1) > 0 == data(1, 4)


meshes = st.builds(
    MeshSpec, tensor=st.sampled_from([1, 2, 4, 8]), context=st.sampled_from([1, 2, 8]),
    data_shard=st.sampled_from([1, 2, 16]), data_replicate=st.sampled_from([1, 3]),
)  # fmt: skip
memories = st.builds(
    MemorySpec, checkpointing=st.sampled_from(["none", "selective", "full"]),
    offload_checkpoints=st.booleans(), offload_optimizer=st.booleans(),
    loss_chunk=st.sampled_from([0, 1024]), mlp_chunk=st.sampled_from([0, 1024]),
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(meshes, memories, st.integers(1024, 1 << 20), st.sampled_from(["bf16", "fp32"]))
def test_memory_is_positive_and_grows_with_tokens(
    mesh: MeshSpec, memory: MemorySpec, tokens: int, precision: str
):
    rank = rank_memory(LLAMA, mesh, memory, tokens=tokens, precision=precision)
    more = rank_memory(LLAMA, mesh, memory, tokens=tokens + 512, precision=precision)
    parts = (rank.states, rank.gathered, rank.kept, rank.working, rank.logits, rank.host)
    assert min(parts) >= 0
    assert rank.total <= more.total


@settings(deadline=None, max_examples=100)
@given(memories, st.sampled_from([8192, 131_072]))
def test_more_context_ranks_never_need_more(memory: MemorySpec, length: int):
    totals = [
        rank_memory(
            LLAMA, MeshSpec(context=c, data_shard=2), memory, tokens=length // c, precision="bf16"
        ).total
        for c in (1, 2, 4, 8, 16)
    ]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("pattern", "layout", "received"),
    [
        (Window(33), "contiguous", 32),
        (SinkWindow(33, 5), "contiguous", 37),
        (Dilated(4, 9), "residues 4", 8),
        (Block(64), "contiguous", 0),
        (Dense(), "zigzag", 7 * 64),
        (BlockTopK(8, 2), "contiguous", 7 * 64),
    ],
)
def test_layouts_of_512_tokens_over_8_ranks(pattern: Pattern, layout: str, received: float):
    best = price_layouts(((pattern, 1),), 512, 8)[0]
    assert (best.name, best.received) == (layout, received)


def test_layouts_are_weighed_over_layers_and_heads():
    dense, window = (Dense(), 1), (Window(33), 8)
    assert price_layouts((window, (Dense(), 8)), 512, 8)[0].name == "zigzag"
    mixed = {p.name: p for p in price_layouts((dense, window), 512, 8)}
    alone = {p.name: p for p in price_layouts((dense,), 512, 8)}
    assert 1 < mixed["contiguous"].balance < alone["contiguous"].balance
    for name, price in mixed.items():
        assert 0 < price.received < alone[name].received


small_patterns = st.sampled_from(
    [Dense(), Window(5), Window(40), SinkWindow(9, 3), Block(12), Dilated(3, 4), Dilated(4)]
)


@settings(deadline=None, max_examples=80)
@given(small_patterns, st.sampled_from([(48, 2), (48, 4), (96, 8), (53, 4), (90, 6)]))
def test_prices_are_those_of_the_predicate(pattern: Pattern, sizes: tuple[int, int]):
    """Areas exactly; tokens that travel exactly, or an upper bound where the pattern has gaps."""
    length, ranks = sizes
    seen = [[bool(pattern.allows(i, j)) for j in range(length)] for i in range(length)]
    for price in price_layouts(((pattern, 1),), length, ranks):
        if price.name == "rotated":
            continue
        half = -(-length // (2 * ranks))
        owner = {
            "contiguous": lambda t: t // -(-length // ranks),
            "zigzag": lambda t, half=half: min(t // half, 2 * ranks - 1 - t // half),
        }.get(price.name)
        if owner is None:
            continue
        mine = [[t for t in range(length) if owner(t) == r] for r in range(ranks)]
        area = [sum(sum(seen[i]) for i in rows) for rows in mine]
        assert price.balance == pytest.approx(max(area) * ranks / sum(area))
        needed = max(
            len({j for i in rows for j in range(length) if seen[i][j]} - set(rows))
            for rows in mine
        )
        assert price.received >= needed
        if all(rule.step == 1 for rule in pattern.rules()):
            assert price.received == needed


def test_heads_are_exchanged_where_keys_would_be_many_more():
    heads = Heads(32, 8)
    assert choose(((Window(8192), 8),), 131_072, 8, heads, 2).spec.heads == 1
    dense = choose(((Dense(), 8),), 131_072, 8, heads, 2)
    assert dense.spec.heads == 8 and "heads are exchanged over 8 ranks" in dense.text
    # Three query heads split over no two of these ranks.
    assert choose(((Dense(), 1),), 131_072, 8, Heads(3, 1), 2).spec.heads == 1

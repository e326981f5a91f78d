"""Plans: they divide, they fit, they are explained; and what cannot be planned says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels.pattern import BlockTopK, Dense, Pattern, PerHead, SinkWindow, Window
from msa_operator.planner import search
from msa_operator.planner.degrees import (
    PlanError,
    context_degrees,
    tensor_degrees,
    tensor_refusal,
    ulysses_degrees,
)
from msa_operator.planner.explain import efa, lines, to_dict
from msa_operator.planner.fitting import Candidate, Fitting, Misfit
from msa_operator.planner.hardware import local, machine
from msa_operator.planner.modelspec import ModelShape, model_shape
from msa_operator.planner.presets import PRESETS
from msa_operator.planner.request import Plan, Request
from msa_operator.planner.runtime import EVERYTHING, THIS_VERSION
from msa_operator.planner.search import plan
from msa_operator.planner.splits import splits

SHAPES = {name: model_shape(config) for name, config in PRESETS.items()}
P5, P5EN, G6 = machine("p5.48xlarge"), machine("p5en.48xlarge"), machine("g6.48xlarge")


def shaped(heads: int, kv_heads: int) -> ModelShape:
    return replace(SHAPES["llama-3-8b"], heads=heads, kv_heads=kv_heads)


def request(**fields: Any) -> Request:
    start: dict[str, Any] = {
        "shape": SHAPES["qwen3-8b"],
        "pattern": SinkWindow(8192, 512),
        "length": 131_072,
        "global_batch_tokens": 4_194_304,
        "machines": (P5,),
        "least": 8,
        "most": 64,
    }
    return Request(**{**start, **fields})


def refused(asked: Request, runtime: Any = EVERYTHING) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan(asked, runtime)
    return caught.value


@pytest.mark.parametrize(
    ("heads", "kv_heads", "domain", "allowed"),
    [(28, 4, 8, [1, 2, 4]), (52, 52, 8, [1, 2, 4]), (40, 8, 8, [1, 2, 4, 8]),
     (12, 12, 8, [1, 2, 4]), (32, 8, 6, [1, 2]), (32, 8, 1, [1]),
     # More ranks than key/value heads: each has a copy of one.
     (32, 1, 8, [1, 2, 4, 8]), (28, 2, 8, [1, 2, 4])],
)  # fmt: skip
def test_tensor_ranks_split_heads_by_group_inside_one_domain(
    heads: int, kv_heads: int, domain: int, allowed: list[int]
):
    assert tensor_degrees(shaped(heads, kv_heads), domain) == allowed


def test_a_refused_tensor_degree_lists_those_that_work():
    refusal = tensor_refusal(shaped(28, 4), 8, 8, "p5.48xlarge")
    assert refusal is not None
    assert "28 query and 4 key/value heads" in refusal.found
    assert (refusal.allowed, refusal.nearest) == ("1, 2, 4", "4")
    error = refused(request(shape=shaped(28, 4), tensor=8))
    assert error.refusals[0].field == "parallelism.tensor"
    assert error.refusals[0].allowed == "1, 2, 4"


def test_ulysses_degrees_split_queries_and_split_or_repeat_keys():
    assert ulysses_degrees(shaped(40, 8)) == [1, 2, 4, 8, 40]


def test_context_ranks_get_two_equal_chunks():
    assert context_degrees(48, 16) == [1, 2, 3, 4, 6, 8, 12]
    # Others are padded, but only where they are asked for.
    found = plan(request(context=3, length=131_071, global_batch_tokens=64 * 131_071), EVERYTHING)
    assert found.mesh.context == 3
    error = refused(request(context=100_000))
    assert error.refusals[0].field == "parallelism.context"
    assert error.refusals[0].nearest == "65536"


def test_tensor_ranks_stay_inside_the_domain_unless_forced():
    for name in ("g5.48xlarge", "g6e.48xlarge"):
        found = plan(
            request(shape=SHAPES["tiny-llama"], pattern=Dense(), length=4096,
                    global_batch_tokens=None, machines=(machine(name),)),
            EVERYTHING,
        )  # fmt: skip
        assert found.mesh.tensor == 1
    forced = plan(
        request(shape=SHAPES["llama-3-8b"], length=4096, global_batch_tokens=65_536,
                machines=(machine("g6e.48xlarge"),), fixed=True, tensor=8, data_shard=2),
        EVERYTHING,
    )  # fmt: skip
    assert forced.mesh.tensor == 8
    assert any("it will be slow" in note for note in forced.notes)


def test_the_sample_of_the_documentation():
    found = plan(request(dense_layers=(0, 1), machines=(P5, P5EN)), EVERYTHING)
    assert found.mesh.world_size == 64 and found.mesh.context > 1
    assert found.rank.total <= found.usable
    assert efa(found) == found.machine.efa > 0
    text = dict(lines(found))
    assert f"vpc.amazonaws.com/efa: {found.machine.efa}" in text["worker pod"]
    assert "nvidia.com/gpu: 8" in text["worker pod"]
    assert "positions" in text["note"]


def test_one_machine_needs_no_efa():
    found = plan(request(least=8, most=8, length=8192), EVERYTHING)
    assert found.machines == 1 and efa(found) == 0


def test_rejections_carry_numbers():
    error = refused(request(shape=SHAPES["llama-3.1-70b"], least=8, most=8), THIS_VERSION)
    assert "GiB per GPU, 77.5 usable" in str(error)
    found = plan(request(), EVERYTHING)
    reasons = [str(r) for r in found.rejected]
    assert any("tokens/s" in r for r in reasons)
    assert any("do not divide over" in r for r in reasons)


def test_this_version_never_plans_what_its_workers_cannot_run():
    found = plan(request(machines=(P5EN,)), THIS_VERSION)
    assert THIS_VERSION.missing(found.mesh, found.memory, Dense()) == ()
    assert found.rank.total <= found.usable
    error = refused(request(tensor=2), replace(THIS_VERSION, tensor=1))
    assert [r.field for r in error.refusals] == ["parallelism.tensor"]
    assert error.refusals[0].nearest == "1"
    error = refused(request(pattern=BlockTopK(128, 16)), THIS_VERSION)
    assert error.refusals[0].field == "attention.pattern.type"


def test_what_a_plan_needs_beyond_this_version_is_named():
    found = plan(request(tensor=2, context=4), EVERYTHING)
    older = replace(THIS_VERSION, tensor=1)
    missing = older.missing(found.mesh, found.memory, BlockTopK(1, 1))
    assert missing[0] == "tensor 2 (1 works)"
    assert any("BlockTopK" in m for m in missing)


def test_every_refusal_comes_at_once():
    error = refused(request(dense_layers=(0, 36, 99), tensor=3, context=1 << 17))
    assert [r.field for r in error.refusals] == [
        "attention.denseLayers[1]", "attention.denseLayers[2]", "parallelism.tensor",
        "parallelism.context",
    ]  # fmt: skip
    error = refused(request(pattern=PerHead((Window(8),) * 9)))
    assert "9 patterns for 8 key/value heads" in str(error)


def test_batches_that_no_number_of_workers_divides():
    host = local(cpus=4, memory_mib=32_000)
    small = {
        "shape": SHAPES["tiny-llama"],
        "pattern": Dense(),
        "length": 4096,
        "machines": (host,),
    }
    alone = {**small, "context": 1, "tensor": 1}
    error = refused(request(**alone, global_batch_tokens=4096, workers=2), THIS_VERSION)
    assert error.refusals[0].field == "sequence.globalBatchTokens"
    assert "8192" in error.refusals[0].allowed
    shared = plan(request(**small, global_batch_tokens=4096, workers=2), THIS_VERSION)
    assert shared.mesh.data_ranks == 1 and shared.mesh.world_size == 2


def test_cpu_workers_that_do_not_fit_are_refused():
    host = local(cpus=4, memory_mib=8000)
    asked = request(shape=SHAPES["llama-3-8b"], length=4096, global_batch_tokens=None,
                    machines=(host,), workers=2)  # fmt: skip
    for runtime in (THIS_VERSION, EVERYTHING):  # there is nowhere to offload to
        error = refused(asked, runtime)
        assert error.refusals[0].field == "hardware.workers"
        assert "GiB per worker" in error.refusals[0].found


def test_numbers_of_accelerators_that_make_no_whole_machines():
    error = refused(request(least=9, most=15))
    assert error.refusals[0].field == "hardware.accelerators"
    assert "p5.48xlarge has 8" in error.refusals[0].found


def test_a_window_as_long_as_the_sequence_is_noted():
    found = plan(request(length=8192, pattern=SinkWindow(8192, 512)), EVERYTHING)
    assert any("dense attention" in note for note in found.notes)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    length = draw(st.sampled_from([4096, 8192, 131_072, 3 * 4096, 1 << 20]))
    sequences = draw(st.sampled_from([None, 1, 2, 12, 32, 64]))
    least = draw(st.sampled_from([1, 2, 8]))
    return Request(
        shape=SHAPES[draw(st.sampled_from(sorted(SHAPES)))],
        pattern=draw(st.sampled_from([Dense(), Window(4096), SinkWindow(1024, 64)])),
        length=length,
        machines=tuple(draw(st.sets(st.sampled_from([P5, P5EN, G6]), min_size=1))),
        global_batch_tokens=None if sequences is None else sequences * length,
        dense_layers=draw(st.sampled_from([(), (0,)])),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        least=least,
        most=draw(st.sampled_from([n for n in (1, 4, 8, 24, 64) if n >= least])),
        tensor=draw(st.sampled_from([None, None, 1, 2])),
        context=draw(st.sampled_from([None, None, 1, 2, 8])),
    )


def check(asked: Request, found: Plan, *, runtime: Any) -> None:
    mesh = found.mesh
    assert asked.least <= mesh.world_size <= asked.most
    assert mesh.world_size == mesh.tensor * mesh.context * mesh.data_shard * mesh.data_replicate
    assert (found.machines * found.machine.count) % mesh.world_size == 0
    assert mesh.tensor in tensor_degrees(asked.shape, found.machine.domain)
    assert mesh.context == 1 or asked.length % (2 * mesh.context) == 0
    assert asked.tensor in (None, mesh.tensor) and asked.context in (None, mesh.context)
    sequences = found.micro_batch * found.accumulation * mesh.data_ranks
    assert found.step_tokens == sequences * asked.length
    assert asked.global_batch_tokens in (None, found.step_tokens)
    assert found.rank.total <= found.usable
    assert found.label not in {r.label for r in found.rejected}
    assert mesh.tensor <= runtime.tensor and mesh.context <= runtime.context
    assert to_dict(found)["worldSize"] == mesh.world_size


@settings(deadline=None, max_examples=80)
@given(requests(), st.sampled_from([EVERYTHING, THIS_VERSION]))
def test_plans_divide_fit_and_keep_what_was_asked(asked: Request, runtime: Any):
    try:
        found = plan(asked, runtime)
    except PlanError as error:
        assert error.refusals
        return
    check(asked, found, runtime=runtime)
    assert plan(asked, runtime) == found, "the same question has the same answer"


def exhaustive(asked: Request, runtime: Any) -> tuple[list[Candidate], list[Misfit]]:
    """Every mesh on every machine, each looked at for itself."""
    found, misfits = [], {}
    for one in asked.machines:
        for split in splits(asked, runtime, one):
            for mesh in split.meshes:
                fitting = Fitting(asked, runtime)
                runs, misfit = fitting.split(one, replace(split, meshes=(mesh,)), 0.0)
                found += runs
                key = one.name, split.ranks, split.degrees
                if misfit and (key not in misfits or misfit.excess < misfits[key].excess):
                    misfits[key] = misfit
    return found, sorted(misfits.values(), key=lambda m: m.excess)


@settings(deadline=None, max_examples=25)
@given(requests(), st.sampled_from([EVERYTHING, THIS_VERSION]))
def test_what_the_search_leaves_out_changes_nothing(asked: Request, runtime: Any):
    found, misfits = exhaustive(asked, runtime)
    reasons = [search._reason(misfit, asked) for misfit in misfits]
    try:
        best = plan(asked, runtime)
    except PlanError as error:
        assert not found
        assert error.rejected == tuple(map(str, reasons[:64]))
        return
    wanted = min(found, key=search._preference(found))
    assert (best.machine, best.mesh) == (wanted.machine, wanted.mesh)
    assert (best.memory, best.micro_batch) == (wanted.setting.memory, wanted.setting.micro)
    slower = search._alternatives(wanted, found)
    assert best.rejected[: len(slower)] == tuple(slower)
    assert set(best.rejected[len(slower) :]) <= set(reasons)
    assert len(best.rejected) == min(64, len(slower) + len(reasons))


def test_tensor_ranks_with_fewer_heads_than_patterns_are_noted_and_slower():
    pattern = PerHead((Window(1024), Dense()))
    even = plan(request(pattern=pattern, tensor=4, least=8, most=8), EVERYTHING)
    uneven = plan(request(pattern=pattern, tensor=8, least=8, most=8), EVERYTHING)
    assert not any("unevenly" in note for note in even.notes)
    assert any("attend unevenly: the busiest 1.9" in note for note in uneven.notes)
    assert (uneven.step_seconds or 0) > 1.3 * (even.step_seconds or 0)


def test_a_plan_tells_the_order_of_heads_that_makes_tensor_ranks_even():
    pattern = PerHead((Window(1024), Window(3072), Window(6144), Window(8192)))

    def planned(tensor: int) -> Plan:
        return plan(request(pattern=pattern, tensor=tensor, least=8, most=8), EVERYTHING)

    four, two, eight = planned(4), planned(2), planned(8)
    (note,) = (note for note in four.notes if "stored as" in note)
    assert "stored as 0 3 1 2 4 7 5 6 of the model's" in note
    assert not any("unevenly" in note for note in four.notes)
    assert not any("stored as" in note or "unevenly" in note for note in two.notes)
    assert any("unevenly" in note for note in eight.notes)
    assert not any("stored as" in note for note in eight.notes)

    def going_on(tensor: int, order: tuple[int, ...] | None) -> Plan:
        asked = request(pattern=pattern, tensor=tensor, least=8, most=8, goes_on=True, order=order)
        return plan(asked, EVERYTHING)

    # A run that goes on has the order that it began with, whatever these ranks would choose.
    kept, plain = going_on(2, (0, 3, 1, 2, 4, 7, 5, 6)), going_on(4, None)
    assert any("stored as 0 3 1 2 4 7 5 6" in note and "of its checkpoint" in note
               for note in kept.notes)  # fmt: skip
    assert any("attend unevenly: the busiest 1.55 x" in note for note in plain.notes)
    assert not any("stored as" in note for note in plain.notes)


def test_a_model_s_own_window_bounds_what_context_ranks_receive():
    limited = replace(SHAPES["llama-3-8b"], sliding_window=4096)

    def received(pattern: Pattern, shape: Any) -> float:
        asked = request(pattern=pattern, shape=shape, context=4, least=8, most=8)
        return plan(asked, EVERYTHING).context.layouts[0].received

    own = received(Window(4096), SHAPES["llama-3-8b"])
    assert received(Dense(), limited) == own == 4095
    mixed = PerHead((Dense(), Window(1024)))
    assert received(mixed, limited) == (4095 + 1023) / 2
    # Keys that are selected at run time are bounded without it.
    selected = BlockTopK(128, 16)
    assert received(selected, limited) == received(selected, SHAPES["llama-3-8b"])


@settings(deadline=None, max_examples=40)
@given(requests())
def test_what_this_version_can_run_the_full_design_can_too(asked: Request):
    try:
        plan(asked, THIS_VERSION)
    except PlanError:
        return
    plan(asked, EVERYTHING)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1024, 4096]))
def test_cpu_plans_use_every_worker(workers: int, share: int, length: int):
    host = local(cpus=8, memory_mib=1 << 20)
    asked = Request(shape=SHAPES["tiny-llama"], pattern=Dense(), length=length, machines=(host,),
                    global_batch_tokens=share * workers * length, workers=workers)  # fmt: skip
    found = plan(asked, THIS_VERSION)
    assert found.mesh.world_size == workers == found.mesh.data_ranks * found.mesh.context
    assert found.accumulation * found.micro_batch == share
    assert found.step_seconds is None

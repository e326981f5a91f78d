"""Heads stored in an order in which tensor ranks attend evenly: the same model, run and losses."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msa_workloads.checkpoint import MARKER, Checkpointer, CheckpointError, Marker, folder_name
from msa_workloads.heads import EVEN, HeadSplit, Order, stored
from msa_workloads.model import build_model, effective_patterns
from msa_workloads.runspec import AttentionSpec, RunSpec
from msa_workloads.storage import open_store
from msa_workloads.weights import in_model_order, in_stored_order

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks
from mesh_cases import SAMPLES, VOCABULARY, Case, alone, step, worst_error

TOLERANCE = 1e-5
"""Of the largest value of the single process, in fp32."""
GRADIENTS = 5e-5
"""The same for gradients: those of biases and norms of queries and keys are what is left of sums
that cancel, a thirtieth of others. Their roundings come to 6e-6 over draws of weights and kinds of
instructions on one CPU, to 1e-5 on another. Heads in a wrong place: 0.8 and more."""

LONG_AND_SHORT = {"type": "PerHead", "members": [
    {"type": "Dense"}, *({"type": "Window", "window": w} for w in (60, 40, 24, 17, 10, 5, 2)),
]}  # fmt: skip
"""Even over two tensor ranks in another order than the model's: the longest come first."""
FOUR = {"type": "PerHead", "members": [
    {"type": "Dense"}, *({"type": "Window", "window": w} for w in (42, 18, 3)),
]}  # fmt: skip
"""Even over two tensor ranks, and over four in another order."""


@dataclass(frozen=True)
class Many(Case):
    """Eight key/value heads of several patterns, and weights of a folder where there is one."""

    members: str = "four"
    source: str | None = None

    @property
    def reference(self) -> Many:
        return replace(
            self, mesh=(1, 1, 1, 1), layout="auto", heads=1, micro_batch=SAMPLES, loss_chunk=0
        )

    def spec(self) -> RunSpec:
        spec = super().spec()
        config = {
            **spec.model.config, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 4, "num_hidden_layers": 2,
        }  # fmt: skip
        if self.model == "llama":
            config["attention_bias"] = True
        if self.model == "mistral":
            config["sliding_window"] = 70
        pattern = FOUR if self.members == "four" else LONG_AND_SHORT
        return replace(
            spec,
            model=replace(spec.model, config=config, source=self.source),
            attention=AttentionSpec(pattern=pattern, dense_layers=self.dense_layers),
        )


CASES = [
    Many((1, 1, 1, 4), "qwen2", loss_chunk=13),
    Many((1, 1, 1, 4), "llama", dense_layers=(1,), micro_batch=2),
    Many((1, 2, 1, 2), "qwen3", members="long and short"),
    Many((1, 1, 2, 2), "mistral", members="long and short", heads=2),
]


def test_a_checkpoint_is_not_loaded_into_another_order(make_spec: Callable[..., RunSpec]):
    spec = make_spec()
    older = Marker(
        step=1, next_sample=2, identity={}, content_sha256="", ranks=1, files={}, saved_at=0.0
    )
    assert "head_orders" not in older.to_json()
    assert Marker(**json.loads(older.to_json())) == older and older.orders == {}
    marker = replace(older, head_orders={"0": [1, 0]})
    assert Marker(**json.loads(marker.to_json())).orders == {0: (1, 0)}
    model = build_model(spec, 260, None, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match="step-00000001 stores heads in another order"):
        Checkpointer(open_store(spec.checkpoint.uri), spec).load(marker, model, optimizer)


def fields(case: Many) -> tuple[Any, ...]:
    return tuple(getattr(case, name) for name in case.__dataclass_fields__)


def measured(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Every case on its mesh, from a folder's weights, beside one process; rank 0 computes that.

    Classes of this file cannot travel between processes, so cases come as their fields.
    """
    from test_weights import save

    torch.use_deterministic_algorithms(True)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    found = []
    for number, values in enumerate(cases):
        case = Many(*values)
        place = f"{folder[0]}/{number}"
        if dist.get_rank() == 0:
            model = save(case.spec(), place)
            with torch.no_grad():  # small enough for rounding to stay what it is
                for parameter in model.parameters():
                    parameter.mul_(0.2)
            model.save_pretrained(place)
        dist.barrier()
        case = replace(case, source=place)
        result = step(case)
        wanted = alone(case.reference) if dist.get_rank() == 0 else result
        found.append({"error": worst_error(result, wanted), "orders": result["orders"]})
    return found


HALF, WHOLE = 2, 4


def trained(specs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Outcomes of runs one after the other, on rank 0. Each starts with what the run in the given
    checkpoint folder had saved at half its way, where there is one; a run of one process comes
    last, and rank 0 leaves the others for it."""
    from msa_workloads.progress import Silent
    from msa_workloads.train import run

    outcomes, rank = [], dist.get_rank()
    for text, folder in specs:
        spec = RunSpec.from_json(text)
        if spec.mesh.world_size == 1:
            dist.destroy_process_group()
            del os.environ["RANK"], os.environ["WORLD_SIZE"]
            if rank:
                break
        if folder and rank == 0:
            half = folder_name(HALF)
            shutil.copytree(Path(folder) / half, Path(spec.checkpoint.uri) / half)
        if dist.is_initialized():
            dist.barrier()
        outcomes.append(run(spec, Silent()))
    return outcomes


def on_four(cases: list[tuple[Any, ...]], specs: list[tuple[str, str]]) -> tuple[Any, Any]:
    dist.init_process_group("gloo")
    return measured(cases), trained(specs)


@pytest.mark.slow
def test_neither_gradients_nor_a_run_on_other_meshes_see_the_order(
    make_spec: Callable[..., RunSpec],
):
    def spec(name: str, accumulation: int, **mesh: int) -> RunSpec:
        made = make_spec(
            name, mesh=mesh, training={"max_steps": WHOLE, "evaluate_sequences": 0},
            sequence={"length": 93, "micro_batch": 1, "accumulation": accumulation},
            checkpoint={"every_steps": HALF},
            attention={"pattern": FOUR, "dense_layers": (1,)},
        )  # fmt: skip
        config = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4}
        return replace(made, model=replace(made.model, config={**made.model.config, **config}))

    plain = spec("plain", 1, data_shard=2, context=2)
    four, two = spec("four", 2, tensor=4), spec("two", 2, tensor=2, context=2)
    later, one = spec("later", 2, tensor=4), spec("one", 2)
    runs = (plain, None), (four, None), (two, four), (later, plain), (one, four)
    texts = [(run.to_json(), start.checkpoint.uri if start else "") for run, start in runs]
    (found, outcomes), *_, (others, _) = on_forks(
        on_four, 4, [fields(case) for case in CASES], texts
    )
    for case, mine, other in zip(CASES, found, others, strict=True):
        assert mine["error"] <= GRADIENTS, case
        assert mine["orders"] == other["orders"]
        check_orders(case, mine["orders"])
    check_runs([run for run, _ in runs], outcomes)


def check_orders(case: Many, orders: dict[int, Order]) -> None:
    """Layers of several patterns have one, which is needed and even."""
    assert set(orders) == {0, 1} - set(case.dense_layers), case
    model = build_model(case.reference.spec(), VOCABULARY, None, torch.device("cpu"))
    assert not model.head_orders
    patterns = effective_patterns(case.spec(), model)
    split = HeadSplit(16, 8, case.mesh[3])
    for layer, order in orders.items():
        assert split.balance(patterns[layer], case.length) > EVEN
        assert split.balance(stored(patterns[layer], order), case.length) <= EVEN


def check_runs(runs: list[RunSpec], outcomes: list[dict[str, Any]]) -> None:
    def orders(run: RunSpec, step: int) -> dict[int, Order]:
        text = (Path(run.checkpoint.uri) / folder_name(step) / MARKER).read_text()
        return Marker(**json.loads(text)).orders

    plain, four, two, later, one = runs
    order = (0, 3, 1, 2, 4, 7, 5, 6)
    for run in (four, two, one):
        assert orders(run, HALF) == orders(run, WHOLE) == {0: order}
    # One that began in the model's order stays there, as does one of an earlier version.
    assert orders(plain, WHOLE) == orders(later, WHOLE) == {}
    whole, *others = outcomes
    for outcome in others:
        for mine, theirs in zip(outcome["history"], whole["history"], strict=True):
            assert mine["digest"] == theirs["digest"]
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE), mine["step"]
    assert [o["resumed_from_step"] for o in outcomes] == [None, None, HALF, HALF, HALF]

    assert whole["heads"] == []
    told = [kind for outcome in others for kind in outcome["heads"]]
    assert [kind["layers"] for kind in told] == [[0]] * 4
    assert [kind["order"] for kind in told] == [list(order), list(order), None, list(order)]
    assert [kind["balance"] <= EVEN for kind in told] == [True, True, False, True]
    (kind,) = (kind for kind in others[1]["context"]["kinds"] if kind["pattern"] == FOUR)
    assert kind["heads_balance"] == told[1]["balance"]
    assert kind["keys"]["most"] > 0


def test_parts_of_heads_and_nothing_else_change_places(tmp_path: Path):
    from test_weights import save

    case = Many(model="llama", dense_layers=(1,), source=str(tmp_path))
    saved = save(case.spec(), str(tmp_path))
    order: Order = (0, 3, 1, 2, 4, 7, 5, 6)
    cpu = torch.device("cpu")
    plain = build_model(case.spec(), VOCABULARY, None, cpu)
    moved = build_model(case.spec(), VOCABULARY, None, cpu, orders={0: order})
    changed = set()
    for (name, mine), (_, theirs) in zip(
        moved.model.named_parameters(), saved.named_parameters(), strict=True
    ):
        if not torch.equal(mine, theirs):
            changed.add(name)
        assert torch.equal(in_model_order(name, mine, {0: order}), theirs), name
        assert torch.equal(in_stored_order(name, theirs, {0: order}), mine), name
    of_heads = "q_proj.weight q_proj.bias k_proj.weight k_proj.bias v_proj.weight v_proj.bias"
    assert changed == {
        f"model.layers.0.self_attn.{name}" for name in [*of_heads.split(), "o_proj.weight"]
    }
    # Two query heads of four rows follow their key/value head.
    query = moved.model.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(query[8:16], saved.model.layers[0].self_attn.q_proj.weight[24:32])
    tokens = torch.arange(40)[None]
    wanted, found = (model.model(input_ids=tokens).logits for model in (plain, moved))
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    # Drawn weights, and those that transformers reads whole, take the same order.
    drawn = [
        build_model(replace(case, source=None).spec(), VOCABULARY, None, cpu, orders=orders)
        for orders in ({}, {0: order})
    ]
    for (name, theirs), (_, mine) in zip(*(m.named_parameters() for m in drawn), strict=True):
        assert torch.equal(in_model_order(name, mine, {0: order}), theirs)
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    whole = build_model(case.spec(), VOCABULARY, None, cpu, orders={0: order})
    for (name, mine), (_, theirs) in zip(
        whole.named_parameters(), moved.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name

"""Heads stored in an order in which tensor ranks attend evenly: the same model, run and losses."""

from __future__ import annotations

import json
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
from msa_workloads.checkpoint import MARKER, Marker, folder_name
from msa_workloads.heads import EVEN, HeadSplit, Order, stored
from msa_workloads.model import build_model, effective_patterns
from msa_workloads.runspec import AttentionSpec, RunSpec
from msa_workloads.weights import in_model_order, in_stored_order

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks
from mesh_cases import SAMPLES, VOCABULARY, Case, alone, step, worst_error

TOLERANCE = 1e-5
"""Of the largest value of the single process, in fp32."""

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


def measured(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Every case on its mesh, from a folder's weights, beside one process; rank 0 computes that.

    Classes of this file cannot travel between processes, so cases come as their fields.
    """
    from test_weights import save

    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    found = []
    for number, fields in enumerate(cases):
        case = Many(*fields)
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


def fields(case: Many) -> tuple[Any, ...]:
    return tuple(getattr(case, name) for name in case.__dataclass_fields__)


@pytest.mark.slow
def test_the_order_changes_neither_loss_nor_gradients():
    ranks = on_forks(measured, 4, [fields(case) for case in CASES])
    for case, found, other in zip(CASES, ranks[0], ranks[3], strict=True):
        assert found["error"] <= TOLERANCE, case
        assert found["orders"] == other["orders"]
        assert set(found["orders"]) == {0, 1} - set(case.dense_layers), case
        spec = case.spec()
        model = build_model(replace(spec, mesh=replace(spec.mesh, tensor=1)), VOCABULARY, None,
                            torch.device("cpu"))  # fmt: skip
        assert not model.head_orders
        split = HeadSplit(16, 8, case.mesh[3])
        for layer, order in found["orders"].items():
            pattern = effective_patterns(spec, model)[layer]
            assert split.balance(pattern, case.length) > EVEN
            assert split.balance(stored(pattern, order), case.length) <= EVEN


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


HALF, WHOLE = 2, 4


def train_all(specs: list[str], saved: list[str]) -> list[dict[str, Any]]:
    """Runs one after the other; each starts with what another one had saved at half its way."""
    from msa_workloads.progress import Silent
    from msa_workloads.train import run

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    outcomes = []
    for text, folder in zip(specs, saved, strict=True):
        spec = RunSpec.from_json(text)
        if folder and dist.get_rank() == 0:
            half = folder_name(HALF)
            shutil.copytree(Path(folder) / half, Path(spec.checkpoint.uri) / half)
        dist.barrier()
        outcomes.append(run(spec, Silent()))
    return outcomes


@pytest.mark.slow
def test_a_run_keeps_its_order_on_other_meshes(make_spec: Callable[..., RunSpec]):
    def spec(name: str, accumulation: int, **mesh: int) -> RunSpec:
        made = make_spec(
            name, mesh=mesh, training={"max_steps": WHOLE, "evaluate_sequences": 1},
            sequence={"length": 93, "micro_batch": 1, "accumulation": accumulation},
            checkpoint={"every_steps": HALF},
            attention={"pattern": FOUR, "dense_layers": (1,)},
        )  # fmt: skip
        config = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4}
        return replace(made, model=replace(made.model, config={**made.model.config, **config}))

    four, later = spec("four", 2, tensor=4), spec("later", 2, tensor=4)
    two = spec("two", 2, tensor=2, context=2)
    plain, one = spec("plain", 1, data_shard=2, context=2), spec("one", 2)

    def train(ranks: int, *runs: tuple[RunSpec, RunSpec | None]) -> list[dict[str, Any]]:
        texts = [run.to_json() for run, _ in runs]
        starts = [start.checkpoint.uri if start else "" for _, start in runs]
        return on_forks(train_all, ranks, texts, starts)[0]

    def orders(run: RunSpec, step: int) -> dict[int, Order]:
        text = (Path(run.checkpoint.uri) / folder_name(step) / MARKER).read_text()
        return Marker(**json.loads(text)).orders

    runs = (plain, None), (four, None), (two, four), (later, plain)
    whole, first, on_two, on_four = train(4, *runs)
    (on_one,) = train(1, (one, four))
    order = (0, 3, 1, 2, 4, 7, 5, 6)
    for run in (four, two, one):
        assert orders(run, HALF) == orders(run, WHOLE) == {0: order}
    # One that began in the model's order stays there, as does one of an earlier version.
    assert orders(plain, WHOLE) == orders(later, WHOLE) == {}
    for outcome in (first, on_two, on_four, on_one):
        for mine, theirs in zip(outcome["history"], whole["history"], strict=True):
            assert mine["digest"] == theirs["digest"]
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4), mine["step"]
    assert [outcome["resumed_from_step"] for outcome in (on_two, on_four, on_one)] == [HALF] * 3

    told = [outcome["heads"] for outcome in (whole, first, on_two, on_four, on_one)]
    assert told[0] == []
    assert [kind["layers"] for kinds in told for kind in kinds] == [[0]] * 4
    assert [kind["order"] for kinds in told[1:] for kind in kinds] == [
        list(order), list(order), None, list(order)
    ]  # fmt: skip
    assert [kind["balance"] <= EVEN for kinds in told[1:] for kind in kinds] == [
        True, True, False, True
    ]  # fmt: skip
    (told_layer,) = (k for k in on_two["context"]["kinds"] if k["pattern"] == FOUR)
    assert told_layer["heads_balance"] == told[2][0]["balance"]
    assert told_layer["keys"]["most"] > 0

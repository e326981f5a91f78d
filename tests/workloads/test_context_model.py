"""A model split over ranks has the loss and the gradients of the whole one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from msa_kernels import hf
from msa_kernels.pattern import Dense, Dilated, PerHead, SinkWindow
from msa_workloads.context.attention import Attend, ContextPlan, Options
from msa_workloads.context.layout import residues, zigzag
from msa_workloads.context.solver import solve

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks

TOKENS, DOCUMENTS = 93, (40, 7, 46)
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 50,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128,
}  # fmt: skip
PATTERNS = [Dense(), SinkWindow(9, 2), PerHead((Dilated(4), Dense()))]


def build(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    hf.register()
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **TINY, tie_word_embeddings=kind == "qwen3")
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="msa", dtype=torch.float32
    )
    hf.set_patterns(model, PATTERNS)
    return model


def step(model: Any, batch: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
    logits = model(
        input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False, **more
    ).logits
    loss = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    return loss.detach()


def split_over_ranks() -> dict[str, float]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    make = torch.Generator().manual_seed(3)
    tokens = torch.randint(50, (1, TOKENS), generator=make)
    labels = torch.randint(50, (1, TOKENS), generator=make)
    labels[0, ::5] = -100
    batch = {
        "tokens": tokens, "labels": labels,
        "positions": torch.cat([torch.arange(n) for n in DOCUMENTS])[None],
        "documents": torch.repeat_interleave(torch.arange(3), torch.tensor(DOCUMENTS))[None],
    }  # fmt: skip
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    weights = {pattern: 1 for each in PATTERNS for pattern in (each.for_group(0),)}
    errors = {}
    for kind in ("llama", "qwen3"):
        whole = build(kind)
        wanted = step(whole, batch, msa_document_ids=batch["documents"])
        layouts = {
            "zigzag": zigzag(TOKENS, world), "residues": residues(TOKENS, world, 4),
            "solved": solve(TOKENS, world, weights, DOCUMENTS).layout,
        }  # fmt: skip
        runs = {
            name: (where, Attend(ContextPlan(where, DOCUMENTS, rank), dist.group.WORLD))
            for name, where in layouts.items()
        }
        outer = zigzag(TOKENS, 2, 2)
        runs["heads"] = outer.split(2), Attend(
            ContextPlan(outer, DOCUMENTS, rank // 2), across[rank % 2], pairs[rank // 2],
            Options(method="ring"),
        )  # fmt: skip
        for name, (layout, attend) in runs.items():
            model = build(kind)
            found = step(model, layout.shard(batch, rank), msa_attend=attend)
            dist.all_reduce(found)
            worst = float((found - wanted).abs() / wanted)
            for mine, full in zip(model.parameters(), whole.parameters(), strict=True):
                dist.all_reduce(mine.grad)
                error = (mine.grad - full.grad).abs().max() / full.grad.abs().max()
                worst = max(worst, float(error))
            errors[f"{kind}, {name}"] = worst
    return errors


@pytest.mark.slow
def test_loss_and_gradients_of_a_model_over_four_ranks():
    for errors in on_forks(split_over_ranks, 4):
        for name, error in errors.items():
            assert error <= 1e-5, (name, error)

"""Weights of a Hugging Face folder: read tensor by tensor, whole or split, and refused clearly."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msa_workloads.model import build_model
from msa_workloads.parallel.mesh import build_mesh, join_world
from msa_workloads.runspec import RunSpec
from msa_workloads.weights import WeightsError, open_weights
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks
from mesh_cases import VOCABULARY, Case


def save(spec: RunSpec, folder: str, **how: Any) -> Any:
    """A model of the spec's config with weights of its own, saved as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(spec.model.config)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    model.save_pretrained(folder, **how)
    return model


def with_source(spec: RunSpec, folder: str, **config: Any) -> RunSpec:
    changed = {**spec.model.config, **config}
    return replace(spec, model=replace(spec.model, source=folder, config=changed))


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "20KB"}], ids=["one file", "many"])
def test_a_folder_is_read_tensor_by_tensor(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers import AutoModelForCausalLM

    spec = Case(model="qwen3").spec()
    saved = save(spec, str(tmp_path), **how)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(how)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    found = build_model(with_source(spec, str(tmp_path)), VOCABULARY, None, torch.device("cpu"))
    for (name, ours), (_, theirs) in zip(
        found.model.named_parameters(), saved.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    tokens = torch.arange(9)[None]
    theirs = saved(input_ids=tokens).logits
    # The same sums in another order: fp32 rounds them relative to the largest.
    ours = found.model(input_ids=tokens).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def over_ranks() -> bool:
    """Whether two tensor x two data ranks hold what the folder does."""
    dist.init_process_group("gloo")
    spec = Case((1, 2, 1, 2), "qwen3").spec()
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        save(spec, folder[0])
    dist.barrier()
    mesh = build_mesh(spec.mesh, join_world("cpu"))
    model = build_model(with_source(spec, folder[0]), VOCABULARY, mesh, mesh.device)
    saved = open_weights(folder[0])
    assert saved is not None
    for name, part in model.model.named_parameters():
        assert isinstance(part, DTensor)
        whole = torch.empty(part.shape)
        saved.copy(name, whole)
        if not torch.equal(part.full_tensor(), whole):
            return False
    return True


@pytest.mark.slow
def test_ranks_keep_their_parts_of_a_folder():
    assert on_forks(over_ranks, 4) == [True] * 4


def test_weights_that_do_not_fit_are_refused(tmp_path: Path):
    spec = Case().spec()
    save(spec, str(tmp_path), max_shard_size="20KB")
    wide = with_source(spec, str(tmp_path), intermediate_size=64)
    with pytest.raises(
        WeightsError, match=r"mlp.gate_proj.weight has shape \(48, 32\), .*\(64, 32\)"
    ):
        build_model(wide, VOCABULARY, None, torch.device("cpu"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    lost = sorted(set(index["weight_map"].values()))[0]
    (tmp_path / lost).unlink()
    with pytest.raises(WeightsError, match=f"lacks {lost}, which its index names"):
        open_weights(str(tmp_path))


def test_other_files_are_left_to_transformers(tmp_path: Path):
    assert open_weights(str(tmp_path)) is None
    spec = Case().spec()
    save(spec, str(tmp_path))
    weights = open_weights(str(tmp_path))
    assert weights is not None
    assert weights.missing(["lm_head.weight", "transformer.wte.weight"]) == [
        "transformer.wte.weight"
    ]

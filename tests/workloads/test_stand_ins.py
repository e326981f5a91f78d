"""Models whose own code is more than what is computed in its place are refused, not changed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msa_workloads.data import Batch
from msa_workloads.model import build_model, effective_patterns
from msa_workloads.optimizer import clip_gradients
from msa_workloads.parallel import activation
from msa_workloads.parallel.mesh import UnsupportedError, check_supported
from msa_workloads.runspec import MemorySpec, RunSpec
from msa_workloads.stand_ins import is_gated, logits_are_a_product
from msa_workloads.tokens import open_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from mesh_cases import PATTERNS, VOCABULARY, Case

CPU = torch.device("cpu")


def spec_of(kind: str, **config: Any) -> RunSpec:
    spec = Case().spec()
    changed = {**spec.model.config, "model_type": kind, "pad_token_id": None, **config}
    return replace(spec, model=replace(spec.model, config=changed))


def model_of(kind: str, **config: Any) -> Any:
    return build_model(spec_of(kind, **config), VOCABULARY, None, CPU).model


@pytest.mark.parametrize(
    ("kind", "gated"),
    [("llama", True), ("qwen3", True), ("bitnet", False), ("seed_oss", False), ("phi", False)],
)
def test_only_plain_gated_mlps_are_tiled(kind: str, gated: bool):
    model = model_of(kind, attention_dropout=0.0)
    assert is_gated(model.base_model.layers[0].mlp) == gated
    if not gated:
        # Without tiles they train on a GPU too, where gated ones are fused.
        activation.apply(model, MemorySpec(), CPU, fused=True)
        with pytest.raises(UnsupportedError, match=r"mlp_chunk: layer 0 has \w+MLP, which is not"):
            activation.apply(model, MemorySpec(mlp_chunk=8), CPU)


@pytest.mark.parametrize(
    ("kind", "plain", "config"),
    [
        ("llama", True, {}),
        ("granite", True, {"logits_scaling": 1.0}),
        ("granite", False, {"logits_scaling": 4.0}),
        ("cohere", False, {}),
        ("dory", False, {}),
        ("nanochat", False, {}),
    ],
)
def test_the_chunked_loss_is_for_logits_that_are_one_product(
    kind: str, plain: bool, config: dict[str, Any]
):
    model = model_of(kind, **config)
    body, head = model.base_model.forward, model.get_output_embeddings().forward
    assert logits_are_a_product(model) == plain
    assert (model.base_model.forward, model.get_output_embeddings().forward) == (body, head)
    if not plain:
        spec = replace(spec_of(kind, **config), memory=MemorySpec(loss_chunk=8))
        with pytest.raises(UnsupportedError, match="does more to its logits than one product"):
            build_model(spec, VOCABULARY, None, CPU)


def test_tensors_that_nothing_sets_are_refused():
    """Ranks would each train with whatever their memory held."""
    with pytest.raises(UnsupportedError, match=r"first values of model.layers.0.mlp.act_fn"):
        model_of("apertus", rope_parameters=None)


def test_buffers_that_belong_to_a_model_are_read_with_its_weights(tmp_path: Path):
    config = {
        "global_head_dim": 8, "hidden_size_per_layer_input": 0, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }  # fmt: skip
    saved = model_of("gemma4_text", **config)
    saved.model.layers[1].layer_scalar.fill_(0.25)
    saved.save_pretrained(tmp_path)
    spec = spec_of("gemma4_text", **config)
    spec = replace(spec, model=replace(spec.model, source=str(tmp_path)))
    found = build_model(spec, VOCABULARY, None, CPU).model
    assert [float(layer.layer_scalar) for layer in found.model.layers] == [1.0, 0.25, 1.0]


def test_bf16_gradients_are_clipped_without_a_bias():
    model = torch.nn.Linear(400, 300, dtype=torch.bfloat16)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = torch.cat([p.grad.double().flatten() for p in model.parameters()])  # type: ignore
    norm = clip_gradients(model, 0.77)
    assert norm == pytest.approx(float(before.norm()), rel=1e-5)
    after = torch.cat([p.grad.double().flatten() for p in model.parameters()])  # type: ignore
    # Each entry is rounded, by up to 2 ** -9; all together keep their length.
    assert float(after.norm()) == pytest.approx(0.77, rel=1e-4)
    assert clip_gradients(model, 0.0) == pytest.approx(0.77, rel=1e-4)


def test_ids_of_a_tokenizer_may_leave_gaps(tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 7, "</s>": 300}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.encode(b"b a").max() == 300
    assert tokenizer.vocabulary == 301


@pytest.mark.parametrize(
    ("part", "field", "value", "says"),
    [
        ("sequence", "accumulation", 0, "sequence.accumulation: found 0, must be at least 1"),
        ("sequence", "micro_batch", 0, "sequence.micro_batch: found 0, must be at least 1"),
        ("sequence", "length", 0, "sequence.length: found 0, must be at least 1"),
        ("training", "learning_rate", float("nan"), "training.learning_rate: found nan"),
        ("training", "beta1", 1.5, "training.beta1: found 1.5, must be at least 0 and at most 1"),
        ("training", "evaluate_sequences", -1, "must be at least 0"),
        ("data", "holdout_fraction", 2.0, "must be at least 0 and at most 1"),
        ("checkpoint", "keep", 0, "checkpoint.keep: found 0, must be at least 1"),
        ("mesh", "tensor", 0, "mesh.tensor: found 0, must be at least 1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(part: str, field: str, value: Any, says: str):
    spec = Case().spec()
    wrong = replace(spec, **{part: replace(getattr(spec, part), **{field: value})})
    with pytest.raises(UnsupportedError, match=says):
        check_supported(wrong)


def test_patterns_that_no_head_would_use_are_refused():
    spec = Case().spec()
    members = [{"type": "Window", "window": n} for n in (3, 5, 9)]
    attention = replace(spec.attention, pattern={"type": "PerHead", "members": members})
    says = "members: found 3 members for 2 key/value heads: the last 1 of them would never be used"
    with pytest.raises(UnsupportedError, match=says):
        build_model(replace(spec, attention=attention), VOCABULARY, None, CPU)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"sliding_window": 9}),
        ("mistral", {"sliding_window": 9}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        ("qwen3", {}),
        ("starcoder2", {"sliding_window": 9}),
        ("phi3", {"sliding_window": 9}),
        ("gemma3_text", {"sliding_window": 9}),
    ],
)
def test_what_is_planned_is_what_layers_attend(kind: str, config: dict[str, Any]):
    spec = spec_of(kind, **config)
    spec = replace(spec, attention=replace(spec.attention, pattern=PATTERNS["per head"]))
    model = build_model(spec, VOCABULARY, None, CPU)
    assert effective_patterns(spec, model) == handed_over(model)


def handed_over(model: Any) -> list[Any]:
    """The patterns that layers ask a context group for, in order."""
    seen = []

    def attend(q: Any, k: Any, v: Any, pattern: Any, **_: Any) -> Any:
        seen.append(pattern)
        return q

    rows = torch.arange(8)[None]
    model(Batch(rows, rows, rows, torch.zeros_like(rows), attend=attend))  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("kind", ["stablelm", "nemotron"])
def test_models_that_keep_keywords_from_attention_are_not_split(kind: str):
    """Each rank would attend to its own tokens alone, and say nothing."""
    with pytest.raises(UnsupportedError, match=r"mesh.context: .*0 of 3 layers asked"):
        handed_over(build_model(spec_of(kind), VOCABULARY, None, CPU))


def test_convolutions_do_not_cross_documents_or_ranks():
    spec = spec_of("zaya", num_experts=4, moe_intermediate_size=16)
    with pytest.raises(UnsupportedError, match="conv_qk_depthwise mixes neighbouring tokens"):
        build_model(spec, VOCABULARY, None, CPU)

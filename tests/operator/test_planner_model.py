"""Sizes of models, exactly: against transformers' own modules, and against published totals."""

from __future__ import annotations

from typing import Any

import pytest
from msa_operator.planner.modelspec import ModelError, model_shape
from msa_operator.planner.presets import PRESETS

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **PRESETS,
    "llama with biases": {**SMALL, "model_type": "llama", "attention_bias": True,
                          "mlp_bias": True, "head_dim": 32},
    "mistral": {**SMALL, "model_type": "mistral", "num_key_value_heads": 2},
    "qwen2": {**SMALL, "model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3 tied": {**SMALL, "model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 16,
                   "attention_bias": True, "tie_word_embeddings": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_that_transformers_builds(name: str):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = dict(CONFIGS[name])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = model_shape(CONFIGS[name])
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    layer = model.model.layers[0]
    assert shape.layer_parameters == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-3-8b", 8_030_261_248), ("llama-3.1-70b", 70_553_706_496),
     ("qwen3-8b", 8_190_735_360), ("qwen3-32b", 32_762_123_264)],
)  # fmt: skip
def test_published_totals(name: str, parameters: int):
    assert model_shape(PRESETS[name]).parameters == parameters


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_configs_without_sizes_are_refused(changes: dict[str, Any], field: str):
    with pytest.raises(ModelError) as caught:
        model_shape({"model_type": "llama", **SMALL, **changes})
    assert caught.value.field == field


def test_a_sliding_window_counts_only_where_the_model_uses_it():
    window = {"sliding_window": 128}
    assert model_shape({**SMALL, "model_type": "mistral", **window}).sliding_window == 128
    assert model_shape({**SMALL, "model_type": "qwen2", **window}).sliding_window is None
    used = {**window, "use_sliding_window": True}
    assert model_shape({**SMALL, "model_type": "qwen2", **used}).sliding_window == 128
    # One that the config leaves out is transformers' own, as workers build it; null is none.
    assert model_shape({**SMALL, "model_type": "mistral"}).sliding_window == 4096
    none = {"model_type": "mistral", "sliding_window": None}
    assert model_shape({**SMALL, **none}).sliding_window is None

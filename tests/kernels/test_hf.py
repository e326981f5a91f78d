"""Hugging Face models: equal to eager attention under the same mask, and loud about the rest."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from msa_kernels import backend, hf
from msa_kernels.backend import BackendError
from msa_kernels.pattern import (
    Block,
    BlockList,
    Columns,
    Dense,
    Dilated,
    Documents,
    Pattern,
    PerHead,
    SinkWindow,
    Union,
    Window,
)
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

LENGTH = 50
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register()
    backend.reset()
    torch.manual_seed(0)


def build(config: PreTrainedConfig, implementation: str = "msa") -> Any:
    torch.manual_seed(0)
    # A config remembers the implementation that a model was built with: never share one.
    own = copy.deepcopy(config)
    return AutoModelForCausalLM.from_config(own, attn_implementation=implementation).eval()


def dense_mask(pattern: Pattern) -> torch.Tensor:
    i = torch.arange(LENGTH)
    seen = pattern.allows(i[:, None], i[None])
    floor = torch.finfo(torch.float32).min
    return torch.where(seen, 0.0, floor)[None, None].expand(2, 1, -1, -1)


def run(model: Any, **kwargs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    out = model(input_ids=ids, labels=ids, use_cache=False, **kwargs)
    return out.logits, list(torch.autograd.grad(out.loss, list(model.parameters())))


CONFIGS = [
    LlamaConfig(**SMALL),
    MistralConfig(**SMALL, sliding_window=7),
    Qwen3Config(**SMALL),
    Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_a_model_without_patterns_computes_what_it_says(config: PreTrainedConfig) -> None:
    model = build(config)
    logits, grads = run(model)
    assert {r.backend for r in backend.used()} == {"torch"}
    expected, wanted = run(build(config, "eager"))
    assert sum(r.calls for r in backend.used()) == 2, "eager attention must not run through msa"
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    for found, exact in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=lambda c: type(c).__name__)
def test_a_pattern_equals_eager_with_its_mask(config: PreTrainedConfig) -> None:
    pattern = SinkWindow(8, 3)
    window = getattr(config, "sliding_window", None)
    effective = pattern.limited(window) if window else pattern
    model = build(config)
    hf.set_patterns(model, pattern)
    logits, grads = run(model)
    expected, wanted = run(build(config, "eager"), attention_mask=dense_mask(effective))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    for found, exact in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-3)


def test_each_layer_has_its_own_pattern() -> None:
    model = build(LlamaConfig(**SMALL))
    hf.set_patterns(model, [Dense(), PerHead((Window(4), Dense()))])
    run(model)
    assert len({r.pattern for r in backend.used()}) == 2
    with pytest.raises(ValueError, match="3 patterns for 2 attention layers"):
        hf.set_patterns(model, [Dense()] * 3)


def packing(form: str) -> dict[str, Any]:
    position = torch.cat([torch.arange(20), torch.arange(30)])[None]
    ids = torch.cat([torch.zeros(20), torch.ones(30)])[None].int()
    bounds = torch.tensor([0, 20, 50], dtype=torch.int32)
    return {
        "msa_document_ids": {"position_ids": position, "msa_document_ids": ids},
        "cu_seq_lens": {
            "position_ids": position, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
            "max_length_q": 30, "max_length_k": 30,
        },
        "position_ids": {"position_ids": position},
    }[form]  # fmt: skip


@pytest.mark.parametrize("form", ["msa_document_ids", "cu_seq_lens", "position_ids"])
def test_packed_documents_equal_each_alone(form: str) -> None:
    model = build(LlamaConfig(**SMALL))
    hf.set_patterns(model, SinkWindow(8, 3))
    ids = torch.randint(1, 64, (1, LENGTH))
    packed = model(input_ids=ids, use_cache=False, **packing(form)).logits
    alone = [model(input_ids=part, use_cache=False).logits for part in (ids[:, :20], ids[:, 20:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-4)


def test_permuted_positions_are_never_taken_for_documents() -> None:
    """A rank that holds both ends of a sequence has positions that jump."""
    model = build(LlamaConfig(**SMALL))
    ids = torch.randint(1, 64, (1, LENGTH))
    permuted = torch.cat([torch.arange(25, 50), torch.arange(25)])[None]
    with pytest.raises(BackendError, match="msa_positions for a permuted"):
        jumps = torch.cat([torch.arange(10), torch.arange(20, 60)])[None]
        model(input_ids=ids, position_ids=jumps, use_cache=False)
    model(input_ids=ids, position_ids=permuted, msa_positions=permuted, use_cache=False)
    assert not any(r.packed for r in backend.used())


def test_generation_with_a_cache_equals_eager() -> None:
    ids = torch.randint(1, 64, (1, 20))
    found = build(LlamaConfig(**SMALL)).generate(ids, max_new_tokens=6, do_sample=False)
    wanted = build(LlamaConfig(**SMALL), "eager").generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, wanted)


# Weights as they are drawn otherwise give the same token whatever is attended to.
LARGE: dict[str, Any] = {**SMALL, "initializer_range": 0.5}
SLIDING = [
    MistralConfig(**LARGE, sliding_window=7),
    Qwen3Config(**LARGE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    Gemma3TextConfig(**LARGE, sliding_window=8),
]


@pytest.mark.parametrize("config", SLIDING, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 3}, {"num_beams": 2}], ids=str)
def test_generation_past_a_sliding_window_equals_eager(
    config: PreTrainedConfig, options: dict[str, Any]
) -> None:
    """The default cache of these models holds the keys of a window, not from token 0 on."""
    ids = torch.randint(1, 64, (2, 5))
    found, wanted = (
        build(config, name).generate(
            ids, max_new_tokens=20, do_sample=False, eos_token_id=None, **options
        )
        for name in ("msa", "eager")
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("pattern", [
    Window(5), Dilated(2), SinkWindow(3, 2), Block(4), PerHead((Dense(), Columns(4, 1))),
], ids=str)  # fmt: skip
def test_patterns_stay_where_they_are_when_a_cache_lets_go_of_keys(pattern: Pattern) -> None:
    """Blocks, columns and sinks are counted from token 0, whatever the cache holds."""
    config = MistralConfig(**LARGE, sliding_window=7)
    hf.set_patterns(model := build(config), pattern)
    ids = torch.randint(1, 64, (1, 40))
    whole = model(ids, use_cache=False).logits
    cache, pieces = None, []
    for piece in ids.split([4, 6, 1, 12, 1, 16], dim=1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)


def test_a_static_cache_is_refused_with_one_that_works() -> None:
    model = build(LlamaConfig(**SMALL))
    with pytest.raises(BackendError, match=r"static one: keys 0 to \d+ .*DynamicCache\(\)"):
        model.generate(torch.ones(1, 5, dtype=int), cache_implementation="static")


def test_layers_that_are_compiled_keep_their_own_patterns() -> None:
    torch._dynamo.reset()
    model = build(LlamaConfig(**SMALL))
    hf.set_patterns(model, [Window(4), Window(40)])
    expected, _ = run(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    found, _ = run(model)
    torch.testing.assert_close(found, expected)
    hf.set_patterns(model, [Window(4), Window(9)])
    found, _ = run(model)
    plain = build(LlamaConfig(**SMALL))
    hf.set_patterns(plain, [Window(4), Window(9)])
    torch.testing.assert_close(found, run(plain)[0])


WHOLE = {"backend": "aot_eager", "fullgraph": True}
COMPILED: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "positions of the model": (LlamaConfig(**SMALL), {}),
    "a window": (MistralConfig(**SMALL, sliding_window=7), {}),
    "a window and a mask": (
        MistralConfig(**SMALL, sliding_window=7), {"attention_mask": torch.ones(2, LENGTH)},
    ),
    "a window in one layer": (
        Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1), {},
    ),
    "permuted": (LlamaConfig(**SMALL), {"msa_positions": torch.arange(LENGTH)[None]}),
    "documents": (LlamaConfig(**SMALL), {"msa_document_ids": torch.arange(LENGTH).expand(2, -1)}),
    "packed": (
        MistralConfig(**SMALL, sliding_window=7),
        {"position_ids": torch.cat([torch.arange(20), torch.arange(30)])[None]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPILED)
def test_a_whole_model_is_one_graph(case: str) -> None:
    torch._dynamo.reset()
    config, kwargs = COMPILED[case]
    hf.set_patterns(model := build(config), [Union((SinkWindow(4, 2), Dilated(3))), Dense()])
    expected, wanted = run(model, **kwargs)
    counts = torch._dynamo.utils.counters
    counts.clear()
    found, grads = run(torch.compile(model, **WHOLE), **kwargs)
    assert counts["stats"]["unique_graphs"] == 1 and not counts["graph_break"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for grad, exact in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, exact, atol=1e-6, rtol=1e-3)


def test_one_graph_serves_every_length() -> None:
    torch._dynamo.reset()
    hf.set_patterns(model := build(MistralConfig(**SMALL, sliding_window=7)), Dense())
    compiled = torch.compile(model, **WHOLE, dynamic=True)
    counts = torch._dynamo.utils.counters
    counts.clear()
    for length in (40, 56, 33):
        ids = torch.randint(1, 64, (2, length))
        found, wanted = (m(ids, use_cache=False).logits for m in (compiled, model))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert counts["stats"]["unique_graphs"] == 1


def test_a_graph_refuses_what_it_refuses_eagerly() -> None:
    torch._dynamo.reset()
    model = torch.compile(build(LlamaConfig(**SMALL)), **WHOLE)
    mask = torch.ones(2, LENGTH)
    run(model, attention_mask=mask)
    mask[0, :3] = 0
    with pytest.raises(BackendError, match="padding mask that hides tokens"):
        run(model, attention_mask=mask)
    run(model, position_ids=torch.arange(LENGTH)[None])
    with pytest.raises(BackendError, match="jump without restarting at 0"):
        run(model, position_ids=torch.arange(0, 2 * LENGTH, 2)[None])
    torch._dynamo.reset()
    small = {**SMALL, "num_hidden_layers": 1, "num_local_experts": 2, "intermediate_size_mlp": 48}
    chunks = build(Llama4TextConfig(**small, attention_chunk_size=8))
    for attend in (chunks, torch.compile(chunks, backend="aot_eager")):
        with pytest.raises(BackendError, match=r"chunked_overlay|in chunks"):
            run(attend)


def test_packed_documents_with_a_cache_are_refused() -> None:
    model = build(LlamaConfig(**SMALL))
    ids = torch.randint(1, 64, (1, 32))
    positions = torch.cat([torch.arange(20), torch.arange(12)])[None]
    first = model(ids[:, :16], position_ids=positions[:, :16], use_cache=True)
    with pytest.raises(BackendError, match="do not go on from the 16 tokens in the cache"):
        model(
            ids[:, 16:], position_ids=positions[:, 16:], past_key_values=first.past_key_values,
            use_cache=True,
        )  # fmt: skip


def test_a_padding_mask_of_ones_is_accepted_and_another_refused() -> None:
    model = build(LlamaConfig(**SMALL))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    torch.testing.assert_close(run(model, attention_mask=mask)[0], run(model)[0])
    mask[0, :3] = 0
    with pytest.raises(BackendError, match=r"padding mask .* msa_document_ids"):
        run(model, attention_mask=mask)
    with pytest.raises(BackendError, match=r"attention mask \(2, 1, 50, 50\)"):
        run(model, attention_mask=dense_mask(Dense()))


def test_what_is_not_implemented_is_refused() -> None:
    with pytest.raises(BackendError, match="soft-capping"):
        run(build(Gemma2Config(**SMALL)))
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    with pytest.raises(BackendError, match="learned sinks"):
        run(build(GptOssConfig(**SMALL, **experts)))
    with pytest.raises(BackendError, match=r"dropout 0\.1"):
        run(build(LlamaConfig(**SMALL, attention_dropout=0.1)).train())
    with pytest.raises(BackendError, match="attention weights"):
        run(build(LlamaConfig(**SMALL)), output_attentions=True)
    with pytest.raises(BackendError, match="keyword 'mystery'"):
        run(build(LlamaConfig(**SMALL)), mystery=torch.ones(1))


def test_a_bidirectional_pattern_in_a_causal_layer_is_refused() -> None:
    model = build(LlamaConfig(**SMALL))
    hf.set_patterns(model, Dense(causal=False))
    with pytest.raises(BackendError, match="the layer is causal and its pattern is not"):
        run(model)


def test_patterns_need_the_implementation() -> None:
    with pytest.raises(ValueError, match="attn_implementation='eager', which ignores patterns"):
        hf.set_patterns(build(LlamaConfig(**SMALL), "eager"), Window(4))


def test_documents_are_said_once_and_whole() -> None:
    model = build(LlamaConfig(**SMALL))
    ids = torch.randint(1, 64, (1, LENGTH))
    both = packing("cu_seq_lens") | packing("msa_document_ids")
    with pytest.raises(BackendError, match="given twice, by msa_document_ids and cu_seq_lens_q"):
        model(ids, use_cache=False, **both)
    with pytest.raises(BackendError, match="cu_seq_lens_k is given without cu_seq_lens_q"):
        model(ids, use_cache=False, cu_seq_lens_k=both["cu_seq_lens_k"])


def test_what_is_no_pattern_or_backend_is_refused_before_any_layer_has_it() -> None:
    model = build(LlamaConfig(**SMALL))
    hf.set_patterns(model, Window(3))
    with pytest.raises(BackendError, match=r"no backend 'nope'; choose auto, fa4"):
        hf.set_patterns(model, Dense(), backend="nope")
    with pytest.raises(TypeError, match="must be a Pattern, found 'Dense'"):
        hf.set_patterns(model, "Dense")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a Pattern, found None"):
        hf.set_patterns(model, [Dense(), None])  # type: ignore[list-item]
    assert {layer.msa_pattern for layer in hf.attention_layers(model)} == {Window(3)}


def test_checkpointed_activations_give_the_same_gradients() -> None:
    plain, saved = (build(LlamaConfig(**SMALL)).train() for _ in range(2))
    for model in (plain, saved):
        hf.set_patterns(model, SinkWindow(8, 3))
    saved.gradient_checkpointing_enable({"use_reentrant": False})
    for found, wanted in zip(run(saved)[1], run(plain)[1], strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_saved_model_has_its_patterns_again(tmp_path: Path) -> None:
    """Lost, they are Dense without a word: the weights load, and attend to everything."""
    model = build(LlamaConfig(**SMALL))
    patterns = [PerHead((Window(4), Dense())), BlockList(10, ((0,), (1,), (0, 2), (3,), (4,)))]
    hf.set_patterns(model, patterns)
    expected = run(model)[0]
    for _ in range(2):
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert model.config._attn_implementation == "msa"
        torch.testing.assert_close(run(model)[0], expected, rtol=0, atol=0)
    hf.set_patterns(model, Window(3))
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    run(model)
    assert [layer.msa_pattern for layer in hf.attention_layers(model)] == [Window(3)] * 2


def test_a_loaded_model_that_is_compiled_at_once_has_its_patterns(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = build(LlamaConfig(**SMALL))
    hf.set_patterns(model, [Window(4), Window(9)])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for layer in loaded.model.layers:
        layer.compile(backend="aot_eager")
    positions = torch.arange(LENGTH)[None]
    found, wanted = (run(m, msa_positions=positions)[0] for m in (loaded, model))
    torch.testing.assert_close(found, wanted)


def test_a_saved_model_without_a_name_for_its_patterns_is_refused(tmp_path: Path) -> None:
    model = build(LlamaConfig(**SMALL))
    hf.set_patterns(model, [Dense(), Window(9) & Documents((20, 30))])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(BackendError, match=r"none for layer 1.*set_patterns"):
        run(loaded)
    hf.set_patterns(loaded, Window(5))
    more = copy.deepcopy(loaded.config)
    more.num_hidden_layers = 3
    with pytest.raises(BackendError, match=r"none for layer 2"):
        run(build(more))

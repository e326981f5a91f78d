"""Memory is saved by computing again, by tiles and by copies: never by another result."""

from __future__ import annotations

import collections
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from msa_kernels.pattern import SinkWindow
from msa_workloads.data import IGNORE, Batch
from msa_workloads.model import LanguageModel, build_model
from msa_workloads.parallel import activation
from msa_workloads.parallel.mesh import UnsupportedError, check_supported
from msa_workloads.parallel.offload import HostBuffers, Parking
from msa_workloads.runspec import MemorySpec
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, VOCABULARY, LAYERS = 48, 61, 5
CPU = torch.device("cpu")


def config(kind: str, **fields: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        kind, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        vocab_size=VOCABULARY, **fields,
    )  # fmt: skip


def language_model(
    memory: MemorySpec, kind: str = "llama", dtype: torch.dtype = torch.float64, **fields: Any
) -> LanguageModel:
    from msa_kernels import hf
    from transformers import AutoModelForCausalLM

    hf.register()
    torch.manual_seed(0)
    inner = AutoModelForCausalLM.from_config(
        config(kind, **fields), attn_implementation="msa", dtype=dtype
    )
    hf.set_patterns(inner, SinkWindow(16, 3))
    kept = activation.apply(inner, memory, CPU)
    model = LanguageModel(inner, memory.loss_chunk).train()
    model.activations = kept
    return model


def batch() -> Batch:
    make = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(VOCABULARY, (2, 2, TOKENS), generator=make)
    labels[0, ::5] = IGNORE
    positions = torch.arange(TOKENS).expand(2, -1).contiguous()
    documents = (torch.arange(TOKENS) >= 20).int().expand(2, -1).contiguous()
    return Batch(tokens, labels, positions, documents)


def gradients(model: LanguageModel) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(batch()) / 77
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


SAVERS = [
    MemorySpec(checkpointing="full"),
    MemorySpec(checkpointing="selective"),
    MemorySpec(mlp_chunk=20, loss_chunk=17),
    MemorySpec(checkpointing="selective", keep_projections=3, mlp_chunk=50),
    MemorySpec(checkpointing="selective", mlp_chunk=96, loss_chunk=200),
    MemorySpec(checkpointing="full", offload_checkpoints=True, mlp_chunk=31),
    MemorySpec(checkpointing="full", checkpoint_layers=2, loss_chunk=1),
    MemorySpec(checkpointing="selective", checkpoint_layers=9, mlp_chunk=40),
    MemorySpec(
        checkpointing="full", checkpoint_layers=2, offload_checkpoints=True,
        checkpoints_on_device=1, mlp_chunk=33, loss_chunk=30,
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_no_switch_changes_loss_or_gradients(kind: str) -> None:
    # gemma2 has other normalisations and another activation, whose derivative autograd makes; its
    # logits are capped, which the chunked loss refuses.
    fields = {"attn_logit_softcapping": None, "tie_word_embeddings": True, "sliding_window": 12}
    chosen = fields if kind == "gemma2" else {}
    loss, expected = gradients(language_model(MemorySpec(), kind, **chosen))
    for memory in SAVERS:
        if kind == "gemma2":
            memory = replace(memory, loss_chunk=0)
        model = language_model(memory, kind, **chosen)
        for _ in range(2):  # buffers are used again
            found_loss, found = gradients(model)
            assert found_loss == pytest.approx(loss, rel=1e-12), memory
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
def test_fp32_agrees_to_a_millionth(biased: bool) -> None:
    fields = {"mlp_bias": biased, "attention_bias": biased}
    loss, expected = gradients(language_model(MemorySpec(), dtype=torch.float32, **fields))
    for memory in SAVERS[1:4]:
        model = language_model(memory, dtype=torch.float32, **fields)
        found_loss, found = gradients(model)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in expected.items():
            error = (found[name] - gradient).abs().max() / gradient.abs().max()
            assert error <= 5e-6, (memory, name, error)


class Count(TorchDispatchMode):
    """Operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.of[f"aten.{n}"] for n in ("mm.default", "mm.out", "addmm_.default"))

    @property
    def attentions(self) -> int:
        return self.of["msa.attention.default"]


def in_backward(memory: MemorySpec) -> Count:
    model = language_model(memory)
    loss = model(batch())
    with Count() as count:
        loss.backward()
    return count


def test_what_is_computed_again_is_what_the_switch_says() -> None:
    plain = in_backward(MemorySpec(loss_chunk=96))
    assert plain.attentions == 0

    def again(memory: MemorySpec) -> tuple[int, int]:
        count = in_backward(replace(memory, loss_chunk=96))
        return count.products - plain.products, count.attentions

    # Of a layer's seven products six: the last one's result is needed by nothing in backward.
    assert again(MemorySpec(checkpointing="full")) == (6 * LAYERS, LAYERS)
    assert again(MemorySpec(checkpointing="selective")) == (6 * LAYERS, 0)
    # A tiled MLP computes its first two again itself, also under a checkpoint, and only once.
    assert again(MemorySpec(mlp_chunk=96)) == (2 * LAYERS, 0)
    assert again(MemorySpec(checkpointing="selective", mlp_chunk=96)) == (6 * LAYERS, 0)
    # Of two layers the products around attention, four each, are kept.
    kept = MemorySpec(checkpointing="selective", keep_projections=2)
    assert again(kept) == (6 * LAYERS - 4 * 2, 0)
    # Segments of layers 0-1, 2-3 and 4: layers 0 and 2 run whole once more.
    in_pairs = MemorySpec(checkpointing="full", checkpoint_layers=2)
    assert again(in_pairs) == (6 * LAYERS + 7 * 2, LAYERS + 2)


def test_only_what_is_kept_is_alive_between_forward_and_backward() -> None:
    alive: dict[int, weakref.ref[torch.Tensor]] = {}

    def inputs_alive(memory: MemorySpec) -> list[int]:
        model = language_model(memory)
        for number, layer in enumerate(model.layers):
            inner = layer.forward

            def watch(
                hidden: torch.Tensor, *args: Any, n: int = number, f: Any = inner, **kw: Any
            ):
                alive[n] = weakref.ref(hidden.untyped_storage())
                return f(hidden, *args, **kw)

            layer.forward = watch
        loss = model(batch())
        found = [n for n in range(LAYERS) if alive[n]() is not None]
        loss.backward()
        return found

    # The first layer's input is also the embedding's output.
    assert inputs_alive(MemorySpec(checkpointing="full")) == [0, 1, 2, 3, 4]
    assert inputs_alive(MemorySpec(checkpointing="full", checkpoint_layers=2)) == [0, 2, 4]
    offload = MemorySpec(checkpointing="full", offload_checkpoints=True)
    assert inputs_alive(offload) == []
    assert inputs_alive(replace(offload, checkpoints_on_device=2)) == [3, 4]


def test_host_buffers_are_used_again() -> None:
    memory = MemorySpec(checkpointing="full", offload_checkpoints=True, checkpoint_layers=2)
    model = language_model(memory)
    kept = model.activations
    assert kept is not None and kept.parking is not None
    for step in range(1, 4):
        gradients(model)
        one = 2 * TOKENS * 32 * 8
        assert kept.parking.buffers.bytes == 3 * one
        assert kept.parking.moved == step * 2 * 3 * one
        assert kept.recomputed_layers == step * 2
    buffers = HostBuffers(pinned=False)
    first = buffers.take(torch.Size((3, 4)), torch.float32)
    buffers.give_back(first)
    assert buffers.take(torch.Size((3, 4)), torch.float32) is first
    assert buffers.take(torch.Size((3, 4)), torch.float32) is not first


def test_a_parked_tensor_comes_back() -> None:
    parking = Parking(CPU)
    value = torch.randn(5, 7)
    parked = parking.park(value)
    parking.fetch(parked)
    assert torch.equal(parking.take(parked), value)


def test_a_second_backward_over_parked_inputs_is_refused() -> None:
    memory = MemorySpec(checkpointing="full", offload_checkpoints=True)
    loss = language_model(memory)(batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice through layer 4"):
        loss.backward()


def test_evaluation_keeps_nothing_and_runs_in_tiles() -> None:
    memory = MemorySpec(
        checkpointing="full", checkpoint_layers=2, offload_checkpoints=True, mlp_chunk=20,
        loss_chunk=30,
    )  # fmt: skip
    model, plain = language_model(memory), language_model(MemorySpec())
    with torch.no_grad():
        found, expected = (m(batch(), per_token=True) for m in (model, plain))
        assert model(batch()).item() == pytest.approx(plain(batch()).item())
    torch.testing.assert_close(found, expected)
    assert model.activations is not None and model.activations.parking is not None
    assert model.activations.parking.moved == 0


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"memory": {"offload_checkpoints": True}}, "checkpointing 'none', which keeps no"),
        ({"memory": {"checkpoint_layers": 2}}, "checkpointing 'none'.* or checkpoint_layers: 1"),
        ({"memory": {"mlp_chunk": -1}}, "mlp_chunk: found -1, must be at least 0"),
        (
            {"memory": {"checkpointing": "full", "checkpoints_on_device": 3}},
            "found 3 without offload_checkpoints",
        ),
        ({"memory": {"parameters": "bf16"}}, "found 'bf16' with training.precision 'fp32'"),
        ({"memory": {"keep_projections": 1}}, "use checkpointing: selective"),
        ({"memory": {"loss_kernel": "liger"}}, "need device: gpu and a loss_chunk"),
    ],
)
def test_switches_that_contradict_each_other_are_refused(
    make_spec: Any, parts: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        check_supported(make_spec(**parts))


def test_models_that_a_switch_does_not_serve_are_refused() -> None:
    from transformers import AutoModelForCausalLM

    phi = AutoModelForCausalLM.from_config(config("phi3", pad_token_id=0))
    with pytest.raises(UnsupportedError, match="layer 0 has Phi3MLP, which is not a gated MLP"):
        activation.apply(phi, MemorySpec(mlp_chunk=16), CPU)
    dropping = AutoModelForCausalLM.from_config(config("phi3", pad_token_id=0, resid_pdrop=0.1))
    with pytest.raises(UnsupportedError, match=r"drops out at a rate of 0\.1"):
        activation.apply(dropping, MemorySpec(checkpointing="full", checkpoint_layers=2), CPU)


def test_compiled_steps_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler's own backend would take minutes here; what is traced is the same.
    from msa_workloads.parallel import elementwise

    def traced(function: Any) -> Any:
        return torch.compile(function, backend="aot_eager")

    monkeypatch.setattr(elementwise, "compiled", traced)
    import transformers.models.llama.modeling_llama as source

    monkeypatch.setattr(source, elementwise.ROTATION, getattr(source, elementwise.ROTATION))
    memory = MemorySpec(checkpointing="selective", mlp_chunk=48, loss_chunk=48)
    loss, expected = gradients(language_model(memory))
    monkeypatch.setattr(elementwise, "wants", lambda device: True)
    model = language_model(memory)
    assert model.activations is not None
    assert any("RMSNorm" in name for name in model.activations.fused)
    found_loss, found = gradients(model)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9)


def test_weights_without_a_master_copy(make_spec: Any) -> None:
    spec = make_spec(memory={"parameters": "bf16"}, training={"precision": "bf16"})
    check_supported(spec)
    model = build_model(spec, 260, None, CPU)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    rotary = [b for n, b in model.named_buffers() if "inv_freq" in n]
    assert rotary and all(b.dtype == torch.float32 for b in rotary)
    assert isinstance(model, nn.Module)

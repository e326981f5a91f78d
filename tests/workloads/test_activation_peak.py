"""How many tensors of the size of a layer's input are alive in backward, against the count that
``benchmarks/training/longest.py`` plans with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msa_kernels.pattern import Window
from msa_workloads.data import Batch
from msa_workloads.model import LanguageModel
from msa_workloads.parallel import activation, offload
from msa_workloads.parallel.tiled_mlp import TiledMlp
from msa_workloads.runspec import MemorySpec

sys.path.insert(0, str(Path(__file__).parent))
from alive import Alive

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "training"
TOKENS, HIDDEN, HEADS, KV_HEADS, VOCABULARY = 512, 64, 8, 2, 61
UNIT = TOKENS * HIDDEN * 4


class Norm(torch.autograd.Function):
    """RMSNorm that keeps its input only, as the compiled one does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps) * weight
        return *torch.autograd.grad(out, (x, weight), grads), None


def language_model(memory: MemorySpec, layers: int) -> LanguageModel:
    from msa_kernels import hf
    from transformers import AutoConfig, AutoModelForCausalLM

    hf.register()
    config = AutoConfig.for_model(
        "llama", hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
    )  # fmt: skip
    inner = AutoModelForCausalLM.from_config(config, attn_implementation="msa")
    hf.set_patterns(inner, Window(32))
    activation.apply(inner, memory, torch.device("cpu"))
    return LanguageModel(inner, memory.loss_chunk).train()


@pytest.mark.parametrize(
    ("layers", "each", "offloaded", "on_device"),
    [
        (4, 1, False, 0), (5, 1, True, 0), (5, 1, True, 2), (6, 2, True, 0), (7, 3, True, 1),
        # The last checkpoints wait on the device: what is parked before them must not come yet.
        (9, 2, True, 2), (11, 3, True, 3), (7, 2, False, 0),
    ],
)  # fmt: skip
def test_backward_holds_what_the_plan_counts(
    layers: int, each: int, offloaded: bool, on_device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import longest
    from common import Shape
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    monkeypatch.setattr(
        LlamaRMSNorm, "forward", lambda self, x: Norm.apply(x, self.weight, self.variance_epsilon)
    )
    memory = MemorySpec(
        checkpointing="full", checkpoint_layers=each, offload_checkpoints=offloaded,
        checkpoints_on_device=on_device, mlp_chunk=64, loss_chunk=64,
    )  # fmt: skip
    model = language_model(memory, layers)
    tokens = torch.randint(VOCABULARY, (1, TOKENS))
    batch = Batch(
        tokens, tokens, torch.arange(TOKENS)[None], torch.zeros(1, TOKENS, dtype=torch.int32)
    )
    # Of at least a quarter of a layer's input.
    alive, seen = Alive(UNIT // 4), []
    make, bounds = offload.HostBuffers._make, TiledMlp.bounds

    def on_host(self: Any, shape: Any, dtype: Any) -> torch.Tensor:
        buffer = make(self, shape, dtype)
        alive.apart.add(buffer.untyped_storage()._cdata)
        return buffer

    def watched(self: TiledMlp, rows: int) -> list[slice]:
        # Where a GPU's peak was measured: the MLP's backward has just made its gradient.
        seen.append(alive.bytes() / UNIT)
        return bounds(self, rows)

    monkeypatch.setattr(offload.HostBuffers, "_make", on_host)
    with alive:
        loss = model(batch)
        with monkeypatch.context() as patch:
            patch.setattr(TiledMlp, "bounds", watched)
            loss.backward()
    shape = Shape(hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, layers=layers)
    planned = longest.backward_units(shape, memory)
    assert max(seen) == max(planned)
    # The first layers run last, when everything that was kept is gone.
    assert seen[-1] == 8.5

"""The peer: Hugging Face's Llama with flash-attn-4 and Liger, as one would put it together.

bf16 parameters and AdamW states, every layer checkpointed whole, Liger's normalisation, SwiGLU,
rotation and fused linear cross-entropy where it is installed; on several GPUs FSDP2, and Ulysses
written plainly: heads for tokens in one all-to-all for each of q, k, v and the output.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Clock, RandomTokens, Shape, patterns
from msa_kernels.pattern import Pattern
from msa_workloads.data import IGNORE
from msa_workloads.parallel.mesh import World
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Peer:
    """The same interface as :class:`ours.Ours`; serves dense and windowed attention."""

    name = "peer"

    def __init__(self, shape: Shape, tokens: int, world: World, rate: float = 1e-4) -> None:
        from transformers import (
            AttentionInterface,
            AttentionMaskInterface,
            LlamaConfig,
            LlamaForCausalLM,
        )

        cuda = world.device.type == "cuda"
        self.world, self.tokens, self.window = world, tokens, None
        liger = cuda and _liger()
        if liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(
                rope=True, rms_norm=True, swiglu=True, cross_entropy=False,
                fused_linear_cross_entropy=False,
            )  # fmt: skip
        self.liger = liger
        self.local, self.kernel = _kernel(cuda)
        self.bytes = 0

        def attend(module, query, key, value, attention_mask, **kwargs):
            rows = [t.transpose(1, 2) for t in (query, key, value)]
            return self._attend(*rows), None

        AttentionInterface.register("peer", attend)
        AttentionMaskInterface.register("peer", lambda *args, **kwargs: None)
        config = shape.config(tokens)
        del config["model_type"]
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
        with world.device:
            model = LlamaForCausalLM(LlamaConfig(attn_implementation="peer", **config))
        torch.set_default_dtype(torch.float32)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = _WithLoss(model, liger).train()
        if world.size > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(world.device.type, (world.size,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model.head, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.rate = rate
        self.clock = Clock(world.device)
        self.start = {n: _local(p).cpu() for n, p in self.model.named_parameters()}
        model.model.norm.register_forward_hook(lambda *_: self.clock.mark())
        stream = RandomTokens(tokens, shape.vocabulary).sample(0)
        share = slice(
            world.rank * tokens // world.size, (world.rank + 1) * tokens // world.size
        )  # fmt: skip
        self.batch = [
            torch.from_numpy(a[share])[None].to(world.device)
            for a in (stream.tokens, stream.positions, stream.labels)
        ]

    def use(self, pattern: Pattern) -> dict[str, Any]:
        names = {p: n for n, p in patterns(self.tokens).items()}
        if names.get(pattern) not in ("dense", "window"):
            raise NotImplementedError(f"the peer's kernel does not serve {pattern}")
        self.window = getattr(pattern, "window", None)
        for name, parameter in self.model.named_parameters():
            _local(parameter).copy_(self.start[name])
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, weight_decay=0.1,
            fused=self.world.device.type == "cuda",
        )  # fmt: skip
        self.bytes = 0
        return {"layout": "ulysses" if self.world.size > 1 else "whole", "liger": self.liger}

    def step(self) -> tuple[float, float]:
        self.clock.start()
        loss = self.model(*self.batch)
        self.clock.mark()
        loss.backward()
        self.clock.mark()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.clock.mark()
        found = loss.detach().double()
        if self.world.size > 1:
            dist.all_reduce(found)
            norm = norm.full_tensor()
        # Each rank's loss is a mean over its own tokens.
        value = float(found) / self.world.size
        if not math.isfinite(value):
            raise ArithmeticError(f"loss {value}")
        return value, float(norm)

    def used(self) -> dict[str, Any]:
        return {"attention": self.kernel, "moved": [{"purpose": "heads", "sent": self.bytes}]}

    def close(self) -> None:
        self.model = self.optimizer = None  # type: ignore[assignment]
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.world.size == 1:
            return self.local(q, k, v, self.window)
        q, k, v = (_ToHeads.apply(t, self) for t in (q, k, v))
        return _ToTokens.apply(self.local(q, k, v, self.window), self)

    def exchange(self, x: Tensor, to_heads: bool) -> Tensor:
        """(1, S/P, H, D) to (1, S, H/P, D), or back."""
        ranks = self.world.size
        if to_heads:
            sent = x[0].unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        else:
            sent = x[0].unflatten(0, (ranks, -1)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        self.bytes += sent.numel() * sent.element_size() * (ranks - 1) // ranks
        if to_heads:
            return received.flatten(0, 1)[None]
        return received.transpose(0, 1).flatten(1, 2)[None]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peer: Peer) -> Tensor:
        ctx.peer = peer
        return peer.exchange(x, True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.peer.exchange(grad, False), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peer: Peer) -> Tensor:
        ctx.peer = peer
        return peer.exchange(x, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.peer.exchange(grad, True), None


class _Head(nn.Module):
    """Output projection and mean cross-entropy, without whole logits."""

    def __init__(self, head: nn.Linear, liger: bool) -> None:
        super().__init__()
        self.weight = head.weight
        self.fused: Any = None
        if liger:
            from liger_kernel.transformers.fused_linear_cross_entropy import (
                LigerFusedLinearCrossEntropyLoss,
            )

            self.fused = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        if self.fused is not None:
            return self.fused(self.weight, hidden, labels)

        def part(rows: Tensor, targets: Tensor) -> Tensor:
            logits = (rows @ self.weight.T).float()
            return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE)

        pieces = zip(hidden.split(4096), labels.split(4096), strict=True)
        total = sum(checkpoint(part, h, y, use_reentrant=False) for h, y in pieces)
        return total / (labels != IGNORE).sum()


class _WithLoss(nn.Module):
    def __init__(self, model: Any, liger: bool) -> None:
        super().__init__()
        self.body = model.model
        self.head = _Head(model.lm_head, liger)

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(
            input_ids=tokens, position_ids=positions, use_cache=False
        ).last_hidden_state
        return self.head(hidden, labels)


def _local(parameter: Tensor) -> Tensor:
    return getattr(parameter, "_local_tensor", parameter).detach()


def _liger() -> bool:
    try:
        import liger_kernel  # noqa: F401
    except ImportError:
        return False
    return True


def _kernel(cuda: bool) -> tuple[Callable[..., Tensor], str]:
    """Causal attention of (B, S, H, D) with an optional window, and its name."""
    if not cuda:
        return _reference, "reference"
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError:
        return _sdpa, "sdpa"

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        sides = (window - 1, 0) if window else (None, None)
        return flash_attn_func(q, k, v, causal=True, window_size=sides)[0]

    return attend, "flash-attn-4"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    if window:
        raise NotImplementedError("windows need flash-attn-4 here")
    heads = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def _reference(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    repeat = q.shape[2] // k.shape[2]
    heads = [q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)]
    length = q.shape[1]
    at = torch.arange(length, device=q.device)
    distance = at[:, None] - at[None]
    mask = (distance >= 0) & (distance < (window or length))
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in heads), attn_mask=mask)
    return out.transpose(1, 2)

"""This project's training step, from its own parts, with a clock between them."""

from __future__ import annotations

import gc
import math
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from common import Clock, RandomTokens, Shape
from msa_kernels import backend as backends
from msa_kernels import hf
from msa_kernels.pattern import Dense, Pattern
from msa_workloads.context import exchange
from msa_workloads.context.run import context_split
from msa_workloads.data import Loader
from msa_workloads.evaluate import move
from msa_workloads.loss import divisor
from msa_workloads.model import build_model, effective_patterns
from msa_workloads.optimizer import build_optimizer, clip_gradients
from msa_workloads.parallel.mesh import World, build_mesh, check_supported
from msa_workloads.runspec import (
    AttentionSpec,
    CheckpointSpec,
    ContextSpec,
    DataSpec,
    MemorySpec,
    MeshSpec,
    ModelSpec,
    RunSpec,
    SequenceSpec,
    TrainingSpec,
)

DENSE = Dense()


class Ours:
    """A model, its optimizer and one batch; patterns are changed between rows."""

    name = "ours"

    def __init__(
        self, shape: Shape, tokens: int, world: World, memory: MemorySpec, *,
        rate: float = 1e-4, heads: int = 1, backend: str = "auto", clip: float = 1.0,
        pattern: Pattern = DENSE, keep_start: bool = True,
    ) -> None:  # fmt: skip
        """``keep_start`` keeps the first weights on the host, for :meth:`use` to start from."""
        cuda = world.device.type == "cuda"
        self.spec = RunSpec(
            name="step",
            model=ModelSpec(config=shape.config(tokens)),
            data=DataSpec(source="random"),
            sequence=SequenceSpec(length=tokens),
            attention=AttentionSpec(pattern=pattern.to_dict(), backend=backend),
            training=TrainingSpec(
                max_steps=10**6, learning_rate=rate, beta2=0.999, clip_norm=clip,
                precision="bf16" if memory.parameters == "bf16" else "fp32",
            ),
            checkpoint=CheckpointSpec(uri="none"),
            output="none",
            device="gpu" if cuda else "cpu",
            mesh=MeshSpec(context=world.size),
            context=ContextSpec(heads=heads),
            memory=memory,
        )  # fmt: skip
        check_supported(self.spec)
        self.world, self.shape = world, shape
        self.mesh = build_mesh(self.spec.mesh, world, heads=heads)
        torch.manual_seed(0)
        self.model = build_model(
            self.spec, shape.vocabulary, self.mesh if world.size > 1 else None, world.device,
            make_on="cuda" if cuda else "cpu",
        )  # fmt: skip
        self.optimizer = build_optimizer(self.model, self.spec.training, memory)
        self.stream: Any = RandomTokens(tokens, shape.vocabulary)
        self.clock = Clock(world.device)
        named = self.model.named_parameters()
        self.start = {n: self._local(p).clone() for n, p in named} if keep_start else {}
        self.model.model.base_model.norm.register_forward_hook(lambda *_: self.clock.mark())
        self.batch: Any = None
        self._read(pattern)

    @staticmethod
    def _local(parameter: torch.Tensor) -> torch.Tensor:
        local = getattr(parameter, "_local_tensor", parameter)
        return local.detach().cpu()

    def use(self, pattern: Pattern) -> dict[str, Any]:
        """Start from the first weights with another pattern; returns how it is split."""
        for name, parameter in self.model.named_parameters():
            getattr(parameter, "_local_tensor", parameter).data.copy_(self.start[name])
        self.optimizer = build_optimizer(self.model, self.spec.training, self.spec.memory)
        return self._read(pattern)

    def _read(self, pattern: Pattern) -> dict[str, Any]:
        """Give the layers a pattern, and this rank its rows of the batch."""
        spec = replace(
            self.spec, attention=replace(self.spec.attention, pattern=pattern.to_dict())
        )  # fmt: skip
        hf.set_patterns(self.model.model, pattern, backend=spec.attention.backend)
        split, _ = context_split(
            spec, effective_patterns(spec, self.model), self.model.heads, self.stream, self.mesh
        )
        read = Loader(self.stream, 0, 1, 1, 1, split).step(0)
        (batch,) = read.batches
        batch = move(batch, self.world.device)
        self.batch = batch
        self.valid = read.valid
        if self.world.size > 1:
            total = torch.tensor(read.valid, device=self.world.device)
            dist.all_reduce(total)
            self.valid = int(total)
        backends.reset()
        exchange.reset()
        home = getattr(getattr(split, "home", None), "name", "whole")
        return {"layout": home, "memory": asdict(self.spec.memory)}

    def step(self) -> tuple[float, float]:
        """One step; marks: start, layers, loss, backward, optimizer. Loss and gradient norm."""
        self.clock.start()
        loss = self.model(self.batch) / divisor(self.valid)
        self.clock.mark()
        loss.backward()
        self.clock.mark()
        norm = clip_gradients(self.model, self.spec.training.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.mark()
        total = loss.detach().double()
        if self.world.size > 1:
            dist.all_reduce(total)
        found = float(total)
        if not math.isfinite(found) or not math.isfinite(norm):
            raise ArithmeticError(f"loss {found}, gradient norm {norm}")
        return found, norm

    def used(self) -> dict[str, Any]:
        """What ran and what moved since :meth:`use`."""
        moved = [asdict(m) for m in exchange.moved().values()]
        return {"attention": [asdict(u) for u in backends.used()], "moved": moved}

    def close(self) -> None:
        self.model = self.optimizer = self.batch = None  # type: ignore[assignment]
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

"""What is measured: pattern, length, batch; 32 query and 8 key/value heads of 128, bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msa_kernels.pattern import (
    Block,
    BlockList,
    Dense,
    Dilated,
    Pattern,
    PerHead,
    SinkWindow,
    Union,
    Window,
)  # fmt: skip

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Case:
    name: str
    pattern: Pattern
    sequence: int
    batch: int = 1
    q_heads: int = Q_HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    dtype: str = "bfloat16"

    @property
    def pairs(self) -> int:
        """Attended pairs over all query heads and the batch."""
        ratio = self.q_heads // self.kv_heads
        groups = (self.pattern.for_group(g).pairs(self.sequence) for g in range(self.kv_heads))
        return self.batch * ratio * sum(groups)

    def tensors(self, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """q, k, v and the output's cotangent: normal, on the GPU."""
        made = torch.Generator("cuda").manual_seed(seed)
        shapes = [self.q_heads, self.kv_heads, self.kv_heads, self.q_heads]
        kind = {"generator": made, "device": "cuda", "dtype": getattr(torch, self.dtype)}
        return tuple(
            torch.randn(self.batch, self.sequence, heads, self.head_dim, **kind)
            for heads in shapes
        )


def pattern(name: str, sequence: int) -> Pattern:
    blocks = sequence // 128
    every_eighth = tuple(tuple(k for k in range(q + 1) if k % 8 == 7) for q in range(blocks))
    return {
        "causal": lambda: Dense(),
        "window1k": lambda: Window(1024),
        "window8k": lambda: Window(8192),
        "window8k_g512": lambda: SinkWindow(8192, 512),
        "dilated4": lambda: Dilated(4),
        "dilated4_diag": lambda: Union((Block(128), Dilated(4))),
        "fixed": lambda: Union((Window(1024), BlockList(128, every_eighth))),
        "strided": lambda: Union((Window(128), Dilated(128))),
        "block_topk16": lambda: PerHead(tuple(_random_blocks(blocks, g) for g in range(KV_HEADS))),
    }[name]()


NAMES = (
    "causal", "window1k", "window8k", "window8k_g512", "dilated4", "dilated4_diag", "fixed",
    "strided", "block_topk16",
)  # fmt: skip


def _random_blocks(blocks: int, seed: int, most: int = 16) -> BlockList:
    """The query's own block and up to 15 earlier ones, another choice for every head."""
    rng = np.random.default_rng(seed)
    rows = [
        tuple(sorted([q, *rng.choice(q, min(q, most - 1), replace=False).tolist()]))
        for q in range(blocks)
    ]  # fmt: skip
    return BlockList(128, tuple(rows))


def cases(
    names: tuple[str, ...], sequences: tuple[int, ...], head_dim: int = HEAD_DIM,
    dtype: str = "bfloat16",
) -> list[Case]:  # fmt: skip
    made = []
    kind: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype}
    for sequence in sequences:
        for name in names:
            if sequence <= 1024:
                if name == "causal":
                    made.append(Case(name, pattern(name, sequence), sequence, batch=16, **kind))
            elif sequence > 8192 or not name.startswith("window8k"):
                made.append(Case(name, pattern(name, sequence), sequence, **kind))
    return made

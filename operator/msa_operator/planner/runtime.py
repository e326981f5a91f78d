"""What the workers of this version can run, in one place.

A plan made with :data:`EVERYTHING` is what the planner would choose; one made with
:data:`THIS_VERSION` is what ``msa run`` starts. When the workers learn more, this file changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from msa_kernels.pattern import BlockTopK, Pattern, PerHead
from msa_workloads.runspec import MemorySpec, MeshSpec

UNLIMITED = 1 << 20


@dataclass(frozen=True)
class Runtime:
    """Largest degrees and the memory switches that the workers implement."""

    name: str
    tensor: int = 1
    context: int = 1
    selective: bool = False
    offload: bool = False
    mlp_chunk: bool = False
    learned_patterns: bool = False
    learned_context: bool = False
    """Keys that are selected at run time can travel between context ranks."""

    def most_context(self, pattern: Pattern) -> int:
        """Largest context degree for a pattern."""
        return 1 if is_learned(pattern) and not self.learned_context else self.context

    def missing(self, mesh: MeshSpec, memory: MemorySpec, pattern: Pattern) -> tuple[str, ...]:
        """What of a plan these workers cannot do, each as ``tensor 8 (1 works)``."""
        gaps = []
        if mesh.tensor > self.tensor:
            gaps.append(f"tensor {mesh.tensor} ({self.tensor} works)")
        if mesh.context > self.context:
            gaps.append(f"context {mesh.context} ({self.context} works)")
        if memory.checkpointing == "selective" and not self.selective:
            gaps.append("selective recomputation (none and full work)")
        if (memory.offload_checkpoints or memory.offload_optimizer) and not self.offload:
            gaps.append("offloading to CPU memory")
        if memory.mlp_chunk and not self.mlp_chunk:
            gaps.append("a tiled MLP")
        if is_learned(pattern) and not self.learned_patterns:
            gaps.append("BlockTopK (the other pattern types work)")
        elif is_learned(pattern) and mesh.context > 1 and not self.learned_context:
            gaps.append("BlockTopK over context ranks (tensor and data ranks work)")
        return tuple(gaps)

    def ladder(self, *, cpu: bool = False) -> tuple[MemorySpec, ...]:
        """Settings of the memory switches, each slower and smaller than the one before.

        On CPUs there is nowhere to offload to.
        """
        rungs = [
            MemorySpec(),
            MemorySpec(loss_chunk=LOSS_CHUNK),
        ]
        if self.selective:
            rungs.append(MemorySpec(checkpointing="selective", loss_chunk=LOSS_CHUNK))
        rungs.append(MemorySpec(checkpointing="full", loss_chunk=LOSS_CHUNK))
        if self.mlp_chunk:
            rungs.append(
                MemorySpec(checkpointing="full", loss_chunk=LOSS_CHUNK, mlp_chunk=MLP_CHUNK)
            )
        if self.offload and not cpu:
            rungs.append(
                MemorySpec(
                    checkpointing="full", loss_chunk=LOSS_CHUNK, mlp_chunk=MLP_CHUNK,
                    offload_checkpoints=True,
                )
            )  # fmt: skip
            rungs.append(
                MemorySpec(
                    checkpointing="full", loss_chunk=LOSS_CHUNK, mlp_chunk=MLP_CHUNK,
                    offload_checkpoints=True, offload_optimizer=True,
                )
            )  # fmt: skip
        return tuple(rungs)


LOSS_CHUNK = 4096
"""Tokens of logits at once: 6 GiB for a vocabulary of 128k, and still a large matrix product."""

MLP_CHUNK = 16_384


def is_learned(pattern: Pattern) -> bool:
    """Whether any head selects its keys at run time."""
    if isinstance(pattern, PerHead):
        return any(is_learned(member) for member in pattern.members)
    return isinstance(pattern, BlockTopK)


THIS_VERSION = Runtime(
    "this version", tensor=UNLIMITED, context=UNLIMITED, selective=True, offload=True,
    mlp_chunk=True,
)  # fmt: skip
EVERYTHING = Runtime(
    "the full design", tensor=UNLIMITED, context=UNLIMITED, selective=True, offload=True,
    mlp_chunk=True, learned_patterns=True, learned_context=True,
)  # fmt: skip

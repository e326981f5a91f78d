"""One rank's part of every batch: tokens, labels, positions and documents of its own rows.

A batch is split where it is read, in the thread that reads ahead, and the plans of its attention
are made there too, so that the training step finds both ready. Labels are shifted and positions
counted over the whole sequence before that: a rank holds neither the next token of its last one
nor the start of its documents.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from msa_kernels.pattern import Pattern

from msa_workloads.context.attention import Attend, ContextPlan, Options
from msa_workloads.context.home import Home, Packing
from msa_workloads.context.layout import Layout
from msa_workloads.data import Batch

PLANS_KEPT = 64
"""Plans of sequences that are remembered: those in flight, and sequences that are alike (one
document each, or the held-out ones, which come back at every evaluation)."""


@dataclass(frozen=True, eq=False)
class Split:
    """How this rank takes its part of a batch, for every batch of a run."""

    home: Home
    rank: int
    """This rank's number among all context ranks."""
    heads: int
    """Consecutive ranks that share the heads of one part (Ulysses); 1 where every rank exchanges
    keys."""
    patterns: tuple[Pattern, ...]
    """Distinct patterns of one head, whose plans are made ahead."""
    group: dist.ProcessGroup | None
    heads_group: dist.ProcessGroup | None
    options: Options
    device: torch.device
    _kept: dict[Packing, ContextPlan] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Evaluation splits its batches while the next step is read ahead."""

    def batch(self, whole: Batch) -> Batch:
        """This rank's rows of a batch, with the attention that spans all ranks' rows."""
        plans = [self.plan(packing) for packing in packings(whole.documents)]
        parts = []
        for row, plan in enumerate(plans):
            named = {
                name: getattr(whole, name)[row : row + 1]
                for name in ("tokens", "labels", "positions", "documents")
            }
            parts.append(_parts(plan.layout, self.heads).shard(named, self.rank))
        mine = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        attend = Attend(plans, self.group, self.heads_group, self.options)
        return replace(whole, **mine, attend=attend)

    def plan(self, documents: Packing) -> ContextPlan:
        """The plan of sequences of these documents, with what every pattern computes."""
        with self._lock:
            if documents not in self._kept:
                while len(self._kept) >= PLANS_KEPT:
                    self._kept.pop(next(iter(self._kept)))
                layout = self.home.of(documents)
                self._kept[documents] = ContextPlan(layout, documents, self.rank // self.heads)
                self._prepare(self._kept[documents])
            return self._kept[documents]

    def _prepare(self, plan: ContextPlan) -> None:
        wanted = [self.options]
        if self.device.type == "cuda" and self.options.method != "ring":
            wanted.insert(0, replace(self.options, fuse="whole"))  # what is asked for first there
        for pattern in self.patterns:
            for options in wanted:
                plan.prepare(pattern, options)


def packings(ids: torch.Tensor | np.ndarray) -> list[Packing]:
    """Document lengths of every row of document ids (batch, tokens)."""
    found = []
    for row in np.asarray(ids):
        ends = np.flatnonzero(np.diff(row)) + 1
        found.append(tuple(np.diff(ends, prepend=0, append=len(row)).tolist()))
    return found


def head_patterns(layers: Sequence[Pattern], kv_heads: int) -> Mapping[Pattern, int]:
    """How many key/value heads of all layers have each pattern of one head."""
    weights: dict[Pattern, int] = {}
    for pattern in layers:
        for head in range(kv_heads):
            one = pattern.for_group(head)
            weights[one] = weights.get(one, 0) + 1
    return weights


@lru_cache(maxsize=PLANS_KEPT)
def _parts(layout: Layout, heads: int) -> Layout:
    return layout.split(heads)

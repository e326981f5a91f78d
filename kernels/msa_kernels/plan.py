"""Plans: a pattern laid on the rows of real tensors, ready for a kernel that knows no patterns.

A pattern is lowered to disjoint parts; :func:`plan` gives each part the layout that its kernel
sees (:class:`PartPlan`): which rows exist, at which positions of which document, and, for a folded
part, how rows are brought together. Everything here is host arithmetic; tile lists and device
tensors are made when first asked for and kept with the plan.

:class:`TileKernel` is the whole contract between the engine and an implementation of attention.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from msa_kernels import folds
from msa_kernels.blocks import Runs, TileLists, build
from msa_kernels.capabilities import LIMITS, refuses
from msa_kernels.pattern import Pattern
from msa_kernels.rules import FARTHEST, Part
from msa_kernels.spans import Spans, serves
from msa_kernels.walks import Walk

Align = Literal["bottom-right", "top-left"]
T = TypeVar("T")

PLANS_KEPT = 32
"""Plans remembered per process: enough for every pattern of a model with the documents of a few
batches in flight; an evicted plan takes its lists and device tensors with it."""

ROWS_KEPT = 1 << 22
"""Query rows of all plans up to which more are remembered: a rank that computes its keys rank by
rank has many small plans for each layer, and every layer needs all of them again."""

MOST_KEPT = 1024
"""Plans beyond which the oldest goes, however small they are."""


@dataclass(frozen=True)
class TokenMaps:
    """Where every row sits, on one device. int32 each; document -1 marks a row in no run."""

    q_position: torch.Tensor
    q_document: torch.Tensor
    k_position: torch.Tensor
    k_document: torch.Tensor


@dataclass(frozen=True, eq=False)
class PartPlan:
    """One part of a pattern over the rows of one call, in the part's own coordinates.

    A kernel is given tensors whose sequence dimension is ``queries.rows`` (``keys.rows``) long.
    A query row sees a key row when both are of the same document (not -1) and
    ``part.allows(query position, key position)``.
    """

    part: Part
    queries: Runs
    keys: Runs
    q_order: NDArray[np.int64] | None = None
    """Set when the fold is a permutation: row ``n`` here is row ``q_order[n]`` of the caller's
    tensor. None when rows stay in place (``part.fold == 1``) or the fold is a view in which
    residues become heads: (B, S, H, D) seen as (B, S/fold, fold*H, D)."""
    k_order: NDArray[np.int64] | None = None
    heads: tuple[PartPlan, ...] = ()
    """Set when every key/value head has rules of its own: the plan of each head."""
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    @property
    def folds_as_view(self) -> bool:
        return self.part.fold > 1 and self.q_order is None

    @property
    def simple(self) -> bool:
        """Positions are row number plus ``q_start`` or ``k_start``, none of a key before 0, and
        there is one document: a kernel needs no token maps."""
        return (
            _simple(self.queries)
            and _simple(self.keys)
            and int(self.keys.position[0]) >= 0
            and int(self.queries.document[0]) == int(self.keys.document[0])
        )

    @property
    def q_start(self) -> int:
        """Position of the first query row of a simple plan."""
        return int(self.queries.position[0])

    @property
    def k_start(self) -> int:
        """Position of the first key row of a simple plan."""
        return int(self.keys.position[0])

    def tiles(self, block_q: int, block_k: int) -> TileLists:
        """Key tiles of every query tile, for these tile sizes."""

        def make() -> TileLists:
            spans = self._spans(block_q, block_k, False)
            if spans is not None:
                return spans.lists()
            return build(self.part, self.queries, self.keys, block_q, block_k)

        return self.kept(("tiles", block_q, block_k), make)

    def walk(self, block_q: int, block_k: int, by_key: bool) -> Walk:
        """Key tiles of every query tile or, ``by_key``, the same pairs of tiles the other way
        around, for the dK/dV pass; not remembered, since a kernel keeps its own form."""
        spans = self._spans(block_q, block_k, by_key)
        if spans is not None:
            return spans.walk()
        lists = self.tiles(block_q, block_k)
        return Walk.of(lists.transposed if by_key else lists)

    def _spans(self, block_q: int, block_k: int, by_key: bool) -> Spans | None:
        """None for parts that are no stretches of tiles."""
        own, other, sizes = self.queries, self.keys, (block_q, block_k)
        if by_key:
            own, other, sizes = self.keys, self.queries, (block_k, block_q)
        return Spans(self.part, own, other, *sizes, by_key) if serves(self.part, other) else None

    def maps(self, device: torch.device) -> TokenMaps:
        """Position and document of every row, on ``device``."""

        def make() -> TokenMaps:
            host = (*self.queries.token_maps(), *self.keys.token_maps())
            return TokenMaps(*(torch.from_numpy(m).to(device) for m in host))

        return self.kept(("maps", device), make)

    def order(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``q_order`` and ``k_order`` as int64 tensors, None when rows stay in place."""
        if self.q_order is None or self.k_order is None:
            return None
        q, k = self.q_order, self.k_order
        return self.kept(
            ("order", device),
            lambda: (torch.from_numpy(q).to(device), torch.from_numpy(k).to(device)),
        )

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, once: what an implementation derives from a plan lives as long as it."""
        with self._lock:
            if key not in self._kept:
                # Later calls may train, and autograd refuses tensors of inference mode.
                with torch.inference_mode(False):
                    made = make()
                if holds_no_values():
                    return made
                self._kept[key] = made
            return self._kept[key]


def holds_no_values() -> bool:
    """Whether tensors that are made now are pretended ones, of shapes alone (FakeTensorMode): a
    call that computes later must not find them."""
    return type(torch.empty(0, device="cpu")) is not torch.Tensor


GradDtypes = tuple[torch.dtype, torch.dtype]
"""Of dQ, and of dK and dV: one may be final where the other is still added to."""


class TileKernel(Protocol):
    """Attention over the tiles of one part; knows positions, documents and nothing of patterns.

    Shapes: q, out, dout (B, Sq, Hq, D); k, v (B, Sk, Hkv, D) with Hq a multiple of Hkv and query
    head h reading key/value head h // (Hq // Hkv); lse and delta (B, Hq, Sq) fp32. Inputs may be
    views of any strides with a contiguous last dimension. All batch rows share the plan.
    """

    name: str
    forms_delta: bool
    """Its backward computes rowsum(dout * out) itself: it needs a delta only where the LSE has a
    cotangent, or where other ranks have a say in it."""

    def refuses(self, request: Request) -> str | None:
        """None when this kernel serves the request, else the reason in one sentence."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PartPlan, scale: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Output in ``out_dtype`` and natural-log LSE; a row without keys gives 0 and -inf."""
        ...

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor | None, plan: PartPlan,
        scale: float, grad_dtypes: GradDtypes,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """dQ, dK, dV in ``grad_dtypes``, accumulated in fp32.

        ``out``, ``lse`` and ``delta`` are those of the whole softmax, of which this part may be a
        piece (other parts, other ranks); delta = rowsum(dout * out) - dlse, None only where
        ``forms_delta`` and dlse is 0. Kernels that compute delta themselves take ``out``, the
        others ignore it. P = exp(scale q.k - lse), 0 where lse
        is -inf; dS = P * (dout.v - delta).
        """
        ...


@dataclass(frozen=True)
class Request:
    """What one call asks for: everything that an implementation may refuse."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    q_rows: int
    k_rows: int
    q_heads: int
    kv_heads: int
    head_dim: int
    pattern: Pattern
    plain: bool
    """One document per batch row, its queries and keys starting at position 0."""
    needs_grad: bool
    return_lse: bool
    deterministic: bool
    """``torch.use_deterministic_algorithms`` is on."""
    partial: bool = False
    """Results are pieces of a softmax that are merged later: they must not be rounded."""
    places: tuple[tuple[Runs, Runs], ...] = field(default=(), compare=False)
    """Queries and keys of every engine call that this one consists of, where they are known
    before: a rank of a context-parallel group gives them."""

    def outside(self, name: str) -> str | None:
        """Why this is beyond the limits that a backend has whatever the pattern, or None."""
        capability = None
        if self.device.type == "cuda" and LIMITS[name].by_capability:
            capability = torch.cuda.get_device_capability(self.device)
        return refuses(
            name, device=self.device.type, dtype=str(self.dtype).split(".")[-1],
            head_dim=self.head_dim, rows=max(self.q_rows, self.k_rows) * self.batch,
            training=self.needs_grad, capability=capability,
        )  # fmt: skip


def plan(pattern: Pattern, queries: Runs, keys: Runs) -> tuple[PartPlan, ...]:
    """One plan per disjoint part of ``pattern`` (of one head group), from a bounded cache.

    ``queries`` and ``keys`` say where the rows of the caller's tensors sit: :func:`whole`,
    :func:`packed` and :func:`varlen` make them for the usual cases; a rank of a context-parallel
    group gives the runs that it holds. Raises :class:`msa_kernels.pattern.PatternError` for
    patterns without fixed rules (BlockTopK, PerHead) and ValueError for a block list that ends
    before a query and for positions of :data:`msa_kernels.rules.FARTHEST` and more.
    """
    key = (pattern, queries.content, keys.content)
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key]
    _check_positions(queries, keys)
    _check_tables(pattern, queries)
    made = tuple(_part_plan(part, queries, keys) for part in pattern.parts())
    with _lock:
        _plans[key] = made
        _forget(_plans, lambda parts: parts[0].queries.rows if parts else 0)
    return made


def stack(pattern: Pattern, kv_heads: int, queries: Runs, keys: Runs) -> PartPlan | None:
    """One plan whose heads each have their own rules, where every head needs one unfolded part.

    For kernels that walk other lists for every head in one launch; None where heads differ more.
    """
    key = (pattern, kv_heads, queries.content, keys.content)
    with _lock:
        if key in _stacks:
            _stacks.move_to_end(key)
            return _stacks[key]
    each = [plan(pattern.for_group(head), queries, keys) for head in range(kv_heads)]
    made = None
    if all(len(parts) == 1 and parts[0].part.fold == 1 for parts in each):
        heads = tuple(parts[0] for parts in each)
        made = PartPlan(heads[0].part, queries, keys, heads=heads)
    with _lock:
        _stacks[key] = made
        _forget(_stacks, lambda part: part.queries.rows if part else 0)
    return made


def _forget(plans: OrderedDict[Any, T], rows: Callable[[T], int]) -> None:
    """Drop the plans that were used longest ago, while there are too many and they are large."""
    while len(plans) > MOST_KEPT or (
        len(plans) > PLANS_KEPT and sum(map(rows, plans.values())) > ROWS_KEPT
    ):
        plans.popitem(last=False)


_stacks: OrderedDict[Hashable, PartPlan | None] = OrderedDict()
_plans: OrderedDict[Hashable, tuple[PartPlan, ...]] = OrderedDict()
_lock = threading.Lock()


@functools.lru_cache(maxsize=256)
def whole(q_rows: int, k_rows: int, align: Align = "bottom-right") -> tuple[Runs, Runs]:
    """One document. Bottom-right alignment puts the last query on the last key's position."""
    offset = k_rows - q_rows if align == "bottom-right" else 0
    return Runs.whole(q_rows, offset), Runs.whole(k_rows)


def packed(ids: NDArray[np.integer]) -> Runs:
    """Documents of a batch of packed rows, seen as one sequence of B * S rows.

    ``ids`` (B, S): a change of id, or of batch row, starts a new document.
    """
    starts = np.ones(ids.shape, bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    begin = np.flatnonzero(starts.reshape(-1))
    return Runs.documents(np.diff(begin, append=ids.size))


def varlen(
    q_bounds: NDArray[np.integer], k_bounds: NDArray[np.integer], align: Align = "bottom-right"
) -> tuple[Runs, Runs]:
    """Sequences with their own query and key lengths, from cumulative bounds (``cu_seqlens``).

    Both (sequences + 1,), starting at 0. Sequences may be empty on either side.
    """
    q_length, k_length = np.diff(q_bounds).astype(np.int64), np.diff(k_bounds).astype(np.int64)
    document = np.arange(len(q_length))
    offset = k_length - q_length if align == "bottom-right" else np.zeros_like(q_length)
    has_q, has_k = q_length > 0, k_length > 0
    queries = Runs(
        q_bounds[:-1][has_q].astype(np.int64), q_length[has_q], offset[has_q], document[has_q],
        int(q_bounds[-1]),
    )  # fmt: skip
    keys = Runs(
        k_bounds[:-1][has_k].astype(np.int64), k_length[has_k], np.zeros_like(k_length[has_k]),
        document[has_k], int(k_bounds[-1]),
    )  # fmt: skip
    return queries, keys


def _check_positions(*sides: Runs) -> None:
    for runs in sides:
        last = int((runs.position + runs.length).max(initial=0))
        if last > FARTHEST or int(runs.position.min(initial=0)) <= -FARTHEST:
            raise ValueError(
                f"a document of {max(last, runs.rows)} tokens is longer than kernels count, "
                f"{FARTHEST}; split it"
            )


def _check_tables(pattern: Pattern, queries: Runs) -> None:
    longest = int((queries.position + queries.length).max(initial=0))
    for rule in pattern.rules():
        if rule.table is None:
            continue
        size, rows = rule.table
        if len(rows) * size < longest:
            raise ValueError(
                f"BlockList has {len(rows)} rows of {size} tokens, {len(rows) * size} in all, but "
                f"there are queries up to {longest}: it needs {-(-longest // size)} rows (empty "
                "ones where nothing is seen)"
            )


def _simple(runs: Runs) -> bool:
    return len(runs.begin) == 1 and int(runs.length[0]) == runs.rows


def _part_plan(part: Part, queries: Runs, keys: Runs) -> PartPlan:
    if part.fold == 1:
        return PartPlan(part, queries, keys)
    folded = folds.brought_together(queries, keys, part.fold)
    return PartPlan(part, *folded)

"""Context-parallel attention: every rank its own queries, exact over the keys of all ranks.

:func:`context_attention` takes a rank's rows and returns its rows of the whole sequence's
attention, differentiable. Keys and values that the plan names travel while the queries that do not
need them are computed; partial results stay in fp32 and are merged exactly. In backward the local
LSE and delta are those of the whole softmax, and the gradients of travelled keys and values go
back to their owners in fp32.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from msa_kernels import backend as backends
from msa_kernels.attention import autocast, check_pattern, check_scale, check_tensors
from msa_kernels.engine import HeadGroup, accumulator
from msa_kernels.pattern import Documents, Pattern
from torch import Tensor

from msa_workloads.context.area import row_area
from msa_workloads.context.commplan import comm_plan
from msa_workloads.context.exchange import METHODS, Method, count
from msa_workloads.context.kernel import agreed, choose, rounded
from msa_workloads.context.layout import Layout, LayoutError
from msa_workloads.context.ops import attention, calls
from msa_workloads.context.passes import Call
from msa_workloads.context.rankplan import Fuse, RankPlan, rank_plan
from msa_workloads.context.ulysses import HeadSplit, heads_to_sequence, sequence_to_heads

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """How keys travel; every choice gives the same result up to rounding."""

    method: Method = "all_to_all"
    """``all_to_all`` and ``p2p`` bring all keys at once; ``ring`` one rank's at a time, so that at
    most two ranks' keys are held, and computes each while the next arrives."""
    fuse: Fuse = "auto"
    """Whether queries with remote keys wait for all of them (one pass: always) or are computed on
    the local ones first and merged (never). ``whole``: all queries wait."""
    keep_ratio: float = 1.0
    """Received keys are kept for backward when no rank receives more than this many times its own
    tokens; otherwise they travel again. Never with ``ring``."""
    gradients: str = "fp32"
    """dtype in which gradients of keys and values return to their owners: fp32 or bf16. Where the
    kernels of all ranks round them, they travel as they are."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("method", METHODS), ("fuse", get_args(Fuse)),
            ("gradients", ("fp32", "bf16")),
        ):  # fmt: skip
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}: found {value!r}, allowed: {', '.join(allowed)}")


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """One sequence on one rank: its layout and its documents. Made once a batch, for all layers.

    ``layout`` is that of the ranks which exchange keys. Where ``heads`` ranks share each of them
    (Ulysses), the data is sharded by ``layout.split(heads)``.
    """

    layout: Layout
    documents: tuple[int, ...]
    rank: int
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if sum(self.documents) != self.layout.tokens:
            raise LayoutError(
                f"documents hold {sum(self.documents)} tokens, "
                f"the layout is for {self.layout.tokens}"
            )
        if not 0 <= self.rank < self.layout.ranks:
            raise LayoutError(
                f"rank {self.rank}, the layout has ranks 0 to {self.layout.ranks - 1}"
            )

    @functools.cached_property
    def mark(self) -> bytes:
        """Equal for equal sequences on equal layouts, on every rank."""
        return hashlib.sha256(repr((self.layout, self.documents)).encode()).digest()

    @classmethod
    def whole(cls, layout: Layout, rank: int) -> ContextPlan:
        """One document."""
        return cls(layout, (layout.tokens,), rank)

    @classmethod
    def of_ids(cls, layout: Layout, ids: Tensor, rank: int) -> list[ContextPlan]:
        """One plan per row of document ids (batch, tokens) of the unsharded batch, in which a
        change of id starts a new document; rows with equal documents share a plan."""
        made: dict[tuple[int, ...], ContextPlan] = {}
        plans = []
        for row in ids.tolist():
            lengths = Documents.from_ids(row).lengths
            if lengths not in made:
                made[lengths] = cls(layout, lengths, rank)
            plans.append(made[lengths])
        return plans

    def prepare(self, pattern: Pattern, options: Options = Options()) -> RankPlan:
        """The rank's plan for one head's pattern; made ahead by a data loader if it likes."""

        def make() -> RankPlan:
            plan = comm_plan(pattern, self.layout, self.documents)
            return rank_plan(pattern, plan, self.rank, options.method, options.fuse)

        return self.kept((pattern, options.method, options.fuse), make)

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` makes, once for each key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan | Sequence[ContextPlan],
    group: dist.ProcessGroup | None,
    *,
    pattern: Pattern,
    scale: float | None = None,
    heads_group: dist.ProcessGroup | None = None,
    options: Options = Options(),
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries over the whole sequence that ``plan`` lays out.

    q is (B, rows, Hq, D), k and v (B, rows, Hkv, D), rows those of this rank. Returns the same
    rows of the output in q's dtype and, with ``return_lse``, natural-log LSE (B, Hq, rows).
    Padding rows give 0 and -inf. ``plan`` is one for the batch, or one per batch row.

    ``group`` holds the ranks that exchange keys, in the layout's order (None: one rank owns all
    rows). With ``heads_group`` its ranks share the heads of one context rank (Ulysses): rows here
    are those of ``layout.split(size of heads_group)``.

    Raises ValueError (:class:`~msa_workloads.context.layout.LayoutError`,
    :class:`~msa_workloads.context.ulysses.HeadsError`) before anything is sent when shapes,
    groups and plan do not fit, and :class:`msa_kernels.backend.BackendError`, on every rank, where
    no tile kernel serves the part of one.
    """
    q, k, v = (autocast(tensor) for tensor in (q, k, v))
    check_tensors(q, k, v)
    plans = [plan] * q.shape[0] if isinstance(plan, ContextPlan) else list(plan)
    if len(plans) != q.shape[0]:
        raise LayoutError(f"{len(plans)} plans for a batch of {q.shape[0]} rows")
    heads = 1 if heads_group is None else dist.get_world_size(heads_group)
    for one in set(plans):
        _check(one, group, q, k, heads)
    check_pattern(pattern)
    factor = check_scale(scale, q.shape[3])
    split, kind = HeadSplit(q.shape[2], k.shape[2], heads), pattern
    order: tuple[int, ...] = ()
    if heads_group is not None and heads > 1:
        order = split.order(pattern, plans[0].layout.tokens)
        pattern = split.pattern(pattern, dist.get_rank(heads_group), order)
        q, k, v = (_reordered(t, order, k.shape[2]) for t in (q, k, v))
        q = sequence_to_heads(q, heads_group)
        k = sequence_to_heads(k, heads_group, split.copies)
        v = sequence_to_heads(v, heads_group, split.copies)
    out, lse = _by_document(
        q, k, v, plans, group, pattern, factor, options, backend, return_lse, kind, heads_group
    )  # fmt: skip
    if heads_group is not None and heads > 1:
        back = tuple(sorted(range(len(order)), key=order.__getitem__))
        out = _reordered(heads_to_sequence(out, heads_group), back, len(back))
        if return_lse:
            rows = heads_to_sequence(lse.transpose(1, 2).unsqueeze(-1), heads_group)
            lse = _reordered(rows, back, len(back)).squeeze(-1).transpose(1, 2)
    return (out, lse) if return_lse else out


def _reordered(rows: Tensor, order: tuple[int, ...], groups: int) -> Tensor:
    """(B, n, H, D) with the heads of ``groups`` key/value groups in another order."""
    if order == tuple(range(groups)):
        return rows
    index = torch.tensor(order, device=rows.device)
    return rows.unflatten(2, (groups, -1)).index_select(2, index).flatten(2, 3)


@dataclass(frozen=True, eq=False)
class Attend:
    """:func:`context_attention` of one batch, as a Hugging Face model is given it.

    ``model(input_ids=..., position_ids=..., msa_attend=Attend(plan, group))`` runs every layer of
    a model built with ``attn_implementation="msa"`` over the ranks of ``group``, each on the rows
    that ``layout.shard`` gave it (token ids, position ids and labels alike).
    """

    plan: ContextPlan | Sequence[ContextPlan]
    group: dist.ProcessGroup | None
    heads_group: dist.ProcessGroup | None = None
    options: Options = Options()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, scale: float | None,
        backend: str,
    ) -> Tensor:  # fmt: skip
        out = context_attention(
            q, k, v, self.plan, self.group, pattern=pattern, scale=scale,
            heads_group=self.heads_group, options=self.options, backend=backend,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out


def _check(
    plan: ContextPlan, group: dist.ProcessGroup | None, q: Tensor, k: Tensor, heads: int
) -> None:
    size = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    if (size, rank) != (plan.layout.ranks, plan.rank):
        raise LayoutError(
            f"the plan is for rank {plan.rank} of {plan.layout.ranks}, this is rank {rank} of a "
            f"group of {size}"
        )
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[1] * heads != plan.layout.rows:
            raise LayoutError(
                f"{name} has {tensor.shape[1]} rows, this rank owns {plan.layout.rows // heads} "
                f"of {plan.layout.padded} (padded from {plan.layout.tokens})"
            )


def _by_document(
    q: Tensor, k: Tensor, v: Tensor, plans: list[ContextPlan], group: dist.ProcessGroup | None,
    pattern: Pattern, scale: float, options: Options, backend: str, return_lse: bool,
    kind: Pattern, heads_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Batch rows of equal plans are one call: of plans that are equal every rank may hold one
    object or several, and all must come to the same number of exchanges."""
    found = []
    for _, some in itertools.groupby(range(len(plans)), key=lambda n: plans[n].mark):
        at = list(some)
        rows = slice(at[0], at[-1] + 1)
        # A slice of everything is a copy in backward.
        some_q, some_k, some_v = (t if len(at) == len(plans) else t[rows] for t in (q, k, v))
        call = _call(
            some_q, some_k, plans[at[0]], group, pattern, options, backend, return_lse, kind,
            heads_group,
        )  # fmt: skip
        out, lse, _kept = attention(some_q, some_k, some_v, call.handle, scale)
        found.append((out, lse))
    if len(found) == 1:
        return found[0]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def _call(
    q: Tensor, k: Tensor, plan: ContextPlan, group: dist.ProcessGroup | None, pattern: Pattern,
    options: Options, backend: str, return_lse: bool, kind: Pattern,
    heads_group: dist.ProcessGroup | None,
) -> Call:  # fmt: skip
    fixed = (
        plan.mark, kind, options, backend, return_lse, q.shape, k.shape, q.dtype, q.device.type,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    (groups, kernel), narrow = agreed(
        lambda: plan.kept(
            (pattern, *fixed[2:], q.device),
            lambda: choose(q, k, plan, pattern, options, backend, return_lse),
        ),
        lambda found: rounded(*found), fixed, [some for some in (group, heads_group) if some],
    )  # fmt: skip
    backends.record(f"context/{kernel.name}", q, k, pattern, len(plan.documents) > 1)
    keep = options.method != "ring" and all(
        part.most_received <= options.keep_ratio * plan.layout.rows for _, part in groups
    )
    returned = torch.bfloat16 if options.gradients == "bf16" else accumulator(q.dtype)
    area = functools.partial(_area, plan, tuple(some for some, _ in groups))
    call = Call(
        tuple(groups), group, kernel, options.method, keep, q.dtype if narrow else returned, kind,
        area,
    )  # fmt: skip
    if torch._C._current_graph_task_id() == -1:  # no backward is running, which computes again
        width = 2 * k.shape[0] * k.shape[3] * k.element_size()
        needed = sum(
            stage.received * len(one.members) for one, part in groups for stage in part.stages
        )
        count("needed", 0, needed * width, kind)
    calls[call.handle] = call
    return call


def _area(plan: ContextPlan, groups: Sequence[HeadGroup]) -> int:
    """Attended pairs of the rank's queries, over all query heads."""
    own = plan.layout.tokens_of(plan.rank)
    total = 0
    for group in groups:
        rows = row_area(group.pattern, plan.documents, plan.layout.padded)
        heads = len(group.members) * group.q_heads // group.kv_heads
        total += int(rows[own].sum()) * heads
    return total

"""How the context ranks of a run share its sequences: chosen once, told to every rank alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from msa_kernels.pattern import Pattern, PatternError

from msa_workloads.context.account import Account
from msa_workloads.context.attention import Options
from msa_workloads.context.home import Rule, choose
from msa_workloads.context.layout import LayoutError, zigzag
from msa_workloads.context.split import Split, head_patterns
from msa_workloads.context.ulysses import HeadsError, HeadSplit
from msa_workloads.data import Stream, Whole
from msa_workloads.heads import Order
from msa_workloads.parallel.collective import on_rank_zero
from msa_workloads.parallel.mesh import CP_HEADS, CP_KEYS, Mesh, MeshAxisName, UnsupportedError
from msa_workloads.runspec import RunSpec

log = logging.getLogger(__name__)

PRICED = 4
"""Sequences of the run's own data on which layouts are priced."""


def check_context(spec: RunSpec) -> None:
    """Raise :class:`UnsupportedError` for a context degree that cannot be, with those that can.

    Of a model config that leaves its heads to transformers' defaults they are checked later.
    """
    ranks, heads, length = spec.mesh.context, spec.context.heads, spec.sequence.length
    if ranks > length:
        raise UnsupportedError(
            f"mesh.context: found {ranks} for sequences of {length} tokens; every rank needs one, "
            f"so at most {length}"
        )
    if heads < 1 or ranks % heads:
        valid = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise UnsupportedError(
            f"context.heads: found {heads}, which does not divide the {ranks} ranks of "
            f"mesh.context; valid: {', '.join(map(str, valid))}"
        )
    config = spec.model.config
    if queries := config.get("num_attention_heads"):
        kv_heads = config.get("num_key_value_heads") or queries
        _check_heads((queries, kv_heads), heads, spec.mesh.tensor)
    shared = ranks // heads
    if shared > 1 and spec.context.layout == "zigzag":
        try:
            zigzag(length, shared, heads)
        except LayoutError as error:
            raise UnsupportedError(f"context.layout: {error}") from None


def _check_heads(heads: tuple[int, int], degree: int, tensor: int) -> None:
    try:
        HeadSplit(heads[0] // tensor, max(1, heads[1] // tensor), degree)
    except HeadsError as error:
        raise UnsupportedError(f"context.heads: {error}") from None


def context_split(
    spec: RunSpec, layers: Sequence[Pattern], heads: tuple[int, int], stream: Stream, mesh: Mesh,
    *, orders: Mapping[int, Order] | None = None,
) -> tuple[Split | Whole, Account | None]:  # fmt: skip
    """The split of every batch of a run over ``mesh``'s context ranks, and what keeps account of
    it; collective.

    ``layers`` are the patterns of all layers, ``heads`` the query and key/value heads of all
    tensor ranks, ``orders`` those in which layers store them where it is not the model's. Raises
    :class:`UnsupportedError` for what cannot be split so, with what can.
    """
    ranks = mesh.sizes[MeshAxisName.CP]
    if ranks == 1:
        return Whole(), None
    _check_heads(heads, spec.context.heads, mesh.sizes[MeshAxisName.TP])
    _check_patterns(layers, heads[1], ranks)
    weights = head_patterns(layers, heads[1])
    shares = spec.context.heads

    def price() -> list[Rule]:
        read = [stream.sample(k).packing for k in range(PRICED)]
        return choose(
            spec.sequence.length, ranks // shares, weights, read, kind=spec.context.layout,
            multiple=shares,
        )  # fmt: skip

    try:
        rules = on_rank_zero(price)
    except LayoutError as error:
        raise UnsupportedError(f"context.layout: {error}") from None
    log.info("context layout %s of %s", rules[0].home.name, [r.describe() for r in rules])
    split = Split(
        home=rules[0].home,
        rank=mesh.at[MeshAxisName.CP],
        heads=shares,
        patterns=tuple(weights),
        group=mesh.context[CP_KEYS].get_group(),
        heads_group=mesh.context[CP_HEADS].get_group() if shares > 1 else None,
        options=Options(method=spec.context.method, gradients=spec.context.gradients),
        device=mesh.device,
    )
    tensor = mesh.sizes[MeshAxisName.TP], mesh.at[MeshAxisName.TP]
    return split, Account(split, rules, layers, heads, tensor, orders or {})


def _check_patterns(layers: Sequence[Pattern], kv_heads: int, ranks: int) -> None:
    for pattern in dict.fromkeys(layers):
        try:
            for group in range(kv_heads):
                pattern.for_group(group).rules()
        except PatternError as error:
            raise UnsupportedError(
                f"mesh.context: found {ranks} with {pattern.kind}, whose keys cannot be planned "
                f"ahead ({error.problem}); allowed: 1, or another pattern"
            ) from None

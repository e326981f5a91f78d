"""What attention over context ranks holds on one of them, beyond attention over its own tokens.

Worked out from the same facts as a run's plan of communication: the rows that the rank receives
and sends, which of its queries wait for them, and whether those are computed in one pass with own
keys or apart from them and merged. A rank's moments in forward and backward are added up buffer by
buffer, as the workers hold them; tests compare the sums with the storages that are alive on real
ranks. Kernels are those that are always there, which return gradients of keys in fp32 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from msa_kernels.pattern import Pattern
from msa_workloads.runspec import ContextSpec

from msa_operator.planner.layouts import Share, shares

WIDE = 4
"""Bytes of sums: fp32."""

ROUNDED = ("fa4", "cudnn")
"""Backends whose gradients are in the dtype of their inputs, whatever is asked for."""


@dataclass(frozen=True)
class Exchange:
    """Bytes for one sequence on the busiest rank."""

    layers: float = 0.0
    """Kept for backward by all layers, where layers keep everything."""
    results: float = 0.0
    """Of these, what attention's operator returned in all layers but one."""
    layer: float = 0.0
    """Kept by the layer that keeps most."""
    work: float = 0.0
    """At the worst moment of a layer's attention, beside the gradients that one rank alone holds
    there."""

    def times(self, sequences: int) -> Exchange:
        return Exchange(
            sequences * self.layers, sequences * self.results, sequences * self.layer,
            sequences * self.work,
        )  # fmt: skip


NONE = Exchange()

Weights = tuple[tuple[Pattern, int], ...]
"""Key/value heads by pattern."""


class Bytes(NamedTuple):
    """Of one token on one rank: all its query heads, and keys (or values) of all its heads."""

    query: float
    key: float
    wide_query: float
    wide_key: float

    def part(self, share: float) -> Bytes:
        """Of a share of the heads."""
        return Bytes(*(share * size for size in self))


@dataclass(frozen=True)
class Ranks:
    """One way to share sequences of ``length`` tokens: ``layout`` is over the ranks that exchange
    keys, which are all or, where heads are exchanged too, as many fewer."""

    length: int
    ranks: int
    spec: ContextSpec
    layout: str
    weights: Weights
    """Of all layers, by which the layout was chosen."""

    @property
    def outer(self) -> int:
        return self.ranks // self.spec.heads


def token_bytes(heads: tuple[int, int], size: int, width: int) -> Bytes:
    """Of ``heads`` query and key/value heads."""
    query, key = (count * size for count in heads)
    return Bytes(query * width, key * width, query * WIDE, key * WIDE)


@lru_cache(maxsize=1024)
def held(
    ranks: Ranks, kinds: tuple[tuple[Weights, int], ...], heads: tuple[int, int], size: int,
    width: int, *, eager: bool = False, merges: bool = True, rounds: bool = False,
    batched: bool = False,
) -> Exchange:  # fmt: skip
    """Of layers of these kinds, each with its patterns by key/value heads and its number.

    ``heads`` are a tensor rank's. ``eager`` merges partial results in plain PyTorch, as CPUs do.
    Kernels whose results cannot be merged have ``merges`` False, those of :data:`ROUNDED` are
    what ``rounds`` says. A micro-batch of several sequences is ``batched``.
    """
    if ranks.ranks == 1:
        return NONE
    degree = ranks.spec.heads
    copies = max(1, degree // heads[1])
    own = token_bytes(heads, size, width)
    # Ranks that exchange heads hold all their rows for a share of the heads.
    there = token_bytes((heads[0], heads[1] * copies), size, width).part(1 / degree)
    if rounds:
        there = there._replace(wide_query=there.query, wide_key=there.key)
    tokens = -(-ranks.length // ranks.ranks)
    mine = tokens * (own.query + 2 * own.key)
    # What comes back from an exchange of heads is the next product's input, beside the result.
    twice = tokens * (own.query + 2 * (copies - 1) * own.key) if degree > 1 else 0.0
    # It is not there during attention; what went out is, until forward is over.
    gone = tokens * own.query if degree > 1 else 0.0
    first = mine if degree > 1 else 0.0
    layers, results, layer, work = 0.0, 0.0, 0.0, 0.0
    for weights, count in kinds:
        keys, forward, backward = _layer(ranks, weights, there, eager, merges)
        layers += count * (keys + twice)
        results += count * keys
        layer = max(layer, keys + twice)
        if rounds and ranks.outer > 2:
            # What several ranks found for the same keys is added up in fp32.
            backward += 2 * tokens * own.wide_key
        # In forward neither the output's gradient is there nor those of the inputs.
        later = tokens * own.query + mine
        work = max(
            work, backward - mine - gone, forward + first - tokens * own.query - later - gone
        )
    if degree > 1 and batched:
        # Heads of several sequences are copied on arrival.
        work = max(work, tokens * own.query)
    return Exchange(layers, max(0.0, results - layer + twice), layer, work)


def _layer(
    ranks: Ranks, weights: Weights, each: Bytes, eager: bool, merges: bool
) -> tuple[float, float, float]:
    """Of one layer on its busiest rank: what is kept, and the most in forward and in backward."""
    total = sum(count for _, count in weights)
    groups = [
        (count / total, shares(p, ranks.weights, ranks.length, ranks.outer, ranks.layout))
        for p, count in weights
    ]
    method = ranks.spec.method
    keeps = method != "ring" and all(
        share.received <= share.own for _, group in groups for share in group
    )
    kept, forward, backward = 0.0, 0.0, 0.0
    # Groups of heads have their keys at once and their gradients one after the other. Of several
    # groups the busiest rank of each counts, an upper bound.
    apart = len(groups) > 1
    for part, group in groups:
        if not merges:
            group = _together(group)
        narrow = each.key < each.wide_key
        moments = [
            _moments(share, merges and share.split(method), method, keeps, eager, narrow)
            for share in group
        ]
        some = each.part(part)
        kept += max(_bytes(m.kept, some) for m in moments)
        forward += max(_most(m.forward, some) for m in moments)
        backward = max(backward, *(_most(m.backward, some) for m in moments))
    if apart:
        own = groups[0][1][0].own
        forward += own * each.query + kept
        backward += own * (each.query + 2 * each.key)
    return kept, forward, backward


def _together(group: Sequence[Share]) -> list[Share]:
    """For a kernel whose results cannot be merged: all queries wait for their keys where no rank
    receives more than it owns, elsewhere those that need any."""
    if any(share.received > share.own for share in group):
        return list(group)
    return [
        replace(share, passes=((share.own, share.own),), whole=True) if share.received else share
        for share in group
    ]


Tokens = tuple[float, float, float, float]
"""Numbers of rows, in the order of :class:`Bytes`."""


class Moments(NamedTuple):
    """Rows that are alive at moments of one rank's call, beside its inputs."""

    kept: Tokens
    """From forward to backward; in no moment."""
    forward: tuple[Tokens, ...]
    backward: tuple[Tokens, ...]


def _bytes(rows: Tokens, each: Bytes) -> float:
    q, k, wide_q, wide_k = rows
    return q * each[0] + k * each[1] + wide_q * each[2] + wide_k * each[3]


def _most(moments: Sequence[Tokens], each: Bytes) -> float:
    return max(_bytes(rows, each) for rows in moments)


def _sum(*some: Tokens) -> Tokens:
    q, k, wide_q, wide_k = (sum(column) for column in zip(*some, strict=True))
    return q, k, wide_q, wide_k


@lru_cache(maxsize=4096)
def _moments(
    share: Share, split: bool, method: str, keeps: bool, eager: bool, narrow: bool
) -> Moments:
    """Keys are counted twice, for the values. ``narrow`` tensors are summed in a wider dtype."""
    n, ring = share.own, method == "ring"
    received, sent = share.received, share.sent
    if not received and not sent:
        return Moments((0, 0, 0, 0), ((n, 0, 0, 0),), ((n, 2 * n, 0, 0),))
    if ring:  # one rank's at a time
        received, sent = min(n, received), min(n, sent)
    arrived: Tokens = (0, 2 * received, 0, 0)
    kept = arrived if keeps else (0, 0, 0, 0)
    there = (0, 0, 0, 0) if keeps else arrived
    travel = _sum(there, (0, 2 * sent, 0, 0))
    waits = sum(rows for rows, _ in share.passes)
    most_keys = max((keys for _, keys in share.passes), default=0) + received
    gathered: Tokens = (0, 2 * most_keys * (1 + share.sorted), 0, 0)
    # Forward. Rows to send are taken and then put together.
    forward: list[Tokens] = [(0, 4 * sent, 0, 0)]
    if split:
        merges = (4 if eager else 2) * share.stretch
        out: Tokens = (0, 0, n, 0)
        late = _sum(out, (0, 0, merges, 0), there, travel if ring else (0, 0, 0, 0))
        forward += [_sum(out, travel), late, _sum(out, (n if narrow else 0, 0, 0, 0), there)]
    else:
        out = (n, 0, 0, 0)
        forward += [_sum(out, travel), _sum(out, there, gathered, (waits, 0, 0, 0))]
    # Backward: the sums, and what is on its way back to the ranks that own it.
    sums: Tokens = (0, 0, n, 2 * n) if split else (n, 0, 0, 2 * n)
    back: Tokens = (0, 0, 0, 2 * (received + sent))
    narrowed: Tokens = (n if split else 0, 2 * n, 0, 0) if narrow else (0, 0, 0, 0)
    backward = [_sum(sums, back, narrowed)]
    returned: Tokens = (0, 0, 0, 2 * received)
    if split:
        found: Tokens = (0, 0, share.stretch, 0)
        remote = _sum(returned, found, returned)
    else:
        each = [keys + received for _, keys in share.passes] or [0]
        # First summands wait for the others where no sum is there yet.
        wait = 2 * (sum(each) if keeps else max(each)) + share.sorted * each[0]
        found = (waits, 0, 0, wait)
        remote = _sum(gathered, returned, found)
    if not keeps:
        remote = _sum(remote, sums, there)
    if ring:
        remote = _sum(remote, travel, back)
    if share.whole:
        backward.append(_sum(sums, back, (0, 0, 0, 2 * (n + received))))
    else:
        backward.append(_sum(sums, *((back, found) if keeps else (travel,))))
    return Moments(kept, tuple(forward), (*backward, remote))

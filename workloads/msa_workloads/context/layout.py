"""Layouts: which rank owns which tokens of one sequence, decided once and used by every layer.

A sequence is padded to a length that splits evenly; the padding is part of no document, sees
nothing and is seen by nothing, so that it never changes a result. A rank owns whole stretches of
one residue class modulo ``stride`` (of the sequence itself when that is 1), in order. Tokens,
labels, positions and document ids are sharded by the same :class:`Layout`, so that they stay
together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from msa_workloads.context.intervals import Ints

FILL = {"labels": -100, "documents": -1}
"""What padding holds, by the name of a batch's tensor; 0 for every other name."""


class LayoutError(ValueError):
    """A split that cannot exist; the message names the nearest valid choice."""


@dataclass(frozen=True)
class Chunk:
    """Tokens ``residue + stride * u`` for ``begin <= u < end``."""

    residue: int
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """``chunks[rank]`` are the rank's tokens, in the order of its rows.

    Every token of the padded sequence is in exactly one chunk and all ranks have as many rows.
    """

    kind: str
    tokens: int
    """Tokens of the sequence, without padding."""
    stride: int
    chunks: tuple[tuple[Chunk, ...], ...]

    def __post_init__(self) -> None:
        rows = {sum(chunk.rows for chunk in mine) for mine in self.chunks}
        if len(rows) != 1:
            raise LayoutError(f"ranks own different numbers of rows: {sorted(rows)}")
        seen = np.zeros(self.padded, np.int64)
        for rank in range(self.ranks):
            np.add.at(seen, self.tokens_of(rank), 1)
        if (seen != 1).any() or self.padded < self.tokens:
            raise LayoutError("every token must have exactly one owner")

    @property
    def ranks(self) -> int:
        return len(self.chunks)

    @cached_property
    def rows(self) -> int:
        """Rows of every rank."""
        return sum(chunk.rows for chunk in self.chunks[0])

    @cached_property
    def padded(self) -> int:
        """Tokens of the padded sequence."""
        return self.rows * self.ranks

    def tokens_of(self, rank: int) -> Ints:
        """Token of every row of ``rank``, int64 (rows,)."""
        return np.concatenate(
            [
                chunk.residue + self.stride * np.arange(chunk.begin, chunk.end)
                for chunk in self.chunks[rank]
            ]
        )

    @cached_property
    def permutation(self) -> Ints:
        """Token of every row of all ranks, one rank after the other, int64 (padded,)."""
        return np.concatenate([self.tokens_of(rank) for rank in range(self.ranks)])

    @cached_property
    def inverse(self) -> Ints:
        """Row, counted over all ranks, of every token of the padded sequence."""
        inverse = np.empty(self.padded, np.int64)
        inverse[self.permutation] = np.arange(self.padded)
        return inverse

    def ranges(self, rank: int) -> list[range]:
        """The rank's tokens as ranges of token numbers, in the order of its rows."""
        return [
            range(c.residue + self.stride * c.begin, c.residue + self.stride * c.end, self.stride)
            for c in self.chunks[rank]
        ]

    def split(self, parts: int) -> Layout:
        """Every rank's rows cut into ``parts`` equal pieces for ranks of their own.

        Rank ``r`` becomes ranks ``r * parts`` to ``r * parts + parts - 1``, whose rows one after
        the other are those of ``r``: the layout of a mesh in which every rank of this one is a
        group that shares its heads.
        """
        if parts == 1:
            return self
        if self.rows % parts:
            raise LayoutError(
                f"{self.rows} rows per rank do not split into {parts}; build the layout with "
                f"multiple={parts}"
            )
        size = self.rows // parts
        pieces: list[tuple[Chunk, ...]] = []
        for mine in self.chunks:
            left = list(mine)
            for _ in range(parts):
                piece, need = [], size
                while need:
                    chunk = left.pop(0)
                    take = min(need, chunk.rows)
                    piece.append(Chunk(chunk.residue, chunk.begin, chunk.begin + take))
                    if take < chunk.rows:
                        left.insert(0, Chunk(chunk.residue, chunk.begin + take, chunk.end))
                    need -= take
                pieces.append(tuple(piece))
        return Layout(self.kind, self.tokens, self.stride, tuple(pieces))

    def shard(
        self, batch: Mapping[str, torch.Tensor], rank: int, fill: Mapping[str, int] = FILL
    ) -> dict[str, torch.Tensor]:
        """The rank's rows of every tensor (batch, tokens, ...), padded with ``fill``.

        Raises :class:`LayoutError` for a tensor of another length.
        """
        mine = torch.from_numpy(self.tokens_of(rank))
        real, out = mine < self.tokens, {}
        for name, tensor in batch.items():
            if tensor.dim() < 2 or tensor.shape[1] != self.tokens:
                raise LayoutError(
                    f"{name} is {tuple(tensor.shape)}, must be (batch, {self.tokens}, ...)"
                )
            rows = tensor[:, torch.where(real, mine, 0).to(tensor.device)]
            rows[:, (~real).to(tensor.device)] = fill.get(name, 0)
            out[name] = rows
        return out

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of :meth:`shard`: all ranks' rows (batch, rows, ...) in token order."""
        rows = torch.cat(list(shards), 1)
        order = torch.from_numpy(self.inverse[: self.tokens]).to(rows.device)
        return rows.index_select(1, order)

    def describe(self) -> dict[str, Any]:
        """For a run's report."""
        return {
            "kind": self.kind,
            "ranks": self.ranks,
            "stride": self.stride,
            "chunks_per_rank": max(len(mine) for mine in self.chunks),
            "padding": self.padded - self.tokens,
        }


def contiguous(tokens: int, ranks: int, multiple: int = 1, shift: int = 0) -> Layout:
    """Rank ``r`` owns the ``r``-th stretch. Rows are a multiple of ``multiple``.

    With ``shift`` the cuts lie that many tokens later, and the last rank owns both ends: for a
    causal window the ranks at the end then share the shorter rows at the start.
    """
    _need(tokens, ranks, ranks, "contiguous")
    rows = _up(tokens, ranks * multiple) // ranks
    if not 0 <= shift < rows:
        raise LayoutError(f"shift must be 0 to {rows - 1} (less than a rank's rows): {shift}")
    mine: list[tuple[Chunk, ...]] = [
        (Chunk(0, shift + r * rows, shift + (r + 1) * rows),) for r in range(ranks)
    ]
    if shift:
        head = Chunk(0, 0, shift)
        tail = Chunk(0, shift + (ranks - 1) * rows, ranks * rows)
        mine[-1] = (head, tail) if ranks > 1 else (Chunk(0, 0, rows),)
    return Layout("rotated" if shift and ranks > 1 else "contiguous", tokens, 1, tuple(mine))


def zigzag(tokens: int, ranks: int, multiple: int = 1) -> Layout:
    """Of ``2 * ranks`` chunks rank ``r`` owns the ``r``-th from the start and from the end."""
    _need(tokens, ranks, 2 * ranks, "zigzag")
    size = _up(tokens, 2 * ranks * multiple) // (2 * ranks)
    return Layout("zigzag", tokens, 1, tuple(_paired(0, ranks, size)))


def residues(
    tokens: int, ranks: int, classes: int, inner: str = "zigzag", multiple: int = 1
) -> Layout:
    """Residue classes of the position, for patterns that stay inside them.

    The sequence is split into ``gcd(classes, ranks)`` classes of equal size; ranks that share one
    split it zigzag or contiguous. A pattern whose steps are multiples of that number then sends
    nothing between classes.
    """
    if inner not in ("zigzag", "contiguous"):
        raise LayoutError(f"inner must be zigzag or contiguous, found {inner!r}")
    stride = int(np.gcd(classes, ranks))
    if stride == 1:
        return (zigzag if inner == "zigzag" else contiguous)(tokens, ranks, multiple)
    shares = ranks // stride
    pieces = 2 * shares if inner == "zigzag" and shares > 1 else shares
    _need(tokens, ranks, stride * pieces, "residues")
    size = _up(tokens, stride * pieces * multiple) // (stride * pieces)
    mine: list[tuple[Chunk, ...]] = []
    for residue in range(stride):
        if pieces == shares:
            mine += [(Chunk(residue, n * size, (n + 1) * size),) for n in range(shares)]
        else:
            mine += _paired(residue, shares, size)
    return Layout("residues", tokens, stride, tuple(mine))


def from_chunks(tokens: int, size: int, owned: Sequence[Sequence[int]]) -> Layout:
    """Rank ``r`` owns the chunks of ``size`` tokens with the numbers ``owned[r]``."""
    merged = []
    for numbers in owned:
        mine: list[Chunk] = []
        for n in sorted(numbers):
            if mine and mine[-1].end == n * size:
                mine[-1] = Chunk(0, mine[-1].begin, (n + 1) * size)
            else:
                mine.append(Chunk(0, n * size, (n + 1) * size))
        merged.append(tuple(mine))
    return Layout("balanced", tokens, 1, tuple(merged))


def _paired(residue: int, ranks: int, size: int) -> list[tuple[Chunk, ...]]:
    pairs = ((r, 2 * ranks - 1 - r) for r in range(ranks))
    return [
        (Chunk(residue, a * size, (a + 1) * size), Chunk(residue, b * size, (b + 1) * size))
        for a, b in pairs
    ]


def _need(tokens: int, ranks: int, pieces: int, kind: str) -> None:
    if ranks < 1:
        raise LayoutError(f"ranks must be at least 1, found {ranks}")
    if tokens >= pieces:
        return
    per_rank = pieces // ranks
    fits = max(1, tokens // per_rank) if tokens else 0
    near = [f"{kind} over {fits} rank{'s' if fits > 1 else ''}"] if fits else []
    if kind != "contiguous" and tokens >= ranks:
        near.append(f"contiguous over {ranks} ranks")
    raise LayoutError(
        f"a sequence of {tokens} tokens is too short for {kind} over {ranks} ranks, which needs "
        f"at least {pieces}; nearest: {' or '.join([*near, f'{pieces} tokens'])}"
    )


def _up(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit

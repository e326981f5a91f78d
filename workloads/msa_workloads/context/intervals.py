"""Sets of tokens as arithmetic progressions and as intervals on one line, never as masks.

A set of tokens is a list of progressions inside documents (:class:`Stretches`). To unite and to
compare such sets, tokens are laid on a line on which every residue class modulo ``m`` is
contiguous (:class:`Line`): a progression whose stride divides ``m`` is then a few intervals, and
sets of all ranks live side by side on copies of the line. Everything is vectorised over ranks,
documents and stretches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Bounds:
    """Documents of a packed sequence: document ``d`` holds tokens ``start[d] .. stop[d]``."""

    start: Ints
    stop: Ints

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Bounds:
        size = np.asarray(lengths, np.int64)
        stop = np.cumsum(size)
        return cls(stop - size, stop)

    @property
    def length(self) -> Ints:
        return self.stop - self.start

    def at(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Document and position in it of every token; document -1 for tokens beyond the last."""
        document = np.searchsorted(self.start, tokens, "right") - 1
        inside = tokens < (self.stop[-1] if len(self.stop) else 0)
        position = np.where(inside, tokens - self.start[document], 0)
        return np.where(inside, document, -1), position


@dataclass(frozen=True, eq=False)
class Stretches:
    """Progressions ``first, first + stride, ...`` of ``count`` positions of a document.

    ``tag`` is whose set this is (a rank). All arrays int64 of one shape; counts are at least 1.
    """

    tag: Ints
    document: Ints
    first: Ints
    count: Ints
    stride: int

    def __getitem__(self, at: Ints | NDArray[np.bool_]) -> Stretches:
        return Stretches(
            self.tag[at], self.document[at], self.first[at], self.count[at], self.stride
        )

    @property
    def last(self) -> Ints:
        return self.first + (self.count - 1) * self.stride

    def within(self, at: Ints, low: Ints, high: Ints) -> tuple[Stretches, NDArray[np.bool_]]:
        """Stretch ``at[n]`` cut to positions ``[low[n], high[n])``, and which ``n`` are left."""
        first, count = self.first[at], self.count[at]
        begin = np.maximum(0, ceil_div(low - first, self.stride))
        end = np.minimum(count, ceil_div(high - first, self.stride))
        keep = end > begin
        cut = Stretches(
            self.tag[at][keep], self.document[at][keep],
            (first + begin * self.stride)[keep], (end - begin)[keep], self.stride,
        )  # fmt: skip
        return cut, keep

    def split(self, into: int) -> Stretches:
        """The same positions, each stretch as at most ``into`` stretches of ``into`` times the
        stride: members of one have the same residue modulo the new stride."""
        if into == 1:
            return self
        at, part = expand(np.minimum(into, self.count))
        return Stretches(
            self.tag[at], self.document[at], self.first[at] + part * self.stride,
            ceil_div(self.count[at] - part, into), self.stride * into,
        )  # fmt: skip


def in_documents(tag: Ints, first: Ints, count: Ints, stride: int, docs: Bounds) -> Stretches:
    """Progressions of tokens of the packed sequence, cut at documents; padding is dropped."""
    if not len(docs.start) or not len(first):
        return Stretches(NONE, NONE, NONE, NONE, stride)
    from_doc = np.searchsorted(docs.start, first, "right") - 1
    to_doc = np.searchsorted(docs.start, first + (count - 1) * stride, "right") - 1
    at, within = expand(to_doc - from_doc + 1)
    document = from_doc[at] + within
    whole = Stretches(tag, np.zeros_like(tag), first, count, stride)
    cut, keep = whole.within(at, docs.start[document], docs.stop[document])
    document = document[keep]
    return Stretches(cut.tag, document, cut.first - docs.start[document], cut.count, stride)


@dataclass(frozen=True)
class Line:
    """Tokens ``0 .. tokens`` with every residue class modulo ``modulus`` contiguous.

    Token ``t`` is at ``(t mod modulus) * height + t // modulus``; classes are one unit apart, so
    that intervals of different classes never join. Copy ``tag`` of the line starts at
    ``tag * size``.
    """

    modulus: int
    tokens: int

    @property
    def height(self) -> int:
        return -(-self.tokens // self.modulus) + 1

    @property
    def size(self) -> int:
        return self.modulus * self.height

    def put(self, s: Stretches, docs: Bounds) -> tuple[Ints, Ints]:
        """Intervals ``[start, stop)`` of the stretches, on the copies of their tags."""
        fine = s.split(self.modulus // s.stride)
        start = fine.tag * self.size + self.at(fine.first + docs.start[fine.document])
        return start, start + fine.count

    def at(self, tokens: Ints) -> Ints:
        return tokens % self.modulus * self.height + tokens // self.modulus

    def token(self, at: Ints) -> Ints:
        return at // self.height + at % self.height * self.modulus


def union(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Disjoint ascending intervals with the same points; touching ones are joined."""
    if not len(start):
        return start, stop
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate(stop[order])
    new = np.ones(len(start), bool)
    new[1:] = start[1:] > stop[:-1]
    ends = np.append(np.flatnonzero(new)[1:] - 1, len(start) - 1)
    return start[new], stop[ends]


def expand(count: Ints) -> tuple[Ints, Ints]:
    """For each unit of ``count``: the entry it belongs to, and its number within the entry."""
    owner = np.repeat(np.arange(len(count)), count)
    begin = np.cumsum(count) - count
    return owner, np.arange(len(owner)) - begin[owner]


def ceil_div(a: Ints, b: int) -> Ints:
    return -(-a // b)

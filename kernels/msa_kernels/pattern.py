"""Attention patterns: what a query may attend to, said once.

A pattern is a frozen value. Everything else (tile lists, pair counts, the layout of a sequence
over ranks, the bytes they exchange) is derived from its rules. Positions are integers counted from
the start of the sequence, or of the document under ``pattern & Documents(...)``. Patterns are
causal unless they say otherwise.

Pure Python; see :mod:`msa_kernels.rules` for the form in which patterns are stated and
:mod:`msa_kernels.blocks` for tile lists.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from msa_kernels.pairs import union_pairs
from msa_kernels.rules import FARTHEST, Part, Rule, any_allows, lower, union_row


class PatternError(ValueError):
    """A pattern that cannot exist. ``path`` is the field, from the pattern's own top."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type[PatternError], tuple[str, str]]:
        return type(self), (self.path, self.problem)


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise PatternError(name, f"must be an integer, found {value!r}")
    if value < least:
        raise PatternError(name, f"must be at least {least}, found {value}")


def _true_or_false(name: str, value: object) -> None:
    # 0 and False are equal and of one hash: one would stand for the other in every cache.
    if not isinstance(value, bool):
        raise PatternError(name, f"must be true or false, found {value!r}")


def _members(given: object) -> tuple[Pattern, ...]:
    """``members`` as a tuple; raises unless they are patterns, one at least."""
    if isinstance(given, Pattern) or not isinstance(given, Iterable):
        raise PatternError("members", f"must be a list of patterns, found {given!r}")
    members = tuple(given)
    if not members:
        raise PatternError("members", "must name at least one pattern")
    for at, member in enumerate(members):
        _a_pattern(f"members[{at}]", member)
    return members


def _a_pattern(name: str, value: object) -> None:
    if not isinstance(value, Pattern):
        raise PatternError(name, f"must be a pattern, found {value!r}")


@dataclass(frozen=True)
class Pattern:
    """Base of all kinds. Subclasses implement :meth:`rules`, and :meth:`_validate` for fields that
    not every value suits."""

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self._validate()
        values = ", ".join([_mark(getattr(self, field.name)) for field in fields(self)])
        object.__setattr__(self, "mark", f"{self.kind}({values})")

    def _validate(self) -> None:
        """Raise :class:`PatternError` for values that make no sense; may normalise fields."""

    if TYPE_CHECKING:

        @property
        def mark(self) -> str:
            """What tells this pattern from others of its kind in this process, as plain text: a
            compiled graph holds a pattern, and text is what its guards compare by value."""
            raise NotImplementedError

    def rules(self) -> tuple[Rule, ...]:
        """The pattern as a union of rules."""
        raise NotImplementedError

    @property
    def causal(self) -> bool:
        """No query sees a key after itself."""
        return all(rule.lo is not None and rule.lo >= 0 for rule in self.rules())

    def allows(self, i: Any, j: Any) -> Any:
        """Whether query ``i`` sees key ``j``; ints, NumPy arrays or torch tensors alike, of a
        dtype that holds the pattern's own numbers too."""
        return any_allows(self.rules(), i, j)

    def row(self, i: int, n: int) -> int:
        """Keys of a sequence of ``n`` tokens that query ``i`` sees, as the bits of an integer."""
        return union_row(self.rules(), i, n)

    def parts(self) -> tuple[Part, ...]:
        """Disjoint passes that together compute the pattern, dilated parts folded, for positions
        below :data:`msa_kernels.rules.FARTHEST`: no number in them is larger."""
        return _parts(self)

    def pairs(self, n: int) -> int:
        """Exact number of attended (query, key) pairs of one head in ``n`` tokens."""
        return _pairs(self, n)

    def density(self, n: int) -> float:
        """Attended pairs over those of dense causal attention of ``n`` tokens, one at least."""
        _at_least("n", n, 1)
        return self.pairs(n) / (n * (n + 1) // 2)

    def for_group(self, group: int) -> Pattern:
        """The pattern of key/value group ``group``."""
        del group
        return self

    def limited(self, window: int) -> Pattern:
        """This pattern within the last ``window`` tokens (a model's own sliding window)."""
        _at_least("window", window, 1)
        return Limited(self, window)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, the same as in the custom resource."""
        out: dict[str, Any] = {"type": self.kind}
        for f in fields(self):
            value = getattr(self, f.name)
            if value == f.default and f.name in ("causal", "window"):
                continue
            out[f.name] = _plain(value)
        return out

    def encoded(self) -> str:
        """Short text, equal for equal patterns (:mod:`msa_kernels.encoding`)."""
        from msa_kernels.encoding import encode

        return encode(self)

    def __and__(self, documents: object) -> Documented:
        if not isinstance(documents, Documents):
            return NotImplemented
        return Documented(self, documents)

    def __or__(self, other: object) -> Union:
        if not isinstance(other, Pattern):
            return NotImplemented
        return Union((self, other))


def _mark(value: Any) -> str:
    if isinstance(value, Pattern):
        return value.mark
    if isinstance(value, tuple) and all(isinstance(item, Pattern) for item in value):
        return ", ".join([item.mark for item in value])
    if isinstance(value, Documents):
        value = value.lengths
    # Rows of a block list, lengths of documents: as text they would be megabytes.
    return f"{hash(value):x}" if isinstance(value, tuple) else repr(value)


@lru_cache(maxsize=1024)
def _pairs(pattern: Pattern, n: int) -> int:
    return union_pairs(pattern.rules(), n)


@lru_cache(maxsize=1024)
def _parts(pattern: Pattern) -> tuple[Part, ...]:
    return lower(rule.bounded(FARTHEST) for rule in pattern.rules())


def _plain(value: Any) -> Any:
    if isinstance(value, Pattern):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


@dataclass(frozen=True)
class Dense(Pattern):
    """Every key up to the query, or every key when ``causal`` is False."""

    kind: ClassVar[str] = "Dense"
    causal: bool = True  # type: ignore[assignment]  # a field where others derive it

    def _validate(self) -> None:
        _true_or_false("causal", self.causal)

    def rules(self) -> tuple[Rule, ...]:
        return (Rule(lo=0 if self.causal else None),)


@dataclass(frozen=True)
class Window(Pattern):
    """``0 <= i - j < window``: the window counts the token itself.

    With ``causal=False`` it reaches as far to both sides: ``|i - j| < window``.
    """

    kind: ClassVar[str] = "Window"
    window: int
    causal: bool = True  # type: ignore[assignment]

    def _validate(self) -> None:
        _at_least("window", self.window, 1)
        _true_or_false("causal", self.causal)

    def rules(self) -> tuple[Rule, ...]:
        return (Rule(lo=0 if self.causal else 1 - self.window, hi=self.window),)


@dataclass(frozen=True)
class Dilated(Pattern):
    """Every ``rate``-th key back from the query, ``window`` of them or all."""

    kind: ClassVar[str] = "Dilated"
    rate: int
    window: int | None = None

    def _validate(self) -> None:
        _at_least("rate", self.rate, 1)
        if self.window is not None:
            _at_least("window", self.window, 1)

    def rules(self) -> tuple[Rule, ...]:
        hi = None if self.window is None else self.rate * self.window
        return (Rule(hi=hi, step=self.rate),)


@dataclass(frozen=True)
class Block(Pattern):
    """Keys up to the query within its own block of ``length`` tokens."""

    kind: ClassVar[str] = "Block"
    length: int

    def _validate(self) -> None:
        _at_least("length", self.length, 1)

    def rules(self) -> tuple[Rule, ...]:
        return (Rule(block=self.length),)


@dataclass(frozen=True)
class Columns(Pattern):
    """The last ``columns`` keys of every ``length``: summary columns of Child et al. 2019."""

    kind: ClassVar[str] = "Columns"
    length: int
    columns: int

    def _validate(self) -> None:
        _at_least("length", self.length, 1)
        _at_least("columns", self.columns, 1)
        if self.columns > self.length:
            raise PatternError("columns", f"must be at most length {self.length}")

    def rules(self) -> tuple[Rule, ...]:
        return (Rule(columns=(self.length, self.columns)),)


@dataclass(frozen=True)
class SinkWindow(Pattern):
    """A window, and the first ``sinks`` tokens, which every later query keeps."""

    kind: ClassVar[str] = "SinkWindow"
    window: int
    sinks: int

    def _validate(self) -> None:
        _at_least("window", self.window, 1)
        _at_least("sinks", self.sinks, 0)

    def rules(self) -> tuple[Rule, ...]:
        return (Rule(hi=self.window), Rule(lo=self.window, sinks=self.sinks))


@lru_cache(maxsize=64)
def _shared(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """One object for all equal ``rows``: comparing an object with itself does not look inside, and
    every look-up of a list in a cache compares."""
    return rows


@dataclass(frozen=True)
class BlockList(Pattern):
    """Explicit key blocks for each query block: ``rows[q]`` lists them, ascending.

    Both sides use blocks of ``block`` tokens; inside a listed block causality still holds unless
    ``causal`` is False. Queries beyond the last row see nothing.
    """

    kind: ClassVar[str] = "BlockList"
    block: int
    rows: tuple[tuple[int, ...], ...]
    causal: bool = True  # type: ignore[assignment]

    def _validate(self) -> None:
        _at_least("block", self.block, 1)
        _true_or_false("causal", self.causal)
        if not isinstance(self.rows, Iterable):
            raise PatternError("rows", f"must be lists of block numbers, found {self.rows!r}")
        rows = []
        for q, row in enumerate(self.rows):
            if not isinstance(row, Iterable):
                raise PatternError(f"rows[{q}]", f"must be a list of block numbers, found {row!r}")
            rows.append(tuple(row))
        object.__setattr__(self, "rows", tuple(rows))
        for q, row in enumerate(self.rows):
            for at, k in enumerate(row):
                _at_least(f"rows[{q}][{at}]", k, 0)
                if at and k <= row[at - 1]:
                    raise PatternError(
                        f"rows[{q}]",
                        f"must ascend without repeats, found {row[at - 1]} before {k}",
                    )
                if self.causal and k > q:
                    raise PatternError(
                        f"rows[{q}][{at}]",
                        f"key block {k} lies after query block {q}; "
                        "list blocks up to the query's own, or set causal: false",
                    )

        object.__setattr__(self, "rows", _shared(self.rows))
        object.__setattr__(self, "_hash", hash((self.block, self.rows, self.causal)))

    def __hash__(self) -> int:
        """Taken once: patterns are keys of caches, and a million tokens have many blocks."""
        return self._hash  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[type[BlockList], tuple[Any, ...]]:
        return BlockList, (self.block, self.rows, self.causal)

    def rules(self) -> tuple[Rule, ...]:
        return (Rule(lo=0 if self.causal else None, table=(self.block, self.rows)),)


@dataclass(frozen=True)
class BlockTopK(Pattern):
    """The ``topk`` key blocks of size ``block`` that an index head scores highest.

    Which blocks they are is known at run time only: it has bounds, not rules. Once selected,
    the selection is a :class:`BlockList`.
    """

    kind: ClassVar[str] = "BlockTopK"
    block: int
    topk: int

    def _validate(self) -> None:
        _at_least("block", self.block, 1)
        _at_least("topk", self.topk, 1)

    @property
    def causal(self) -> bool:
        return True

    def rules(self) -> tuple[Rule, ...]:
        raise PatternError(
            "type",
            "BlockTopK is selected at run time and has no fixed rules; "
            "use pairs_bound, or the BlockList that a selection yields",
        )

    def pairs_bound(self, n: int) -> int:
        """Most pairs that any selection can attend: its own block and ``topk - 1`` whole ones."""
        full, rest = divmod(n, self.block)
        total = 0
        for q in range(full + (rest > 0)):
            rows = self.block if q < full else rest
            total += rows * min(q, self.topk - 1) * self.block + rows * (rows + 1) // 2
        return total


@dataclass(frozen=True)
class Union(Pattern):
    """A key is seen when any part sees it; a pair that two parts share counts once."""

    kind: ClassVar[str] = "Union"
    members: tuple[Pattern, ...]

    def _validate(self) -> None:
        object.__setattr__(self, "members", _members(self.members))
        for at, member in enumerate(self.members):
            if isinstance(member, PerHead | Documented | BlockTopK):
                raise PatternError(
                    f"members[{at}]",
                    f"a {member.kind} cannot be inside a Union; put the Union inside it instead",
                )

    def rules(self) -> tuple[Rule, ...]:
        return tuple(rule for member in self.members for rule in member.rules())


@dataclass(frozen=True)
class PerHead(Pattern):
    """Key/value group ``g`` uses ``members[g % len(members)]``.

    Interleaved, so that tensor and Ulysses ranks get the same mix. Never inside a group: all
    query heads that share a key/value head share its pattern.
    """

    kind: ClassVar[str] = "PerHead"
    members: tuple[Pattern, ...]

    def _validate(self) -> None:
        object.__setattr__(self, "members", _members(self.members))
        for at, member in enumerate(self.members):
            if isinstance(member, PerHead | Documented):
                raise PatternError(f"members[{at}]", f"a {member.kind} cannot be inside PerHead")

    @property
    def causal(self) -> bool:
        return all(member.causal for member in self.members)

    def rules(self) -> tuple[Rule, ...]:
        raise PatternError("type", "PerHead differs by head: ask for_group(g) first")

    def pairs(self, n: int) -> int:
        raise PatternError("type", "PerHead differs by head: ask for_group(g).pairs(n)")

    def density(self, n: int) -> float:
        return sum(m.density(n) for m in self.members) / len(self.members)

    def for_group(self, group: int) -> Pattern:
        return self.members[group % len(self.members)]

    def limited(self, window: int) -> PerHead:
        return PerHead(tuple(member.limited(window) for member in self.members))


@dataclass(frozen=True)
class Limited(Pattern):
    """``pattern`` within the last ``window`` tokens."""

    kind: ClassVar[str] = "Limited"
    pattern: Pattern
    window: int

    def _validate(self) -> None:
        _a_pattern("pattern", self.pattern)
        if isinstance(self.pattern, PerHead | Documented):
            raise PatternError(
                "pattern", f"a {self.pattern.kind} cannot be inside Limited; limit what is in it"
            )
        _at_least("window", self.window, 1)

    def rules(self) -> tuple[Rule, ...]:
        rules = (rule.limited(self.window) for rule in self.pattern.rules())
        return tuple(rule for rule in rules if not rule.empty)


@dataclass(frozen=True)
class Documents:
    """Lengths of the documents packed into one sequence, in order."""

    lengths: tuple[int, ...]

    if TYPE_CHECKING:

        @property
        def bounds(self) -> tuple[int, ...]:
            """``0``, then the end of each document."""
            raise NotImplementedError

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, Iterable):
            raise PatternError("lengths", f"must be a list of lengths, found {self.lengths!r}")
        object.__setattr__(self, "lengths", tuple(self.lengths))
        for at, length in enumerate(self.lengths):
            _at_least(f"lengths[{at}]", length, 1)
        # Not a cached property: torch.compile cannot trace the lock of one.
        object.__setattr__(self, "bounds", (0, *itertools.accumulate(self.lengths)))

    @classmethod
    def from_ids(cls, ids: Sequence[int]) -> Documents:
        """From one id per token; a change of id starts a new document."""
        return cls(tuple(len(list(run)) for _, run in itertools.groupby(ids)))

    @property
    def total(self) -> int:
        return self.bounds[-1]

    def start(self, i: Any) -> Any:
        """Start of the document of position ``i``, by comparisons only."""
        start = i * 0
        for length, end in zip(self.lengths[:-1], self.bounds[1:], strict=False):
            start = start + length * (i >= end)
        return start


@dataclass(frozen=True)
class Documented(Pattern):
    """``pattern`` inside every document of a packed sequence, and nothing across."""

    kind: ClassVar[str] = "Documented"
    pattern: Pattern
    documents: Documents

    def _validate(self) -> None:
        _a_pattern("pattern", self.pattern)
        if isinstance(self.pattern, Documented):
            raise PatternError("pattern", "documents are given already")

    @property
    def causal(self) -> bool:
        return self.pattern.causal

    def rules(self) -> tuple[Rule, ...]:
        raise PatternError("type", "positions restart in each document: use .pattern.rules()")

    def allows(self, i: Any, j: Any) -> Any:
        at, to = self.documents.start(i), self.documents.start(j)
        inside = (i < self.documents.total) & (j < self.documents.total) & (j >= 0)
        return self.pattern.allows(i - at, j - at) & (at == to) & inside

    def row(self, i: int, n: int) -> int:
        self._check(n)
        doc = bisect.bisect_right(self.documents.bounds, i) - 1
        start = self.documents.bounds[doc]
        return self.pattern.row(i - start, self.documents.lengths[doc]) << start

    def pairs(self, n: int) -> int:
        self._check(n)
        return sum(self.pattern.pairs(length) for length in self.documents.lengths)

    def for_group(self, group: int) -> Documented:
        return Documented(self.pattern.for_group(group), self.documents)

    def limited(self, window: int) -> Documented:
        return Documented(self.pattern.limited(window), self.documents)

    def to_dict(self) -> dict[str, Any]:
        raise PatternError("", "documents belong to a batch, not to a pattern's description")

    def _check(self, n: int) -> None:
        if n != self.documents.total:
            raise PatternError(
                "documents", f"hold {self.documents.total} tokens, the sequence has {n}"
            )


Heads = Literal["split", "union"]


def Strided(length: int, heads: Heads = "split") -> Pattern:
    """Window(l) and Dilated(l) (Child et al. 2019): on alternating groups, or on every one."""
    return _pair(Window(length), Dilated(length), heads)


def Fixed(length: int, columns: int, heads: Heads = "split") -> Pattern:
    """Block(l) and Columns(l, c) (Child et al. 2019): on alternating groups, or on every one."""
    return _pair(Block(length), Columns(length, columns), heads)


def _pair(a: Pattern, b: Pattern, heads: Heads) -> Pattern:
    if heads == "union":
        return Union((a, b))
    if heads == "split":
        return PerHead((a, b))
    raise PatternError("heads", f"must be split or union, found {heads!r}")


KINDS: dict[str, type[Pattern]] = {
    kind.kind: kind
    for kind in (
        Dense, Window, Dilated, Block, Columns, SinkWindow, BlockList, BlockTopK, Union, PerHead,
        Limited,
    )
}  # fmt: skip
SHORTHANDS = {"Strided": Strided, "Fixed": Fixed}


def from_dict(raw: object, path: str = "") -> Pattern:
    """Read :meth:`Pattern.to_dict` back, or the same mapping from a job file.

    Raises :class:`PatternError` whose ``path`` leads to the offending field.
    """
    from msa_kernels.described import read

    return read(raw, path)

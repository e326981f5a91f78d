"""YAML 1.2 core schema, read into plain values that remember their lines.

Job files are written by people, so the surprises of older readers are kept out: ``2e-5`` is a
float, ``on`` and ``yes`` are strings, ``010`` is ten, ``1_000`` is a string, a key given twice is
an error, a tag other than the core ones is an error. Aliases and merge keys (``<<``) work and are
bounded: a file whose aliases expand to more than ``MAX_NODES`` values is refused before any of it
is built a second time.

The grammar is ruamel.yaml's; resolving scalars and building values is done here, from its events.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)

Path = tuple[str | int, ...]

MAX_BYTES = 1 << 20
"""Largest file read: what the API server would store (1.5 MiB in etcd) is not much larger."""
MAX_NODES = 200_000
"""Most values after aliases are expanded; no honest job file comes near it."""
MAX_DEPTH = 64

_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_MERGE = object()


class YamlError(ValueError):
    """A text that is not one YAML 1.2 document. ``line`` counts from 1; 0 when unknown."""

    def __init__(self, problem: str, line: int = 0, column: int = 0) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line
        self.column = column


@dataclass(frozen=True)
class Document:
    """``value`` and, for the path of everything inside it, the line where it is written."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """Line of ``path``, or of the nearest parent that is written in the document."""
        for end in range(len(path), -1, -1):
            if (found := self.lines.get(path[:end])) is not None:
                return found
        return 0


@dataclass(frozen=True)
class _Node:
    """A value as written: ``items`` of a mapping are (key, value), of a sequence (None, value)."""

    kind: str
    line: int
    scalar: Any = None
    items: tuple[tuple[Any, _Node], ...] = ()
    size: int = 1
    depth: int = 0


def load(text: str | bytes) -> Document:
    """Read exactly one document.

    Raises :class:`YamlError` on anything else: bad syntax, bad encoding, several documents,
    duplicate keys, keys that are not strings, unknown tags, recursion and alias bombs.
    """
    if isinstance(text, bytes):
        text = _decode(text)
    if len(text) > MAX_BYTES:
        raise YamlError(f"is larger than {MAX_BYTES >> 20} MiB")
    try:
        node = _Reader(YAML(typ="safe", pure=True).parse(text)).document()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "is not YAML"
        if mark is None:
            raise YamlError(str(problem)) from None
        raise YamlError(str(problem), mark.line + 1, mark.column + 1) from None
    except YAMLError as error:
        raise YamlError(_one_line(error)) from None
    except OverflowError:
        raise YamlError("holds an escape for a character that does not exist") from None
    lines: dict[Path, int] = {}
    return Document(_build(node, (), lines), lines)


def scalar(text: str) -> Any:
    """The core schema's value of a plain (unquoted) scalar.

    Raises :class:`ValueError` for an integer with more digits than Python converts.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", "").lower())
    if _NAN.fullmatch(text):
        return float("nan")
    return text


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise YamlError(f"is not UTF-8 text (byte {error.start})", line) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Reader:
    """Composes nodes from parser events, in one pass."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = iter(events)
        self._anchors: dict[str, _Node | None] = {}
        self._nodes = 0

    def document(self) -> _Node:
        self._take(StreamStartEvent)
        start = next(self._events)
        if isinstance(start, StreamEndEvent):
            raise YamlError("is empty", 1)
        if start.version is not None and tuple(start.version) != (1, 2):
            found = ".".join(map(str, start.version))
            raise YamlError(f"declares YAML {found}; remove the directive, YAML 1.2 is read", 1)
        node = self._node(next(self._events), 0)
        self._take(DocumentEndEvent)
        after = next(self._events)
        if isinstance(after, DocumentStartEvent):
            line = after.start_mark.line + 1
            raise YamlError(
                f"holds more than one document (the second starts on line {line}); "
                "put each in a file of its own", line,
            )  # fmt: skip
        return node

    def _take(self, kind: type) -> None:
        event = next(self._events)
        assert isinstance(event, kind), event

    def _node(self, event: Any, depth: int) -> _Node:
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if depth > MAX_DEPTH:
            raise YamlError(f"is nested deeper than {MAX_DEPTH} levels", line, column)
        if isinstance(event, AliasEvent):
            return self._count(self._alias(event, depth, line, column), line)
        anchor = event.anchor
        if anchor is not None:
            self._anchors[anchor] = None
        if isinstance(event, ScalarEvent):
            node = _Node("scalar", line, _resolve(event, line, column))
        elif isinstance(event, SequenceStartEvent):
            _check_tag(event.tag, "seq", line, column)
            node = self._sequence(line, depth)
        else:
            assert isinstance(event, MappingStartEvent), event
            _check_tag(event.tag, "map", line, column)
            node = self._mapping(line, depth)
        if anchor is not None:
            self._anchors[anchor] = node
        return self._count(node, line) if node.kind == "scalar" else node

    def _alias(self, event: Any, depth: int, line: int, column: int) -> _Node:
        if event.anchor not in self._anchors:
            raise YamlError(f"alias *{event.anchor} has no anchor before it", line, column)
        node = self._anchors[event.anchor]
        if node is None:
            raise YamlError(f"alias *{event.anchor} is inside its own anchor", line, column)
        if depth + node.depth > MAX_DEPTH:
            raise YamlError(f"is nested deeper than {MAX_DEPTH} levels", line, column)
        return node

    def _count(self, node: _Node, line: int) -> _Node:
        self._nodes += node.size
        if self._nodes > MAX_NODES:
            raise YamlError(f"expands to more than {MAX_NODES:,} values through its aliases", line)
        return node

    def _sequence(self, line: int, depth: int) -> _Node:
        items: list[tuple[Any, _Node]] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            items.append((None, self._node(event, depth + 1)))
        return _sized("sequence", line, items)

    def _mapping(self, line: int, depth: int) -> _Node:
        items: dict[str, _Node] = {}
        merged: list[tuple[str, _Node]] = []
        while not isinstance(event := next(self._events), MappingEndEvent):
            at, column = event.start_mark.line + 1, event.start_mark.column + 1
            key = self._key(event, at, column)
            value = self._node(next(self._events), depth + 1)
            if key is _MERGE:
                merged += _merge(value, at, column)
            elif key in items:
                raise YamlError(
                    f"key {key!r} is given twice, first on line {items[key].line}", at, column
                )
            else:
                # A mapping's value is reported where its key stands: that is what one edits.
                items[key] = replace(value, line=at)
        for key, value in merged:
            items.setdefault(key, value)
        return _sized("mapping", line, list(items.items()))

    def _key(self, event: Any, line: int, column: int) -> Any:
        if not isinstance(event, ScalarEvent):
            raise YamlError("a key must be plain text", line, column)
        if event.anchor is not None:
            raise YamlError("a key cannot carry an anchor", line, column)
        if event.value == "<<" and event.style is None:
            return _MERGE
        key = _resolve(event, line, column)
        if not isinstance(key, str):
            raise YamlError(f"key {event.value!r} must be text; write it in quotes", line, column)
        return key


def _sized(kind: str, line: int, items: list[tuple[Any, _Node]]) -> _Node:
    size = 1 + sum(node.size for _, node in items)
    depth = 1 + max((node.depth for _, node in items), default=0)
    return _Node(kind, line, None, tuple(items), size, depth)


def _merge(node: _Node, line: int, column: int) -> list[tuple[str, _Node]]:
    sources = [item for _, item in node.items] if node.kind == "sequence" else [node]
    if any(source.kind != "mapping" for source in sources):
        raise YamlError("<< takes a mapping or a list of mappings", line, column)
    return [item for source in sources for item in source.items]


def _check_tag(tag: Any, kind: str, line: int, column: int) -> None:
    if tag is not None and str(tag) not in (f"{_TAG}{kind}", f"!!{kind}", "!"):
        raise YamlError(f"tag {tag} is not part of YAML's core schema", line, column)


def _resolve(event: Any, line: int, column: int) -> Any:
    """The value of a scalar event, by its tag, its quotes or its text."""
    text = event.value
    if _SURROGATE.search(text):
        try:
            # JSON writes one character beyond U+FFFF as two escapes; YAML reads them one by one.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            problem = "holds half of a surrogate pair, which is no character"
            raise YamlError(problem, line, column) from None
    tag = None if event.tag is None else str(event.tag).replace("!!", _TAG)
    try:
        if tag is None:
            return scalar(text) if event.style is None else text
        if tag in ("!", f"{_TAG}str"):
            return text
        value = scalar(text)
    except ValueError:
        raise YamlError(f"number {text[:20]}... is too long", line, column) from None
    kinds = {"int": int, "float": float, "bool": bool, "null": type(None)}
    kind = kinds.get(tag.removeprefix(_TAG)) if tag.startswith(_TAG) else None
    if kind is None:
        raise YamlError(f"tag {event.tag} is not part of YAML's core schema", line, column)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise YamlError(f"{text!r} does not fit its tag {event.tag}", line, column)
    return value


def _build(node: _Node, path: Path, lines: dict[Path, int]) -> Any:
    lines[path] = node.line
    if node.kind == "scalar":
        return node.scalar
    if node.kind == "sequence":
        return [_build(item, (*path, n), lines) for n, (_, item) in enumerate(node.items)]
    return {key: _build(item, (*path, key), lines) for key, item in node.items}

"""Documents of a source: where each lies, how many tokens it has, which are held out.

A corpus is an index of a few numbers per document; the text stays where it is and is read when a
sample needs it. The split depends on a document's name alone, so adding or removing other
documents never moves one from training to evaluation.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from msa_workloads.sources import DataError, Entry, Source, content_hash
from msa_workloads.tokens import Tokenizer

CACHE_TOKENS = 16 << 20
"""Tokens of recently used documents kept in memory, 64 MiB at four bytes each."""

WHOLE_BYTES = 4 << 20
"""A byte-level document above this is read by range instead of whole: memory stays bounded."""


@dataclass(frozen=True)
class Index:
    """One row per document, as arrays of equal length; small enough to send to every rank.

    ``entry`` numbers the object, ``start`` and ``size`` are the byte range there (a JSON line for
    ``.jsonl``), ``tokens`` counts special tokens too, ``text_bytes`` does not, ``key`` is the
    64-bit hash of the document's name.
    """

    entries: tuple[Entry, ...]
    entry: np.ndarray
    start: np.ndarray
    size: np.ndarray
    tokens: np.ndarray
    text_bytes: np.ndarray
    key: np.ndarray
    content: dict[str, Any]

    def __len__(self) -> int:
        return len(self.entry)


def build_index(source: Source, tokenizer: Tokenizer, text_field: str) -> Index:
    """Read the source once, object by object; raises :class:`DataError` when nothing is in it."""
    entries = source.entries()
    rows: list[tuple[int, int, int, int, int, int]] = []
    for number, entry in enumerate(entries):
        if entry.name.endswith(".jsonl"):
            for line_number, start, line in _lines(source.stream(entry)):
                text = _field(line, text_field, f"{entry.name}:{line_number}")
                if text:
                    count = _count(tokenizer, text)
                    name = f"{entry.name}#{line_number}"
                    rows.append((number, start, len(line), count, len(text), _name_key(name)))
        elif entry.size:
            count = tokenizer.count(entry.size)
            if count is None:
                count = len(tokenizer.encode(source.read(entry, 0, entry.size)))
            rows.append((number, 0, entry.size, count, entry.size, _name_key(entry.name)))
    if not rows:
        raise DataError(f"{source.address}: every document is empty")
    columns = list(zip(*rows, strict=True))
    return Index(
        entries=entries,
        entry=np.array(columns[0], dtype=np.int32),
        start=np.array(columns[1], dtype=np.int64),
        size=np.array(columns[2], dtype=np.int64),
        tokens=np.array(columns[3], dtype=np.int64),
        text_bytes=np.array(columns[4], dtype=np.int64),
        key=np.array(columns[5], dtype=np.uint64),
        content=content_hash(source, entries),
    )


def differing(source: Source, index: Index) -> str | None:
    """The first object that this process does not see as the index has it, or None; found by names
    and sizes. Objects with versions are the same for everybody, and checked when they are read."""
    if all(entry.version for entry in index.entries):
        return None
    here = {entry.name: entry.size for entry in source.entries()}
    return next((e.name for e in index.entries if here.get(e.name) != e.size), None)


def split(index: Index, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Document numbers for training and for evaluation, by whole documents.

    A document is held out when its name's hash falls below ``fraction``. With few documents one
    at least stays on each side: the one with the smallest hash is held out, the one with the
    largest is trained on. A single document is trained on and nothing is held out.
    """
    if fraction <= 0 or len(index) < 2:
        return np.arange(len(index)), np.arange(0)
    held = index.key < np.uint64(min(fraction, 1.0) * (2**64 - 2**11))
    held[np.argmin(index.key)] = True
    held[np.argmax(index.key)] = False
    return np.flatnonzero(~held), np.flatnonzero(held)


class Corpus:
    """Tokens of any document of an index, with a bounded cache; for several threads, since a step
    is read ahead while held-out documents are."""

    def __init__(self, source: Source, tokenizer: Tokenizer, text_field: str, index: Index):
        self.index = index
        self.tokenizer = tokenizer
        self._source = source
        self._text_field = text_field
        self._cache: OrderedDict[int, np.ndarray] = OrderedDict()
        self._cached = 0
        self._lock = threading.Lock()

    def text(self, document: int) -> bytes:
        """The whole text of a document, UTF-8 for ``.jsonl`` and as it is for ``.txt``."""
        row = self.index
        entry = row.entries[row.entry[document]]
        start, size = int(row.start[document]), int(row.size[document])
        raw = self._source.read(entry, start, start + size)
        if entry.name.endswith(".jsonl"):
            return _field(raw, self._text_field, entry.name)
        return raw

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Ids ``start:stop`` of a document, int32 of shape (stop - start,)."""
        if self._by_range(document):
            return self._range(document, start, stop)
        # Hugging Face's tokenizers are not for two threads either ("Already borrowed").
        with self._lock:
            return self._whole(document)[start:stop]

    def _whole(self, document: int) -> np.ndarray:
        if document in self._cache:
            self._cache.move_to_end(document)
            return self._cache[document]
        ids = self.tokenizer.encode(self.text(document))
        if len(ids) != self.index.tokens[document]:
            name = self.index.entries[self.index.entry[document]].name
            raise DataError(
                f"{name} changed while it was in use: indexed with "
                f"{self.index.tokens[document]} tokens, now has {len(ids)}"
            )
        self._cache[document] = ids
        self._cached += len(ids)
        while self._cached > CACHE_TOKENS and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached -= len(dropped)
        return ids

    def _by_range(self, document: int) -> bool:
        row = self.index
        plain = not row.entries[row.entry[document]].name.endswith(".jsonl")
        large = row.size[document] > WHOLE_BYTES
        return bool(plain and large and self.tokenizer.count(0) is not None)

    def _range(self, document: int, start: int, stop: int) -> np.ndarray:
        entry = self.index.entries[self.index.entry[document]]
        size = int(self.index.size[document])
        low, high = max(0, start - 1), max(0, min(size, stop - 1))
        ids = self.tokenizer.encode(self._source.read(entry, low, max(low, high)))
        # encode() put bos before and eos after the piece: keep each only at the document's ends.
        return ids[(0 if start == 0 else 1) : len(ids) - (0 if stop == size + 2 else 1)]


def _name_key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _count(tokenizer: Tokenizer, text: bytes) -> int:
    count = tokenizer.count(len(text))
    return len(tokenizer.encode(text)) if count is None else count


def _field(line: bytes, text_field: str, where: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: a mapping with field {text_field!r} is needed, found {record!r:.40}"
        )
    if text_field not in record:
        known = ", ".join(sorted(record))
        raise DataError(f"{where}: no field {text_field!r} (data.textField); it has {known}")
    if not isinstance(record[text_field], str):
        raise DataError(f"{where}: field {text_field!r} holds no text: {record[text_field]!r:.40}")
    return record[text_field].encode("utf-8", errors="surrogatepass")


def _lines(chunks: Iterator[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Non-blank lines as (line number from 1, byte offset, line without its end)."""
    rest, offset, number = b"", 0, 0
    for chunk in chunks:
        parts = (rest + chunk).split(b"\n")
        rest = parts.pop()
        for part in parts:
            number += 1
            if part.strip():
                yield number, offset, part
            offset += len(part) + 1
    if rest.strip():
        yield number + 1, offset, rest

"""Where text comes from: every source lists its objects in one fixed order and reads any range.

``python-stdlib://`` is the source code of the running Python's standard library, ``file://`` a
glob on a local or shared disk, ``s3://`` a prefix or glob in a bucket. A source knows bytes only;
:mod:`msa_workloads.corpus` turns objects into documents.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

CHUNK = 1 << 20
"""Bytes per read while an object is streamed: bounds memory whatever the object's size."""

BODY_RETRIES = 5
"""Times a broken S3 body is continued by range; botocore retries only until the body starts."""

RETRY_SECONDS = 0.1
"""First wait before a body is continued; it doubles each time, to 3.2 s at the fifth."""

TEXT_SUFFIXES = (".txt", ".jsonl")


class DataError(ValueError):
    """The data cannot be read as asked; the message names the address and what to do."""


@dataclass(frozen=True)
class Entry:
    """One object: ``name`` is relative and stable, ``size`` in bytes.

    ``version`` changes when the content does (S3's entity tag), or is empty where only reading
    the bytes can tell.
    """

    name: str
    size: int
    version: str = ""


class Source(Protocol):
    """What :mod:`msa_workloads.corpus` needs. All methods may raise :class:`DataError`."""

    address: str

    def entries(self) -> tuple[Entry, ...]:
        """All objects, sorted by name."""
        ...

    def read(self, entry: Entry, start: int, stop: int) -> bytes:
        """Bytes ``start`` (included) to ``stop`` (excluded) of one object."""
        ...

    def stream(self, entry: Entry) -> Iterator[bytes]:
        """All bytes of one object in order, at most :data:`CHUNK` at a time."""
        ...


def open_source(address: str) -> Source:
    """The source behind ``address``; raises :class:`DataError` for an unknown scheme."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        raise DataError(
            f"data source {address!r} has no scheme: use file:///absolute/path/*.txt, "
            "s3://bucket/prefix/*.jsonl or python-stdlib://"
        )
    if scheme == "python-stdlib":
        if rest:
            raise DataError(f"python-stdlib:// takes no path, found {rest!r}")
        return StdlibSource()
    if scheme == "file":
        return FileSource(address, unquote(rest))
    if scheme == "s3":
        return S3Source(address)
    raise DataError(
        f"data source {address!r}: unknown scheme {scheme!r}, allowed: python-stdlib, file, s3"
    )


class _Files:
    """Reading that local sources share; ``paths`` maps a name to its file."""

    def __init__(self, address: str, paths: dict[str, Path]) -> None:
        self.address = address
        self._paths = dict(sorted(paths.items()))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(Entry(name, path.stat().st_size) for name, path in self._paths.items())

    def read(self, entry: Entry, start: int, stop: int) -> bytes:
        try:
            with self._paths[entry.name].open("rb") as file:
                file.seek(start)
                got = file.read(stop - start)
        except OSError as error:
            raise DataError(f"cannot read {self._paths[entry.name]}: {error.strerror}") from None
        if len(got) != stop - start:
            raise DataError(
                f"{self._paths[entry.name]} changed while it was in use: it ended early"
            )
        return got

    def stream(self, entry: Entry) -> Iterator[bytes]:
        try:
            with self._paths[entry.name].open("rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk
        except OSError as error:
            raise DataError(f"cannot read {self._paths[entry.name]}: {error.strerror}") from None


class StdlibSource(_Files):
    """The ``.py`` files of the running Python's standard library, installed packages excluded."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = {}
        for folder, folders, files in os.walk(root):
            folders[:] = [f for f in folders if f not in ("site-packages", "dist-packages")]
            for file in files:
                path = Path(folder, file)
                if file.endswith(".py") and path.is_file():
                    paths[path.relative_to(root).as_posix()] = path
        if not paths:
            raise DataError(
                f"python-stdlib://: no .py files under {root}; this Python was installed "
                "without its sources, use file:// with text of your own"
            )
        super().__init__("python-stdlib://", paths)


class FileSource(_Files):
    """``.txt`` and ``.jsonl`` files that match a glob (``**`` crosses folders)."""

    def __init__(self, address: str, pattern: str) -> None:
        if not pattern.startswith("/"):
            raise DataError(f"{address}: the path must be absolute, as in file:///data/*.txt")
        if os.path.isdir(pattern):
            pattern = os.path.join(pattern, "**")
        found = [Path(p) for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]
        if not found:
            raise DataError(f"{address}: no file matches")
        usable = [p for p in found if p.suffix in TEXT_SUFFIXES]
        if not usable:
            raise DataError(
                f"{address}: found {found[0].name}, but only .txt (one document per file) and "
                ".jsonl (one per line) are read"
            )
        root = os.path.commonpath([p.parent for p in usable])
        super().__init__(address, {p.relative_to(root).as_posix(): p for p in usable})


class S3Source:
    """``.txt`` and ``.jsonl`` objects under a prefix or glob, read by range with retries.

    Credentials, region and endpoint are boto3's own (``AWS_ENDPOINT_URL`` included).
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._bucket, _, self._pattern = address.removeprefix("s3://").partition("/")
        if not self._bucket:
            raise DataError(f"{address}: names no bucket")
        self._client = s3_client()

    def entries(self) -> tuple[Entry, ...]:
        from botocore.exceptions import BotoCoreError, ClientError

        prefix, matches = key_filter(self._pattern)
        found: list[Entry] = []
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix
            )
            for page in pages:
                for item in page.get("Contents", ()):
                    key = item["Key"]
                    if matches(key):
                        found.append(Entry(key, item["Size"], item["ETag"].strip('"')))
        except (BotoCoreError, ClientError) as error:
            raise DataError(f"{self.address}: cannot be listed: {error}") from None
        usable = tuple(e for e in found if e.name.endswith(TEXT_SUFFIXES))
        if not usable:
            what = f"found {found[0].name}, but only" if found else "no object matches; only"
            raise DataError(f"{self.address}: {what} .txt and .jsonl are read")
        return tuple(sorted(usable, key=lambda e: e.name))

    def read(self, entry: Entry, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        return b"".join(self._body(entry, start, stop))

    def stream(self, entry: Entry) -> Iterator[bytes]:
        if entry.size:
            yield from self._body(entry, 0, entry.size)

    def _body(self, entry: Entry, start: int, stop: int) -> Iterator[bytes]:
        """Range ``start:stop``; a connection that breaks is continued where it broke."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        failures = 0
        while start < stop:
            try:
                body = self._client.get_object(
                    Bucket=self._bucket, Key=entry.name, Range=f"bytes={start}-{stop - 1}",
                    IfMatch=f'"{entry.version}"',
                )["Body"]  # fmt: skip
                for chunk in body.iter_chunks(CHUNK):
                    start += len(chunk)
                    yield chunk
            except (BotoCoreError, HTTPError, OSError) as error:
                failures += 1
                if failures > BODY_RETRIES:
                    raise DataError(
                        f"s3://{self._bucket}/{entry.name}: gave up at byte {start} after "
                        f"{failures} broken connections: {error}"
                    ) from None
                time.sleep(RETRY_SECONDS * 2**failures)
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code")
                problem = (
                    "changed while the run was reading it"
                    if code == "PreconditionFailed"
                    else f"cannot be read: {error}"
                )
                raise DataError(f"s3://{self._bucket}/{entry.name} {problem}") from None


def key_filter(pattern: str) -> tuple[str, Callable[[str], bool]]:
    """The prefix under which the keys of a prefix or glob lie, and which of those it means.

    A glob over keys means what it means on disk: only ``**`` crosses a slash. Keys of a prefix
    are all that begin with it.
    """
    prefix = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    if prefix == pattern:
        return prefix, lambda key: key.startswith(prefix)
    forms = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def form(piece: str) -> str:
        if some := re.fullmatch(r"\[(!?)([^]]+)\]", piece):
            inside = re.sub(r"([\\^[&~|])", r"\\\1", some[2])
            return f"(?!/)[{'^' if some[1] else ''}{inside}]"
        return forms.get(piece, re.escape(piece))

    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^]]+\])", pattern)
    matches = re.compile("".join(map(form, pieces)), re.DOTALL).fullmatch
    return prefix, lambda key: matches(key) is not None


def s3_client() -> Any:
    """An S3 client that retries throttling and server errors by botocore's standard mode."""
    import boto3
    from botocore.config import Config

    # Eight attempts with full jitter ride out S3's partition splits, which last about a minute.
    return boto3.client("s3", config=Config(retries={"mode": "standard", "max_attempts": 8}))


def content_hash(source: Source, entries: tuple[Entry, ...]) -> dict[str, Any]:
    """What identifies the content: ``method``, ``sha256``, ``objects``, ``bytes``.

    Local files are hashed over relative names and bytes. Objects with a version are hashed over
    names, sizes and versions, because reading a whole bucket to name it would cost a pass.
    """
    digest = hashlib.sha256()
    versioned = all(entry.version for entry in entries)
    for entry in entries:
        digest.update(f"{entry.name}\0{entry.size}\0{entry.version}\0".encode())
        if not versioned:
            for chunk in source.stream(entry):
                digest.update(chunk)
    return {
        "method": "names, sizes and entity tags" if versioned else "names and bytes",
        "sha256": digest.hexdigest(),
        "objects": len(entries),
        "bytes": sum(entry.size for entry in entries),
    }

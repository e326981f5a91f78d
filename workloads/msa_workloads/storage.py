"""Where checkpoints lie: a local or shared folder, or an S3 prefix, behind one interface.

Both offer the same promise: :meth:`Store.commit` makes a small file appear whole and durable, or
not at all, after everything written before it.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import unquote

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from msa_workloads.sources import s3_client

READ_AHEAD = 8 << 20
"""Bytes per ranged read of an S3 checkpoint; large enough that requests do not dominate."""

SPOOL = 64 << 20
"""Bytes of an S3 upload kept in memory before they move to a temporary file."""


class CommitConflict(RuntimeError):
    """Another writer committed the same checkpoint first."""


class Store(Protocol):
    """A place of checkpoints. Paths are relative, ``folder/file``."""

    uri: str

    def folders(self) -> list[str]:
        """All checkpoint folders, whole or not, sorted."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file in a folder; empty when there is none."""
        ...

    def read(self, path: str) -> bytes:
        """A small file; raises FileNotFoundError."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """A small file, durable on return."""
        ...

    def commit(self, path: str, data: bytes) -> None:
        """A small file that appears whole, durable and once: raises :class:`CommitConflict`."""
        ...

    def delete(self, folder: str, marker: str) -> None:
        """Remove a folder, its marker first, so that what is half deleted is not complete."""
        ...

    def writer(self, folder: str) -> StorageWriter: ...

    def reader(self, folder: str) -> StorageReader: ...


def open_store(uri: str) -> Store:
    """A store for ``s3://bucket/prefix``, ``file:///folder`` or a plain path."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return FolderStore(Path(uri))
    if scheme == "file":
        return FolderStore(Path(unquote(rest)))
    if scheme == "s3":
        return S3Store(uri)
    raise ValueError(f"checkpoint.uri: found {uri!r}, allowed: a folder, file:// or s3://")


class FolderStore:
    """Checkpoints in a folder on a disk that all ranks share."""

    def __init__(self, root: Path) -> None:
        self.uri = str(root)
        self._root = root

    def folders(self) -> list[str]:
        if not self._root.is_dir():
            return []
        return sorted(path.name for path in self._root.iterdir() if path.is_dir())

    def sizes(self, folder: str) -> dict[str, int]:
        path = self._root / folder
        if not path.is_dir():
            return {}
        return {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())

    def commit(self, path: str, data: bytes) -> None:
        file = self._root / path
        # The names of the data files must reach the disk before the marker that vouches for them.
        _sync_folder(file.parent)
        self.write(f"{path}.tmp", data)
        temporary = file.with_name(f"{file.name}.tmp")
        if file.exists():
            raise CommitConflict(f"{file} exists: another run writes checkpoints here")
        temporary.rename(file)
        _sync_folder(file.parent)
        _sync_folder(self._root)

    def delete(self, folder: str, marker: str) -> None:
        path = self._root / folder
        (path / marker).unlink(missing_ok=True)
        if path.is_dir():
            shutil.rmtree(path)

    def writer(self, folder: str) -> StorageWriter:
        return FileSystemWriter(self._root / folder)

    def reader(self, folder: str) -> StorageReader:
        return FileSystemReader(self._root / folder)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class S3Store:
    """Checkpoints under an S3 prefix, through boto3."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._files = _S3Files()
        self._bucket, _, self._prefix = self.uri.removeprefix("s3://").partition("/")
        if not self._bucket or not self._prefix:
            raise ValueError(f"checkpoint.uri: found {uri!r}, need s3://bucket/prefix")

    def folders(self) -> list[str]:
        pages = self._files.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}/", Delimiter="/"
        )
        prefixes = [p["Prefix"] for page in pages for p in page.get("CommonPrefixes", ())]
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes)

    def sizes(self, folder: str) -> dict[str, int]:
        prefix = f"{self._prefix}/{folder}/"
        pages = self._files.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix
        )
        items = [item for page in pages for item in page.get("Contents", ())]
        return {item["Key"].removeprefix(prefix): item["Size"] for item in items}

    def read(self, path: str) -> bytes:
        client = self._files.client
        try:
            return client.get_object(Bucket=self._bucket, Key=self._key(path))["Body"].read()
        except client.exceptions.NoSuchKey:
            raise FileNotFoundError(f"{self.uri}/{path}") from None

    def write(self, path: str, data: bytes) -> None:
        self._files.client.put_object(Bucket=self._bucket, Key=self._key(path), Body=data)

    def commit(self, path: str, data: bytes) -> None:
        from botocore.exceptions import ClientError

        try:
            self._files.client.put_object(
                Bucket=self._bucket, Key=self._key(path), Body=data, IfNoneMatch="*"
            )
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            if code in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise CommitConflict(
                    f"{self.uri}/{path} exists: another run writes checkpoints here"
                ) from None
            raise

    def delete(self, folder: str, marker: str) -> None:
        names = sorted(self.sizes(folder), key=lambda name: name != marker)
        for name in names:
            self._files.client.delete_object(
                Bucket=self._bucket, Key=self._key(f"{folder}/{name}")
            )

    def writer(self, folder: str) -> StorageWriter:
        writer = FileSystemWriter(".", sync_files=False)
        writer.fs = cast(Any, self._files)
        writer.path = cast(Any, f"{self.uri}/{folder}")
        return writer

    def reader(self, folder: str) -> StorageReader:
        reader = FileSystemReader(".")
        reader.fs = cast(Any, self._files)
        reader.path = cast(Any, f"{self.uri}/{folder}")
        return reader

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}"


class _S3Files(FileSystemBase):
    """The file operations that torch's checkpoint reader and writer ask for, on S3."""

    def __init__(self) -> None:
        self.client = s3_client()

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        bucket, key = _bucket_key(path)
        if mode == "rb":
            size = self.client.head_object(Bucket=bucket, Key=key)["ContentLength"]
            raw = _S3Reader(self.client, bucket, key, size)
            with io.BufferedReader(raw, READ_AHEAD) as stream:
                yield stream
            return
        spool = _Spool(SPOOL)
        try:
            yield cast(io.IOBase, spool)
            spool.seek(0)
            self.client.upload_fileobj(spool, bucket, key)
        finally:
            spool.discard()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        bucket, key = _bucket_key(path)
        self.client.copy({"Bucket": bucket, "Key": key}, *_bucket_key(new_path))
        self.client.delete_object(Bucket=bucket, Key=key)

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """S3 has no folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).startswith("s3://")

    def exists(self, path: str | os.PathLike[str]) -> bool:
        from botocore.exceptions import ClientError

        bucket, key = _bucket_key(path)
        try:
            self.client.head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") == "404":
                return False
            raise
        return True

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        bucket, key = _bucket_key(path)
        self.client.delete_object(Bucket=bucket, Key=key)


class _S3Reader(io.RawIOBase):
    """A seekable view of one object by ranged reads."""

    def __init__(self, client: Any, bucket: str, key: str, size: int) -> None:
        self._client, self._bucket, self._key = client, bucket, key
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._size, self._at + len(buffer))
        if stop <= self._at:
            return 0
        body = self._client.get_object(
            Bucket=self._bucket, Key=self._key, Range=f"bytes={self._at}-{stop - 1}"
        )["Body"].read()
        buffer[: len(body)] = body
        self._at += len(body)
        return len(body)


class _Spool(tempfile.SpooledTemporaryFile[bytes]):
    """A temporary file that outlives ``close``: torch closes what it wrote, boto3 what it sent."""

    def close(self) -> None:
        """Keep the content until :meth:`discard`."""

    def discard(self) -> None:
        """Close for good."""
        super().close()


def _bucket_key(path: str | os.PathLike[str]) -> tuple[str, str]:
    bucket, _, key = os.fspath(path).removeprefix("s3://").partition("/")
    return bucket, key

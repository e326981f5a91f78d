"""A place of checkpoints that takes no more is a reason of its own, with the way out.

PyTorch raises what went wrong on any rank as a ``CheckpointException``, which is no ``Exception``:
left alone it passes by everything that reports failures.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

FULL = {errno.ENOSPC, errno.EDQUOT}
LEAST = 1 << 20
"""Bytes; a disk on which a save failed and that has less is taken to be full."""

CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}


class StorageError(RuntimeError):
    """Nothing can be written where checkpoints go; another attempt would find it so too."""


@contextmanager
def checkpoint_errors(doing: str, uri: str) -> Iterator[None]:
    """What goes wrong while ``doing``, as an Exception that names the rank and the reason.

    Raises :class:`StorageError` for a full or closed ``uri``, RuntimeError for what PyTorch wraps.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, OSError) and cause.errno in FULL | CLOSED:
            raise StorageError(_way_out(doing, uri, cause)) from cause
        if _is_full(uri):
            raise StorageError(_way_out(doing, uri, OSError(errno.ENOSPC, ""))) from cause
        raise RuntimeError(f"{doing}: rank {rank}: {type(cause).__name__}: {cause}") from cause
    except OSError as error:
        if error.errno in FULL | CLOSED:
            raise StorageError(_way_out(doing, uri, error)) from error
        raise


def _is_full(uri: str) -> bool:
    """PyTorch's own writer says of a full disk only that it is not where it should be."""
    try:
        disk = os.statvfs(uri)
    except OSError:  # s3://, or gone
        return False
    return disk.f_bavail * disk.f_frsize < LEAST


def _way_out(doing: str, uri: str, error: OSError) -> str:
    number = error.errno or 0
    if number in CLOSED:
        return f"{doing}: {uri} cannot be written: {os.strerror(number)}"
    return (
        f"{doing}: {uri}: {os.strerror(number)}; make room, or keep fewer (checkpoint.keep), and "
        "resume from the checkpoint before it"
    )

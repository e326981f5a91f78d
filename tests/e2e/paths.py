"""Where the harness keeps what it builds and what it runs; nothing is written elsewhere."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = Path(__file__).resolve().parent / "tools"
MANIFESTS = Path(__file__).resolve().parent / "manifests"


class Unavailable(RuntimeError):
    """This machine cannot run what was asked for; the message says why and what would help."""


def cache() -> Path:
    """The cache folder: FLASH_MSA_CACHE, or flash-msa in the user's cache."""
    chosen = os.environ.get("FLASH_MSA_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser().resolve() / "flash-msa"


def fresh(folder: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds the lock of that name among all processes of this user; waits for its holder."""
    path = cache() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield

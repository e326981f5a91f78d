"""One process at a time works in a folder; the system ends a hold however its process ends."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from pathlib import Path
from typing import TextIO

LOCK = ".lock"
"""In a folder that is or was worked in. It stays: to remove it would let two in at once."""


class InUse(Exception):
    """Another process works in the folder; the message says which, as far as it is known."""


def take(folder: Path) -> TextIO:
    """Hold ``folder`` until the file that is returned is closed, or this process ends.

    Raises :class:`InUse`, and OSError where no file can be written or locked there.
    """
    lock = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        lock.write(f"process {os.getpid()} on {platform.node()} since {now}")
        lock.flush()
    except BlockingIOError:
        with lock:
            lock.seek(0)
            raise InUse(lock.read(200) or "another process") from None
    except OSError:
        lock.close()
        raise
    return lock

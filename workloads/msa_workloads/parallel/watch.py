"""Ranks watch each other: when one fails or vanishes, all end within a minute and say which.

A collective cannot be interrupted from Python, and NCCL notices a lost peer only by its timeout.
So every rank has a thread that beats in the group's store, watches the next rank's beat, and
reads whether anybody has failed. The first failure, with its traceback, is what all others show.
Each rank reads two keys a beat, whatever the number of ranks.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

import torch.distributed as dist

from msa_workloads.failures import lost_a_peer
from msa_workloads.logs import short_traceback

BEAT_SECONDS = 5.0
"""Between two looks: a failure is seen that late at most."""

SILENT_SECONDS = 40.0
"""A rank whose beat stands still for so long is gone or stopped. Its thread needs milliseconds of
a CPU, on machines as busy as any seen so far."""

GRACE_SECONDS = 5.0
"""Left to ranks that learn of a failure to end by an error of their own."""

DONE = "done"

_numbers = itertools.count()
"""Of the watches of this process: ranks make them in the same order, and each has its own keys."""


class Watch:
    """Use as a context manager around everything that ranks do together.

    A rank that leaves by an exception tells the others why. One that is still inside when it has
    learnt of another's failure writes that to stderr and ends its process with code 1.
    """

    def __init__(
        self, *, beat: float = BEAT_SECONDS, silent: float = SILENT_SECONDS,
        grace: float = GRACE_SECONDS,
    ) -> None:  # fmt: skip
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._prefix = f"watch/{next(_numbers)}"
        self._failed = f"{self._prefix}/failed"
        self._beat, self._silent, self._grace = beat, silent, grace
        self._store: Any = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._ranks > 1:
            # A connection of its own: the group's may be blocked in a wait for a key.
            shared: Any = dist.distributed_c10d._get_default_store()
            self._store = shared.clone()
            self._store.set(self._key(self._rank), "0")
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        where: TracebackType | None,
    ) -> None:  # fmt: skip
        del kind, where
        if self._ranks == 1:
            return
        self._left.set()
        self._thread.join(self._grace)
        try:
            if error is not None and not lost_a_peer(f"{type(error)}: {error}"):
                self._tell(f"rank {self._rank} failed:\n{short_traceback(error)}")
            self._store.set(self._key(self._rank), DONE)
        except (RuntimeError, OSError):
            # The store lives in rank 0's process or beside it; without it nobody can be told.
            return

    def _tell(self, text: str) -> None:
        """The first failure stays; what follows from it is not written over it."""
        self._store.compare_set(self._failed, "", text)

    def _watch(self) -> None:
        count = 0
        neighbour = (self._rank + 1) % self._ranks
        seen, changed = "", time.monotonic()
        while not self._left.wait(self._beat):
            count += 1
            try:
                self._store.set(self._key(self._rank), str(count))
                if self._store.check([self._key(neighbour)]):
                    now = self._store.get(self._key(neighbour)).decode()
                    if now != seen:
                        seen, changed = now, time.monotonic()
                silent = time.monotonic() - changed
                if seen != DONE and silent > self._silent:
                    self._tell(
                        f"rank {neighbour} has not answered for {silent:.0f} s: its process or "
                        "its machine is gone, or stopped"
                    )
                failed = self._store.check([self._failed])
                text = self._store.get(self._failed).decode() if failed else ""
            except (RuntimeError, OSError) as error:
                text = f"the group's store is gone, and with it the rank that kept it: {error}"
            if text:
                self._end(text)

    def _end(self, text: str) -> None:
        """End this process, unless it ends by an error of its own first."""
        if self._left.wait(self._grace):
            return
        print(f"rank {self._rank} ends, because {text}", file=sys.stderr, flush=True)
        os._exit(1)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/beat/{rank}"

"""Which of several failures a person should read: the cause, not what followed from it."""

from __future__ import annotations

import re

LOST_A_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|socket closed|broken pipe|remote process exited",
    re.IGNORECASE,
)
"""What gloo and NCCL say on ranks whose peer is gone."""


def headline(error: BaseException) -> str:
    """Type and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def lost_a_peer(text: str) -> bool:
    """Whether a failure only says that another rank is gone."""
    return LOST_A_PEER.search(text.splitlines()[0]) is not None


def reason(failures: dict[int, str], error: BaseException | None) -> str:
    """The failing rank's own traceback; what ranks say that only lost a peer comes last.

    ``failures`` are texts by rank, in the order in which they came; ``error`` is what Ray Train
    raised, which knows of ranks that could say nothing.
    """
    own = [text for text in failures.values() if not lost_a_peer(text)]
    if own:
        return own[0]
    dead = getattr(error, "worker_failures", None) or {}
    for rank, cause in dead.items():
        if rank not in failures:
            return f"rank {rank} ended without a Python error: {headline(cause)}"
    if failures:
        return next(iter(failures.values()))
    cause = getattr(error, "controller_failure", error)
    return headline(cause) if cause else "the workers returned no outcome"

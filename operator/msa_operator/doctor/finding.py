"""One thing that was looked at, how it is, and what to do when it is not as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failed", "unknown"]


@dataclass(frozen=True)
class Finding:
    """``failed`` stops something that a user wants; ``warning`` slows or limits it; ``unknown``
    could not be looked at, which is no fault."""

    check: str
    state: State
    found: str
    action: str = ""
    """What to do about it, in words that can be followed; given whenever the state is not ok."""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warning(check: str, found: str, action: str) -> Finding:
    return Finding(check, "warning", found, action)


def failed(check: str, found: str, action: str) -> Finding:
    return Finding(check, "failed", found, action)


def unknown(check: str, found: str, action: str) -> Finding:
    return Finding(check, "unknown", found, action)


def well(findings: Sequence[Finding]) -> bool:
    """Nothing failed."""
    return all(f.state != "failed" for f in findings)

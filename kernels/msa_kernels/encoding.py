"""Patterns as short text: what travels through an operator in a pattern's place.

Equal text for equal patterns. Short patterns are their canonical JSON. Long ones, block lists of
many rows, are the hash of it: operators copy text, and the pattern itself stays in this process.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from functools import lru_cache

from msa_kernels.pattern import Pattern, from_dict

LONG = 4096
"""Characters above which a pattern travels by its hash."""
KEPT = 256
"""Long patterns remembered, the last ones used."""


def encode(pattern: Pattern) -> str:
    """The text of ``pattern``; :func:`decode` reads it in this process."""
    text = _encode(pattern)
    if text.startswith(_HASH):
        _keep(text, pattern)
    return text


def decode(text: str) -> Pattern:
    """The pattern of a text; raises ValueError for a hash that this process does not know."""
    if not text.startswith(_HASH):
        return _decode(text)
    with _lock:
        pattern = _long.get(text)
    if pattern is None:
        raise ValueError(
            f"pattern {text} is not known here: encode it first in this process, and keep at most "
            f"{KEPT} long patterns in flight"
        )
    _keep(text, pattern)
    return pattern


@lru_cache(maxsize=256)
def _encode(pattern: Pattern) -> str:
    text = json.dumps(pattern.to_dict(), separators=(",", ":"), sort_keys=True)
    if len(text) <= LONG:
        return text
    return _HASH + hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=256)
def _decode(text: str) -> Pattern:
    return from_dict(json.loads(text))


def _keep(text: str, pattern: Pattern) -> None:
    with _lock:
        _long[text] = pattern
        _long.move_to_end(text)
        while len(_long) > KEPT:
            _long.popitem(last=False)


_HASH = "sha256:"
_long: OrderedDict[str, Pattern] = OrderedDict()
_lock = threading.Lock()

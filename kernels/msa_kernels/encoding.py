"""Patterns as short text: what travels through an operator in a pattern's place.

Equal text for equal patterns. Short patterns are their canonical JSON. Long ones, block lists of
many rows, are the hash of it: operators copy text, and the pattern itself stays in this process,
where :func:`decode` finds it while anybody holds it: a gradient that is due does, and a compiled
graph. The last :data:`KEPT` are held here.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from functools import lru_cache

from msa_kernels.pattern import Pattern, from_dict

LONG = 4096
"""Characters above which a pattern travels by its hash."""
KEPT = 256
"""Long patterns held, the last ones used."""


def encode(pattern: Pattern) -> str:
    """The text of ``pattern``; :func:`decode` reads it in this process."""
    text = _encode(pattern)
    if text.startswith(_HASH):
        with _lock:
            # Of equal patterns the one that is known stays: others may hold it and wait.
            _hold(text, _long.setdefault(text, pattern))
    return text


def decode(text: str) -> Pattern:
    """The pattern of a text; raises ValueError for a hash that this process does not know."""
    if not text.startswith(_HASH):
        return _decode(text)
    with _lock:
        pattern = _long.get(text)
        if pattern is None:
            raise ValueError(
                f"pattern {text} is not known in this process, and its text does not say what it "
                "is: a graph that holds it works where it was traced"
            )
        _hold(text, pattern)
    return pattern


def pin(text: str) -> None:
    """Hold the pattern of a text for as long as the process lives: a compiled graph may."""
    if text.startswith(_HASH):
        pattern = decode(text)
        with _lock:
            _pinned[text] = pattern


@lru_cache(maxsize=256)
def _encode(pattern: Pattern) -> str:
    text = json.dumps(pattern.to_dict(), separators=(",", ":"), sort_keys=True)
    if len(text) <= LONG:
        return text
    return _HASH + hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=256)
def _decode(text: str) -> Pattern:
    return from_dict(json.loads(text))


def _hold(text: str, pattern: Pattern) -> None:
    _recent[text] = pattern
    _recent.move_to_end(text)
    while len(_recent) > KEPT:
        _recent.popitem(last=False)


_HASH = "sha256:"
_long: weakref.WeakValueDictionary[str, Pattern] = weakref.WeakValueDictionary()
_recent: OrderedDict[str, Pattern] = OrderedDict()
_pinned: dict[str, Pattern] = {}
_lock = threading.Lock()

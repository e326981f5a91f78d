"""Results remembered by identity of the argument: where a hash would cost as much as the work."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

A = TypeVar("A")
T = TypeVar("T")


def by_identity(kept: int) -> Callable[[Callable[[A], T]], Callable[[A], T]]:
    """Remembers the last ``kept`` results of a function of one argument, which stays alive with
    its result and must not change."""

    def decorate(function: Callable[[A], T]) -> Callable[[A], T]:
        results: OrderedDict[int, tuple[A, Any]] = OrderedDict()
        lock = threading.Lock()

        @functools.wraps(function)
        def remembered(argument: A) -> T:
            with lock:
                found = results.get(id(argument))
                if found is not None:
                    results.move_to_end(id(argument))
                    return found[1]
            value = function(argument)
            with lock:
                results[id(argument)] = argument, value
                while len(results) > kept:
                    results.popitem(last=False)
            return value

        return remembered

    return decorate

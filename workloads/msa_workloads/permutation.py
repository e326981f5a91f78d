"""Permutations that need no state: element ``k`` of a shuffle is computed, not looked up.

A balanced Feistel network over the next even power of two, walked until it lands inside the
range, is a bijection of ``range(n)`` for any key (Black and Rogaway, 2002, "Ciphers with
arbitrary finite domains"). Any rank can thus start at any sample of any epoch.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6
"""Four rounds already pass as random to the eye; six cost nothing beside reading a sample."""

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """The finaliser of SplitMix64: a fixed bijection of 64-bit integers that looks random."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """One 64-bit key out of several integers, order included."""
    value = 0
    for part in parts:
        value = mix(value ^ (part & _MASK))
    return value


def permute(index: int, n: int, seed: int) -> int:
    """Where ``index`` of ``range(n)`` goes under the permutation that ``seed`` names."""
    if not 0 <= index < n:
        raise IndexError(f"{index} is not in range({n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for step in range(ROUNDS):
            left, right = right, left ^ (mix(seed ^ (step << 56) ^ right) & low)
        index = left << half | right
        if index < n:
            return index


def shuffled(keys: np.ndarray, seed: int) -> np.ndarray:
    """Indices that put ``keys`` (uint64) in an order that depends on keys and ``seed`` only."""
    with np.errstate(over="ignore"):
        value = (keys ^ np.uint64(mix(seed))) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value ^= value >> np.uint64(31)
    return np.argsort(value, kind="stable")

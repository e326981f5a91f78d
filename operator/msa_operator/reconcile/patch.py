"""Merging a podPatch: mappings by key, lists of named things by name, null removes."""

from __future__ import annotations

import copy
from typing import Any

_KEYS = {
    "containers": "name", "initContainers": "name", "env": "name", "volumes": "name",
    "volumeMounts": "mountPath", "imagePullSecrets": "name", "ports": "containerPort",
}  # fmt: skip
"""Lists that a pod template merges by a key; every other list is replaced whole."""


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """``base`` changed by ``patch``, as Kubernetes merges pod templates; neither is touched."""
    if isinstance(base, dict) and isinstance(patch, dict):
        out = dict(base)
        for key, value in patch.items():
            if value is None:
                out.pop(key, None)
            else:
                out[key] = merge(out.get(key), value, key)
        return out
    key = _KEYS.get(field)
    if key is not None and isinstance(base, list) and isinstance(patch, list):
        return _by_key(base, patch, key)
    if isinstance(patch, dict):
        return merge({}, patch)
    return copy.deepcopy(patch)


def _by_key(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    out = list(base)
    at = {item.get(key): n for n, item in enumerate(out) if isinstance(item, dict)}
    for item in patch:
        found = at.get(item.get(key)) if isinstance(item, dict) else None
        if found is None:
            out.append(copy.deepcopy(item))
        else:
            out[found] = merge(out[found], item)
    return out

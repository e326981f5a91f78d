"""Descriptions: patterns as the mappings of job files, read with the path of every fault.

The other way around is :meth:`msa_kernels.pattern.Pattern.to_dict`. A description names its kind
as ``type`` and has the fields of that kind's constructor; the shorthands Strided and Fixed are
written like kinds. Values are checked by the constructors, whose errors gain the path from the top
of the description.

Pure Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from msa_kernels.pattern import KINDS, SHORTHANDS, Pattern, PatternError


def read(raw: object, path: str = "") -> Pattern:
    """What :func:`msa_kernels.pattern.from_dict` says."""
    if not isinstance(raw, Mapping):
        raise PatternError(path, f"must be a mapping with a type, found {raw!r}")
    name = raw.get("type")
    build = KINDS.get(str(name)) or SHORTHANDS.get(str(name))
    if build is None:
        known = ", ".join(sorted((*KINDS.keys() - {"Limited"}, *SHORTHANDS)))
        raise PatternError(_join(path, "type"), f"found {name!r}, allowed: {known}")
    known_fields = _FIELDS[str(name)]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key == "type":
            continue
        if key not in known_fields:
            raise PatternError(
                _join(path, str(key)),
                f"{name} has no such field; it has {', '.join(known_fields)}",
            )
        values[key] = _read(key, value, _join(path, key))
    for key, required in known_fields.items():
        if required and key not in values:
            raise PatternError(_join(path, key), f"{name} needs it")
    try:
        return build(**values)
    except PatternError as error:
        raise PatternError(_join(path, error.path), error.problem) from None


def _read(key: str, value: Any, path: str) -> Any:
    if key == "members":
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise PatternError(path, f"must be a list of patterns, found {value!r}")
        return tuple(read(v, f"{path}[{n}]") for n, v in enumerate(value))
    if key == "pattern":
        return read(value, path)
    if key == "rows":
        if not isinstance(value, Sequence) or not all(isinstance(r, Sequence) for r in value):
            raise PatternError(path, f"must be a list of lists of block numbers, found {value!r}")
        return tuple(tuple(row) for row in value)
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


_FIELDS: dict[str, dict[str, bool]] = {
    name: {f.name: f.name not in ("causal",) and (name, f.name) != ("Dilated", "window")
           for f in fields(kind)}
    for name, kind in KINDS.items()
} | {
    "Strided": {"length": True, "heads": False},
    "Fixed": {"length": True, "columns": True, "heads": False},
}  # fmt: skip

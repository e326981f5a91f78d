"""``spec.attention.pattern``: read by the kernels' own reader, described to the API server.

A custom resource's schema cannot recurse, so nesting is written out to the depth that patterns
have: PerHead holds Unions or leaves, a Union holds leaves, and every level is one flat object
told apart by ``type``, with a CEL rule per type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msa_kernels.pattern import KINDS, SHORTHANDS, Pattern, PatternError, from_dict

from msa_operator.api.problems import closest, show, split
from msa_operator.api.schema import Bool, Choice, Each, Fault, Int, Marker

POSITIONS = 1 << 40
"""Far beyond any sequence; keeps products of two such numbers inside 64 bits in CEL's sums."""

_FIELDS: dict[str, Marker] = {
    "window": Int(1, POSITIONS),
    "sinks": Int(0, POSITIONS),
    "rate": Int(1, 1 << 20),
    "length": Int(1, POSITIONS),
    "columns": Int(1, POSITIONS),
    "block": Int(1, 1 << 20),
    "topk": Int(1, 1 << 20),
    "causal": Bool(),
    "heads": Choice(("split", "union")),
    "rows": Each(Each(Int(0, 1 << 20), 8192), 8192),
}
# Required and optional fields of each type, as the kernels' constructors have them.
_SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Dense": ((), ("causal",)),
    "Window": (("window",), ("causal",)),
    "Dilated": (("rate",), ("window",)),
    "Block": (("length",), ()),
    "Columns": (("length", "columns"), ()),
    "SinkWindow": (("window", "sinks"), ()),
    "BlockList": (("block", "rows"), ("causal",)),
    "BlockTopK": (("block", "topk"), ()),
    "Strided": (("length",), ("heads",)),
    "Fixed": (("length", "columns"), ("heads",)),
    "Union": (("members",), ()),
    "PerHead": (("members",), ()),
}
_LEAVES = ("Dense", "Window", "Dilated", "Block", "Columns", "SinkWindow", "BlockList")
_IN_UNION = _LEAVES
_IN_PERHEAD = (*_LEAVES, "BlockTopK", "Union")
_TOP = (*_LEAVES, "BlockTopK", "Strided", "Fixed", "Union", "PerHead")
_MEMBERS = {"Union": (16, _IN_UNION), "PerHead": (64, _IN_PERHEAD)}
TYPES = _TOP


@dataclass(frozen=True)
class PatternField(Marker):
    """Reads a pattern; the value is a :class:`msa_kernels.pattern.Pattern`."""

    def read(self, value: Any) -> Pattern:
        if isinstance(value, Pattern):
            return value
        if faults := self.faults(value):
            raise faults[0]
        return from_dict(value)

    def faults(self, value: Any) -> list[Fault]:
        """Everything that is wrong with ``value``, members included."""
        faults = list(_faults(value, "", _TOP))
        if faults:
            return faults
        try:
            causal = from_dict(value).causal
        except PatternError as error:
            found, allowed = show(_at(value, error.path)), error.problem.split(", found")[0]
            return [Fault(f"found {found}", allowed, path=f".{error.path}")]
        if not causal:
            return [Fault(
                "found a pattern in which tokens see later ones",
                "causal patterns: training predicts the next token, which must stay unseen",
                "causal: true", ".causal",
            )]  # fmt: skip
        return []

    def plain(self, value: Pattern) -> Any:
        return value.to_dict()

    def openapi(self) -> dict[str, Any]:
        return _level(_TOP, _level(_IN_PERHEAD, _level(_IN_UNION, None)))


def _faults(value: Any, path: str, types: tuple[str, ...]) -> Iterator[Fault]:
    if not isinstance(value, dict):
        name = closest(value, types)
        nearest = f"{{type: {name}}}" if name else ""
        yield Fault(f"found {show(value)}", "a mapping with a type", nearest, path)
        return
    name = value.get("type")
    if name not in types:
        found = "is missing" if name is None else f"found {show(name)}"
        if name in TYPES:
            found += ", which cannot stand inside another pattern here"
        nearest = "" if name in TYPES else closest(name, types)
        yield Fault(found, ", ".join(types), nearest, f"{path}.type")
        return
    required, optional = _SHAPES[name]
    known = (*required, *optional)
    for key, inner in value.items():
        at = f"{path}.{key}"
        if key == "type":
            continue
        if key not in known:
            allowed = ", ".join(known) or "no field beside type"
            yield Fault(f"{name} has no such field", allowed, closest(key, known), at)
        elif key == "members":
            yield from _member_faults(name, inner, at)
        else:
            try:
                _FIELDS[key].read(inner)
            except Fault as fault:
                yield Fault(fault.found, fault.allowed, fault.nearest, at + fault.path)
    for key in required:
        if key not in value:
            yield Fault(
                "is missing", f"{name} needs {' and '.join(required)}", path=f"{path}.{key}"
            )


def _member_faults(name: str, value: Any, path: str) -> Iterator[Fault]:
    most, types = _MEMBERS[name]
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        found = f"{len(value)} entries" if isinstance(value, list) else show(value)
        yield Fault(f"found {found}", f"a list of 1 to {most} patterns", path=path)
        return
    for n, member in enumerate(value):
        yield from _faults(member, f"{path}[{n}]", types)


def _at(value: Any, path: str) -> Any:
    for part in split(path):
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            break
    return value


def _level(types: tuple[str, ...], members: dict[str, Any] | None) -> dict[str, Any]:
    """One flat object for ``types``; ``members`` is the schema of a member, or None."""
    names: list[str] = []
    for name in types:
        names += [f for f in (*_SHAPES[name][0], *_SHAPES[name][1]) if f not in names]
    properties: dict[str, Any] = {"type": {"type": "string", "enum": list(types)}}
    properties |= {name: _FIELDS[name].openapi() for name in names if name != "members"}
    if members is not None:
        most = max(_MEMBERS[name][0] for name in types if name in _MEMBERS)
        properties["members"] = {
            "type": "array",
            "minItems": 1,
            "maxItems": most,
            "x-kubernetes-list-type": "atomic",
            "items": members,
        }
    rules = [_shape_rule(name, names) for name in types]
    if "causal" in properties:
        rules.append({
            "rule": "!has(self.causal) || self.causal",
            "message": "training predicts the next token: a pattern must not see later tokens",
            "fieldPath": ".causal",
        })  # fmt: skip
    if "columns" in properties:
        rules.append({
            "rule": "!has(self.columns) || !has(self.length) || self.columns <= self.length",
            "message": "columns must be at most length",
            "fieldPath": ".columns",
        })  # fmt: skip
    if "PerHead" in types:
        rules.append({
            "rule": "self.type != 'Union' || !has(self.members) || "
            "(size(self.members) <= 16 && self.members.all(m, m.type != 'Union' && "
            "m.type != 'BlockTopK'))",
            "message": "a Union holds up to 16 patterns that are neither Union nor BlockTopK",
        })  # fmt: skip
    return {
        "type": "object",
        "required": ["type"],
        "properties": properties,
        "x-kubernetes-validations": rules,
    }


def _shape_rule(name: str, fields: list[str]) -> dict[str, str]:
    required, optional = _SHAPES[name]
    terms = [f"has(self.{f})" for f in required]
    terms += [f"!has(self.{f})" for f in fields if f not in required and f not in optional]
    needs = f"needs {' and '.join(required)}" if required else "needs nothing more"
    may = f", may have {' and '.join(optional)}" if optional else ""
    return {
        "rule": f"self.type != '{name}' || ({' && '.join(terms) or 'true'})",
        "message": f"{name} {needs}{may}, and has no other field",
    }


# A kind added to the kernels must be described here before it can be used in a job.
assert set(_SHAPES) == (KINDS.keys() - {"Limited"}) | SHORTHANDS.keys()

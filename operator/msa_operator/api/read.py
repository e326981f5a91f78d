"""Reading an object of the custom resources: every problem at once, each with its place.

pydantic's own errors name neither lines nor what would have been right, and a model whose field
is wrong is never checked as a whole. So the walk is ours, over pydantic's models: leaves are read
by their markers, rules run on whatever could be read, and the model is built when all is well.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from msa_operator.api.pattern import PatternField
from msa_operator.api.problems import Problem, closest, join, show
from msa_operator.api.schema import Fault, Marker, Model

Path = tuple[str | int, ...]
M = TypeVar("M", bound=Model)


class _Unknown(Exception):
    """A rule reads a field that is itself wrong."""


class Partial:
    """The fields of an object that could be read; asking for another skips the rule."""

    def __init__(self, kind: type[Model], values: dict[str, Any]) -> None:
        self._kind = kind
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        if name in self._kind.model_fields:
            raise _Unknown(name)
        inherited = getattr(self._kind, name)
        if isinstance(inherited, property) and inherited.fget is not None:
            return inherited.fget(self)
        return inherited


@dataclass
class Reader:
    """Reads one document; ``where`` gives the text for a path, such as ``job.yaml:12``."""

    where: Callable[[Path], str]
    problems: list[Problem] = field(default_factory=list)

    def read(self, kind: type[M], raw: Any) -> M | None:
        """The object, or None when :attr:`problems` has grown."""
        before = len(self.problems)
        self._object(kind, raw, ())
        return kind.model_validate(_prune(kind, raw)) if len(self.problems) == before else None

    def add(self, path: Path, found: str, allowed: str = "", nearest: str = "") -> None:
        self.problems.append(Problem(join(path), found, allowed, nearest, self.where(path)))

    def _object(self, kind: type[Model], raw: Any, path: Path) -> Partial:
        if not isinstance(raw, dict):
            known = ", ".join(_aliases(kind))
            self.add(path, f"found {show(raw)}", f"a mapping with {known}")
            return Partial(kind, {})
        aliases = _aliases(kind)
        if kind.model_config.get("extra") == "forbid":
            for key in raw:
                if key not in aliases:
                    self._unknown(kind, aliases, key, path)
        values: dict[str, Any] = {}
        for alias, (name, info) in aliases.items():
            if raw.get(alias) is None:
                if info.is_required():
                    self.add((*path, alias), "is missing", _help(info))
                else:
                    values[name] = self._default(info, (*path, alias))
            else:
                self._field(info, name, raw[alias], (*path, alias), values)
        partial = Partial(kind, values)
        self._rules(kind, partial, path)
        return partial

    def _default(self, info: FieldInfo, path: Path) -> Any:
        value = info.get_default(call_default_factory=True)
        return self._object(type(value), {}, path) if isinstance(value, Model) else value

    def _field(
        self, info: FieldInfo, name: str, raw: Any, path: Path, values: dict[str, Any]
    ) -> None:
        model, many = model_of(info)
        if model is not None and many:
            most = max_length(info)
            if not isinstance(raw, list):
                self.add(path, f"found {show(raw)}", "a list")
            elif len(raw) > most:
                self.add(path, f"found {len(raw)} entries", f"at most {most}")
            else:
                values[name] = [self._object(model, r, (*path, n)) for n, r in enumerate(raw)]
        elif model is not None:
            values[name] = self._object(model, raw, path)
        else:
            for fault in self._leaf(marker_of(info), raw, name, values):
                where = self.where(_deep(path, fault))
                at = join(path) + fault.path
                self.problems.append(Problem(at, fault.found, fault.allowed, fault.nearest, where))

    def _leaf(
        self, marker: Marker, raw: Any, name: str, values: dict[str, Any]
    ) -> Iterator[Fault]:
        if isinstance(marker, PatternField) and (faults := marker.faults(raw)):
            yield from faults
            return
        try:
            values[name] = marker.read(raw)
        except Fault as fault:
            yield fault

    def _unknown(self, kind: type[Model], known: dict[str, Any], key: str, path: Path) -> None:
        nearest = closest(key, known)
        if not nearest:
            found = list(_elsewhere(kind, key, path))
            nearest = next((p for p in found if p.endswith(f".{key}")), found[0] if found else "")
        self.add((*path, key), "unknown field", ", ".join(known), nearest)

    def _rules(self, kind: type[Model], partial: Partial, path: Path) -> None:
        for rule in kind.rules:
            if rule.holds is None:
                continue
            try:
                if rule.holds(partial):
                    continue
                found = rule.found(partial) if rule.found else "does not hold"
                nearest = rule.nearest(partial) if rule.nearest else ""
            except _Unknown:
                continue
            at = (*path, *rule.field.split(".")) if rule.field else path
            self.add(at, found, rule.message, nearest)


def marker_of(info: FieldInfo) -> Marker:
    """The marker that a leaf field carries."""
    for item in info.metadata:
        if isinstance(item, Marker):
            return item
    for argument in typing.get_args(info.annotation):
        for item in getattr(argument, "__metadata__", ()):
            if isinstance(item, Marker):
                return item
    raise TypeError(f"field {info.alias} carries no marker")


def model_of(info: FieldInfo) -> tuple[type[Model] | None, bool]:
    """The model that a field holds, if it does, and whether it holds a list of them."""
    kind = info.annotation
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return (item, True) if isinstance(item, type) and issubclass(item, Model) else (None, True)
    if isinstance(kind, type) and issubclass(kind, Model):
        return kind, False
    return None, False


def max_length(info: FieldInfo) -> int:
    """Most entries of a list of models."""
    return next(m.max_length for m in info.metadata if hasattr(m, "max_length"))


def _aliases(kind: type[Model]) -> dict[str, tuple[str, FieldInfo]]:
    return {info.alias or name: (name, info) for name, info in kind.model_fields.items()}


def _help(info: FieldInfo) -> str:
    model, _ = model_of(info)
    if model is not None:
        return f"a mapping with {', '.join(_aliases(model))}"
    try:
        marker_of(info).read(None)
    except Fault as fault:
        return fault.allowed
    return ""


def _deep(path: Path, fault: Fault) -> Path:
    deep = list(path)
    for piece in fault.path.replace("[", ".[").split("."):
        if piece:
            deep.append(int(piece[1:-1]) if piece.startswith("[") else piece)
    return tuple(deep)


def _elsewhere(kind: type[Model], key: str, path: Path) -> Iterator[str]:
    """Paths below ``kind`` where a field of this name does exist."""
    for alias, (_, info) in _aliases(kind).items():
        model, many = model_of(info)
        if model is None or many or alias in ("status", "metadata"):
            continue
        if meant := closest(key, _aliases(model)):
            yield join((*path, alias, meant))
        yield from _elsewhere(model, key, (*path, alias))


def _prune(kind: type[Model], raw: Any) -> Any:
    """``raw`` without nulls, which mean "not given" as they do on an API server."""
    clean: dict[str, Any] = {}
    aliases = _aliases(kind)
    for key, value in raw.items():
        if value is None:
            continue
        model, many = model_of(aliases[key][1]) if key in aliases else (None, False)
        if model is not None:
            value = [_prune(model, v) for v in value] if many else _prune(model, value)
        clean[key] = value
    return clean

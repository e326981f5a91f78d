"""The building blocks of the custom resources' types.

A leaf's annotation carries one marker that both reads a value (and says what would have been
right) and knows its part of the custom resource's OpenAPI schema, so the two cannot drift apart.
A :class:`Rule` states, once in Python and once in CEL, what one field cannot say alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

from msa_operator.api.problems import closest, show

WHOLE = (1 << 53) - 1
"""Largest integer that JSON readers which compute in doubles keep exact, the API server's own
check of bounds among them."""


class Fault(ValueError):
    """A value that does not fit: what it is, what fits, and the nearest that does."""

    def __init__(self, found: str, allowed: str, nearest: str = "", path: str = "") -> None:
        super().__init__(f"{found}; allowed: {allowed}")
        self.found = found
        self.allowed = allowed
        self.nearest = nearest
        self.path = path
        """Where inside the value, when the value has an inside."""


class Marker:
    """Reads one kind of leaf. Subclasses are frozen dataclasses."""

    def read(self, value: Any) -> Any:
        """The value as the type holds it; raises :class:`Fault`."""
        raise NotImplementedError

    def openapi(self) -> dict[str, Any]:
        """This leaf's structural schema."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        del source, handler
        return core_schema.no_info_plain_validator_function(
            self.read, serialization=core_schema.plain_serializer_function_ser_schema(self.plain)
        )

    def plain(self, value: Any) -> Any:
        """The value as JSON holds it."""
        return value


@dataclass(frozen=True)
class Bool(Marker):
    def read(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        meant = {"on": "true", "yes": "true", "true": "true", "1": "true", "y": "true"}
        meant |= {"off": "false", "no": "false", "false": "false", "0": "false", "n": "false"}
        raise Fault(
            f"found {show(value)}", "true or false", meant.get(str(value).strip().lower(), "")
        )

    def openapi(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Int(Marker):
    """An integer from ``lo`` to ``hi``, both included."""

    lo: int
    hi: int = WHOLE

    def read(self, value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and self.lo <= value <= self.hi:
            return value
        raise Fault(f"found {show(value)}", f"an integer {self._range()}", self._nearest(value))

    def _range(self) -> str:
        return f"from {self.lo} to {self.hi}" if self.hi < WHOLE else f"of at least {self.lo}"

    def _nearest(self, value: Any) -> str:
        if isinstance(value, str):
            match = re.fullmatch(r"\s*([-+]?[0-9][0-9_,]*)\s*(k|m|ki|mi)?\s*", value.lower())
            if match is None:
                return ""
            scale = {"": 1, "k": 1000, "ki": 1024, "m": 10**6, "mi": 1 << 20}[match[2] or ""]
            value = int(re.sub("[_,]", "", match[1])) * scale
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ""
        if not math.isfinite(value):
            return ""
        return str(min(max(round(value), self.lo), self.hi))

    def openapi(self) -> dict[str, Any]:
        return {"type": "integer", "format": "int64", "minimum": self.lo, "maximum": self.hi}


@dataclass(frozen=True)
class Number(Marker):
    """A finite number from ``lo`` to ``hi``; ``above`` excludes ``lo`` itself."""

    lo: float
    hi: float
    above: bool = False

    def read(self, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            number
            and math.isfinite(value)
            and self.lo <= value <= self.hi
            and not (self.above and value == self.lo)
        ):
            return float(value)
        low = "above" if self.above else "from"
        raise Fault(
            f"found {show(value)}", f"a number {low} {self.lo:g} to {self.hi:g}",
            self._nearest(value),
        )  # fmt: skip

    def _nearest(self, value: Any) -> str:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return ""
        if isinstance(value, bool) or math.isnan(number):
            return ""
        number = min(max(number, self.lo), self.hi)
        return "" if self.above and number == self.lo else f"{number:g}"

    def openapi(self) -> dict[str, Any]:
        schema = {"type": "number", "minimum": self.lo, "maximum": self.hi}
        return schema | {"exclusiveMinimum": True} if self.above else schema


@dataclass(frozen=True)
class Text(Marker):
    """Text of ``shortest`` to ``longest`` characters that ``pattern`` matches."""

    longest: int = 253
    pattern: str = ""
    help: str = ""
    nearest: Callable[[Any], str] | None = None
    shortest: int = 0

    def read(self, value: Any) -> str:
        fits = isinstance(value, str) and self.shortest <= len(value) <= self.longest
        if fits and (not self.pattern or re.fullmatch(self.pattern, value)):
            return value
        allowed = self.help or "text"
        if isinstance(value, str) and len(value) > self.longest:
            raise Fault(
                f"found {len(value)} characters ({show(value, 40)})",
                f"{allowed}, at most {self.longest} characters",
                self._suggest(value),
            )
        raise Fault(f"found {show(value)}", allowed, self._suggest(value))

    def _suggest(self, value: Any) -> str:
        if self.nearest is not None:
            nearest = self.nearest(value)
            fits = self.shortest <= len(nearest) <= self.longest
            return nearest if fits and re.fullmatch(self.pattern, nearest) else ""
        if isinstance(value, bool | int | float) and not self.pattern:
            return f'"{show(value)}"'
        return ""

    def openapi(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string", "maxLength": self.longest}
        if self.shortest:
            schema["minLength"] = self.shortest
        if self.pattern:
            schema["pattern"] = self.pattern
        return schema


@dataclass(frozen=True)
class Choice(Marker):
    """One of a few words, spelled exactly."""

    words: tuple[str, ...]

    def read(self, value: Any) -> str:
        if isinstance(value, str) and value in self.words:
            return value
        raise Fault(f"found {show(value)}", ", ".join(self.words), closest(value, self.words))

    def openapi(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True)
class Each(Marker):
    """A list of up to ``most`` leaves, without repeats where ``unique``."""

    item: Marker
    most: int
    unique: bool = False

    def read(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise Fault(f"found {show(value)}", "a list", f"[{show(value)}]")
        if len(value) > self.most:
            raise Fault(f"found {len(value)} entries", f"at most {self.most}")
        items: list[Any] = []
        for n, raw in enumerate(value):
            try:
                item = self.item.read(raw)
            except Fault as fault:
                raise Fault(fault.found, fault.allowed, fault.nearest, f"[{n}]") from None
            if self.unique and item in items:
                raise Fault(f"found {show(raw)} twice", "each value once", path=f"[{n}]")
            items.append(item)
        return tuple(items)

    def openapi(self) -> dict[str, Any]:
        schema = {"type": "array", "maxItems": self.most, "items": self.item.openapi()}
        return schema | {"x-kubernetes-list-type": "set" if self.unique else "atomic"}

    def plain(self, value: Any) -> Any:
        return [self.item.plain(item) for item in value]


@dataclass(frozen=True)
class Map(Marker):
    """Text to text, up to ``most`` entries."""

    most: int = 64
    longest: int = 253

    def read(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise Fault(f"found {show(value)}", "a mapping of text to text")
        if len(value) > self.most:
            raise Fault(f"found {len(value)} entries", f"at most {self.most}")
        for key, item in value.items():
            if not isinstance(item, str) or len(item) > self.longest:
                nearest = f'"{show(item)}"' if isinstance(item, bool | int | float) else ""
                raise Fault(f"found {show(item)}", "text", nearest, f".{key}")
        return dict(value)

    def openapi(self) -> dict[str, Any]:
        values = {"type": "string", "maxLength": self.longest}
        return {"type": "object", "maxProperties": self.most, "additionalProperties": values}


@dataclass(frozen=True)
class Opaque(Marker):
    """A mapping that is handed on as it is; something else owns its schema."""

    def read(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Fault(f"found {show(value)}", "a mapping")
        return value

    def openapi(self) -> dict[str, Any]:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


@dataclass(frozen=True)
class Rule:
    """What one field cannot say alone, for the API server (``cel``) and for us (``holds``).

    ``holds`` may touch fields that are themselves wrong; it is then skipped, not failed.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None
    """None for a transition rule, which needs the old object: only the API server has it."""
    field: str = ""
    """Path below the rule's own object that a person would edit."""
    found: Callable[[Any], str] | None = None
    nearest: Callable[[Any], str] | None = None

    def openapi(self) -> dict[str, Any]:
        rule: dict[str, Any] = {"rule": self.cel, "message": self.message}
        return rule | {"fieldPath": f".{self.field}"} if self.field else rule


class Model(BaseModel):
    """Base of every object of the custom resources: frozen, camelCase outside, closed."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

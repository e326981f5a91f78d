"""Problems: what is wrong with an input, where, and the nearest thing that works."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Problem:
    """One fault of one input, complete enough to be mended without reading documentation."""

    path: str
    """Where in the document: ``spec.attention.pattern.window``."""
    found: str
    allowed: str = ""
    nearest: str = ""
    """The closest valid value, ready to be typed; empty when there is none."""
    where: str = ""
    """``job.yaml:12``, or the flag that set the value."""

    def __str__(self) -> str:
        text = f"{self.where}: " if self.where else ""
        text += f"{self.path}: {self.found}" if self.path else self.found
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.nearest:
            text += f"; nearest: {self.nearest}"
        return text


class JobError(ValueError):
    """An input that cannot be used. ``problems`` holds every fault found, in file order."""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__("\n".join(map(str, self.problems)))

    def to_json(self) -> str:
        return json.dumps({"problems": [asdict(p) for p in self.problems]}, indent=2)


def show(value: Any, limit: int = 60) -> str:
    """A found value as the file would write it, cut to ``limit`` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


SHORTEST = 3
"""Characters from which a piece of one known word alone stands for it: fp8 for triton-fp8."""


def closest(word: object, known: Iterable[str]) -> str:
    """The known word that was most likely meant, or an empty string."""
    text = str(word)
    by_fold = {k.casefold().replace("_", "").replace("-", ""): k for k in known}
    folded = text.casefold().replace("_", "").replace("-", "")
    found = difflib.get_close_matches(folded, by_fold, n=1, cutoff=0.6)
    if not found and len(folded) >= SHORTEST:
        inside = [k for k in by_fold if folded in k]
        found = inside if len(inside) == 1 else []
    return by_fold[found[0]] if found else ""


def join(path: Iterable[str | int]) -> str:
    """``("spec", "volumes", 0)`` as ``spec.volumes[0]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def split(path: str) -> tuple[str | int, ...]:
    """The reverse of :func:`join`; raises :class:`ValueError` when it is not a path."""
    parts: list[str | int] = []
    for piece in path.split("."):
        name, *indices = piece.split("[")
        if name:
            parts.append(name)
        elif not indices or not parts:
            raise ValueError(f"{path!r} is not a path such as training.maxSteps or env[0].name")
        for index in indices:
            if not index.endswith("]") or not index[:-1].isdecimal():
                raise ValueError(f"{path!r}: an index is written [0]")
            parts.append(int(index[:-1]))
    return tuple(parts)

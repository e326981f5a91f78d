"""Which degrees of parallelism a model, a length and a machine admit, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from msa_workloads import heads

from msa_operator.planner.modelspec import ModelShape


@dataclass(frozen=True)
class Refusal:
    """A field of the job that makes every plan impossible, with what would be possible."""

    field: str
    """Path below ``spec``."""
    found: str
    allowed: str
    nearest: str = ""

    def __str__(self) -> str:
        nearest = f"; nearest: {self.nearest}" if self.nearest else ""
        return f"{self.field}: {self.found}; allowed: {self.allowed}{nearest}"


class PlanError(ValueError):
    """No plan exists. ``refusals`` name the fields to change, ``rejected`` what was tried."""

    def __init__(self, refusals: tuple[Refusal, ...], rejected: tuple[str, ...] = ()) -> None:
        super().__init__("\n".join(map(str, refusals)))
        self.refusals = refusals
        self.rejected = rejected


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """Of ``n``, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def tensor_degrees(shape: ModelShape, domain: int) -> list[int]:
    """Tensor degrees of a model (:func:`msa_workloads.heads.tensor_degrees`) whose ranks share
    fast links."""
    valid = heads.tensor_degrees(shape.heads, shape.kv_heads, shape.intermediate)
    return [d for d in valid if domain % d == 0]


def ulysses_degrees(shape: ModelShape) -> list[int]:
    """Degrees at which heads can be exchanged for sequence."""
    return heads.valid_degrees(shape.heads, shape.kv_heads)


def context_degrees(length: int, limit: int) -> list[int]:
    """Context degrees up to ``limit`` that need no padding: every rank gets two equal chunks, so
    that causal work can be balanced by pairing an early with a late one."""
    return [1, *(d for d in range(2, limit + 1) if length % (2 * d) == 0)]


def tensor_refusal(shape: ModelShape, domain: int, value: int, where: str) -> Refusal | None:
    """Why ``value`` cannot be the tensor degree on a machine called ``where``."""
    allowed = tensor_degrees(shape, domain)
    if value in allowed:
        return None
    return Refusal(
        "parallelism.tensor",
        f"found {value} for {shape.heads} query and {shape.kv_heads} key/value heads on {where} "
        f"({domain} linked)",
        ", ".join(map(str, allowed)),
        str(heads.nearest(value, allowed)),
    )


def context_refusal(length: int, value: int) -> Refusal | None:
    """Why ``value`` cannot be the context degree of sequences of ``length``.

    Any degree works that leaves every rank two chunks: sequences are padded inside.
    """
    most = max(1, length // 2)
    if value <= most:
        return None
    return Refusal(
        "parallelism.context",
        f"found {value} for length {length}: each rank needs two chunks of at least one token, "
        f"{2 * value} in all",
        f"1 to {most}",
        str(most),
    )

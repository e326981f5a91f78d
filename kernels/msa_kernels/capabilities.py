"""What each backend serves, as far as it follows from names and numbers: no device is asked.

Pure, so that a plan made on a laptop refuses what a GPU would refuse once it is paid for.
Implementations read their limits here, and add what only they can know: the device, whether a
package is installed, where the rows of a call sit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import pairwise

from msa_kernels.memo import by_identity
from msa_kernels.pattern import Dense, Pattern, PatternError
from msa_kernels.rules import Part, Rule

Capability = tuple[int, int]
"""Of an NVIDIA GPU: (8, 0) is an A100, (9, 0) an H100."""

AUTO = "auto"
FLOATS = ("float64", "float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
MOST_RULES = 6
"""Of a part, as the project's kernels encode them."""
FLEX_ROWS = 1 << 18
"""Of a batch: a sink column makes FlexAttention's padded lists as wide as they are tall, 2048 x
2048 int32 here; from four times the length on they would cost more memory than the keys."""
MOST_INTERVALS = 256
"""Per query: beyond it the table of their ends outgrows the keys (2 KiB per query)."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one backend. What is not said is not limited."""

    gpu: bool = False
    """Runs on GPUs only."""
    dtypes: tuple[str, ...] = FLOATS
    gpu_dtypes: tuple[str, ...] = FLOATS
    """Of ``dtypes``, those that a GPU computes."""
    head_dims: Container[int] = range(1, 257)
    head_text: str = "up to 256"
    least: Capability = (0, 0)
    capabilities: tuple[Capability, ...] = ()
    """The only ones, where it names them."""
    gradients_on_cpu: bool = True
    rows: int | None = None
    """Most rows of a batch together."""
    dense_only: bool = False
    part: Callable[[Part], str | None] = lambda part: None
    """Why a part of a pattern is not served."""
    merges_parts: bool = True
    """Its results of several parts, or head groups' of theirs, can be put together."""
    merges_passes: bool = True
    """Its results of some of a row's keys can be put together with those of others: what a ring of
    context ranks does."""
    one_document: bool = False
    """A row is one document; over context ranks, a few."""
    whole_calls: bool = False
    """Computes whole calls: no rank of a context-parallel group can have a part of one."""
    exact: bool = True
    """Agrees with the others to the rounding of its inputs' dtype."""
    package: str = ""
    """That brings it."""

    @property
    def by_capability(self) -> bool:
        """Whether the GPU's compute capability decides."""
        return bool(self.capabilities) or self.least > (0, 0)


def one_band(part: Part) -> str | None:
    """Why ``part`` is not dense attention or one causal window, or None."""
    if part.minus or len(part.rules) != 1:
        return "serves one band of distances, not several rules"
    rule = part.rules[0]
    if rule != Rule(rule.lo, rule.hi) or (rule.lo, rule.hi is None) not in (
        (0, True), (0, False), (None, True),
    ):  # fmt: skip
        return "serves dense and causal windows only"
    return None


def few_intervals(part: Part) -> str | None:
    """Why the keys of a query in ``part`` are not a few intervals, or None."""
    if part.minus:
        return "serves unions of intervals without exclusions"
    if any(rule.step > 1 for rule in part.rules):
        return "serves intervals of keys, not dilated ones"
    if any(rule.columns is not None for rule in part.rules):
        return "serves intervals of keys, not columns"
    found = intervals(part)
    if found > MOST_INTERVALS:
        return f"serves at most {MOST_INTERVALS} intervals per query, found {found}"
    return None


def intervals(part: Part) -> int:
    """An upper bound of the intervals of one query of a part that is made of intervals."""
    return sum(1 if rule.table is None else _stretches(rule.table[1]) for rule in part.rules)


@by_identity(kept=64)
def _stretches(rows: tuple[tuple[int, ...], ...]) -> int:
    """Most of one row: neighbouring blocks are one stretch."""
    return max((sum(b != a + 1 for a, b in pairwise((-2, *row))) for row in rows), default=0)


def few_rules(part: Part) -> str | None:
    """Why the project's kernels cannot evaluate ``part``, or None."""
    found = len(part.rules) + len(part.minus)
    if found > MOST_RULES:
        return f"serves at most {MOST_RULES} rules in one part, found {found}"
    tables = [r.table for r in (*part.rules, *part.minus) if r.table is not None]
    if any(table != tables[0] for table in tables):
        return "serves one block list in a part, not two different ones"
    return None


LIMITS: Mapping[str, Limits] = {
    "fa4": Limits(
        gpu=True, dtypes=HALVES, head_dims=(64, 96, 128), head_text="64, 96 and 128",
        least=(9, 0), part=one_band, merges_parts=False, merges_passes=False, one_document=True,
        package="flash-attn-4",
    ),
    "cudnn": Limits(
        gpu=True, dtypes=HALVES, head_dims=(*range(8, 129, 8), 256),
        head_text="in multiples of 8 up to 128, and 256",
        capabilities=((9, 0), (10, 0), (10, 3)), part=few_intervals, merges_parts=False,
        merges_passes=False, one_document=True,
        package="nvidia-cudnn-frontend",
    ),
    "triton": Limits(gpu=True, dtypes=FLOATS[1:], part=few_rules),
    "sdpa": Limits(gpu_dtypes=HALVES, dense_only=True, one_document=True, whole_calls=True),
    "flex": Limits(
        dtypes=FLOATS[1:], gradients_on_cpu=False, rows=FLEX_ROWS, whole_calls=True
    ),
    "torch": Limits(),
    "triton-fused": Limits(gpu=True, dtypes=FLOATS[1:], part=few_rules),
    "triton-fp8": Limits(
        gpu=True, dtypes=HALVES, head_dims=range(1, 129), head_text="up to 128", least=(8, 9),
        part=few_rules, merges_passes=False, exact=False,
    ),
}  # fmt: skip
"""By name, in the order in which they are asked for one that serves."""

NAMES = (AUTO, *LIMITS)
"""What a caller, a RunSpec or a job may ask for."""


def refuses(
    name: str, *, device: str, dtype: str, head_dim: int, rows: int, training: bool,
    capability: Capability | None = None,
) -> str | None:  # fmt: skip
    """Why a backend does not serve such calls whatever the pattern, as the end of a sentence that
    begins with its name; None when it may.

    ``device`` is "cpu" or "cuda", ``dtype`` a name as torch has it, ``rows`` those of a batch
    together; ``capability`` is None where nobody knows it.
    """
    limits = LIMITS[name]
    if limits.gpu and device != "cuda":
        return "needs a GPU"
    if capability is not None and (why := unfit(name, capability)):
        return why
    if dtype not in limits.dtypes:
        return f"serves {' and '.join(limits.dtypes)}, not {dtype}"
    if device == "cuda" and dtype not in limits.gpu_dtypes:
        return f"has no fused kernel for {dtype} on a GPU"
    if head_dim not in limits.head_dims:
        return f"serves head sizes {limits.head_text}, not {head_dim}"
    if limits.rows is not None and rows > limits.rows:
        return f"has padded block lists, which are capped at {limits.rows} rows, found {rows}"
    if training and device == "cpu" and not limits.gradients_on_cpu:
        return "has no gradient on a CPU"
    return None


def unfit(name: str, capability: Capability) -> str | None:
    """Why a GPU of this compute capability does not run a backend, or None."""
    limits = LIMITS[name]
    if limits.capabilities and capability not in limits.capabilities:
        return f"needs compute capability {' or '.join(map(_version, limits.capabilities))}"
    if capability < limits.least:
        return f"needs compute capability {_version(limits.least)} or newer"
    return None


def _version(capability: Capability) -> str:
    return ".".join(map(str, capability))


def refuses_pattern(name: str, pattern: Pattern, kv_heads: int) -> str | None:
    """Why a backend does not serve a pattern of so many key/value heads, like :func:`refuses`."""
    limits = LIMITS[name]
    if limits.dense_only:
        return None if isinstance(pattern, Dense) else f"serves Dense only, not {pattern.kind}"
    try:
        groups = dict.fromkeys(pattern.for_group(head) for head in range(kv_heads))
        each = [group.parts() for group in groups]
    except PatternError as error:
        return str(error)
    if not limits.merges_parts and any(len(parts) != 1 for parts in each):
        return "rounds its output, which partial results of a union must not be"
    reasons = (limits.part(part) for parts in each for part in parts)
    return next((reason for reason in reasons if reason), None)

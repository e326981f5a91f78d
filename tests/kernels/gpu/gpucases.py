"""Cases of the GPU suite: a pairwise covering set, tensors of every layout, and the comparison."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import torch
from msa_kernels import check
from msa_kernels.attention import msa_attention
from msa_kernels.pattern import (
    Block,
    BlockList,
    Columns,
    Dense,
    Dilated,
    Pattern,
    PerHead,
    SinkWindow,
    Strided,
    Union,
    Window,
)  # fmt: skip
from msa_kernels.reference import Result, reference, visible

FACTORS: dict[str, tuple] = {
    "pattern": (
        "dense", "bidirectional", "window", "wide window", "two-sided window", "sinks", "dilated",
        "dilated window", "block", "columns", "block list", "union of list and window",
        "union with dilation", "lists per head", "kinds per head",
    ),
    "head_dim": (64, 80, 96, 128, 192, 256),
    "ratio": (1, 2, 4, 8, 16),
    "length": (1, 2, 127, 128, 129, 500, 1025),
    "documents": ("one", "ids", "bounds", "fewer queries", "fewer keys"),
    "dtype": ("bfloat16", "float16"),
    "layout": ("contiguous", "heads first", "packed qkv", "odd address"),
    "kernels": ("fastest", "plain"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    pattern: str
    head_dim: int
    ratio: int
    length: int
    documents: str
    dtype: str
    layout: str
    kernels: str

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)).replace(" ", "_") for name in FACTORS)


def covering(seed: int = 0) -> list[Case]:
    """Cases in which every pair of values of two factors occurs: greedy, the same every time."""
    names = list(FACTORS)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    }
    rng = random.Random(seed)
    made: list[Case] = []
    while missing:
        best, gain = None, -1
        first = rng.choice(sorted(missing, key=repr))
        for _ in range(40):
            chosen = {name: rng.choice(FACTORS[name]) for name in names}
            chosen[first[0]], chosen[first[2]] = first[1], first[3]
            found = len(missing & _pairs(chosen))
            if found > gain:
                best, gain = chosen, found
        assert best is not None
        missing -= _pairs(best)
        made.append(Case(**best))
    return made


def _pairs(chosen: dict) -> set[tuple]:
    return {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(FACTORS, 2)}


def pattern(name: str, length: int) -> Pattern:
    """Patterns with structure within 1 to about a thousand tokens."""

    def some(seed: int, size: int = 48) -> BlockList:
        """Up to three blocks for each of the queries', none for some."""
        rng = random.Random(seed)
        blocks = range(-(-length // size))
        return BlockList(
            size, tuple(tuple(sorted(rng.sample(range(q + 1), min(q, 3)))) for q in blocks)
        )

    return {
        "dense": lambda: Dense(),
        "bidirectional": lambda: Dense(causal=False),
        "window": lambda: Window(37),
        "wide window": lambda: Window(300),
        "two-sided window": lambda: Window(70, causal=False),
        "sinks": lambda: SinkWindow(150, 70),
        "dilated": lambda: Dilated(4),
        "dilated window": lambda: Dilated(3, 40),
        "block": lambda: Block(171),
        "columns": lambda: Columns(24, 3),
        "block list": lambda: some(1, 128),
        "union of list and window": lambda: Union((Window(60), some(2))),
        "union with dilation": lambda: Strided(16, "union"),
        "lists per head": lambda: PerHead((some(3), some(4))),
        "kinds per head": lambda: PerHead((Window(50), Dilated(4))),
    }[name]()


@dataclass(frozen=True)
class Call:
    """Tensors of one call, on the GPU, and what to pass with them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    where: dict[str, object]
    """``documents`` or ``align`` of :func:`msa_attention`."""
    oracle: dict[str, object]
    """The same for the oracle."""


def call(case: Case, kv_heads: int = 2) -> Call:
    made = torch.Generator().manual_seed(case.length * 1000 + case.head_dim)
    dtype = getattr(torch, case.dtype)
    batch = 1 if case.documents == "bounds" else 2
    q_rows = k_rows = case.length
    if case.documents == "fewer queries":
        q_rows = max(1, case.length // 3)
    if case.documents == "fewer keys":
        k_rows = max(1, case.length // 3)
    heads = kv_heads * case.ratio
    q, dout = (_tensor(made, batch, q_rows, heads, case, dtype) for _ in range(2))
    k, v = (_tensor(made, batch, k_rows, kv_heads, case, dtype) for _ in range(2))
    dlse = torch.randn(batch, heads, q_rows, generator=made).cuda()
    where, oracle = _where(case, batch, q_rows, k_rows)
    return Call(q, k, v, dout, dlse, where, oracle)


def _tensor(
    made: torch.Generator, batch: int, rows: int, heads: int, case: Case, dtype: torch.dtype
) -> torch.Tensor:
    """(batch, rows, heads, head size) in the memory layout that the case names."""
    dim = case.head_dim
    data = torch.randn(batch, rows, heads, dim, generator=made).to("cuda", dtype)
    if case.layout == "heads first":
        return data.transpose(1, 2).contiguous().transpose(1, 2)
    if case.layout == "packed qkv":
        wide = torch.full((batch, rows, 3, heads, dim), float("nan"), dtype=dtype, device="cuda")
        wide[:, :, 1] = data
        return wide[:, :, 1]
    if case.layout == "odd address":
        flat = torch.full((data.numel() + 1,), float("nan"), dtype=dtype, device="cuda")
        flat[1:] = data.flatten()
        return flat[1:].view(data.shape)
    return data


def _where(
    case: Case, batch: int, q_rows: int, k_rows: int
) -> tuple[dict[str, object], dict[str, object]]:
    if case.documents == "ids":
        cut = torch.zeros(batch, q_rows, dtype=torch.int32)
        for row in range(batch):
            cut[row, case.length // 3 + row :] += 1
            cut[row, case.length // 2 + 2 * row :] += 1
        return {"documents": cut.cuda()}, {"documents": cut}
    if case.documents == "bounds":
        edges = sorted({0, case.length // 5, case.length // 5 + 1, case.length})
        bounds = torch.tensor(edges, dtype=torch.int32)
        return {"documents": (bounds, bounds)}, {"bounds": (edges, edges)}
    if case.documents in ("fewer queries", "fewer keys"):
        return {"align": "bottom-right"}, {"align": "bottom-right"}
    return {}, {}


def compute(given: Call, what: Pattern, backend: str, lse: bool = True) -> dict[str, torch.Tensor]:
    """Output, LSE and gradients through the public function."""
    leaves = [t.detach().requires_grad_() for t in (given.q, given.k, given.v)]
    result = msa_attention(*leaves, what, backend=backend, return_lse=lse, **given.where)
    out, log = result if isinstance(result, tuple) else (result, None)
    roots, cotangents = [out], [given.dout]
    if log is not None:
        # A row without keys has LSE -inf, whose cotangent must not matter.
        roots.append(log)
        cotangents.append(given.dlse)
    grads = torch.autograd.grad(roots, leaves, cotangents)
    found = {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return found if log is None else found | {"lse": log.detach()}


def compare(given: Call, what: Pattern, found: dict[str, torch.Tensor]) -> None:
    """Every tensor's error is at most 2.5 times PyTorch's own at the dtype, plus 2e-3."""
    tensors = (given.q, given.k, given.v)
    dlse = given.dlse if "lse" in found else None
    exact = by_name(
        reference(*tensors, what, device="cuda", dout=given.dout, dlse=dlse, **given.oracle)
    )
    own = check.eager(*tensors, given.dout, visible(given.q, given.k, what, **given.oracle), dlse)
    limits = {
        name: check.OWN_ERROR_FACTOR * relative_error(tensor, exact[name]) + check.OWN_ERROR_MARGIN
        for name, tensor in own.items()
    }
    errors = {name: relative_error(tensor, exact[name]) for name, tensor in found.items()}
    allowed = {name: limits.get(name, check.OWN_ERROR_MARGIN) for name in found}
    assert all(errors[name] <= allowed[name] for name in found), (errors, allowed)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm-wise; inf for NaN and where infinities differ. Gradients that vanish (a query with one
    key) are compared with 0.01 per element."""
    found = found.double()
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.where(finite, 0.0, found), torch.where(finite, 0.0, wanted)):
        return math.inf
    error = float(torch.where(finite, found - wanted, 0.0).norm())
    size = float(torch.where(finite, wanted, 0.0).norm())
    error /= max(size, 0.01 * wanted.numel() ** 0.5)
    return math.inf if math.isnan(error) else error


def by_name(result: Result) -> dict[str, torch.Tensor]:
    assert result.grads is not None
    return dict(zip(check.NAMES, (result.out, result.lse, *result.grads), strict=True))

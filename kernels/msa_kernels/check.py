"""``python -m msa_kernels.check``: what this machine has, and whether its attention is right.

Every backend runs small shapes of every kind of pattern, forward and backward, against the fp64
oracle. Exit code 0 when all that ran agree, 1 when one does not or when a backend that was named
ran nothing; a backend that refuses a case says why and does not fail the check.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from msa_kernels import backend as backends
from msa_kernels.attention import msa_attention
from msa_kernels.pattern import (
    Block,
    BlockList,
    Columns,
    Dense,
    Dilated,
    Fixed,
    Pattern,
    SinkWindow,
    Strided,
    Window,
)  # fmt: skip
from msa_kernels.reference import Result, reference, visible

FP32_TOLERANCE = 1e-5
"""Largest error over the largest reference value of the tensor."""
OWN_ERROR_FACTOR = 2.5
OWN_ERROR_MARGIN = 2e-3
"""bf16 and fp16, norm-wise: at most 2.5 times the error of the same attention composed of
PyTorch operators in that dtype, plus 2e-3."""

NAMES = ("out", "lse", "dq", "dk", "dv")
FP8_LIMITS = {"out": 0.07, "lse": 0.02, "dq": 0.07, "dk": 0.07, "dv": 0.05}
"""Of a forward in e4m3, norm-wise on normal inputs: one and a half times what its roundings were
seen to cost here."""


@dataclass(frozen=True)
class Case:
    name: str
    pattern: Pattern
    length: int = 200
    documents: tuple[int, ...] | None = None
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64


def cases() -> tuple[Case, ...]:
    """Small shapes of every kind: lengths no tile divides, grouped heads, packed documents."""
    rows = tuple(tuple(sorted({0, q // 2, q})) for q in range(13))
    return (
        Case("dense", Dense()),
        Case("dense, both directions", Dense(causal=False)),
        Case("window", Window(37)),
        Case("window, packed", Window(37), documents=(1, 90, 109)),
        Case("sinks and window", SinkWindow(50, 7)),
        Case("dilated", Dilated(4)),
        Case("dilated, packed", Dilated(3, 9), documents=(64, 5, 131)),
        Case("strided, per head", Strided(16)),
        Case("fixed, union", Fixed(32, 4, heads="union")),
        Case("columns", Columns(24, 3)),
        Case("block", Block(48)),
        Case("block list", BlockList(16, rows)),
        Case("grouped 8/1, head size 128", Window(64), q_heads=8, kv_heads=1, head_dim=128),
    )


@dataclass(frozen=True)
class Outcome:
    """``errors`` by tensor, relative; empty, with the reason ``refused``, when it did not run."""

    backend: str
    case: str
    dtype: str
    errors: dict[str, float]
    limits: dict[str, float]
    refused: str = ""

    @property
    def ok(self) -> bool:
        return all(self.errors[name] <= self.limits[name] for name in self.errors)


def machine() -> dict[str, Any]:
    """Versions and devices, JSON-ready."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "triton": None,
        "gpus": [],
    }
    if importlib.util.find_spec("triton"):
        import triton

        found["triton"] = triton.__version__
    for n in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(n)
        found["gpus"].append({
            "name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30, 1),
        })  # fmt: skip
    return found


def check(device: str, dtype: torch.dtype, names: Iterable[str]) -> Iterator[Outcome]:
    """The named backends on every case, one outcome at a time."""
    for name in names:
        for case in cases():
            yield run(name, case, device, dtype)


def run(name: str, case: Case, device: str, dtype: torch.dtype) -> Outcome:
    """One backend on one case; the gradient too, unless the backend has none here."""
    seed = torch.Generator().manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        shape = (2, case.length, heads, case.head_dim)
        return torch.randn(shape, generator=seed).to(device, dtype)

    q, k, v = random(case.q_heads), random(case.kv_heads), random(case.kv_heads)
    dout = random(case.q_heads)
    ids = None
    if case.documents is not None:
        lengths = torch.tensor(case.documents)
        ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths).expand(2, -1)
    text = str(dtype).split(".")[-1]
    reason = ""
    for with_lse, with_grad in ((True, True), (False, True), (True, False), (False, False)):
        try:
            found = _compute(name, case, (q, k, v, dout), ids, with_lse, with_grad)
        except backends.BackendError as error:
            reason = reason or error.reasons.get(name, str(error))
            continue
        wanted = reference(q, k, v, case.pattern, documents=ids, dout=dout)
        limits = _limits(case, q, k, v, dout, ids, wanted)
        return _compare(name, case, found, wanted, FP8_LIMITS if name == "triton-fp8" else limits)
    return Outcome(name, case.name, text, {}, {}, reason)


def _compute(
    name: str, case: Case, tensors: tuple[torch.Tensor, ...], ids: torch.Tensor | None,
    with_lse: bool, with_grad: bool,
) -> dict[str, torch.Tensor]:  # fmt: skip
    q, k, v = (t.clone().requires_grad_(with_grad) for t in tensors[:3])
    result = msa_attention(
        q, k, v, case.pattern, documents=ids, backend=name, return_lse=with_lse
    )  # fmt: skip
    out, lse = result if isinstance(result, tuple) else (result, None)
    found = {"out": out.detach()}
    if lse is not None:
        found["lse"] = lse.detach()
    if with_grad:
        grads = torch.autograd.grad(out, (q, k, v), tensors[3])
        found |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return found


def _compare(
    name: str, case: Case, found: dict[str, torch.Tensor], wanted: Result,
    limits: dict[str, float],
) -> Outcome:  # fmt: skip
    dtype = found["out"].dtype
    measure = largest_error if dtype in (torch.float32, torch.float64) else norm_error
    exact = _tensors(wanted)
    errors = {key: measure(tensor, exact[key]) for key, tensor in found.items()}
    return Outcome(name, case.name, str(dtype).split(".")[-1], errors, limits)


def _tensors(result: Result) -> dict[str, torch.Tensor]:
    assert result.grads is not None
    return dict(zip(NAMES, (result.out, result.lse, *result.grads), strict=True))


def largest_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error over the largest reference value; inf where infinities differ or for NaN."""
    return _error(found, wanted, lambda t: float(t.abs().max()))


def norm_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the error over the norm of the reference; inf where infinities differ or for NaN."""
    return _error(found, wanted, lambda t: float(t.norm()))


def _error(
    found: torch.Tensor, wanted: torch.Tensor, size: Callable[[torch.Tensor], float]
) -> float:  # fmt: skip
    found = found.detach().to(wanted.device, torch.float64)
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.where(finite, 0, found), torch.where(finite, 0, wanted)):
        return math.inf
    error = size(torch.where(finite, found - wanted, 0))
    if math.isnan(error):
        return math.inf
    scale = size(torch.where(finite, wanted, 0))
    return error / scale if scale else error


def _limits(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor,
    ids: torch.Tensor | None, wanted: Result,
) -> dict[str, float]:  # fmt: skip
    if q.dtype in (torch.float32, torch.float64):
        return dict.fromkeys(NAMES, FP32_TOLERANCE)
    exact = _tensors(wanted)
    own = eager(q, k, v, dout, visible(q, k, case.pattern, documents=ids))
    errors = {name: norm_error(tensor, exact[name]) for name, tensor in own.items()}
    return {n: OWN_ERROR_FACTOR * errors.get(n, 0.0) + OWN_ERROR_MARGIN for n in NAMES}


def eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, seen: torch.Tensor,
    dlse: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Attention as PyTorch composes it in the inputs' dtype: the error that the dtype costs.

    ``seen`` is bool (B, Hq, Sq, Sk); softmax is taken in fp32, as models do. Gradients are those
    for ``dout`` and, where given, the cotangent ``dlse`` (B, Hq, Sq) of the LSE.
    """
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    seen = seen.to(q.device)
    group = q.shape[2] // k.shape[2]
    heads = [leaves[0], *(t.repeat_interleave(group, 2) for t in leaves[1:])]
    scores = torch.einsum("bqhd,bkhd->bhqk", *heads[:2]) * q.shape[3] ** -0.5
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    weights = weights * seen.any(-1, keepdim=True)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, heads[2])
    roots, cotangents = [out], [dout]
    if dlse is not None:
        roots.append(torch.logsumexp(scores.float(), -1))
        cotangents.append(torch.where(seen.any(-1), dlse, 0.0))
    grads = torch.autograd.grad(roots, leaves, cotangents)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m msa_kernels.check", description=__doc__)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", action="append", choices=tuple(backends.LOADERS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args(argv)
    try:
        torch.zeros(1, device=args.device).cpu()  # a device without values cannot be checked
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        # PyTorch says the reason in its first line; the rest is for its developers.
        parser.error(f"--device {args.device} cannot be used: {str(error).splitlines()[0]}")
    usual = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    dtype = getattr(torch, args.dtype) if args.dtype else usual
    found = machine()
    outcomes = list(check(args.device, dtype, args.backend or backends.LOADERS))
    if args.output == "json":
        rows = [asdict(o) | {"ok": o.ok} for o in outcomes]
        print(json.dumps({"machine": found, "device": args.device, "results": rows}, indent=2))
    else:
        _print(found, args.device, outcomes)
    idle = set(args.backend or ()) - {o.backend for o in outcomes if not o.refused}
    for name in sorted(idle):
        print(f"{name} ran nothing on {args.device}", file=sys.stderr)
    return 0 if all(o.ok for o in outcomes) and not idle else 1


def _print(found: dict[str, Any], device: str, outcomes: list[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    gpus = ", ".join(f"{g['name']} (sm {g['capability']})" for g in found["gpus"]) or "none"
    console.print(
        f"Python {found['python']}, torch {found['torch']}, triton {found['triton'] or 'none'}, "
        f"GPU: {gpus}; checking on {device}"
    )
    table = Table("backend", "case", "dtype", *NAMES, "result")
    for o in outcomes:
        numbers = [f"{o.errors[n]:.1e}" if n in o.errors else "-" for n in NAMES]
        result = "ok" if o.ok else "WRONG"
        if o.refused:
            continue
        table.add_row(o.backend, o.case, o.dtype, *numbers, result)
    console.print(table)
    refusals = Counter((o.backend, o.refused) for o in outcomes if o.refused)
    for (name, reason), count in refusals.items():
        number = "1 case" if count == 1 else f"{count} cases"
        console.print(f"{name} refused {number}: {reason}", style="dim", markup=False)


if __name__ == "__main__":
    sys.exit(main())

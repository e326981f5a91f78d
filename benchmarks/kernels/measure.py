"""Measure attention forward and backward, ours beside other libraries in one run, on one GPU.

    python benchmarks/kernels/measure.py --out benchmarks/kernels/h200.json
    python benchmarks/kernels/measure.py --peers auto,triton --patterns causal --sequences 32768

Medians over CUDA-event timings of a forward with autograd on, the backward that follows it, and
both together; the L2 cache is flushed before each, and a spin on the GPU hides the host's launch
time where a case is short. ``host_ms`` is the wall time of a forward and backward in calls back to
back: where it exceeds the device's time, launching costs more than running. TFLOP/s count attended
pairs only: 4 * D per pair and query head forward, 2.5 times that backward. Every result is checked
at the timed shape (:mod:`samples`). Building lists, masks and plans, compiling and tuning are not
timed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import arguments
import torch
from cases import NAMES, Case, cases
from msa_kernels import backend
from peers import PEERS, Attend, NoWay
from samples import FP8_FIRST, FP8_LIMIT, LIMIT, check


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--peers", type=arguments.names(PEERS), default=",".join(PEERS),
                        help="implementations to run")  # fmt: skip
    parser.add_argument("--patterns", type=arguments.names(NAMES), default=",".join(NAMES),
                        help="patterns, as cases.py names them")  # fmt: skip
    parser.add_argument("--sequences", type=arguments.numbers,
                        default="512,1024,8192,32768,131072", help="tokens of a row")  # fmt: skip
    parser.add_argument("--head-dims", type=arguments.numbers, default="128", help="head sizes")
    parser.add_argument("--dtypes", type=arguments.names(("bfloat16", "float16")),
                        default="bfloat16", help="of inputs")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("kernels.json"),
                        help="the record, written after every row")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help="stop taking new cases after this long")  # fmt: skip
    args = parser.parse_args()
    arguments.needs_gpu(parser)
    began = time.monotonic()
    rows: list[dict] = []
    todo = [
        case
        for dtype in args.dtypes
        for dim in args.head_dims
        for case in cases(args.patterns, args.sequences, dim, dtype)
    ]
    for case in todo:
        for peer in args.peers:
            if time.monotonic() - began > args.seconds:
                print("out of time before", peer, case.name, case.sequence, flush=True)
                continue
            row = run(peer, case)
            if row is not None:
                rows.append(row)
                print(line(row), flush=True)
                args.out.write_text(json.dumps({**machine(), "rows": rows}, indent=1))


def run(peer: str, case: Case) -> dict | None:
    row: dict = {
        "implementation": peer, "pattern": case.name, "sequence": case.sequence,
        "batch": case.batch, "heads": f"{case.q_heads}/{case.kv_heads}",
        "head_dim": case.head_dim, "dtype": case.dtype,
    }  # fmt: skip
    torch.compiler.reset()
    try:
        attend = PEERS[peer](case)
        backend.reset()
        row |= measure(attend, case, peer == "triton-fp8")
        if peer in ("auto", "triton", "triton-fused", "triton-fp8"):
            row["ran"] = sorted({used.backend for used in backend.used()})
    except NoWay:
        return None
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:400]
        traceback.print_exc(limit=-3)
    torch.cuda.empty_cache()
    return row


def measure(attend: Attend, case: Case, eight_bits: bool) -> dict:
    q, k, v, dout = case.tensors()
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def forward() -> torch.Tensor:
        return attend(*leaves)

    def backward(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout)

    out = forward()
    tolerance = (FP8_LIMIT, FP8_FIRST) if eight_bits else (LIMIT, 0)
    errors = check(case, (q, k, v), dout, out, backward(out), *tolerance)
    del out
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    grads = backward(forward())
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - base
    del grads
    forward_ms = median(lambda: None, lambda _: forward())
    backward_ms = median(forward, backward)
    total_ms = median(lambda: None, lambda _: backward(forward()))
    host_ms = wall(lambda: backward(forward())) if total_ms < 3 else None
    flops = 4 * case.head_dim * case.pairs
    return {
        "forward_ms": round(forward_ms, 4), "backward_ms": round(backward_ms, 4),
        "total_ms": round(total_ms, 4),
        "forward_tflops": round(flops / forward_ms / 1e9, 1),
        "backward_tflops": round(2.5 * flops / backward_ms / 1e9, 1),
        "total_tflops": round(3.5 * flops / total_ms / 1e9, 1),
        "host_ms": host_ms, "peak_bytes": peak, **errors,
    }  # fmt: skip


def median(prepare: Callable, timed: Callable) -> float:
    """Milliseconds of ``timed(prepare())``."""
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    times: list[float] = []
    timed(prepare())
    spent = 0.0
    while len(times) < 3 or (spent < 300 and len(times) < 25):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        given = prepare()
        flush.zero_()
        torch.cuda._sleep(2_000_000)
        start.record()
        result = timed(given)
        stop.record()
        torch.cuda.synchronize()
        del result, given
        times.append(start.elapsed_time(stop))
        spent += times[-1]
    return statistics.median(times)


def wall(work: Callable, count: int = 50) -> float:
    """Milliseconds of wall time a call, of ``count`` calls back to back."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - began) / count, 4)


def machine() -> dict:
    packages = ("torch", "triton", "flash-attn-4", "nvidia-cudnn-frontend")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "card": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
        "versions": versions, "matmul_tflops": _ceiling(),
    }  # fmt: skip


_measured: list[float] = []


def _ceiling() -> float:
    """bf16 matrix product of 8192 cubed, random data."""
    if not _measured:
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        ms = median(lambda: None, lambda _: a @ b)
        _measured.append(round(2 * 8192**3 / ms / 1e9, 1))
    return _measured[0]


def line(row: dict) -> str:
    where = (
        f"{row['pattern']:14s} {row['batch']:2d}x{row['sequence']:<6d} {row['implementation']:12s}"
    )
    if "error" in row:
        return f"{where} ERROR {row['error'][:160]}"
    return (
        f"{where} fwd {row['forward_ms']:8.2f} {row['forward_tflops']:5.0f} | bwd "
        f"{row['backward_ms']:8.2f} {row['backward_tflops']:5.0f} | both {row['total_ms']:8.2f} "
        f"{row['total_tflops']:5.0f} | {row['peak_bytes'] / 2**30:5.2f} GiB {row.get('ran', '')}"
    )


if __name__ == "__main__":
    main()

"""One pass of several backends in turns, on a GPU: differences of a few per cent, without clocks.

    python benchmarks/kernels/turns.py forward triton triton-fp8 fa4 --out turns.json
    python benchmarks/kernels/turns.py backward triton triton-fused --patterns causal,fixed

Tile kernels are called without autograd. Every turn runs each backend once, in one order and then
in the other; a time is the median over turns, ``apart`` the norm-wise difference of the results
from those of the first backend named.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import arguments
import torch
from cases import NAMES, Case, cases
from measure import machine
from msa_kernels import backend, engine
from msa_kernels.attention import DIRECT
from msa_kernels.fused import row_delta
from msa_kernels.plan import whole

Work = Callable[[], tuple[torch.Tensor, ...]]
GROUPS_APART = 3


def forward(name: str, case: Case, tensors: tuple[torch.Tensor, ...]) -> Work:
    q, k, v, _ = tensors
    runs = whole(case.sequence, case.sequence)
    return functools.partial(
        engine.forward, backend.load(name), q, k, v, case.pattern, *runs, case.head_dim**-0.5
    )


def backward(name: str, case: Case, tensors: tuple[torch.Tensor, ...]) -> Work:
    """On the output and LSE of ``triton``; delta is part of it where a kernel takes one."""
    q, k, v, dout, out, lse = tensors
    runs, kernel = whole(case.sequence, case.sequence), backend.load(name)

    def run() -> tuple[torch.Tensor, ...]:
        delta = None if getattr(kernel, "forms_delta", False) else row_delta(dout, out, None)
        return engine.backward(
            kernel, q, k, v, out, dout, lse, delta, case.pattern, *runs, case.head_dim**-0.5
        )

    return run


def milliseconds(work: Work, flush: torch.Tensor) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(2_000_000)
    start.record()
    result = work()
    stop.record()
    torch.cuda.synchronize()
    del result
    return start.elapsed_time(stop)


def apart(found: tuple[torch.Tensor, ...], first: tuple[torch.Tensor, ...]) -> float:
    """The largest of some heads; all of a result in fp32 at once would take gigabytes."""
    return max(
        float((a[..., h, :].float() - b[..., h, :].float()).norm() / b[..., h, :].float().norm())
        for a, b in zip(found, first, strict=True)
        if a.ndim == 4
        for h in range(0, b.shape[2], GROUPS_APART)
    )


def measure(case: Case, names: list[str], direction: str, turns: int) -> list[dict]:
    tensors, make = case.tensors(), forward
    if direction == "backward":
        tensors, make = (*tensors, *forward("triton", case, tensors)()), backward
    works = {name: make(name, case, tensors) for name in names}
    first = works[names[0]]()
    far = {name: apart(works[name](), first) for name in names}
    del first
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(round(milliseconds(works[name], flush), 3))
    flops = case.head_dim * case.pairs * (4 if direction == "forward" else 10)
    return [
        {
            "direction": direction, "pattern": case.name, "sequence": case.sequence,
            "implementation": name, "ms": statistics.median(found), "all": found,
            "tflops": round(flops / statistics.median(found) / 1e9, 1),
            "apart": round(far[name], 5),
        }
        for name, found in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("direction", choices=("forward", "backward"), help="the pass to run")
    parser.add_argument(
        "backends",
        nargs="+",
        help="tile kernels; the first is compared with",
        choices=[name for name in backend.LOADERS if name not in DIRECT],
    )
    parser.add_argument(
        "--patterns",
        type=arguments.names(NAMES),
        default="causal,window8k,window8k_g512",
        help=", ".join(NAMES),
    )
    parser.add_argument(
        "--sequences", type=arguments.numbers, default="32768,131072", help="tokens of a row"
    )
    parser.add_argument("--turns", type=arguments.number, default=8, help="runs of each backend")
    parser.add_argument(
        "--out", type=Path, default=Path("turns.json"), help="the record, written after every case"
    )
    args = parser.parse_args()  # fmt: skip
    arguments.needs_gpu(parser)
    rows: list[dict] = []
    for case in cases(args.patterns, args.sequences):
        for row in measure(case, args.backends, args.direction, args.turns):
            rows.append(row)
            print(
                f"{row['pattern']:14s} {row['sequence']:7d} {row['implementation']:13s} "
                f"{row['ms']:8.2f} ms {row['tflops']:6.1f}  apart {row['apart']:.1e}", flush=True,
            )  # fmt: skip
        args.out.write_text(json.dumps({**machine(), "rows": rows}, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Small calls of every kernel, to be run under NVIDIA's compute-sanitizer.

    python benchmarks/kernels/sanitize.py --out sanitizer.json

Each call runs under memcheck (out-of-bounds and misaligned accesses, leaks excepted) and racecheck
(hazards in shared memory) in a process of its own, Gluon and plain kernels each, several side by
side, without PyTorch's caching allocator, in which neighbouring tensors would hide an access past
the end. The record is written as each ends, the most telling first, so that a run that is cut
short keeps what it has. Exit code 1 when a tool reports an error or does not finish. Kernels are
compiled before the tools start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

TOOLS = {
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"],
    "memcheck": ["--tool", "memcheck", "--padding", "256"],
}
KERNELS = ("Gluon", "plain")
CALLS = ("sinks in documents", "lists per head", "dense", "strided", "odd head size")


def call(name: str, kernels: str) -> None:
    """Forward and backward of a call: two or three tiles each way, a group of two query heads."""
    import torch
    from msa_kernels import backend
    from msa_kernels.attention import msa_attention
    from msa_kernels.pattern import BlockList, Dense, Pattern, PerHead, SinkWindow, Strided
    from msa_kernels.triton.launch import TritonKernel

    lists = tuple(BlockList(128, rows) for rows in (((0,), (0, 1), (1, 2)), ((), (1,), (0, 1, 2))))
    odd = 96 if kernels == "Gluon" else 192
    pattern, rows, dim, cut = dict[str, tuple[Pattern, int, int, int]]({
        "sinks in documents": (SinkWindow(90, 20), 200, 128, 70),
        "lists per head": (PerHead(lists), 300, 128, 0),
        "dense": (Dense(), 200, 128, 0),
        "strided": (Strided(4, "union"), 192, 64, 0),
        "odd head size": (SinkWindow(60, 7), 129, odd, 0),
    })[name]  # fmt: skip
    documents = torch.arange(rows).ge(cut)[None].int() if cut else None
    backend.load("triton")
    backend._loaded["triton"] = TritonKernel(hopper=None if kernels == "Gluon" else False)
    heads = 2 if name == "lists per head" else 1
    q, k, v = (
        torch.randn(1, rows, h, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (2 * heads, heads, heads)
    )
    out, lse = msa_attention(
        q, k, v, pattern, documents=documents, backend="triton", return_lse=True
    )
    torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse)))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("sanitizer.json"))
    parser.add_argument("--seconds", type=int, default=100, help="limit of all runs together")
    parser.add_argument("--workers", type=int, default=8, help="processes on the GPU at a time")
    parser.add_argument("--call", choices=CALLS, help="make one call, in this process")
    parser.add_argument("--kernels", choices=KERNELS, default="Gluon")
    args = parser.parse_args()
    if args.call:
        call(args.call, args.kernels)
        return
    with ThreadPoolExecutor(args.workers) as pool:
        warm = [pool.submit(subprocess.run, _call(n, k), check=True)
                for n in CALLS for k in KERNELS]  # fmt: skip
        for future in warm:
            future.result()
        deadline = time.monotonic() + args.seconds
        jobs: list[Future[dict]] = [
            pool.submit(check, tool, name, kernels, deadline)
            for name in CALLS for kernels in KERNELS for tool in TOOLS
        ]  # fmt: skip
        rows = []
        for future in as_completed(jobs):
            rows.append(future.result())
            args.out.write_text(json.dumps({**_machine(), "rows": rows}, indent=1))
            row = rows[-1]
            print(row["tool"], row["kernels"], row["call"], f"{row['seconds']} s", row["summary"],
                  flush=True)  # fmt: skip
    sys.exit(0 if all(row["clean"] for row in rows) else 1)


def check(tool: str, name: str, kernels: str, deadline: float) -> dict:
    """One tool over one call of one kind of kernel; not started where no time is left."""
    began = time.monotonic()
    row: dict[str, Any] = {
        "tool": tool, "kernels": kernels, "call": name, "seconds": 0.0, "exit": None,
        "clean": False, "summary": "not started: no time was left",
    }  # fmt: skip
    if began >= deadline:
        return row
    options = [*TOOLS[tool], "--kernel-regex", "kns=_kernel"]
    try:
        done = subprocess.run(
            ["compute-sanitizer", *options, *_call(name, kernels)], capture_output=True,
            text=True, timeout=deadline - began,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )  # fmt: skip
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, text = None, _text(error.stdout) + _text(error.stderr)
    lines = [line for line in text.splitlines() if line.startswith("=========")]
    summary = lines[-1] if lines and code is not None else f"not finished: {text[-300:]}"
    clean = code == 0 and any(n in summary for n in (" 0 errors", "(0 errors", " 0 hazards"))
    return row | {
        "command": " ".join(["compute-sanitizer", *options]), "exit": code, "clean": clean,
        "seconds": round(time.monotonic() - began, 1), "summary": summary,
        "report": [] if clean else lines[:60],
    }  # fmt: skip


def _machine() -> dict[str, Any]:
    import torch

    return {"card": torch.cuda.get_device_name(), "torch": torch.__version__}


def _call(name: str, kernels: str) -> list[str]:
    return [sys.executable, __file__, "--call", name, "--kernels", kernels]


def _text(captured: str | bytes | None) -> str:
    return captured.decode(errors="replace") if isinstance(captured, bytes) else captured or ""


if __name__ == "__main__":
    main()

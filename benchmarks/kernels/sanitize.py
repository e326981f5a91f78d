"""Small calls of every kernel, to be run under NVIDIA's compute-sanitizer.

    python benchmarks/kernels/sanitize.py --out sanitizer.json

Runs itself under memcheck (out-of-bounds and misaligned accesses, leaks excepted) and racecheck
(hazards in shared memory), Gluon and plain kernels each, all side by side, without PyTorch's
caching allocator, in which neighbouring tensors would hide an access past the end. Exit code 1
when a tool reports an error or does not finish. Kernels are compiled before the tools start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOOLS = {
    "memcheck": ["--tool", "memcheck", "--padding", "256"],
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"],
}
KERNELS = ("Gluon", "plain")


def calls(kernels: str) -> None:
    """Every kernel of one kind: all sorts of tiles, lists per head, documents, odd sizes."""
    import torch
    from msa_kernels import backend
    from msa_kernels.attention import msa_attention
    from msa_kernels.pattern import BlockList, Dense, PerHead, SinkWindow, Strided
    from msa_kernels.triton.launch import TritonKernel

    lists = tuple(tuple(sorted({q, q // 2})) for q in range(3))
    others = tuple((q,) if q % 2 else () for q in range(3))
    ids = torch.arange(300).ge(133)[None].int()
    cases = (
        (Dense(), 300, 128, None), (SinkWindow(150, 40), 300, 128, ids),
        (PerHead((BlockList(128, lists), BlockList(128, others))), 300, 128, None),
        (Strided(16, "union"), 288, 64, None), (SinkWindow(60, 7), 129, 96, None),
        (SinkWindow(60, 7), 129, 192, ids[:, :129].contiguous()),
    )  # fmt: skip
    backend.load("triton")
    backend._loaded["triton"] = TritonKernel(hopper=None if kernels == "Gluon" else False)
    for pattern, rows, dim, documents in cases:
        q, k, v = (
            torch.randn(
                1, rows, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            for heads in (4, 2, 2)
        )
        out, lse = msa_attention(
            q, k, v, pattern, documents=documents, backend="triton", return_lse=True
        )
        torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), lse.detach()))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("sanitizer.json"))
    parser.add_argument("--seconds", type=int, default=100, help="limit of all runs, side by side")
    parser.add_argument("--calls", choices=KERNELS, help="make the calls, in this process")
    args = parser.parse_args()
    if args.calls:
        calls(args.calls)
        return
    warm = [subprocess.Popen(_calls(kernels)) for kernels in KERNELS]
    if any(process.wait() for process in warm):
        sys.exit("the calls fail without the tools already")
    with ThreadPoolExecutor() as pool:
        jobs = [(tool, kernels, args.seconds) for tool in TOOLS for kernels in KERNELS]
        found = list(pool.map(lambda job: check(*job), jobs))
    args.out.write_text(json.dumps(found, indent=1))
    for row in found:
        print(row["tool"], row["kernels"], row["exit"], row["summary"], flush=True)
    sys.exit(0 if all(row["clean"] for row in found) else 1)


def check(tool: str, kernels: str, seconds: int) -> dict:
    """One tool over the calls of one kind of kernel."""
    began = time.monotonic()
    options = [*TOOLS[tool], "--kernel-regex", "kns=_kernel"]
    try:
        done = subprocess.run(
            ["compute-sanitizer", *options, *_calls(kernels)], capture_output=True, text=True,
            timeout=seconds, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )  # fmt: skip
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, text = None, _text(error.stdout) + _text(error.stderr)
    lines = [line for line in text.splitlines() if line.startswith("=========")]
    summary = lines[-1] if lines and code is not None else f"not finished: {text[-300:]}"
    return {
        "tool": tool, "kernels": kernels, "command": " ".join(["compute-sanitizer", *options]),
        "exit": code, "seconds": round(time.monotonic() - began, 1), "summary": summary,
        "clean": code == 0 and (" 0 errors" in summary or "(0 errors" in summary
                                or " 0 hazards" in summary),
        "report": lines[:60],
    }  # fmt: skip


def _calls(kernels: str) -> list[str]:
    return [sys.executable, __file__, "--calls", kernels]


def _text(captured: str | bytes | None) -> str:
    return captured.decode(errors="replace") if isinstance(captured, bytes) else captured or ""


if __name__ == "__main__":
    main()

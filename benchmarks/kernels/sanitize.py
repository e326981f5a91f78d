"""Small calls of every kernel, to be run under NVIDIA's compute-sanitizer.

    python benchmarks/kernels/sanitize.py --out sanitizer.json

Runs itself under memcheck (out-of-bounds and misaligned accesses, leaks excepted) and racecheck
(hazards in shared memory), Gluon and plain kernels alike, without PyTorch's caching allocator, in
which neighbouring tensors would hide an access past the end. Exit code 1 when a tool reports an
error. Kernels are compiled beforehand, outside the tools.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

TOOLS = {
    "memcheck": ["--tool", "memcheck", "--padding", "256"],
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"],
}


def calls() -> None:
    """Every kernel once: partial and full tiles, lists per head, documents, unions, odd sizes."""
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
    for hopper in (True, False):
        backend.load("triton")
        backend._loaded["triton"] = TritonKernel(hopper=None if hopper else False)
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
    parser.add_argument("--seconds", type=int, default=60, help="limit of each tool")
    parser.add_argument("--calls", action="store_true", help="make the calls, in this process")
    args = parser.parse_args()
    if args.calls:
        calls()
        return
    alone = [sys.executable, __file__, "--calls"]
    subprocess.run(alone, check=True)
    found: dict[str, dict] = {}
    for name, options in TOOLS.items():
        began = time.monotonic()
        command = ["compute-sanitizer", *options, "--kernel-regex", "kns=_kernel", *alone]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=args.seconds,
                env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            )  # fmt: skip
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            code, text = -1, _text(error.stdout) + _text(error.stderr)
        lines = [line for line in text.splitlines() if line.startswith("=========")]
        found[name] = {
            "command": " ".join(["compute-sanitizer", *options]), "exit": code,
            "seconds": round(time.monotonic() - began, 1),
            "summary": lines[-1] if lines else text[-400:], "report": lines[:60],
        }  # fmt: skip
        print(name, code, found[name]["summary"], flush=True)
        args.out.write_text(json.dumps(found, indent=1))
    clean = all("0 errors" in f["summary"] or "0 hazards" in f["summary"] for f in found.values())
    sys.exit(0 if clean else 1)


def _text(captured: str | bytes | None) -> str:
    return captured.decode(errors="replace") if isinstance(captured, bytes) else captured or ""


if __name__ == "__main__":
    main()

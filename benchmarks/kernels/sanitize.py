"""Small calls of every kernel under NVIDIA's compute-sanitizer and Triton's ConSan.

    python benchmarks/kernels/sanitize.py --out sanitizer.json

Each call runs in a process of its own, several side by side: under memcheck (out-of-bounds and
misaligned accesses) without PyTorch's caching allocator, in which neighbouring tensors would hide
an access past the end, and under a tool that looks for accesses that nothing orders. For plain
kernels that is racecheck. Gluon's order theirs by mbarriers, which racecheck does not follow;
ConSan, a pass of Triton's compiler, does, and its assertions stop a kernel that reads a buffer
before its copy has arrived or overwrites one that is still read. What racecheck says of Gluon
kernels is recorded by source line and decides nothing. A kernel that forgets a wait is run too:
the record shows that ConSan stops it.

The record is written as each run ends, so that a run that is cut short keeps what it has. Exit
code 1 when a tool reports an error or does not finish.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import arguments

SANITIZERS = {
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "all", "--print-limit", "0"],
    "memcheck": ["--tool", "memcheck", "--padding", "256"],
}
TOOLS = ("consan", *SANITIZERS)
KERNELS = ("Gluon", "plain")
CALLS = (
    "sinks in documents",
    "lists per head",
    "dense",
    "strided",
    "odd head size",
    "wide head size",
)
FORGETS = "a wait is forgotten"
"""The call that ConSan must stop."""


def call(name: str, kernels: str) -> None:
    """Forward and backward of a call: two or three tiles each way, a group of two query heads."""
    import torch
    import triton
    from msa_kernels import backend
    from msa_kernels.attention import msa_attention
    from msa_kernels.pattern import BlockList, Dense, Pattern, PerHead, SinkWindow, Strided
    from msa_kernels.triton.launch import TritonKernel

    # What ConSan knows of each buffer lies in global memory.
    triton.set_allocator(
        lambda size, _align, _stream: torch.empty(size, device="cuda", dtype=torch.int8)
    )
    if name == FORGETS:
        from unsynchronised import read_too_early

        read_too_early()
        return
    lists = tuple(BlockList(128, rows) for rows in (((0,), (0, 1), (1, 2)), ((), (1,), (0, 1, 2))))
    odd = 96 if kernels == "Gluon" else 192
    pattern, rows, dim, cut = dict[str, tuple[Pattern, int, int, int]]({
        "sinks in documents": (SinkWindow(90, 20), 200, 128, 70),
        "lists per head": (PerHead(lists), 300, 128, 0),
        "dense": (Dense(), 200, 128, 0),
        "strided": (Strided(4, "union"), 192, 64, 0),
        "odd head size": (SinkWindow(60, 7), 129, odd, 0),
        "wide head size": (SinkWindow(60, 7), 200, 256, 70),
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
    # In this thread: Triton's allocator belongs to the thread that set it.
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse)))
    torch.cuda.synchronize()


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("sanitizer.json"),
                        help="the record, written as each run ends")  # fmt: skip
    parser.add_argument(
        "--seconds", type=arguments.number, default=200, help="limit of all runs together"
    )
    parser.add_argument(
        "--workers", type=arguments.number, default=8, help="processes on the GPU at a time"
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS,
                        help="what to run")  # fmt: skip
    parser.add_argument("--call", choices=(*CALLS, FORGETS), help="make one call, in this process")
    parser.add_argument("--kernels", choices=KERNELS, default="Gluon",
                        help="of --call")  # fmt: skip
    args = parser.parse_args()
    arguments.needs_gpu(parser)
    if args.call:
        call(args.call, args.kernels)
        return
    deadline = time.monotonic() + args.seconds
    runs = [(name, kernels) for name in CALLS for kernels in KERNELS]
    with ThreadPoolExecutor(args.workers) as pool:
        # Instrumented kernels take a minute to compile: first, beside everything else.
        jobs: list[Future[dict]] = [
            pool.submit(consan, name, deadline)
            for name in (FORGETS, *CALLS)
            if "consan" in args.tools
        ]
        tools = [tool for tool in SANITIZERS if tool in args.tools]
        warm = [pool.submit(_run, _call(*run), {}, deadline) for run in runs if tools]
        jobs += [
            pool.submit(sanitizer, tool, *run, first, deadline)
            for run, first in zip(runs, warm, strict=False)
            for tool in tools
        ]
        rows = []
        for future in as_completed(jobs):
            rows.append(future.result())
            args.out.write_text(json.dumps({**_machine(), "rows": rows}, indent=1))
            row = rows[-1]
            print(row["tool"], row["kernels"], row["call"], f"{row['seconds']} s",
                  {True: "clean", False: "NOT CLEAN", None: "decides nothing"}[row["clean"]],
                  row["summary"],
                  flush=True)  # fmt: skip
    sys.exit(1 if any(row["clean"] is False for row in rows) else 0)


def consan(name: str, deadline: float) -> dict:
    """A call of Gluon kernels that check their own order; clean when none of them stopped, or the
    one that forgets a wait did."""
    began = time.monotonic()
    mode = {"TRITON_INSTRUMENTATION_MODE": "consan", "CUDA_LAUNCH_BLOCKING": "1"}
    code, text = _run(_call(name, "Gluon"), mode, deadline)
    said = [line.strip() for line in text.splitlines() if "Assertion" in line or "rror" in line]
    stopped = any("device-side assert" in line for line in said)
    sites = Counter(re.sub(r".*\(?(\w+\.py:\d+).*?Assertion `?", r"\1 ", s) for s in said)
    return _row("consan", name, "Gluon", began, code) | {
        "clean": code not in (0, None) and stopped if name == FORGETS else code == 0,
        "summary": said[0][-200:] if said else "no assertion failed" if code == 0 else text[-300:],
        "report": [f"{count} x {site[:200]}" for site, count in sites.most_common(12)],
    }


def sanitizer(tool: str, name: str, kernels: str, compiled: Future, deadline: float) -> dict:
    """One tool of compute-sanitizer over one call, once its kernels are compiled."""
    compiled.result()
    began = time.monotonic()
    options = [*SANITIZERS[tool], "--show-backtrace", "no", "--kernel-regex", "kns=_kernel"]
    code, text = _run(
        ["compute-sanitizer", *options, *_call(name, kernels)],
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, deadline,
    )  # fmt: skip
    lines = [line for line in text.splitlines() if line.startswith("=========")]
    summary = lines[-1] if lines and code is not None else f"not finished: {text[-300:]}"
    clean = code == 0 and any(n in summary for n in (" 0 errors", "(0 errors", " 0 hazards"))
    unfollowed = tool == "racecheck" and kernels == "Gluon" and code == 0
    return _row(tool, name, kernels, began, code) | {
        "command": " ".join(["compute-sanitizer", *options]),
        "clean": clean or (None if unfollowed else False), "summary": summary,
        "report": [] if clean else _hazards(lines) or lines[:60],
    }  # fmt: skip


def _hazards(lines: list[str]) -> list[str]:
    """Hazards by kind and by the source lines of the two accesses, most frequent first."""
    found: Counter[str] = Counter()
    kind, sites = "", []
    for line in lines:
        if match := re.search(r"Potential (\w+) hazard", line):
            kind, sites = match[1], []
        elif match := re.search(r"(Write|Read) Thread .* at (\w+)\+\w+ in (\S+)", line):
            sites.append(f"{match[1]} in {match[2]} {match[3]}")
            if len(sites) == 2:
                found[f"{kind}: {', '.join(sites)}"] += 1
    return [f"{count} x {site}" for site, count in found.most_common(40)]


def _row(tool: str, name: str, kernels: str, began: float, code: int | None) -> dict[str, Any]:
    return {
        "tool": tool, "kernels": kernels, "call": name, "exit": code,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _run(command: list[str], env: dict[str, str], deadline: float) -> tuple[int | None, str]:
    """Exit code, None where time ran out, and what was printed."""
    left = deadline - time.monotonic()
    if left <= 0:
        return None, "no time was left"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=left, env={**os.environ, **env}
        )
    except subprocess.TimeoutExpired as error:
        return None, _text(error.stdout) + _text(error.stderr)
    return done.returncode, done.stdout + done.stderr


def _machine() -> dict[str, Any]:
    import datetime

    import torch
    import triton

    return {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def _call(name: str, kernels: str) -> list[str]:
    return [sys.executable, __file__, "--call", name, "--kernels", kernels]


def _text(captured: str | bytes | None) -> str:
    return captured.decode(errors="replace") if isinstance(captured, bytes) else captured or ""


if __name__ == "__main__":
    main()

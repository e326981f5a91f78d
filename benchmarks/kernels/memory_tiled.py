"""Peak memory of the tiled torch implementation on a CPU, forward and backward.

    python benchmarks/kernels/memory_tiled.py [--output benchmarks/kernels/memory_tiled.json]

Measures how much a process grows (peak resident set, inputs and gradients included) over one
forward and backward pass at 65,536 tokens, 4 heads of size 64, fp32, Window(1024). Every length
runs in a process of its own, since a peak never falls.
"""

from __future__ import annotations

import datetime
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import arguments
import torch
from msa_kernels.attention import msa_attention
from msa_kernels.pattern import Window

HEADS, HEAD_DIM, WINDOW = 4, 64, 1024
LENGTHS = (16_384, 32_768, 65_536)
LIMIT_BYTES = 1_200_000_000


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(length: int) -> dict[str, Any]:
    """One pass at ``length`` tokens; the growth over the process after a small warm-up pass."""
    step(1024)
    before, start = peak_bytes(), time.perf_counter()
    step(length)
    return {
        "length": length,
        "added_bytes": peak_bytes() - before,
        "tensor_bytes": 3 * 2 * length * HEADS * HEAD_DIM * 4,
        "seconds": round(time.perf_counter() - start, 2),
    }


def step(length: int) -> None:
    shape = (1, length, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    out = msa_attention(q, k, v, Window(WINDOW), backend="torch")
    assert isinstance(out, torch.Tensor)
    out.sum().backward()


def main() -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument(
        "--length", type=arguments.number, help="measure this length alone and print it"
    )
    parser.add_argument("--output", type=Path, help="write the record here")
    args = parser.parse_args()
    if args.length:
        print(json.dumps(measure(args.length)))
        return 0
    rows = []
    for length in LENGTHS:
        command = [sys.executable, __file__, "--length", str(length)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(f"{length:>7} tokens: {rows[-1]['added_bytes'] / 1e6:8.1f} MB added", flush=True)
    record = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pattern": f"Window({WINDOW})",
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": "float32",
        "limit_bytes": LIMIT_BYTES,
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if rows[-1]["added_bytes"] < LIMIT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())

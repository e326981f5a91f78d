"""What tile lists cost the host: new ones for every batch of documents, and cached ones.

    python benchmarks/kernels/lists.py --output lists.json

For batches of 131,072 tokens packed from documents of random lengths: milliseconds of one core to
lay out a batch that was never seen (positions, lists of all three kernels, on the host side of the
copy), and microseconds to find the lists of one that was. On a GPU also the forward time beside
it, so that the share of a cached look-up can be read off, and whether a step synchronises.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import arguments
import numpy as np
import torch
from msa_kernels import plan as plans
from msa_kernels.attention import msa_attention
from msa_kernels.pattern import (
    Block,
    BlockList,
    Dense,
    Dilated,
    Pattern,
    SinkWindow,
    Union,
    Window,
)
from msa_kernels.triton.launch import prepare

TOKENS = 131_072
PATTERNS: dict[str, Pattern] = {
    "dense": Dense(),
    "window1k": Window(1024),
    "window8k": Window(8192),
    "sinks": SinkWindow(8192, 512),
    "block": Block(1024),
    "block list": BlockList(
        128, tuple(tuple(k for k in range(q + 1) if k % 8 == 7 or k >= q - 7) for q in range(1024))
    ),
    "strided": Union((Window(128), Dilated(128))),
}
MEANS = (512, 4096, 32_768)


def packing(mean: int, rng: np.random.Generator) -> np.ndarray:
    """Ids (1, tokens): documents of geometric lengths around ``mean``."""
    lengths = rng.geometric(1 / mean, 4 * TOKENS // mean + 8)
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None, :TOKENS].copy()


def milliseconds(work: Callable[[], object]) -> float:
    """Of this thread on a core: waiting for others is not the lists' fault."""
    began = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - began)


def fresh(pattern: Pattern, mean: int, device: torch.device, count: int) -> list[float]:
    """Milliseconds for each of ``count`` packings, each new."""
    rng = np.random.default_rng(mean)
    times = []
    for _ in range(count + 1):
        ids = packing(mean, rng)

        def lay_out(ids: np.ndarray = ids) -> None:
            runs = plans.packed(ids)
            for part in plans.plan(pattern, runs, runs):
                prepare(part, device, torch.bfloat16, 128)

        times.append(milliseconds(lay_out))
    return times[1:]


def cached(pattern: Pattern, mean: int, device: torch.device) -> float:
    """Microseconds to find what a call needs, for a packing that was laid out before."""
    runs = plans.packed(packing(mean, np.random.default_rng(mean)))
    times = []
    for _ in range(201):

        def look_up() -> None:
            for part in plans.plan(pattern, runs, runs):
                prepare(part, device, torch.bfloat16, 128)

        times.append(1e3 * milliseconds(look_up))
    return statistics.median(times[1:])


def forward(pattern: Pattern, mean: int) -> dict[str, object]:
    """Device milliseconds of a forward with these documents; whether a step waits for the GPU."""
    made = torch.Generator("cuda").manual_seed(0)
    kind = {"generator": made, "device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(1, TOKENS, heads, 128, **kind) for heads in (32, 8, 8))
    ids = torch.from_numpy(packing(mean, np.random.default_rng(mean)))

    def attend() -> torch.Tensor:
        return msa_attention(q, k, v, pattern, documents=ids, backend="triton")

    attend()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend()
        waits = ""
    except RuntimeError as error:
        waits = str(error)
    torch.cuda.set_sync_debug_mode("default")
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        attend()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return {"forward_ms": round(statistics.median(times), 3), "synchronises": waits}


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("lists.json"),
                        help="the record, written after every row")  # fmt: skip
    parser.add_argument("--count", type=arguments.number, default=9,
                        help="batches that are laid out for a row")  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    rows = []
    for name, pattern in PATTERNS.items():
        for mean in MEANS:
            times = fresh(pattern, mean, device, args.count)
            row: dict[str, object] = {
                "pattern": name, "tokens": TOKENS, "mean_document": mean,
                "build_ms": round(statistics.median(times), 2),
                "build_ms_most": round(max(times), 2),
                "cached_us": round(cached(pattern, mean, device), 1),
            }  # fmt: skip
            if gpu and mean == 4096:
                row |= forward(pattern, mean)
            rows.append(row)
            print(row, flush=True)
            card = torch.cuda.get_device_name() if gpu else "none"
            found = {"card": card, "torch": torch.__version__, "rows": rows}
            args.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

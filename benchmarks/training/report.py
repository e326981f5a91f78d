"""The page of what benchmarks/training has recorded.

    python benchmarks/training/report.py benchmarks/training/h200.jsonl  # writes docs/

The file holds lines as step.py and longest.py wrote them, and ``comment`` lines for the page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training-speed.md"
HEAD = """# A training step, measured

Made by `benchmarks/training/report.py` from `benchmarks/training/h200.jsonl`. The model has
Llama-3-8B's width and four layers, a vocabulary of 128,256, one sequence of 131,072 random tokens,
bf16 parameters and AdamW states. The peer is a Hugging Face model with flash-attn-4, Liger's
kernels, whole-layer checkpoints, and on two GPUs FSDP2 and Ulysses; ours keeps attention's output
through checkpoints, tiles the MLP, and exchanges what the pattern needs. Rows of one file were
measured in one run of one machine, one after the other; medians after a warm-up step.
"""


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    peers = {(row["row"].split("/")[1], row["gpus"]): row for row in steps if "peer" in row["row"]}
    lines = [
        "| row | GPUs | tokens/s | step, ms | layers | head and loss | backward | optimizer | "
        "peak GiB | over the peer | first losses |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in steps:
        peer = peers.get((row["row"].split("/")[1], row["gpus"]))
        ratio = f"{peer['step_ms'] / row['step_ms']:.3f}" if peer and peer is not row else ""
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"][:3])
        lines.append(
            f"| {row['row']} | {row['gpus']} | {row['tokens_per_second']:,.0f} | "
            f"{row['step_ms']:.0f} | {row['forward_layers_ms']:.0f} | "
            f"{row['forward_head_loss_ms']:.0f} | {row['backward_ms']:.0f} | "
            f"{row['optimizer_ms']:.0f} | {max(row['peak_gib']):.1f} | {ratio} | {losses} |"
        )
    found: dict[str, Any] = next(row for row in rows if row["kind"] == "environment")
    versions = ", ".join(
        f"{name} {found[name]}" for name in ("torch", "triton", "transformers", "flash-attn-4",
                                             "liger-kernel")
    )  # fmt: skip
    comments = "\n\n".join(row["text"] for row in rows if row["kind"] == "comment")
    text = f"{HEAD}\n{found['card']}, {versions}, {found['date']}.\n\n" + "\n".join(lines)
    PAGE.write_text(f"{text}\n\n{comments}\n")


if __name__ == "__main__":
    main()

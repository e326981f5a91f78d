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
through checkpoints, tiles the MLP, and exchanges what the pattern needs. Medians after a warm-up
step.
"""
LONGEST = """## The longest sequence

`benchmarks/training/longest.py`: one whole optimizer step of Llama 3 8B (all layers, the loss over
the whole vocabulary), bf16 weights, gradients and AdamW states. Only some layers' inputs are kept,
most of them in host memory with the optimizer's states; the rest is computed again.
"""


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    found: dict[str, Any] = next(row for row in rows if row["kind"] == "environment")
    versions = ", ".join(
        f"{name} {found[name]}" for name in ("torch", "triton", "transformers", "flash-attn-4",
                                             "liger-kernel")
    )  # fmt: skip
    comments = [row["text"] for row in rows if row["kind"] == "comment"]
    heading = f"{HEAD}\n{found['card']}, {versions}, {found['date']}."
    after = [row["text"] for row in rows if row["kind"] == "longest comment"]
    parts = [heading, steps(rows), *comments, LONGEST + longest(rows), *after]
    PAGE.write_text("\n\n".join(parts) + "\n")


def steps(rows: list[dict[str, Any]]) -> str:
    measured = [row for row in rows if row["kind"] == "step"]

    def case(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["row"].split("/")[1], row["gpus"], row["session"]

    peers = {case(row): row for row in measured if "peer" in row["row"]}
    lines = [
        "| row | GPUs | session | tokens/s | step, ms | layers | head and loss | backward | "
        "optimizer | peak GiB | over the peer | first losses |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in measured:
        peer = peers.get(case(row))
        ratio = f"{peer['step_ms'] / row['step_ms']:.3f}" if peer and peer is not row else ""
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"][:3])
        lines.append(
            f"| {row['row']} | {row['gpus']} | {row['session']} | "
            f"{row['tokens_per_second']:,.0f} | "
            f"{row['step_ms']:.0f} | {row['forward_layers_ms']:.0f} | "
            f"{row['forward_head_loss_ms']:.0f} | {row['backward_ms']:.0f} | "
            f"{row['optimizer_ms']:.0f} | {max(row['peak_gib']):.1f} | {ratio} | {losses} |"
        )
    return "\n".join(lines)


def longest(rows: list[dict[str, Any]]) -> str:
    """What trained, and what it held beside what was expected of it."""
    lines = [
        "| tokens | GPUs | attention | loss | seconds | tokens/s | GPU GiB | expected | "
        "pinned host GiB | process GiB | copied GiB |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if row["kind"] == "longest":
            window = f"Window({row['window']})" if row["window"] else "dense"
            lines.append(
                f"| {row['tokens']:,} | {row['gpus']} | {window} | {row['loss']:.4f} | "
                f"{row['step_seconds']:.0f} | {row['tokens_per_second']:,.0f} | "
                f"{max(row['peak_gib']):.1f} | {row['estimate']['gpu_peak']:.1f} | "
                f"{row['host_pinned_gib']:.1f} | {row['resident_gib']:.1f} | "
                f"{sum(row['copied_gib'].values()):.0f} |"
            )
    return "\n" + "\n".join(lines)


if __name__ == "__main__":
    main()

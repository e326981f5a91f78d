"""The page and the plot of what benchmarks/context/two_gpus.py has recorded.

    python benchmarks/context/report.py benchmarks/context/h200x2.json   # writes docs/

The file holds ``runs``, each as two_gpus.py wrote it, with a ``note`` on what was run. Rows of
other programs in the same machine's run stand under ``others``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "context-speed.md"
PLOT = REPOSITORY / "docs" / "img" / "context-speed.svg"
MIB = 1 << 20


def table(run: dict[str, Any]) -> str:
    lines = [
        "| method | computed by | ms | one GPU, ms | speed-up (95 %) | sent, MiB: keys, all | "
        "balance | peak GiB |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for row in run["rows"]:
        low, high = row["speed_up_interval"]
        ran = next((b for b in row["backends"] if b.startswith("context/")), row["backends"][0])
        keys, everything = (
            max(row[name]) / MIB for name in ("bytes_sent_forward", "bytes_sent_total")
        )
        lines.append(
            f"| **{row['method']}** | {ran.removeprefix('context/')} | {row['total_ms']:.1f} | "
            f"{row['one_gpu_ms']:.1f} | {row['speed_up']:.3f} ({low:.3f} to {high:.3f}) | "
            f"{keys:.1f}, {everything:.1f} | {row['balance']:.3f} | "
            f"{row['peak_bytes'] / 2**30:.2f} |"
        )
        for peer in row.get("peers", ()):
            low, high = peer["ours_over_peer_interval"]
            lines.append(
                f"| {peer['method']} | | {peer['total_ms']:.1f} | | ours over it "
                f"{peer['ours_over_peer']:.3f} ({low:.3f} to {high:.3f}) | | | "
                f"{peer['peak_bytes'] / 2**30:.2f} |"
            )
    for other in run.get("others", ()):
        lines.append(f"| {other['method']} | | {other['total_ms']:.1f} | | | | | |")
    return "\n".join(lines)


def page(record: dict[str, Any]) -> str:
    parts = [
        "# Context parallelism, measured",
        "Made by `benchmarks/context/report.py` from `benchmarks/context/h200x2.json`. Forward "
        "and backward of attention, 32 query and 8 key/value heads of 128, bf16, 131,072 tokens "
        "over two GPUs of one host. One GPU, ours and the peers alternate in every round; a "
        "time is the slowest rank's, the median over rounds. One GPU runs the same "
        "implementation on the whole sequence. Every result was compared with one GPU's at this "
        "shape before it was timed.",
        "![Milliseconds by method](img/context-speed.svg)",
    ]
    for run in record["runs"]:
        parts.append(
            f"## {run['note']}\n\n{run['card']} x {run['ranks']}, torch {run['torch']}, Triton "
            f"{run['triton']}, NCCL {run['nccl']}, {run['date']}, at {run['commit']}.\n\n"
            f"{table(run)}"
        )
    parts.append(record["reading"])
    return "\n\n".join(parts) + "\n"


def plot(record: dict[str, Any]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
    for axis, word in zip(axes, ("dense", "window"), strict=True):
        bars: dict[str, tuple[float, str]] = {}
        for run in reversed(record["runs"]):  # the newest is the first, and stays
            for row in run["rows"]:
                if not row["method"].startswith(word):
                    continue
                ran = next(b for b in row["backends"] if b.startswith("context/"))
                name = f"{row['method']} ({ran.removeprefix('context/')})"
                bars[name] = (row["total_ms"], "tab:blue")
                for peer in row.get("peers", ()):
                    bars[peer["method"]] = (peer["total_ms"], "tab:gray")
            for other in run.get("others", ()):
                if ("window" in other["method"]) == (word == "window"):
                    bars[other["method"]] = (other["total_ms"], "tab:gray")
        names = sorted(bars, key=lambda n: -bars[n][0])
        axis.barh(names, [bars[n][0] for n in names], color=[bars[n][1] for n in names])
        axis.set_xlabel("ms, forward and backward")
        axis.tick_params(labelsize=7)
        axis.set_title({"dense": "dense causal", "window": "window 8192"}[word], fontsize=9)
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "context"
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    record = json.loads(Path(sys.argv[1]).read_text())
    PAGE.write_text(page(record))
    plot(record)


if __name__ == "__main__":
    main()

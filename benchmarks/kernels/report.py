"""Write the tables and the plot of ``docs/kernels.md`` from recorded runs.

    python benchmarks/kernels/report.py benchmarks/kernels/h200.json

The file holds rows of one run of ``measure.py``, or of several with a ``run`` number each: the
newest of a row is shown, and all of them side by side where there are more. A row with a ``note``
is kept for the record and shown only where there is no other.
"""

from __future__ import annotations

import json
from pathlib import Path

import arguments
import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "msa"

import matplotlib.pyplot as plt  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "kernels.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
OURS = ("auto", "triton", "triton-fused", "triton-fp8")


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("record", type=Path, help="what measure.py wrote")
    args = parser.parse_args()
    try:
        run = json.loads(args.record.read_text())
        measured = any("total_ms" in row for row in run["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{args.record} is not a record: {type(error).__name__}: {error}")
    if not measured:
        parser.error(f"{args.record} has no row of measure.py")
    rows = [row for row in run["rows"] if "error" not in row]
    by_key: dict[tuple, list[dict]] = {}
    for row in rows:
        by_key.setdefault(key(row), []).append(row)
    newest = [
        max(same, key=lambda row: ("note" not in row, row.get("run", 1)))
        for same in by_key.values()
    ]
    plain = [row for row in newest if shape(row) == ("128", "bfloat16")]
    others = [row for row in newest if row not in plain]
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    tables = heading(run) + table(plain) + again(by_key)
    if others:
        tables += "\n\nOther head sizes, and fp16:\n\n" + table(others)
    PAGE.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}")
    plot(plain, max(row["sequence"] for row in plain), DOCS / "img" / "kernels.svg")


def key(row: dict) -> tuple:
    names = ("pattern", "sequence", "batch", "implementation")
    return (*(row[name] for name in names), *shape(row))


def again(by_key: dict[tuple, list[dict]]) -> str:
    """Rows that several runs measured with the same implementation."""
    lines = []
    for same in by_key.values():
        sound = [
            row for row in same if "note" not in row and row.get("ran") == same[-1].get("ran")
        ]
        if len(sound) > 1:
            times = ", ".join(f"{row['total_ms']:.2f}" for row in sound)
            numbers = ", ".join(str(row["run"]) for row in sound)
            apart = max(r["total_ms"] for r in sound) / min(r["total_ms"] for r in sound) - 1
            where = f"{sound[0]['batch']} x {sound[0]['sequence']}"
            lines.append(
                f"| {named(sound[0])} | {where} | {sound[0]['implementation']} | {times} | "
                f"{numbers} | {100 * apart:.1f} % |"
            )
    if not lines:
        return ""
    head = (
        "| pattern | batch x tokens | implementation | both, ms | runs | apart |\n"
        "|---|---|---|---:|---|---:|\n"
    )
    return "\n\nRows that several runs measured, each on another machine:\n\n" + (
        head + "\n".join(sorted(lines))
    )


def named(row: dict) -> str:
    where = "" if shape(row) == ("128", "bfloat16") else f", {' '.join(shape(row))}"
    return row["pattern"] + where


def shape(row: dict) -> tuple[str, str]:
    return str(row["head_dim"]), row.get("dtype", "bfloat16")


def heading(run: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    runs = run.get("runs", [run])
    dates = ", ".join(dict.fromkeys(one["date"] for one in runs))
    ceiling = " to ".join(
        f"{edge(one['matmul_tflops'] for one in runs):.0f}" for edge in (min, max)
    )  # fmt: skip
    return (
        f"{run['card']}, {dates}; {versions}; bf16 matrix product {ceiling} TFLOP/s. "
        "Milliseconds, and useful TFLOP/s in brackets.\n\n"
    )


def table(rows: list[dict]) -> str:
    lines = [
        "| pattern | batch x tokens | implementation | forward | backward | both | extra GiB |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    order = sorted(
        rows, key=lambda r: (r["pattern"], *shape(r), -r["sequence"], r["total_ms"])
    )  # fmt: skip
    for row in order:
        name = row["implementation"]
        if row.get("ran") and row["ran"] != [name]:
            name += f" ({', '.join(row['ran'])})"
        shown = f"**{name}**" if row["implementation"] in OURS else name
        cells = [
            f"{row[f'{kind}_ms']:.2f} ({row[f'{kind}_tflops']:.0f})"
            for kind in ("forward", "backward", "total")
        ]
        lines.append(
            f"| {named(row)} | {row['batch']} x {row['sequence']} | {shown} | "
            f"{' | '.join(cells)} | {row['peak_bytes'] / 2**30:.2f} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict], sequence: int, path: Path) -> None:
    """Forward and backward by pattern, at one length; rows with a note stand in the table only."""
    chosen = [row for row in rows if row["sequence"] == sequence and "note" not in row]
    patterns = list(dict.fromkeys(row["pattern"] for row in chosen))
    names = list(dict.fromkeys(row["implementation"] for row in chosen))
    figure, axes = plt.subplots(figsize=(9, 4))
    width = 0.8 / len(names)
    for at, name in enumerate(names):
        mine = {row["pattern"]: row["total_tflops"] for row in chosen
                if row["implementation"] == name}  # fmt: skip
        places = [n + (at - len(names) / 2) * width for n, p in enumerate(patterns) if p in mine]
        axes.bar(places, [mine[p] for p in patterns if p in mine], width, label=name)
    axes.set_xticks(range(len(patterns)), patterns, rotation=20, ha="right")
    axes.set_ylabel("useful TFLOP/s, forward and backward")
    axes.set_title(f"{sequence} tokens, 32/8 heads of 128, bf16, one H200")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Draws docs/img/overview.svg: one file, its doors, and the tiles that its pattern visits.

    python docs/img/overview.py

The tiles are not an illustration: they come from the same lists that the kernels walk.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from msa_kernels.blocks import Runs, build
from msa_kernels.pattern import SinkWindow

LENGTH, TILE = 4096, 128
PATTERN = SinkWindow(window=1024, sinks=128)
CELL = 9  # pixels per tile

INK, SOFT, LINE = "#1f2933", "#5f6c7b", "#cbd2d9"
FULL, PARTIAL, EMPTY, CARD, ACCENT = "#1f6f8b", "#8cc3d4", "#f1f4f6", "#f7f9fa", "#b3541e"
JOB = """apiVersion: flashmsa.dev/v1alpha1
kind: LongContextJob
spec:
  model: {preset: llama-3-8b}
  data: {source: s3://corpus/}
  sequence: {length: 131072}
  attention:
    pattern:
      type: SinkWindow
      window: 8192
      sinks: 512"""
DOORS = [
    ("This machine", "msa run job.yaml", True),
    ("Any Ray cluster", "ray job submit -- msa run ...", True),
    ("Kubernetes (in progress)", "kubectl apply -f job.yaml", False),
]
LEGEND = [
    (FULL, "full tile: computed without a mask"),
    (PARTIAL, "partial tile: computed with a mask"),
    (EMPTY, "skipped: neither computed nor read"),
]


def tiles() -> dict[tuple[int, int], bool]:
    """(query tile, key tile) -> whether it is full, over the parts of the pattern."""
    found: dict[tuple[int, int], bool] = {}
    for part in PATTERN.parts():
        lists = build(part, Runs.whole(LENGTH), Runs.whole(LENGTH), TILE, TILE)
        for query in range(lists.q_tiles):
            for at in range(lists.ptr[query], lists.ptr[query + 1]):
                found[query, int(lists.index[at])] = bool(lists.full[at])
    return found


def text(x: float, y: float, words: str, size: float = 13, colour: str = INK, **style: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{extra}>{escape(words)}</text>'
    )


def box(x: int, y: int, w: int, h: int, fill: str = CARD, line: str = LINE, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    shape = f'x="{x}" y="{y}" width="{w}" height="{h}" rx="8"'
    return f'<rect {shape} fill="{fill}" stroke="{line}" stroke-width="1.5"{dashes}/>'


def arrow(x0: int, y0: int, x1: int, y1: int) -> str:
    middle = (x0 + x1) // 2
    path = f"M{x0},{y0} C{middle},{y0} {middle},{y1} {x1},{y1}"
    return (
        f'<path d="{path}" fill="none" stroke="{SOFT}" stroke-width="1.5" marker-end="url(#tip)"/>'
    )


def draw() -> str:
    """The whole picture as an SVG document."""
    visited = tiles()
    side = LENGTH // TILE
    mono = {"font_family": "ui-monospace, Menlo, Consolas, monospace"}
    bold = {"font_weight": "600"}
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 440" role="img" '
        'font-family="system-ui, -apple-system, Helvetica, Arial, sans-serif">',
        "<title>One job file runs on a laptop, a Ray cluster or Kubernetes; its attention "
        "pattern decides which tiles are computed</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{SOFT}"/></marker>',
        "</defs>",
        '<rect x="0" y="0" width="1040" height="440" rx="12" fill="#ffffff"/>',
        text(32, 44, "1  Write one file", 16, **bold),
        box(32, 64, 262, 236),
    ]
    for row, line in enumerate(JOB.splitlines()):
        colour = ACCENT if row >= 6 else INK
        parts.append(text(46, 90 + 19 * row, line, 12, colour, xml__space="preserve", **mono))

    parts.append(text(358, 44, "2  Run it anywhere", 16, **bold))
    for row, (name, command, works) in enumerate(DOORS):
        top = 64 + 84 * row
        parts += [
            arrow(296, 182, 352, top + 34),
            box(358, top, 250, 68, dash="" if works else "5 4"),
            text(374, top + 28, name, 14, INK if works else SOFT, **bold),
            text(374, top + 50, command, 12, INK if works else SOFT, **mono),
            arrow(610, top + 34, 676, 200),
        ]

    left, top = 684, 64
    parts.append(text(left, 44, "3  Attend to what the pattern says", 16, **bold))
    for query in range(side):
        for key in range(side):
            full = visited.get((query, key))
            fill = EMPTY if full is None else FULL if full else PARTIAL
            parts.append(
                f'<rect x="{left + CELL * key}" y="{top + CELL * query}" '
                f'width="{CELL - 1}" height="{CELL - 1}" fill="{fill}"/>'
            )
    width = CELL * side
    parts += [
        text(left + width + 10, top + 10, "keys", 11, SOFT),
        text(left, top + width + 16, "queries, top to bottom", 11, SOFT),
        text(
            left + width, top + width + 16, f"{len(visited)} of {side * side} tiles", 11, SOFT,
            text_anchor="end",
        ),
    ]  # fmt: skip
    for row, (fill, words) in enumerate(LEGEND):
        y = top + width + 26 + 17 * row
        parts.append(f'<rect x="{left}" y="{y}" width="10" height="10" fill="{fill}"/>')
        parts.append(text(left + 18, y + 9, words, 11.5, SOFT))

    parts += [
        box(32, 328, 576, 88, fill="#fdf7f3", line="#e8cdbd"),
        text(48, 354, "One pattern object, and everything else derived from it", 14, **bold),
        text(
            48,
            377,
            "tile lists for the kernels   ·   exact pair counts for the planner",
            12.5,
            SOFT,
        ),
        text(48, 398, "key ranges and bytes for context parallelism (in progress)", 12.5, SOFT),
        "</svg>",
    ]
    return "\n".join(part.replace("xml--space", "xml:space") for part in parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())

"""What a person sees while a run goes on, and when it ends.

On a terminal a live line; elsewhere (a log file, CI) a plain line now and then, so that a run of a
thousand steps is some twenty lines, not a thousand.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from msa_workloads.runspec import RunSpec

PLAIN_LINES = 20
"""Lines that a whole run prints where there is no terminal."""

PLAIN_SECONDS = 60.0
"""A line is printed at least this often there, so that a slow run is seen to be alive."""

RECENT_STEPS = 20
"""Steps over which the rate behind the ETA is averaged."""


class Display:
    """A sink that shows rows; use it as a context manager."""

    def __init__(self, console: Console, spec: RunSpec) -> None:
        self._console = console
        self._steps = spec.training.max_steps
        self._recent: list[dict[str, Any]] = []
        self._last_line = 0.0
        self._task: Any = None
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[shown]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Display:
        self._progress.start()
        self._task = self._progress.add_task("train", total=self._steps, shown="starting")
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the live one."""
        self._progress.console.print(text, highlight=False, markup=False)

    def begin(self, rows: list[dict[str, Any]], plan: dict[str, Any]) -> None:
        del plan
        self._recent = []
        at = rows[-1]["step"] if rows else 0
        if at:
            self.say(f"resumed from the checkpoint of step {at}")
        self._progress.update(self._task, completed=at)

    def add(self, row: dict[str, Any]) -> None:
        self._recent = [*self._recent[1 - RECENT_STEPS :], row]
        shown = self._line(row)
        self._progress.update(self._task, completed=row["step"], shown=shown)
        if held := row.get("held_out"):
            self.say(f"step {row['step']}: held-out {held['bits_per_byte']:.3f} bits per byte")
        if not self._console.is_terminal and self._is_time_for_line(row["step"]):
            self.say(f"step {row['step']}/{self._steps}  {shown}")
            self._last_line = time.monotonic()

    def _is_time_for_line(self, step: int) -> bool:
        every = max(1, self._steps // PLAIN_LINES)
        overdue = time.monotonic() - self._last_line > PLAIN_SECONDS
        return step % every == 0 or step in (1, self._steps) or overdue

    def _line(self, row: dict[str, Any]) -> str:
        seconds = sum(r["seconds"] for r in self._recent) / len(self._recent)
        rate = sum(r["tokens_per_second"] * r["seconds"] for r in self._recent) / (
            seconds * len(self._recent)
        )
        left = seconds * (self._steps - row["step"])
        return f"loss {row['loss']:.4f}  {rate:,.0f} tokens/s  ETA {clock(left)}"


def clock(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """The end of a run, as a table."""
    table = Table(title=f"{summary['name']}: finished", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in summary_lines(summary):
        table.add_row(label, value)
    console.print(table, highlight=False)


def _attention(used: dict[str, Any]) -> str:
    packed = ", packed documents" if used["packed"] else ""
    return (
        f"{used['backend']}: {used['pattern']}, {used['q_rows']} queries, {used['dtype']} on "
        f"{used['device']}{packed}, {used['calls']} calls on rank 0"
    )


def _backend(summary: dict[str, Any]) -> str:
    ran = dict.fromkeys(used["backend"] for used in summary["attention"])
    return f"{summary['backend']} was asked for, {' and '.join(ran) or 'none'} ran"


def summary_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each line that terminal and report share."""
    losses, speed = summary["loss"], summary["speed"]
    lines = [("steps", f"{summary['steps']} ({summary['samples']} sequences)")]
    if summary["losses"]:
        text = f"{losses['first']:.4f} at first, {losses['last']:.4f} at last (nats per token)"
        lines.append(("loss", text))
    held, order1 = summary["held_out"], summary["order1"]
    if held:
        text = f"{held['bits_per_byte']:.4f} bits per byte on {held['predicted']:,} {held['unit']}"
        lines.append(("held out", text))
    else:
        lines.append(("held out", "nothing: the data is a single document, or evaluation is off"))
    if order1:
        lines.append(("order-1 byte model", f"{order1['bits_per_byte']:.4f} bits per byte"))
    content = summary["data"]
    lines += [
        (
            "data",
            f"{content['source']}, {content['objects']:,} objects, {content['bytes']:,} bytes",
        ),
        ("content hash", content["sha256"]),
        ("attention", "; ".join(map(_attention, summary["attention"])) or "none ran"),
        ("backend", _backend(summary)),
        *(("heads", heads_line(kind)) for kind in summary.get("heads", ())),
        *context_lines(summary.get("context")),
        ("speed", f"{speed['tokens_per_second']:,.0f} tokens/s on {summary['ranks']} ranks"),
        ("time", _time(summary)),
        ("restarts", str(summary["restarts"])),
        ("checkpoint", f"step {summary['last_checkpoint_step']} in {summary['checkpoint_uri']}"),
        ("report", summary["files"]["report"]),
    ]
    return lines


def _time(summary: dict[str, Any]) -> str:
    wall, steps = clock(summary["wall_seconds"]), clock(summary["speed"]["seconds"])
    if summary.get("resumed_from_step"):
        return f"{wall} since it was resumed, {steps} in steps from the first one on"
    return f"{wall} in all, {steps} in steps"


def heads_line(kind: dict[str, Any]) -> str:
    """How layers store heads of several patterns, and how evenly ranks that split them attend."""
    where, order = f"layers {spans(kind['layers'])}", kind["order"]
    even = f"area max/mean {kind['balance']:.3f} over ranks that split them"
    if order is None:
        return f"{where}: in the model's order, {even}"
    return (
        f"{where}: key/value heads stored as {' '.join(map(str, order))} of the model's, in "
        f"checkpoints too; {even}, {kind['plain']:.3f} in the model's order"
    )


def spans(numbers: list[int]) -> str:
    """``0-3, 7``."""
    ends = [n for n in numbers if n + 1 not in numbers]
    begins = [n for n in numbers if n - 1 not in numbers]
    return ", ".join(
        str(begin) if begin == end else f"{begin}-{end}"
        for begin, end in zip(begins, ends, strict=True)
    )


def context_lines(report: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Label and text of each line that terminal and report share."""
    if report is None:
        return []
    how = f"{report['method']}, gradients {report['gradients']}"
    if report["heads"] > 1:
        moved = report["heads_bytes"]["most"]
        how += f", heads over {report['heads']} ranks ({size(moved)} a step)"
    lines = [("context", f"{report['ranks']} ranks, {report['layout']} layout, {how}")]
    for kind in report["kinds"]:
        needed, keys, back = (kind[n]["most"] for n in ("needed", "keys", "gradients"))
        times = f", {keys / needed:.2f} x the minimum" if needed else ""
        alone = kind["alone"]
        lost = ""
        if alone and alone["layout"] != report["layout"] and alone["received_here"]:
            ratio = alone["received"] / alone["received_here"]
            lost = f"; alone {alone['layout']} would move {ratio:.0%} of that"
        over = kind["heads_balance"]
        uneven = f", over ranks that split heads {over:.3f}" if over > 1 else ""
        lines.append((
            f"  {kind['layers']} x {_name(kind['pattern'])}",
            f"{size(keys)} keys and values a step to the busiest rank{times}, {size(back)} "
            f"gradients; area max/mean {kind['balance']:.3f}{uneven}{lost}",
        ))  # fmt: skip
    hidden = report["hidden"]
    text = (
        "not measured: only GPUs tell" if hidden is None
        else f"{hidden['share']:.1%} of {hidden['milliseconds']:.1f} ms of exchanges"
    )  # fmt: skip
    return [*lines, ("  hidden", text)]


def _name(pattern: Any) -> str:
    if isinstance(pattern, str):
        return pattern
    inner = ", ".join(
        f"{key} {value}" if not isinstance(value, list) else
        ", ".join(_name(v) for v in value if isinstance(v, dict)) or f"{key} listed"
        for key, value in pattern.items() if key != "type"
    )  # fmt: skip
    return f"{pattern['type']}({inner})" if inner else pattern["type"]


def size(count: float) -> str:
    """``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"

"""A plan on the terminal."""

from __future__ import annotations

from typing import Any

from msa_kernels.capabilities import AUTO
from rich.console import Console
from rich.table import Table
from rich.text import Text

from msa_operator.api import LongContextJob
from msa_operator.models import Model
from msa_operator.planner.explain import lines
from msa_operator.planner.request import Plan

SHOWN = 10
"""Rejected alternatives printed; JSON has more."""


def pattern_text(raw: dict[str, Any]) -> str:
    """``SinkWindow(window 512, sinks 64)``, members inside, rows counted."""
    words = []
    for key, value in raw.items():
        if key == "members":
            words += [pattern_text(member) for member in value]
        elif key == "rows":
            words.append(f"{len(value)} rows")
        elif key != "type":
            words.append(f"{key} {value}")
    return f"{raw['type']}({', '.join(words)})" if words else raw["type"]


def job_lines(job: LongContextJob, model: Model) -> list[tuple[str, str]]:
    """What is planned for, before the plan."""
    shape = model.shape
    return [
        ("model", f"{model.label}, {shape.parameters:,} parameters, {shape.layers} layers, "
                  f"{shape.heads} heads over {shape.kv_heads} key/value heads"),
        ("length", f"{job.spec.sequence.length:,} tokens"),
        ("attention", _attention(job)),
    ]  # fmt: skip


def _attention(job: LongContextJob) -> str:
    asked = job.spec.attention
    text = pattern_text(asked.pattern.to_dict())
    if asked.dense_layers:
        layers = ", ".join(map(str, sorted(asked.dense_layers)))
        text += f"; Dense in layers {layers}"
    return text if asked.backend == AUTO else f"{text}, backend {asked.backend}"


def print_plan(
    console: Console, job: LongContextJob, model: Model, plan: Plan, missing: tuple[str, ...] = ()
) -> None:
    """The plan, why, and what else was considered."""
    console.print(Text.assemble(("plan ", "bold"), (job.metadata.name, "bold cyan"), "  ",
                                (plan.label, "bold")))  # fmt: skip
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in (*job_lines(job, model), *lines(plan)):
        grid.add_row(f"  {label}", Text(text))
    console.print(grid)
    if plan.rejected:
        console.print(Text("not chosen", style="bold"))
        table = Table.grid(padding=(0, 2))
        # Both may wrap, or a narrow terminal would show no reasons.
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for r in plan.rejected[:SHOWN]:
            table.add_row(Text(f"  {r.label}"), Text(r.reason))
        console.print(table)
        if len(plan.rejected) > SHOWN:
            rest = len(plan.rejected) - SHOWN
            console.print(Text(f"  and {rest} more: --output json", style="dim"))
    if missing:
        console.print(Text.assemble(
            ("this version's workers cannot run it yet: ", "yellow"), ", ".join(missing)
        ))  # fmt: skip

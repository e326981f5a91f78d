"""``msa status``: jobs of a cluster as a table, live with --watch, or everything of one."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from msa_operator.cli.cluster import BAD_INPUT, Connection, Refused, cluster_options, find_job
from msa_operator.cli.jobs import JobView, short, view
from msa_operator.cli.options import emit, output_option

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WATCH_SECONDS = 2.0

_STYLES = {
    "Running": "green", "Complete": "green", "Failed": "bold red", "Recovering": "yellow",
    "Draining": "yellow", "Suspended": "dim",
}  # fmt: skip


@click.command(short_help="Show jobs of a cluster, live with --watch.")
@click.argument("name", required=False)
@click.option("-A", "--all-namespaces", is_flag=True, help="Jobs of all namespaces.")
@click.option("-w", "--watch", is_flag=True, help="Show changes as they happen, until Ctrl-C.")
@output_option
@cluster_options
def status(
    name: str | None, all_namespaces: bool, watch: bool, output: str,
    connect: Callable[[], Connection],
) -> None:  # fmt: skip
    """Show all jobs of the namespace, or everything of NAME: plan, progress, attempts, conditions.

    \b
      msa status
      msa status qwen-128k
      msa status --all-namespaces --watch
      msa status qwen-128k --output json | jq .status.progress

    With --watch and a NAME it ends when the job does.
    """
    if name and all_namespaces:
        raise click.UsageError("NAME and --all-namespaces exclude each other")
    if watch and output != "table":
        raise click.UsageError("--watch shows a table; kubectl get lcj --watch -o json streams")
    at = connect()
    if output != "table":
        emit(_raw(at, name, all_namespaces), output)
    elif watch:
        _watch(at, name, all_namespaces)
    else:
        from rich.console import Console

        # A pipe has no width: lines there are as long as they are.
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=200)
        console.print(_shown(at, _views(at, name, all_namespaces), name, all_namespaces))


def _raw(at: Connection, name: str | None, everywhere: bool) -> Any:
    from msa_operator.runtime.kube import JOBS

    if name:
        return find_job(at, name)
    return {"items": list(at.kube.list(JOBS, "" if everywhere else at.namespace))}


def _views(at: Connection, name: str | None, everywhere: bool) -> list[JobView]:
    now = datetime.datetime.now(datetime.UTC)
    raw = _raw(at, name, everywhere)
    jobs = [view(job, now) for job in ([raw] if name else raw["items"])]
    return sorted(jobs, key=lambda job: (job.over, job.namespace, job.age))


def _shown(
    at: Connection, jobs: list[JobView], name: str | None, everywhere: bool
) -> RenderableType:
    if name:
        return _one(jobs[0])
    if not jobs:
        where = "any namespace" if everywhere else f"namespace {at.namespace}"
        return f"no jobs in {where}; msa submit job.yaml makes one"
    return _many(jobs, everywhere)


def _watch(at: Connection, name: str | None, everywhere: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from msa_operator.cli.cluster import RETRIED
    from msa_operator.runtime.kube import KubeError

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            try:
                jobs = _views(at, name, everywhere)
                live.update(_shown(at, jobs, name, everywhere), refresh=True)
                if name and jobs[0].over:
                    return
            except KubeError as error:
                if error.code not in RETRIED:
                    raise
            except Refused as refused:
                # The job was deleted while it was watched.
                raise Refused(str(refused), BAD_INPUT) from None
            time.sleep(WATCH_SECONDS)


def _many(jobs: list[JobView], everywhere: bool) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, right in (
        *([("NAMESPACE", False)] if everywhere else []), ("NAME", False), ("PHASE", False),
        ("NODES", True), ("STEP", True), ("LOSS", True), ("TOKENS/S", True), ("MFU", True),
        ("ETA", True), ("CHECKPOINT", True), ("AGE", True),
    ):  # fmt: skip
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for job in jobs:
        table.add_row(
            *([job.namespace] if everywhere else []), job.name,
            Text(_phase(job), style=_STYLES.get(job.phase, "")), job.nodes, *_numbers(job),
            short(job.age),
        )  # fmt: skip
    said = [Text(f"{job.name}: {job.message}") for job in jobs if job.message]
    return Group(table, *([Text(""), *said] if said else []))


def _phase(job: JobView) -> str:
    return f"{job.phase}, deleting" if job.deleting else job.phase


def _numbers(job: JobView) -> list[str]:
    steps = "" if job.step is None else f"{job.step}/{job.max_steps}"
    return [
        steps,
        "" if job.loss is None else f"{job.loss:.4f}",
        "" if not job.tokens_per_second else f"{job.tokens_per_second:,}",
        "" if job.mfu is None else f"{job.mfu:.1%}",
        "" if job.over else job.eta,
        "" if not job.checkpoint else str(job.checkpoint),
    ]


def _one(job: JobView) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    steps, loss, speed, mfu, eta, checkpoint = _numbers(job)
    heard = (
        f" (heard {short(job.updated)} ago)" if job.updated is not None and not job.over else ""
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for label, value in (
        ("phase", _phase(job)),
        ("what to do", job.message),
        ("plan", job.plan),
        ("nodes", job.nodes),
        ("progress", f"step {steps}{heard}" if steps else ""),
        ("loss", loss),
        ("speed", f"{speed} tokens/s{f', MFU {mfu}' if mfu else ''}" if speed else ""),
        ("left", eta),
        ("checkpoint", f"step {checkpoint} in {job.checkpoint_uri}" if checkpoint else ""),
        ("cluster", job.cluster),
        ("age", short(job.age)),
        *(("note", note) for note in job.notes),
    ):
        if value:
            facts.add_row(f"  {label}", Text(value))
    title = Text.assemble((job.name, "bold cyan"), (f"  in {job.namespace}", "dim"))
    parts: list[RenderableType] = [title, facts]
    if job.attempts:
        parts += [Text("attempts", style="bold"), _attempts(job)]
    if job.conditions:
        parts += [Text("conditions", style="bold"), _conditions(job)]
    return Group(*parts)


def _attempts(job: JobView) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for attempt in job.attempts:
        steps = f"steps {attempt.get('fromStep', 0)} to {attempt.get('toStep', 0)}"
        table.add_row(
            f"  {attempt.get('number')}", str(attempt.get("reason") or attempt.get("state", "")),
            steps, str(attempt.get("message", "")),
        )  # fmt: skip
    return table


def _conditions(job: JobView) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for condition in job.conditions:
        table.add_row(
            f"  {condition.get('type')}", str(condition.get("status", "")),
            str(condition.get("reason", "")), str(condition.get("message", "")),
        )  # fmt: skip
    return table

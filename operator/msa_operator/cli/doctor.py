"""``msa doctor``: is everything there that training needs, here or in a cluster?"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from msa_operator.cli.cluster import connect, explained
from msa_operator.cli.options import emit, output_option
from msa_operator.doctor.finding import Finding, well

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "unknown": "dim"}


@click.command(short_help="Check this machine, or a cluster, for what training needs.")
@click.option("--cluster", is_flag=True, help="Look at the cluster of the kubeconfig instead.")
@click.option("--kubeconfig", type=click.Path(dir_okay=False), help="Another kubeconfig file.")
@click.option("--context", help="Another context of it.")
@click.option("-n", "--namespace", help="Where your jobs are; default: the context's namespace.")
@output_option
def doctor(
    cluster: bool, kubeconfig: str | None, context: str | None, namespace: str | None, output: str
) -> None:
    """Check what training needs, and say for each thing that is missing what to do.

    Without --cluster: this machine, its packages, memory, disk and GPUs, and whether attention
    computes here what it should. With it: the API server, the custom resources, the operator,
    KubeRay, your rights, storage, nodes and network policies; nothing is changed.

    \b
      msa doctor
      msa doctor --cluster --namespace team-a
      msa doctor --cluster --output json | jq '.findings[] | select(.state == "failed")'

    Exit codes: 0 nothing failed, 1 something did, 2 a flag, 4 the kubeconfig cannot be used.
    """
    if cluster:
        found = _cluster(kubeconfig, context, namespace)
    elif kubeconfig or context or namespace:
        raise click.UsageError("--kubeconfig, --context and --namespace go with --cluster")
    else:
        from msa_operator.doctor import local

        found = local.findings(Path("runs"))
    if output == "table":
        _print(found)
    else:
        emit({"ok": well(found), "findings": [asdict(f) for f in found]}, output)
    sys.exit(0 if well(found) else 1)


def _cluster(kubeconfig: str | None, context: str | None, namespace: str | None) -> list[Finding]:
    with explained():
        at = connect(kubeconfig, context, namespace)
    from msa_operator.doctor import cluster

    return cluster.findings(cluster.Target(at.kube, at.namespace, at.server))


def _print(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for f in found:
        text = Text(f.found)
        if f.action:
            text.append(f"\n{f.action}", style="italic")
        table.add_row(Text(f.state, style=_STYLES[f.state]), Text(f.check, style="bold"), text)
    console = Console()
    console.print(table)
    count = sum(f.state == "failed" for f in found)
    console.print(f"\n{count} failed" if count else "\nnothing failed", highlight=False)

"""The test cluster by hand.

python tests/e2e build              build every tool that is not in the cache
python tests/e2e up [NAME]          bring a cluster up; it stays
python tests/e2e down [NAME]        take it down and restore everything
python tests/e2e status             which clusters run
python tests/e2e kubeconfig [NAME]  print the path of an administrator's kubeconfig
python tests/e2e operator [NAME]    install the charts there, with storage for namespace default
python tests/e2e render             write manifests/install.yaml from the charts
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import charts, cluster, machine
from .build import build_all, tool
from .paths import Unavailable
from .process import run

CLAIM = "checkpoints"
"""As in the chart's values for this cluster."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 on success, 1 when it failed, 3 when this machine cannot run it."""
    parser = argparse.ArgumentParser(
        prog="python tests/e2e", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=[*_COMMANDS])
    parser.add_argument("name", nargs="?", default="dev")
    options = parser.parse_args(arguments)
    try:
        return _COMMANDS[options.command](options.name)
    except Unavailable as reason:
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 3
    except (RuntimeError, TimeoutError) as problem:
        print(f"failed: {problem}", file=sys.stderr)
        return 1


def _build(_: str) -> int:
    nodes, reason = True, ""
    try:
        machine.require_linux_root()
    except Unavailable as found:
        nodes, reason = False, f"without the parts of nodes: {found}"
    for name, path in build_all(nodes=nodes).items():
        print(f"{name:24} {path}")
    print(reason, end="\n" if reason else "")
    return 0


def _up(name: str) -> int:
    cluster.Cluster.up(name, with_parent=False, say=lambda text: print(text, flush=True))
    print(f"export KUBECONFIG={cluster.kubeconfig(name)}")
    return 0


def _down(name: str) -> int:
    print(f"{name} is down" if cluster.down(name) else f"there was no cluster named {name}")
    return 0


def _status(_: str) -> int:
    for name in cluster.running():
        print(f"{name}  {cluster.kubeconfig(name)}")
    return 0


def _kubeconfig(name: str) -> int:
    print(cluster.kubeconfig(name))
    return 0


def _operator(name: str) -> int:
    access = cluster.kubeconfig(name)
    storage = cluster.claim(access.parents[1] / "volumes/default/checkpoints", "default", CLAIM)
    run([str(tool("kubectl")), f"--kubeconfig={access}", "apply", "-f", "-"], stdin=storage)
    values = f"--values={charts.OPERATOR / 'examples' / 'test-cluster.yaml'}"
    for chart, given in ((charts.CRDS, []), (charts.OPERATOR, [values, "--wait"])):
        where = [chart.name, str(chart), f"--namespace={charts.NAMESPACE}", "--create-namespace"]
        print(charts.helm("upgrade", "--install", *where, *given, kubeconfig=access))
    return 0


def _render(_: str) -> int:
    print(f"wrote {charts.write_install_manifest()}")
    return 0


_COMMANDS = {
    "build": _build,
    "up": _up,
    "down": _down,
    "status": _status,
    "kubeconfig": _kubeconfig,
    "operator": _operator,
    "render": _render,
}

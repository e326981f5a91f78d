"""Which tests run, and beside which others.

Tests marked gpu are left out where there is no GPU, and the summary says so. Tests marked full run
only when they are asked for: ``pytest -m full``. Under ``pytest -n``, the tests of one file stay
together, and all that use the cluster of two nodes, of which a machine carries one at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
from e2e.fixtures import api_server, cluster  # noqa: F401

_left_out = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Lets several test processes share the cores: each computes with one thread."""
    if hasattr(config, "workerinput"):
        import os

        os.environ.setdefault("OMP_NUM_THREADS", "1")


def _has_gpu() -> bool:
    import torch  # only when a GPU test was collected: the control plane's tests need no torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests marked ``gpu`` on a machine without one, and ``full`` ones unless asked."""
    if "full" not in str(config.getoption("markexpr")):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if item not in full]
    # The longest pieces first, so that no process ends up waiting for another's: the cluster,
    # files that are slow as a whole, and those that have a slow test.
    long = ("cluster", "slow")
    some = {item.path for item in items if item.get_closest_marker("slow")}

    def length(item: pytest.Item) -> list[bool]:
        whole = [item.parent.get_closest_marker(mark) is None for mark in long]
        return [*whole, item.path not in some]

    items.sort(key=length)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu or _has_gpu():
        return
    config.stash[_left_out] = len(gpu)
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if item not in gpu]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands the number of tests left out to the process that prints the summary, if another."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(_left_out, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which process runs which tests: a file is one piece, and so is the folder two_nodes."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return file.rpartition("/")[0] if "/two_nodes/" in file else file

    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker collects all tests, so any of them knows how many there are."""
    count = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[_left_out] = max(count, node.config.stash.get(_left_out, 0))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Says how many GPU tests this machine could not run."""
    count = config.stash.get(_left_out, 0)
    if count:
        terminalreporter.write_line(f"GPU: no device here, {count} tests marked gpu did not run")

"""Tests marked gpu are left out where there is no GPU, and the summary says so.

Tests marked full run only when they are asked for: ``pytest -m full``.
"""

from __future__ import annotations

import pytest
from e2e.fixtures import api_server, cluster  # noqa: F401

_left_out = pytest.StashKey[int]()


def _has_gpu() -> bool:
    import torch  # only when a GPU test was collected: the control plane's tests need no torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests marked ``gpu`` on a machine without one, and ``full`` ones unless asked."""
    if "full" not in str(config.getoption("markexpr")):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if item not in full]
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu or _has_gpu():
        return
    config.stash[_left_out] = len(gpu)
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if item not in gpu]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Says how many GPU tests this machine could not run."""
    count = config.stash.get(_left_out, 0)
    if count:
        terminalreporter.write_line(f"GPU: no device here, {count} tests marked gpu did not run")

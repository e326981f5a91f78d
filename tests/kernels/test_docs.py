"""The Python in the documentation runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msa_kernels.pattern import Dilated, Fixed, Pattern, SinkWindow, Window

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["patterns.md", "attention.md"])
def test_examples_run(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)


def test_the_picture_shows_what_the_patterns_say() -> None:
    picture = re.search(r"```\n(Window.*?)```", (DOCS / "patterns.md").read_text(), re.DOTALL)
    assert picture is not None
    rows = [line.split() for line in picture[1].splitlines()[1:]]
    shown: list[Pattern] = [Window(4), SinkWindow(3, 2), Dilated(3), Fixed(4, 1, "union")]
    for column, pattern in enumerate(shown):
        for i in range(12):
            wanted = "".join("x" if pattern.allows(i, j) else "." for j in range(12))
            assert rows[i][column] == wanted, (pattern, i)

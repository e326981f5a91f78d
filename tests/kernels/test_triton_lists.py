"""How rows of lists are shared out over programs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is installed on Linux only")

from msa_kernels.triton import lists
from msa_kernels.triton.lists import SHARE, TURNS, DeviceLists

SMS = 132


@given(st.integers(1, 2000), st.integers(1, 256), st.integers(0, 3000), st.integers(1, 4))
def test_short_rows_go_together_while_there_are_turns_for_all(
    rows: int, heads: int, tiles_a_row: int, own_lists: int
) -> None:
    none = torch.empty(0, dtype=torch.int32)
    order = torch.empty(rows * own_lists, dtype=torch.int32, device="meta")
    index = torch.empty(rows * own_lists * tiles_a_row + 1, dtype=torch.int32, device="meta")
    made = DeviceLists(none, none, index, order, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "_processors", lambda device: SMS)
        each, shares = made.shares(heads)
    assert each >= 1
    assert each * shares >= rows > each * (shares - 1)
    # No longer than asked for but by one row, and never so long that an SM is without a turn.
    assert each == 1 or (each - 1) * max(1, tiles_a_row) < SHARE
    assert each == 1 or rows * heads // each >= TURNS * SMS

"""Results are remembered by identity, for the last arguments only."""

from __future__ import annotations

from msa_kernels.memo import by_identity


def test_equal_arguments_are_different_ones_and_old_ones_are_forgotten() -> None:
    calls = []

    @by_identity(kept=2)
    def length(rows: list[int]) -> int:
        calls.append(rows)
        return len(rows)

    first, second, third = [1], [1], [1, 2]
    assert [length(rows) for rows in (first, second, first, second)] == [1, 1, 1, 1]
    assert len(calls) == 2
    assert (length(third), length(second), length(first)) == (2, 1, 1)
    assert [id(rows) for rows in calls] == [id(first), id(second), id(third), id(first)]

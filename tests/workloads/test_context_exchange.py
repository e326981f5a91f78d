"""Copies in wide words move the same bits as plain ones, whatever the strides."""

from __future__ import annotations

import pytest
import torch
from msa_workloads.context.exchange import copy, words
from torch import Tensor


def _cases() -> dict[str, Tensor]:
    plain = torch.arange(2 * 6 * 4 * 8, dtype=torch.float32).view(2, 6, 4, 8)
    return {
        "whole words": plain.bfloat16(),
        "rows of a stage": plain.bfloat16().movedim(2, 0),
        "a stretch": plain.half()[:, 1:5],
        "odd rows": plain.bfloat16()[..., :5],
        "odd place": plain.bfloat16()[..., 1:5],
        "across": plain.transpose(2, 3),
        "wide": plain.double(),
    }


@pytest.mark.parametrize("name", _cases())
def test_a_copy_is_the_plain_one(name: str) -> None:
    source = _cases()[name]
    for target in (torch.full(source.shape, -1.0, dtype=source.dtype), torch.zeros_like(source)):
        copy(target, source)
        assert torch.equal(target, source)
        copy(wider := target.float(), source)
        assert torch.equal(wider, source.float())


def test_words_hold_eight_bytes_where_all_rows_begin_at_one() -> None:
    fits = {name: words(rows).dtype == torch.int64 for name, rows in _cases().items()}
    assert fits == {
        "whole words": True, "rows of a stage": True, "a stretch": True, "odd rows": False,
        "odd place": False, "across": False, "wide": False,
    }  # fmt: skip

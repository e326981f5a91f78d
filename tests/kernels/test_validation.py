"""Bad arguments end in one error that says what was found, what is allowed and what is near."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msa_kernels.attention import msa_attention
from msa_kernels.backend import BackendError
from msa_kernels.pattern import (
    BlockList,
    BlockTopK,
    Dense,
    Documents,
    PerHead,
    Union,
    Window,
)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD = zeros(2, 8, 4, 16)
KEYS = zeros(2, 8, 2, 16)
IDS = torch.zeros(2, 8, dtype=torch.int64)
BOUNDS = torch.tensor([0, 3, 8])


def packed(**changes: Any) -> dict[str, Any]:
    return {"q": GOOD[:1], "k": KEYS[:1], "v": KEYS[:1], **changes}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"q": zeros(8, 4, 16)}, "3 dimensions .* unsqueeze"),
        ({"scale": -0.5}, "must be positive, found -0.5; negate q"),
        ({"scale": float("nan")}, "must be positive, found nan"),
        ({"k": zeros(2, 8, 3, 16), "v": zeros(2, 8, 3, 16)}, "4 query heads are not a multiple"),
        (
            {"q": zeros(2, 4, 8, 16), "k": zeros(2, 4, 7, 16), "v": zeros(2, 4, 7, 16)},
            r"7 key/value heads; the layout is .*transpose\(1, 2\) where heads come first",
        ),
        ({"q": zeros(1, 8, 4, 16)}, "agree in batch"),
        ({"q": zeros(2, 8, 4, 32)}, "agree in batch and head size"),
        ({"v": zeros(2, 8, 2, 32)}, "same shape"),
        ({"v": KEYS.double()}, "differ in dtype"),
        ({"q": GOOD.int(), "k": KEYS.int(), "v": KEYS.int()}, "supported: float64"),
        ({"q": zeros(2, 0, 4, 16)}, "empty"),
        ({"q": zeros(2, 5, 4, 16)}, "say where queries sit"),
        ({"align": "left"}, "'bottom-right' or 'top-left'"),
        ({"documents": Documents((3, 4))}, "hold 7 tokens, the sequence 8"),
        ({"documents": IDS[:1]}, r"must be \(batch, sequence\) = \(2, 8\)"),
        ({"documents": IDS.float()}, "int16, int32 or int64, found torch.float32"),
        ({"documents": IDS, "pattern": Dense() & Documents((8,))}, "given twice"),
        ({"documents": (BOUNDS, BOUNDS)}, "one packed row, the batch has 2"),
        (packed(documents=(BOUNDS, BOUNDS[:2])), "2 sequences and cu_k has 1"),
        (packed(documents=(BOUNDS, torch.tensor([0, 3, 9]))), "ends at 9 but the tensor has 8"),
        (packed(documents=(torch.tensor([0, 9, 8]), BOUNDS)), "never fall"),
        (packed(documents=(BOUNDS,)), "pair"),
        ({"q": zeros(2, 5, 4, 16), "documents": IDS[:, :5]}, "give documents=.cu_q, cu_k."),
        ({"pattern": BlockList(3, ((0,), (1,)))}, "2 rows of 3 tokens, 6 in all"),
        ({"pattern": Union((Window(2), BlockList(3, ((0,),))))}, "needs 3 rows"),
        ({"pattern": BlockTopK(4, 2)}, "nearest: BlockList"),
        ({"pattern": PerHead((Dense(), BlockTopK(4, 2)))}, "nearest: BlockList"),
        ({"backend": "cutlass"}, "choose auto, .*triton, .*torch"),
        ({"backend": "triton"}, "triton: .*Nearest: backend='torch'"),
        ({"backend": "sdpa", "pattern": Window(4)}, "serves Dense only.*Nearest"),
        ({"backend": "flex", "needs_grad": True}, "no gradient on a CPU"),
    ],
)
def test_one_error_that_teaches(arguments: dict[str, Any], says: str) -> None:
    given = {"q": GOOD, "k": KEYS, "v": KEYS, "pattern": Dense()} | arguments
    if given.pop("needs_grad", False):
        given["q"] = given["q"].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"(?s){says}"):
        msa_attention(**given)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"q": [[1.0]]}, "q must be a tensor, found list"),
        ({"pattern": "SinkWindow"}, "must be a Pattern"),
        ({"documents": [3, 5]}, "found list"),
        (packed(documents=([0, 8], BOUNDS)), "cu_q must be a tensor"),
    ],
)
def test_wrong_types_are_type_errors(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        msa_attention(**({"q": GOOD, "k": KEYS, "v": KEYS, "pattern": Dense()} | arguments))


def test_refusals_are_listed_by_backend() -> None:
    with pytest.raises(BackendError) as found:
        msa_attention(GOOD, KEYS, KEYS, Window(3), backend="sdpa")
    assert found.value.reasons == {"sdpa": "serves Dense only, not Window"}


def test_unequal_lengths_need_no_alignment_without_causality() -> None:
    out = msa_attention(zeros(2, 5, 4, 16), KEYS, KEYS, Dense(causal=False))
    assert isinstance(out, torch.Tensor)
    assert out.shape == (2, 5, 4, 16)

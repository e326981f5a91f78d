"""The merge of partial outputs: exact, for empty sides too, and differentiable."""

from __future__ import annotations

import math

import pytest
import torch
from msa_kernels.merge import merge

INF = math.inf


def partial(lse: list[float], fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((1, len(lse), 1, 2), fill), torch.tensor(lse)[None, None]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(0.0, 100.0, 100.0), (-INF, 3.0, 3.0), (3.0, -INF, 3.0), (-INF, -INF, -INF),
     (1e4, 1e4, 1e4 + math.log(2)), (-1e4, 2.0, 2.0)],
)  # fmt: skip
def test_logs_add_without_overflow_or_nan(a: float, b: float, expected: float) -> None:
    out, lse = merge((partial([a], 1.0), partial([b], 2.0)))
    assert lse.item() == pytest.approx(expected)
    assert torch.isfinite(out).all()
    if a == b == -INF:
        assert (out == 0).all()


def test_the_empty_partial_is_the_identity() -> None:
    some = (torch.randn(2, 5, 3, 4), torch.randn(2, 3, 5))
    empty = (torch.zeros(2, 5, 3, 4), torch.full((2, 3, 5), -INF))
    for order in ((some, empty), (empty, some)):
        out, lse = merge(order)
        assert torch.equal(out, some[0])
        assert torch.equal(lse, some[1])


def test_any_grouping_gives_the_whole_softmax() -> None:
    scores, values = torch.randn(1, 2, 6, 40).double(), torch.randn(1, 40, 2, 8).double()

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        some = scores[..., keys]
        weights = torch.softmax(some, -1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, values[:, keys]), some.logsumexp(-1)

    whole = attend(slice(None))
    a, b, c = (attend(slice(*cut)) for cut in ((0, 3), (3, 30), (30, 40)))
    for found in (merge((a, b, c)), merge((merge((a, b)), c)), merge((c, merge((b, a))))):
        torch.testing.assert_close(found[0], whole[0])
        torch.testing.assert_close(found[1], whole[1])


def test_gradients_flow_and_empty_rows_give_none() -> None:
    a = torch.randn(1, 4, 1, 3, dtype=torch.float64, requires_grad=True)
    log_a = torch.randn(1, 1, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(1, 4, 1, 3, dtype=torch.float64, requires_grad=True)
    log_b = torch.randn(1, 1, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *t: merge(((t[0], t[1]), (t[2], t[3]))), (a, log_a, b, log_b))
    nothing = torch.full((1, 1, 4), -INF, dtype=torch.float64, requires_grad=True)
    out, _ = merge(((a, nothing), (b, nothing)))
    grads = torch.autograd.grad(out.sum(), (a, b, nothing))
    assert all((g == 0).all() for g in grads)


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        merge(())

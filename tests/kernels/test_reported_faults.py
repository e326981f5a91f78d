"""Faults that users of other attention libraries reported: each must not happen here."""

from __future__ import annotations

import math

import pytest
import torch
from msa_kernels.attention import msa_attention
from msa_kernels.pattern import Block, BlockList, Dense, Documents, SinkWindow, Union, Window
from msa_kernels.reference import reference
from msa_kernels.testing import assert_close


def make(q_rows: int, k_rows: int, heads: int = 2, dim: int = 16) -> tuple[torch.Tensor, ...]:
    seed = torch.Generator().manual_seed(q_rows + 1000 * k_rows)
    shapes = [(1, q_rows, heads, dim)] + [(1, k_rows, heads, dim)] * 2
    return tuple(torch.randn(s, generator=seed).requires_grad_() for s in shapes)


def with_grads(
    tensors: tuple[torch.Tensor, ...], pattern: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    out, lse = msa_attention(*tensors, pattern, return_lse=True, **kwargs)  # type: ignore[arg-type]
    return out, lse, torch.autograd.grad(out.square().sum(), tensors)


def test_far_more_queries_than_keys_stays_finite() -> None:
    cu_q, cu_k = torch.tensor([0, 76, 110, 256]), torch.tensor([0, 1, 2, 3])
    out, lse, grads = with_grads(make(256, 3, dim=32), Dense(), documents=(cu_q, cu_k))
    assert all(torch.isfinite(t).all() for t in (out, *grads))
    for begin, end in ((0, 76), (76, 110), (110, 256)):
        assert (out[:, begin : end - 1] == 0).all()
        assert (grads[0][:, begin : end - 1] == 0).all()
        assert (lse[..., begin : end - 1] == -math.inf).all()
        assert torch.isfinite(lse[..., end - 1]).all()


def test_bottom_right_with_more_queries_than_keys() -> None:
    q, k, v = make(5, 2)
    out, lse = msa_attention(q, k, v, Dense(), align="bottom-right", return_lse=True)
    assert (out[:, :3] == 0).all()
    assert (lse[..., :3] == -math.inf).all()
    torch.testing.assert_close(out[:, 3], v[:, 0])
    weights = torch.softmax(torch.einsum("bhd,bkhd->bhk", q[:, 4], k) / 4, -1)
    torch.testing.assert_close(out[:, 4], torch.einsum("bhk,bkhd->bhd", weights, v))


@pytest.mark.parametrize(
    ("align", "seen"),
    [("bottom-right", [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
     ("top-left", [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])],
)  # fmt: skip
def test_fewer_queries_than_keys_by_alignment(align: str, seen: list[list[int]]) -> None:
    q, k, _ = make(2, 5)
    v = torch.eye(5)[None, :, None].expand(1, 5, 2, 5)
    v = torch.nn.functional.pad(v, (0, 11))
    out = msa_attention(q, k, v, Dense(), align=align)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    assert (out[0, :, 0, :5] > 0).int().tolist() == seen


def test_a_row_without_keys_is_zero_not_the_mean() -> None:
    q, k, v = make(16, 16)
    rows = ((), (0, 1))
    out, lse = msa_attention(q, k, torch.full_like(v, 7.0), BlockList(8, rows), return_lse=True)
    assert (out[:, :8] == 0).all()
    assert (lse[..., :8] == -math.inf).all()
    torch.testing.assert_close(out[:, 8:], torch.full_like(out[:, 8:], 7.0))


def test_a_row_without_keys_poisons_nobody() -> None:
    """Gradients of all others are bit-equal whatever the blind queries hold."""
    rows = ((), (0, 1), (1, 2))
    first = make(24, 24)
    other = tuple(t.detach().clone().requires_grad_() for t in first)
    with torch.no_grad():
        other[0][:, :8] = 1e4
    grads = with_grads(first, BlockList(8, rows))[2]
    again = with_grads(other, BlockList(8, rows))[2]
    assert all(torch.isfinite(g).all() for g in again)
    assert (again[0][:, :8] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1025])
def test_odd_lengths_in_bf16_keep_finite_gradients(length: int) -> None:
    tensors = tuple(t.detach().bfloat16().requires_grad_() for t in make(length, length))
    exact = tuple(t.detach().float().requires_grad_() for t in tensors)
    grads = with_grads(tensors, Dense())[2]
    for found, wanted in zip(grads, with_grads(exact, Dense())[2], strict=True):
        assert torch.isfinite(found).all()
        assert_close("gradient", found, wanted.double(), 2e-2)


def test_regions_that_no_tile_divides() -> None:
    """Three blocks of 171 tokens and a short window across their borders."""
    pattern = Union((Block(171), Window(4)))
    tensors = make(513, 513)
    out, _, grads = with_grads(tensors, pattern)
    wanted = reference(*tensors, pattern, dout=2 * out.detach())  # type: ignore[arg-type]
    assert wanted.grads is not None
    for found, exact in zip(grads, wanted.grads, strict=True):
        assert_close("gradient", found, exact)


def test_a_window_counts_the_token_itself() -> None:
    q, k, _ = make(6, 6)
    v = torch.nn.functional.pad(torch.eye(6)[None, :, None].expand(1, 6, 2, 6), (0, 10))
    out = msa_attention(q, k, v, Window(3))
    assert isinstance(out, torch.Tensor)
    assert (out[0, 5, 0, :6] > 0).int().tolist() == [0, 0, 0, 1, 1, 1]


def test_a_window_of_everything_is_dense_within_rounding() -> None:
    q, k, v = make(150, 150)
    wide = msa_attention(q, k, v, Window(150))
    dense = msa_attention(q, k, v, Dense())
    torch.testing.assert_close(wide, dense, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dim", [257, 512])
def test_a_head_that_no_kernel_holds_is_refused_up_front(dim: int) -> None:
    with pytest.raises(ValueError, match="supported: 1 to 256"):
        msa_attention(*make(4, 4, dim=dim), Dense())  # type: ignore[arg-type]


def test_a_masked_key_does_not_leak() -> None:
    q, k, v = make(50, 50)
    loud = v.detach().clone()
    loud[:, 0] = 1e4
    before = msa_attention(q, k, v, Window(10))
    after = msa_attention(q, k, loud, Window(10))
    assert torch.equal(before[:, 10:], after[:, 10:])


def test_a_masked_score_above_the_maximum_does_not_matter() -> None:
    q, k, v = make(50, 50)
    with torch.no_grad():
        k[:, 30] = 1e3 * q[:, 30] / q[:, 30].norm()
    hidden = BlockList(10, ((0,), (1,), (2,), (3,), (2, 4)))
    out, lse, grads = with_grads((q, k, v), hidden)
    assert all(torch.isfinite(t).all() for t in (out, lse, *grads))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_rows_sum_to_one_up_to_the_last_token(length: int) -> None:
    q, k, v = make(length, length)
    out = msa_attention(q, k, torch.ones_like(v), SinkWindow(20, 3))
    torch.testing.assert_close(out, torch.ones_like(v))


def test_scores_are_scaled() -> None:
    q, k, v = make(40, 40)
    plain = msa_attention(q, k, v, Dense())
    torch.testing.assert_close(plain, msa_attention(q, k, v, Dense(), scale=0.25))
    torch.testing.assert_close(plain, msa_attention(2 * q, k, v, Dense(), scale=0.125))
    assert not torch.allclose(plain, msa_attention(q, k, v, Dense(), scale=1.0))  # type: ignore[arg-type]


def test_one_percent_of_the_pairs_is_exact() -> None:
    q, k, v = make(640, 640)
    rows = tuple((q_block // 2,) if q_block % 3 else () for q_block in range(80))
    pattern = BlockList(8, rows)
    assert pattern.density(640) < 0.02
    out, lse, grads = with_grads((q, k, v), pattern)
    wanted = reference(q, k, v, pattern, dout=2 * out.detach())
    assert wanted.grads is not None
    assert_close("out", out, wanted.out)
    assert_close("lse", lse, wanted.lse)
    for found, exact in zip(grads, wanted.grads, strict=True):
        assert_close("gradient", found, exact)


def test_huge_scores_neither_overflow_nor_vanish() -> None:
    q, k, v = make(64, 64)
    out, lse, grads = with_grads((200 * q, 200 * k, v), Dense())  # type: ignore[arg-type]
    assert all(torch.isfinite(t).all() for t in (out, lse, *grads))


def test_heads_do_not_mix() -> None:
    q, k, v = make(30, 30)
    changed = k.detach().clone()
    changed[:, :, 1] += 1
    before, after = msa_attention(q, k, v, Dense()), msa_attention(q, changed, v, Dense())
    assert torch.equal(before[:, :, 0], after[:, :, 0])
    assert not torch.equal(before[:, :, 1], after[:, :, 1])


def test_an_odd_packing_keeps_its_last_token() -> None:
    q, k, v = make(7, 7)
    out = msa_attention(q, k, v, Dense(), documents=Documents((4, 3)))
    assert isinstance(out, torch.Tensor)
    alone = msa_attention(q[:, 4:], k[:, 4:], v[:, 4:], Dense())
    assert out.shape[1] == 7
    torch.testing.assert_close(out[:, 4:], alone)

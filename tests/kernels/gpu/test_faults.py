"""Faults that users of other attention libraries reported, on the GPU: none may happen here."""

from __future__ import annotations

import math

import pytest
import torch
from gpucases import Call, call, compare, compute, pattern
from gpucases import Case as Shape
from msa_kernels.attention import msa_attention
from msa_kernels.pattern import (
    Block,
    BlockList,
    Dense,
    Documents,
    Pattern,
    SinkWindow,
    Union,
    Window,
)
from msa_kernels.reference import reference
from torch import nn

pytestmark = pytest.mark.gpu

BACKENDS = ("triton", "auto")


def make(q_rows: int, k_rows: int, heads: int = 2, dim: int = 64, dtype=torch.bfloat16):
    seed = torch.Generator().manual_seed(q_rows + 1000 * k_rows)
    shapes = [(1, q_rows, heads, dim)] + [(1, k_rows, heads, dim)] * 2
    return tuple(torch.randn(s, generator=seed).to("cuda", dtype).requires_grad_() for s in shapes)


def with_grads(tensors, pattern: Pattern, backend: str = "triton", **where):
    out, lse = msa_attention(*tensors, pattern, return_lse=True, backend=backend, **where)
    return out, lse, torch.autograd.grad(out.float().square().sum(), tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_far_more_queries_than_keys_stays_finite(dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, 76, 110, 256]), torch.tensor([0, 1, 2, 3])
    tensors = make(256, 3, dim=32, dtype=dtype)
    out, lse, grads = with_grads(tensors, Dense(), documents=bounds)
    assert all(torch.isfinite(t).all() for t in (out, *grads))
    for begin, end in ((0, 76), (76, 110), (110, 256)):
        assert (out[:, begin : end - 1] == 0).all()
        assert (grads[0][:, begin : end - 1] == 0).all()
        assert (lse[..., begin : end - 1] == -math.inf).all()
        assert torch.isfinite(lse[..., end - 1]).all()


def test_bottom_right_with_more_queries_than_keys() -> None:
    q, k, v = make(5, 2, dtype=torch.float32)
    out, lse = msa_attention(q, k, v, Dense(), align="bottom-right", return_lse=True)
    assert (out[:, :3] == 0).all()
    assert (lse[..., :3] == -math.inf).all()
    torch.testing.assert_close(out[:, 3], v[:, 0])
    weights = torch.softmax(torch.einsum("bhd,bkhd->bhk", q[:, 4], k) / 8, -1)
    torch.testing.assert_close(out[:, 4], torch.einsum("bhk,bkhd->bhd", weights, v))


@pytest.mark.parametrize(
    ("align", "seen"),
    [("bottom-right", [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
     ("top-left", [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])],
)  # fmt: skip
def test_fewer_queries_than_keys_by_alignment(align: str, seen: list[list[int]]) -> None:
    q, k, _ = make(2, 5)
    v = torch.eye(5, device="cuda", dtype=q.dtype)[None, :, None].expand(1, 5, 2, 5)
    v = torch.nn.functional.pad(v, (0, 59))
    out = msa_attention(q, k, v, Dense(), align=align)
    assert (out[0, :, 0, :5] > 0).int().tolist() == seen


@pytest.mark.parametrize("backend", [*BACKENDS, "cudnn"])
def test_a_row_without_keys_is_zero_not_the_mean(backend: str) -> None:
    q, k, v = make(512, 512, dim=128)
    rows = ((), (0, 1), (), (1, 3))
    try:
        out, lse, grads = with_grads(
            (q, k, torch.full_like(v, 7.0).requires_grad_()), BlockList(128, rows), backend
        )
    except ValueError as error:
        if backend == "cudnn":
            pytest.skip(str(error))
        raise
    for begin in (0, 256):
        assert (out[:, begin : begin + 128] == 0).all()
        assert (lse[..., begin : begin + 128] == -math.inf).all()
        assert (grads[0][:, begin : begin + 128] == 0).all()
    assert all(torch.isfinite(g).all() for g in grads)
    torch.testing.assert_close(out[:, 128:256], torch.full_like(out[:, 128:256], 7.0))


def test_a_row_without_keys_poisons_no_projection() -> None:
    """Gradients of all others are bit-equal whatever the blind queries hold."""
    rows = ((), (0, 1), (1, 2))
    first = make(384, 384)
    other = tuple(t.detach().clone().requires_grad_() for t in first)
    with torch.no_grad():
        other[0][:, :128] = 1e4
    grads = with_grads(first, BlockList(128, rows))[2]
    again = with_grads(other, BlockList(128, rows))[2]
    assert all(torch.isfinite(g).all() for g in again)
    assert (again[0][:, :128] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1025])
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_lengths_in_bf16_keep_finite_gradients(length: int, backend: str) -> None:
    tensors = make(length, length, dim=128)
    found = with_grads(tensors, Dense(), backend)
    exact = reference(*tensors, Dense(), dout=2 * found[0], device="cuda")
    for grad, wanted in zip(found[2], exact.grads, strict=True):
        assert torch.isfinite(grad).all()
        size = max(float(wanted.abs().max()), 1e-2)
        assert float((grad.double() - wanted).abs().max()) <= 2e-2 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_regions_that_no_tile_divides(dtype: torch.dtype) -> None:
    """Three blocks of 1,024 tokens shifted by 4, and a short window across their borders."""
    what = Union((Block(1028), Window(4)))
    tensors = make(3084, 3084, heads=1, dtype=dtype)
    out, _, grads = with_grads(tensors, what)
    exact = reference(*tensors, what, dout=2 * out.float(), device="cuda")
    limit = 1e-4 if dtype == torch.float32 else 8e-3
    for grad, wanted in zip(grads, exact.grads, strict=True):
        assert float((grad.double() - wanted).norm() / wanted.norm()) < limit


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_counts_the_token_itself(backend: str) -> None:
    q, k, _ = make(6, 6)
    v = torch.eye(6, device="cuda", dtype=q.dtype)[None, :, None].expand(1, 6, 2, 6)
    v = torch.nn.functional.pad(v, (0, 58)).contiguous()
    out = msa_attention(q, k, v, Window(3), backend=backend)
    assert (out[0, 5, 0, :6] > 0).int().tolist() == [0, 0, 0, 1, 1, 1]
    out = msa_attention(q, k, v, Window(1), backend=backend)
    torch.testing.assert_close(out, v)


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("width", [1, 100, 1 << 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_windows_with_groups(width: int, ratio: int, backend: str) -> None:
    """Forward tests alone would pass with a backward that forgets the mask."""
    given = call(Shape("", 128, ratio, 700, "one", "bfloat16", "contiguous", "fastest"))
    what = Window(width)
    compare(given, what, compute(given, what, backend, lse=False))


def test_a_window_of_everything_is_dense_within_rounding() -> None:
    q, k, v = make(1500, 1500, dim=128)
    wide = msa_attention(q, k, v, Window(1500))
    torch.testing.assert_close(wide, msa_attention(q, k, v, Dense()), atol=2e-2, rtol=2e-2)


def test_a_masked_key_does_not_leak() -> None:
    q, k, v = make(500, 500)
    loud = v.detach().clone()
    loud[:, 0] = 1e4
    before, after = (msa_attention(q, k, x, Window(10), backend="triton") for x in (v, loud))
    assert torch.equal(before[:, 10:], after[:, 10:])


def test_what_lies_beyond_the_tensor_does_not_leak() -> None:
    """Keys of the same allocation past the last one are NaN."""
    store = torch.full((1, 300, 2, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    store[:, :257] = torch.randn(1, 257, 2, 64)
    part = store[:, :257]
    leaves = [part.detach().requires_grad_() for _ in range(3)]
    out, lse, grads = with_grads(leaves, Dense())
    assert all(torch.isfinite(t).all() for t in (out, lse, *grads))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_rows_sum_to_one_up_to_the_last_token(length: int) -> None:
    q, k, v = make(length, length)
    out = msa_attention(q, k, torch.ones_like(v), SinkWindow(20, 3), backend="triton")
    torch.testing.assert_close(out, torch.ones_like(v))


def test_one_percent_of_the_pairs_is_exact() -> None:
    rows = tuple((q // 2,) if q % 3 else () for q in range(80))
    what = BlockList(8, rows)
    given = call(Shape("", 64, 2, 640, "one", "bfloat16", "contiguous", "fastest"))
    compare(given, what, compute(given, what, "triton"))


def test_huge_scores_neither_overflow_nor_vanish() -> None:
    q, k, v = make(300, 300)
    leaves = [t.detach().requires_grad_() for t in (100 * q, 100 * k, v)]
    out, lse, grads = with_grads(leaves, Dense())
    assert all(torch.isfinite(t).all() for t in (out, lse, *grads))


def test_an_odd_packing_keeps_its_last_token() -> None:
    q, k, v = make(7, 7)
    out = msa_attention(q, k, v, Dense(), documents=Documents((4, 3)))
    alone = msa_attention(q[:, 4:], k[:, 4:], v[:, 4:], Dense())
    assert out.shape[1] == 7
    torch.testing.assert_close(out[:, 4:], alone, atol=1e-2, rtol=1e-2)


def test_the_cotangent_may_be_a_broadcast() -> None:
    """``out.sum().backward()`` hands down one number for all elements."""
    for backend in BACKENDS:
        q, k, v = make(640, 640, dim=128)
        out = msa_attention(q, k, v, SinkWindow(100, 9), backend=backend)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        exact = reference(q, k, v, SinkWindow(100, 9), dout=torch.ones_like(out), device="cuda")
        for grad, wanted in zip(grads, exact.grads, strict=True):
            size = max(float(wanted.norm()), 1e-2 * wanted.numel() ** 0.5)
            assert float((grad.double() - wanted).norm()) < 1e-2 * size


def test_unsupported_calls_name_what_is_supported() -> None:
    q, k, v = make(8, 8)
    with pytest.raises(ValueError, match="supported: 1 to 256"):
        msa_attention(*make(8, 8, dim=512), Dense())
    with pytest.raises(ValueError, match="Nearest: backend='torch'"):
        msa_attention(q.double(), k.double(), v.double(), Dense(), backend="triton")


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(128, 384, bias=True, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 64)) for t in self.project(x).chunk(3, -1))
        return msa_attention(q, k, v, BlockList(64, ((), (0, 1), (1, 2))), documents=documents)


def test_a_blind_batch_element_leaves_finite_projections() -> None:
    layer = Projected()
    x = torch.randn(2, 192, 128, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(2, 192, dtype=torch.int32)
    layer(x, ids).float().square().sum().backward()
    assert torch.isfinite(layer.project.weight.grad).all()
    assert torch.isfinite(layer.project.bias.grad).all()


def test_patterns_of_every_name_exist() -> None:
    given: Call = call(Shape("dense", 64, 1, 2, "one", "float16", "contiguous", "fastest"))
    assert compute(given, pattern("dense", 2), "triton")["out"].shape == given.q.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_a_device_that_is_not_the_current_one(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pattern = SinkWindow(300, 8)
    near = make(700, 700)
    far = tuple(t.detach().to("cuda:1").requires_grad_() for t in near)
    with torch.cuda.device(0):
        out, lse, grads = with_grads(far, pattern, backend)
    wanted = with_grads(near, pattern, backend)
    for found, exact in zip((out, lse, *grads), (*wanted[:2], *wanted[2]), strict=True):
        assert found.device == far[0].device
        torch.testing.assert_close(found.to(exact.device), exact)

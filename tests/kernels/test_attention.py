"""msa_attention equals the fp64 oracle: outputs, LSE and every gradient, for every pattern."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels.attention import msa_attention
from msa_kernels.check import OWN_ERROR_FACTOR, OWN_ERROR_MARGIN, eager, norm_error
from msa_kernels.pattern import (
    Block,
    BlockList,
    Columns,
    Dense,
    Dilated,
    Documents,
    Pattern,
    PerHead,
    SinkWindow,
    Strided,
    Union,
    Window,
)
from msa_kernels.reference import reference, visible
from msa_kernels.testing import assert_close, document_ids, patterns

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def qkv(
    q_rows: int, k_rows: int, *, batch: int = 1, heads: tuple[int, int] = (4, 2), dim: int = 16,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Tensors:  # fmt: skip
    make = torch.Generator().manual_seed(seed)
    shapes = [(batch, q_rows, heads[0], dim)] + [(batch, k_rows, heads[1], dim)] * 2
    q, k, v = (torch.randn(s, generator=make).to(dtype).requires_grad_() for s in shapes)
    return q, k, v


def both(q_k_v: Tensors, pattern: Pattern, tolerance: float = 1e-5, **kwargs: object) -> None:
    """Compare everything that msa_attention computes with the oracle."""
    q, k, v = q_k_v
    make = torch.Generator().manual_seed(1)
    dout = torch.randn(q.shape, generator=make).to(q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=make)
    out, lse = msa_attention(q, k, v, pattern, return_lse=True, **kwargs)  # type: ignore[arg-type]
    finite = torch.where(lse == -math.inf, 0, lse)
    grads = torch.autograd.grad((out * dout).sum() + (finite * dlse).sum(), (q, k, v))
    if isinstance(kwargs.get("documents"), tuple):
        kwargs["bounds"] = kwargs.pop("documents")
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    wanted = reference(q, k, v, pattern, dout=dout, dlse=dlse, **kwargs)  # type: ignore[arg-type]
    assert wanted.grads is not None
    assert_close("out", out, wanted.out, tolerance)
    assert_close("lse", lse, wanted.lse, tolerance)
    for name, found, exact in zip(("dq", "dk", "dv"), grads, wanted.grads, strict=True):
        assert_close(name, found, exact, tolerance)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return {
        "heads": (kv_heads * draw(st.sampled_from([1, 2, 4])), kv_heads),
        "dim": draw(st.sampled_from([8, 16, 24])),
        "batch": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(deadline=None, max_examples=300)
@given(st.data(), st.integers(1, 300), shapes())
def test_any_pattern_of_any_length(data: st.DataObject, n: int, shape: dict) -> None:
    both(qkv(n, n, **shape), data.draw(patterns(n)))


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 300), shapes())
def test_any_packing_of_documents(data: st.DataObject, n: int, shape: dict) -> None:
    ids = data.draw(document_ids(shape["batch"], n))
    both(qkv(n, n, **shape), data.draw(patterns(n)), documents=ids)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 200), st.integers(1, 200), shapes())
def test_unequal_lengths_in_both_alignments(
    data: st.DataObject, q_rows: int, k_rows: int, shape: dict
) -> None:
    pattern = data.draw(patterns(max(q_rows, k_rows)))
    align = data.draw(st.sampled_from(["bottom-right", "top-left"]))
    both(qkv(q_rows, k_rows, **shape), pattern, align=align)


@settings(deadline=None, max_examples=100)
@given(
    st.data(), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=5)
)
def test_sequences_with_their_own_lengths(
    data: st.DataObject, lengths: list[tuple[int, int]]
) -> None:
    lengths.append((1, 1))
    cu_q = torch.tensor([0, *(a for a, _ in lengths)]).cumsum(0)
    cu_k = torch.tensor([0, *(b for _, b in lengths)]).cumsum(0)
    pattern = data.draw(patterns(60))
    align = data.draw(st.sampled_from(["bottom-right", "top-left"]))
    both(qkv(int(cu_q[-1]), int(cu_k[-1])), pattern, documents=(cu_q, cu_k), align=align)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_a_packed_document_equals_the_document_alone(
    data: st.DataObject, lengths: list[int]
) -> None:
    pattern = data.draw(patterns(max(lengths)))
    n = sum(lengths)
    q, k, v = qkv(n, n)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2))
    packed = msa_attention(q, k, v, pattern, documents=Documents(tuple(lengths)))
    assert isinstance(packed, torch.Tensor)
    grads = torch.autograd.grad(packed, (q, k, v), dout)
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        own = [t.detach()[:, here].clone().requires_grad_() for t in (q, k, v)]
        alone = msa_attention(*own, pattern)
        assert isinstance(alone, torch.Tensor)
        torch.testing.assert_close(packed[:, here], alone, atol=1e-5, rtol=1e-5)
        expected = torch.autograd.grad(alone, own, dout[:, here])
        for found, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(found[:, here], wanted, atol=2e-5, rtol=1e-5)
        start += length


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
def test_gradcheck_over_causal_window_and_groups(
    causal: bool, window: int | None, heads: tuple[int, int]
) -> None:
    pattern = Dense(causal) if window is None else Window(window, causal)
    tensors = qkv(13, 13, heads=heads, dim=3, dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda *t: msa_attention(*t, pattern, return_lse=True), tensors, fast_mode=True
    )


@pytest.mark.parametrize(
    "pattern",
    [
        Strided(4, "union"), Strided(3), Dilated(3, 2), SinkWindow(4, 3), Block(5), Columns(4, 2),
        Union((Block(5), Dilated(4), Window(2))), PerHead((Window(3), Columns(5, 1))),
        SinkWindow(6, 2).limited(4),
    ],
)  # fmt: skip
def test_gradcheck_of_every_kind(pattern: Pattern) -> None:
    """Outputs and the LSE of queries that see a key, over packed documents."""
    ids = torch.tensor([[0] * 6 + [1] * 11])

    def attend(*t: torch.Tensor) -> torch.Tensor:
        out, lse = msa_attention(*t, pattern, documents=ids, return_lse=True)
        return out.sum((1, 3)) + torch.where(lse == -math.inf, 0, lse).sum(2)

    tensors = qkv(17, 17, dim=3, dtype=torch.float64)
    torch.autograd.gradcheck(attend, tensors, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 1025])
def test_half_precision_stays_near_what_the_dtype_costs(length: int, dtype: torch.dtype) -> None:
    pattern = SinkWindow(100, 3)
    q, k, v = qkv(length, length, dim=32, dtype=dtype)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    out = msa_attention(q, k, v, pattern)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out, (q, k, v), dout)
    wanted = reference(q, k, v, pattern, dout=dout)
    assert wanted.grads is not None
    own = eager(*(t.detach() for t in (q, k, v)), dout, visible(q, k, pattern))
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    exact = dict(zip(found, (wanted.out, *wanted.grads), strict=True))
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all()
        limit = OWN_ERROR_FACTOR * norm_error(own[name], exact[name]) + OWN_ERROR_MARGIN
        assert norm_error(tensor, exact[name]) <= limit, name


def test_strided_views_are_read_in_place() -> None:
    """Projections packed as one tensor, heads before the sequence, and a batch that is a view."""
    base = torch.randn(2, 70, 3, 4, 16)
    packed = [t.requires_grad_() for t in base.unbind(2)]
    both((packed[0], packed[1], packed[2]), Strided(7, "union"))
    swapped = [torch.randn(2, 4, 70, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    both((swapped[0], swapped[1], swapped[2]), Dilated(5))
    one = torch.randn(1, 70, 4, 16).expand(3, -1, -1, -1).detach().requires_grad_()
    both((one, one.detach().requires_grad_(), one.detach().requires_grad_()), Window(9))


@pytest.mark.parametrize("backend", ["torch", "sdpa", "flex"])
def test_heads_that_are_not_stored_together_are_read(backend: str) -> None:
    """Every second number, heads across rows, one number for all, and heads of one number."""
    views = [
        torch.randn(2, 20, 4, 16)[..., ::2], torch.randn(2, 20, 16, 4).transpose(2, 3),
        torch.randn(2, 20, 4, 1).expand(-1, -1, -1, 16), torch.randn(2, 20, 1, 4).transpose(2, 3),
    ]  # fmt: skip
    for view in views:
        assert view.stride(-1) != 1
        close = torch.empty(view.shape).copy_(view)
        found = msa_attention(view, view, view, Dense(), backend=backend)
        torch.testing.assert_close(found, msa_attention(close, close, close, Dense()))


def test_views_beyond_2_to_the_31_elements() -> None:
    """Rows at stride 8,192 whose last start at element 2**31; only their own pages are touched."""
    rows, stride, dim = 64, 8_192, 8
    storage = torch.empty(262_145 * stride, dtype=torch.bfloat16)
    offset = (262_145 - rows) * stride
    views = []
    for n in range(3):
        view = storage.as_strided((1, rows, 1, dim), (stride, stride, dim, 1), offset + n * dim)
        views.append(view.copy_(torch.randn(view.shape)))
    far = msa_attention(*views, Window(9))
    near = msa_attention(*(v.clone() for v in views), Window(9))
    assert torch.equal(far, near)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1 << 31, 1 << 32, sys.maxsize, 1 << 70])
@pytest.mark.parametrize("backend", ["torch", "flex"])
def test_numbers_beyond_32_bits_mean_what_they_say(size: int, backend: str) -> None:
    """No token of 40 is that far away: windows and blocks hold all, columns at the end none."""
    q, k, v = (t.detach() for t in qkv(40, 40))
    same: dict[Pattern, Pattern] = {
        Window(size): Dense(), Window(size, causal=False): Dense(causal=False),
        Block(size): Dense(), SinkWindow(5, size): Dense(), SinkWindow(size, 3): Dense(),
        Dilated(2, size): Dilated(2), Dilated(size): Window(1), Dense().limited(size): Dense(),
        BlockList(size, ((0,),)): Dense(), Columns(size, size): Dense(),
        Columns(size, size - 7): BlockList(1, tuple(tuple(range(7, q + 1)) for q in range(40))),
        Union((Window(3), Block(size))): Dense(), Union((Window(3), Columns(size, 1))): Window(3),
        PerHead((Window(size), Window(3))): PerHead((Dense(), Window(3))),
        BlockList(1, ((0,), (0, size), *[()] * 38), causal=False):
            BlockList(1, ((0,), (0,), *[()] * 38)),
    }  # fmt: skip
    for pattern, wanted in same.items():
        found = msa_attention(q, k, v, pattern, backend=backend)
        torch.testing.assert_close(found, msa_attention(q, k, v, wanted, backend=backend))


def test_the_oracle_has_gradients_of_the_lse_alone() -> None:
    q, k, v = qkv(9, 9)
    dlse = torch.randn(1, 4, 9)
    found = reference(q, k, v, Window(3), dlse=dlse).grads
    _, lse = msa_attention(q, k, v, Window(3), return_lse=True)
    wanted = torch.autograd.grad(lse, (q, k), dlse)
    assert found is not None
    for one, other in zip(found, (*wanted, torch.zeros_like(v)), strict=True):
        torch.testing.assert_close(one.float(), other, atol=1e-5, rtol=1e-5)


def test_twenty_runs_are_bit_identical() -> None:
    tensors = qkv(200, 200)

    def once() -> list[torch.Tensor]:
        out = msa_attention(*tensors, Strided(16))
        assert isinstance(out, torch.Tensor)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    first = once()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_one_key_per_query_is_the_value() -> None:
    q, k, v = qkv(30, 30, heads=(2, 2))
    out, lse = msa_attention(q, k, v, Window(1), return_lse=True)
    assert torch.equal(out, v)
    score = (q * k).sum(-1).transpose(1, 2) * 16**-0.5
    torch.testing.assert_close(lse, score)


def test_documents_come_in_three_forms() -> None:
    q, k, v = qkv(40, 40)
    lengths, bounds = (7, 20, 13), torch.tensor([0, 7, 27, 40])
    ids = torch.repeat_interleave(torch.tensor([5, 5, 9]), torch.tensor(lengths))[None]
    ids[:, 7:27] = 2
    pattern = SinkWindow(6, 2)
    first = msa_attention(q, k, v, pattern, documents=Documents(lengths))
    for other in (
        msa_attention(q, k, v, pattern, documents=ids),
        msa_attention(q, k, v, pattern, documents=(bounds, bounds.int())),
        msa_attention(q, k, v, pattern & Documents(lengths)),
    ):
        assert torch.equal(first, other)  # type: ignore[arg-type]


def test_autocast_decides_the_dtype() -> None:
    q, k, v = qkv(20, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = msa_attention(q, k.bfloat16(), v, Window(4))
        exact = msa_attention(q.double(), k.double(), v.double(), Window(4))
        with pytest.raises(ValueError, match=r"q is torch\.int64"):
            msa_attention(q.long(), k.long(), v.long(), Window(4))
    assert isinstance(out, torch.Tensor)
    assert isinstance(exact, torch.Tensor)
    assert (out.dtype, exact.dtype) == (torch.bfloat16, torch.float64)


def test_a_block_list_for_each_group() -> None:
    rows = tuple(tuple(sorted({0, q})) for q in range(9))
    every = tuple((q,) for q in range(9))
    both(qkv(70, 70), PerHead((BlockList(8, rows), BlockList(8, every))))


def test_documents_first_seen_in_inference_mode_train_later() -> None:
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    documents = Documents((3, 5))
    with torch.inference_mode():
        msa_attention(q, q, q, Dense(), documents=documents)
    msa_attention(q, q, q, Dense(), documents=documents).sum().backward()
    assert q.grad is not None

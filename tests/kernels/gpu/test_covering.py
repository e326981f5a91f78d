"""Every pair of pattern, head size, group, length, placement, dtype and layout, against fp64."""

from __future__ import annotations

import pytest
import torch
from gpucases import Case, by_name, call, compare, compute, covering, pattern, relative_error
from msa_kernels import backend, check
from msa_kernels.attention import msa_attention
from msa_kernels.pattern import (
    Block,
    BlockList,
    Dense,
    Pattern,
    PerHead,
    SinkWindow,
    Union,
    Window,
)  # fmt: skip
from msa_kernels.reference import reference
from msa_kernels.triton.launch import TritonKernel
from msa_kernels.triton.launch_fp8 import MAX_HEAD_DIM, Fp8Kernel

pytestmark = pytest.mark.gpu

PLAIN = Case("dense", 128, 4, 1000, "one", "bfloat16", "contiguous", "fastest")


@pytest.mark.parametrize("case", covering(), ids=str)
def test_a_covering_set(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.kernels == "plain":
        monkeypatch.setitem(backend._loaded, "triton", TritonKernel(hopper=False))
    what = pattern(case.pattern, case.length)
    given = call(case)
    compare(given, what, compute(given, what, "triton"))


@pytest.mark.parametrize("case", covering()[::2], ids=str)
def test_a_backward_of_one_pass(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.kernels == "plain":
        plain = TritonKernel(hopper=False, fused=True)
        monkeypatch.setitem(backend._loaded, "triton-fused", plain)
    what = pattern(case.pattern, case.length)
    given = call(case)
    compare(given, what, compute(given, what, "triton-fused"))


@pytest.mark.parametrize(
    "case", [case for case in covering() if case.head_dim <= MAX_HEAD_DIM][::2], ids=str
)
def test_a_forward_in_e4m3(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and LSE; gradients of rows that see a key or two vanish but for roundings."""
    if case.kernels == "plain":
        monkeypatch.setitem(backend._loaded, "triton-fp8", Fp8Kernel(hopper=False))
    what = pattern(case.pattern, case.length)
    given = call(case)
    found = compute(given, what, "triton-fp8")
    exact = by_name(reference(given.q, given.k, given.v, what, device="cuda", dout=given.dout,
                              dlse=given.dlse, **given.oracle))  # fmt: skip
    errors = {name: relative_error(found[name], exact[name]) for name in ("out", "lse")}
    assert max(errors.values()) < 0.08, errors
    assert all(bool(torch.isfinite(found[name]).all()) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("name", ["triton", "triton-fused", "triton-fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("hopper", [None, False], ids=["fastest", "plain"])
def test_what_is_no_number_shows(
    name: str, bad: float, hopper: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {"triton": TritonKernel(hopper), "triton-fp8": Fp8Kernel(hopper)}
    kernels["triton-fused"] = TritonKernel(hopper, fused=True)
    monkeypatch.setitem(backend._loaded, name, kernels[name])
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 600, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    k[0, 300, 1, 5] = bad
    out = msa_attention(q, k, v, Window(200), backend=name)
    shown = torch.ones(200, dtype=torch.bool) if bad != bad else q[0, 300:500, 1, 5].cpu() > 0
    assert out[0, 300:500, 1].cpu()[shown].isnan().all()
    assert out[0, :, 0].isfinite().all()


@pytest.mark.parametrize("name", ["dense", "sinks", "union with dilation", "lists per head"])
@pytest.mark.parametrize("kernels", ["fastest", "plain"])
def test_a_forward_in_e4m3_has_the_same_bits_and_gradients_of_its_size(
    name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "plain":
        monkeypatch.setitem(backend._loaded, "triton-fp8", Fp8Kernel(hopper=False))
    given = call(Case(name, 128, 4, 1500, "one", "bfloat16", "contiguous", kernels))
    what = pattern(name, 1500)
    first = compute(given, what, "triton-fp8", lse=False)
    for _ in range(9):
        again = compute(given, what, "triton-fp8", lse=False)
        assert all(torch.equal(first[key], again[key]) for key in first)
    exact = by_name(reference(given.q, given.k, given.v, what, device="cuda", dout=given.dout))
    errors = {key: relative_error(value, exact[key]) for key, value in first.items()}
    assert max(errors.values()) < check.FP8_LIMITS["out"], errors


@pytest.mark.parametrize(
    ("name", "length"),
    [("dense", 4099), ("sinks", 8193), ("union with dilation", 5003), ("block list", 2177)],
)
def test_large_odd_lengths(name: str, length: int) -> None:
    given = call(Case(name, 128, 2, length, "one", "bfloat16", "contiguous", "fastest"), 1)
    compare(given, pattern(name, length), compute(given, pattern(name, length), "triton"))


@pytest.mark.parametrize("dim", [8, 40, 72, 100, 160, 250])
def test_head_sizes_between_the_tuned_ones(dim: int) -> None:
    given = call(Case("sinks", dim, 2, 300, "ids", "bfloat16", "contiguous", "fastest"))
    compare(given, pattern("sinks", 300), compute(given, pattern("sinks", 300), "triton"))


def _lists(count: int, seed: int) -> BlockList:
    return BlockList(128, tuple(() if q == seed else (*range(q % 3, q + 1, 3),)
                                for q in range(count)))  # fmt: skip


@pytest.mark.parametrize(
    ("what", "dim", "ratio", "dtype"),
    [
        (SinkWindow(200, 70), 128, 4, "bfloat16"),
        (Union((Window(200), _lists(8, 9))), 128, 4, "bfloat16"),
        (PerHead((_lists(8, 2), _lists(8, 3))), 128, 4, "bfloat16"),
        (Dense(causal=False), 64, 1, "float16"),
        (Block(171), 96, 2, "bfloat16"),
        (_lists(8, 0), 80, 8, "bfloat16"),
        (Dense(), 256, 2, "bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["cudnn", "fa4"])
def test_optional_packages(name: str, what: Pattern, dim: int, ratio: int, dtype: str) -> None:
    """Where they are installed and serve the case: the LSE's gradient too, and strided inputs."""
    for layout in ("contiguous", "packed qkv"):
        given = call(Case("", dim, ratio, 1000, "one", dtype, layout, "fastest"))
        try:
            found = compute(given, what, name, lse=name == "cudnn")
        except backend.BackendError as error:
            pytest.skip(str(error.reasons.get(name)))
        compare(given, what, found)


def test_folded_rows_and_merged_parts_on_optional_packages() -> None:
    """auto mixes nothing that rounds twice: whatever runs, the result is within the limit."""
    for what in (pattern("dilated", 1000), pattern("union with dilation", 1000)):
        given = call(PLAIN)
        compare(given, what, compute(given, what, "auto", lse=False))


@pytest.mark.parametrize(
    "name", ["dense", "sinks", "union with dilation", "lists per head", "columns"]
)
@pytest.mark.parametrize("kernels", ["fastest", "plain"])
def test_twenty_runs_are_one_result(
    name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "plain":
        monkeypatch.setitem(backend._loaded, "triton", TritonKernel(hopper=False))
    given = call(Case(name, 128, 4, 2304, "one", "bfloat16", "contiguous", kernels))
    what = pattern(name, 2304)
    first = compute(given, what, "triton")
    for _ in range(19):
        again = compute(given, what, "triton")
        assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("name", ["auto", "triton", "cudnn"])
def test_a_deterministic_program_gets_the_same_bits(name: str) -> None:
    if name == "cudnn" and _missing(name):
        pytest.skip("cudnn-frontend is not installed")
    given = call(Case("sinks", 128, 4, 2304, "one", "bfloat16", "contiguous", "fastest"))
    what = pattern("sinks", 2304)
    torch.use_deterministic_algorithms(True)
    try:
        first = compute(given, what, name, lse=False)
        for _ in range(9):
            again = compute(given, what, name, lse=False)
            assert all(torch.equal(first[key], again[key]) for key in first)
    finally:
        torch.use_deterministic_algorithms(False)
    compare(given, what, first)


def _missing(name: str) -> bool:
    try:
        backend.load(name)
    except ImportError:
        return True
    return False

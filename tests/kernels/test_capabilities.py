"""What backends say without a device is what they say with one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels import backend, capabilities
from msa_kernels.capabilities import HALVES, LIMITS, NAMES, refuses, refuses_pattern, unfit
from msa_kernels.cudnn import CudnnIntervals
from msa_kernels.fa4 import FlashAttention4
from msa_kernels.pattern import BlockList, Dense, Dilated, Pattern, PerHead, Union, Window
from msa_kernels.plan import Request
from msa_kernels.testing import patterns

ROWS = 64


def request(name: str, pattern: Pattern, dtype: str, head_dim: int) -> Request:
    """One document on a GPU, whose results nobody merges."""
    return Request(
        device=torch.device("cuda"), dtype=getattr(torch, dtype), batch=1, q_rows=ROWS,
        k_rows=ROWS, q_heads=4, kv_heads=2, head_dim=head_dim, pattern=pattern, plain=True,
        needs_grad=True, return_lse=False, deterministic=False,
    )  # fmt: skip


def ahead(name: str, asked: Request) -> str | None:
    """What a plan would say."""
    dtype = str(asked.dtype).removeprefix("torch.")
    return refuses(
        name, device="cuda", dtype=dtype, head_dim=asked.head_dim, rows=ROWS, training=True,
        capability=(9, 0),
    ) or refuses_pattern(name, asked.pattern, asked.kv_heads)  # fmt: skip


@pytest.fixture(scope="module")
def hopper() -> object:
    """A Hopper GPU with flash-attn-4 and cudnn-frontend, as far as refusals ask."""
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in (("fa4", FlashAttention4), ("cudnn", CudnnIntervals)):
            patch.setitem(backend._loaded, name, object.__new__(kind))
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(torch.version, "cuda", "13.0")
        yield


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(sorted(LIMITS)),
    pattern=patterns(ROWS) | st.sampled_from([Dense(), Window(4), Dilated(2)]),
    dtype=st.sampled_from(capabilities.FLOATS),
    head_dim=st.sampled_from([1, 24, 64, 80, 128, 192, 256]),
)
def test_a_plan_says_what_the_backend_says(
    hopper: None, name: str, pattern: Pattern, dtype: str, head_dim: int
) -> None:
    asked = request(name, pattern, dtype, head_dim)
    said, found = ahead(name, asked), backend.refusal(name, asked)
    assert said is None or found is not None, f"{name} serves what a plan refuses: {said}"
    folds = {part.fold for g in range(2) for part in pattern.for_group(g).parts()}
    if found is not None and not (name == "cudnn" and folds != {1}):
        # cudnn's rule for dilated parts is about the heads of one rank, which no plan knows.
        assert said is not None, f"{name} refuses what a plan takes: {found}"


def test_limits_of_the_kernels_are_theirs() -> None:
    launch_fp8 = pytest.importorskip("msa_kernels.triton.launch_fp8")
    from msa_kernels.triton import launch

    for name, most in (
        ("triton", launch.MAX_HEAD_DIM), ("triton-fused", launch.MAX_HEAD_DIM),
        ("triton-fp8", launch_fp8.MAX_HEAD_DIM),
    ):  # fmt: skip
        assert most in LIMITS[name].head_dims and most + 1 not in LIMITS[name].head_dims
    assert LIMITS["triton-fp8"].least == launch_fp8.LEAST_CAPABILITY
    # Results of some keys: what ranks of a ring merge.
    for name, limits in LIMITS.items():
        if not limits.gpu or limits.package:
            continue
        asked = request(name, Dense(), "bfloat16", 64)
        pieces = Request(**{**asked.__dict__, "partial": True})
        assert (backend.refusal(name, pieces) is None) == limits.merges_passes, name


def test_names_are_those_that_can_be_loaded() -> None:
    assert ("auto", *LIMITS) == NAMES and list(LIMITS) == list(backend.LOADERS)
    direct = {n for n in ("sdpa", "flex", "torch", "triton")
              if isinstance(backend.load(n), backend.Direct)}  # fmt: skip
    assert direct == {n for n, limits in LIMITS.items() if limits.whole_calls}


@pytest.mark.parametrize(
    ("name", "pattern", "reason"),
    [
        ("fa4", Union((Window(8), Dilated(4))), "partial results of a union"),
        ("fa4", PerHead((Window(8), Union((Window(8), Dilated(4))))), "partial results"),
        ("cudnn", Dilated(4, 2), None),
        ("sdpa", Window(8), "serves Dense only, not Window"),
        ("triton", Union(tuple(BlockList(8, ((0,), (n,))) for n in (0, 1))), "one block list"),
        ("triton", Union(tuple(Window(8 * n + 1) | BlockList(8, ((0,),)) for n in range(4))),
         "at most 6 rules in one part, found 8"),
        ("torch", Union((Window(8), Dilated(4))), None),
    ],
)  # fmt: skip
def test_patterns_that_are_refused_say_why(name: str, pattern: Pattern, reason: str | None):
    said = refuses_pattern(name, pattern, 2)
    assert said is None if reason is None else reason in (said or ""), said


def test_what_a_gpu_is_too_old_for_is_told_by_its_capability() -> None:
    assert unfit("triton-fp8", (8, 0)) == "needs compute capability 8.9 or newer"
    assert unfit("cudnn", (12, 0)) == "needs compute capability 9.0 or 10.0 or 10.3"
    assert unfit("fa4", (10, 0)) is unfit("triton", (8, 0)) is None
    known = {"device": "cpu", "head_dim": 64, "rows": 8, "training": True}
    assert refuses("triton", dtype="float32", **known) == "needs a GPU"
    assert refuses("flex", dtype="float32", **known) == "has no gradient on a CPU"
    assert refuses("flex", dtype="float32", **known | {"training": False}) is None
    assert all(refuses("torch", dtype=dtype, **known) is None for dtype in (*HALVES, "float64"))

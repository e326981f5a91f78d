"""Dispatch: what runs is exact, chosen by request, and reported."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels import backend, check, flex
from msa_kernels.attention import msa_attention
from msa_kernels.capabilities import FLEX_ROWS
from msa_kernels.cudnn import CudnnIntervals
from msa_kernels.fa4 import FlashAttention4
from msa_kernels.pattern import (
    Block,
    BlockList,
    Dense,
    Dilated,
    Pattern,
    PerHead,
    SinkWindow,
    Strided,
    Union,
    Window,
)  # fmt: skip
from msa_kernels.plan import Request, plan, whole
from msa_kernels.reference import reference
from msa_kernels.testing import assert_close, document_ids, patterns
from torch._subclasses import FakeTensorMode


def request(**changes: object) -> Request:
    values: dict[str, object] = {
        "device": torch.device("cpu"), "dtype": torch.float32, "batch": 1, "q_rows": 64,
        "k_rows": 64, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "pattern": Dense(),
        "plain": True, "needs_grad": False, "return_lse": False, "deterministic": False,
    }  # fmt: skip
    return Request(**(values | changes))  # type: ignore[arg-type]


@settings(deadline=None, max_examples=12)
@given(st.data(), st.integers(1, 200))
def test_flex_equals_the_oracle(data: st.DataObject, n: int) -> None:
    pattern, ids = data.draw(patterns(n)), data.draw(st.none() | document_ids(2, n))
    q, k, v = torch.randn(2, n, 4, 16), torch.randn(2, n, 2, 16), torch.randn(2, n, 2, 16)
    out, lse = msa_attention(
        q, k, v, pattern, documents=ids, backend="flex", return_lse=True
    )  # fmt: skip
    wanted = reference(q, k, v, pattern, documents=ids)
    assert_close("out", out, wanted.out)
    assert_close("lse", lse, wanted.lse)


@pytest.mark.parametrize("causal", [True, False])
def test_sdpa_equals_the_oracle(causal: bool) -> None:
    q, k, v = (torch.randn(2, 77, h, 16, requires_grad=True) for h in (4, 2, 2))
    out = msa_attention(q, k, v, Dense(causal), backend="sdpa")
    assert isinstance(out, torch.Tensor)
    dout = torch.randn_like(out)
    wanted = reference(q, k, v, Dense(causal), dout=dout)
    assert wanted.grads is not None
    assert_close("out", out, wanted.out)
    for found, exact in zip(torch.autograd.grad(out, (q, k, v), dout), wanted.grads, strict=True):
        assert_close("gradient", found, exact)


@pytest.mark.parametrize("pattern", [Window(9), Dilated(3)], ids=str)
def test_flex_on_fake_tensors_leaves_nothing_for_real_ones(pattern: Pattern) -> None:
    q = torch.randn(1, 210, 2, 16)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        out = msa_attention(fake, fake, fake, pattern, backend="flex")
        assert isinstance(out, torch.Tensor) and out.shape == q.shape
    found = msa_attention(q, q, q, pattern, backend="flex")
    assert_close("out", found, reference(q, q, q, pattern).out)


def test_named_backends_of_whole_calls_compile() -> None:
    """sdpa becomes part of the graph; flex makes its lists on the host, and says so."""
    torch._dynamo.reset()
    q = torch.randn(1, 70, 2, 16)

    def attend(q: torch.Tensor, name: str) -> torch.Tensor:
        out = msa_attention(q * 2, q, q, Dense(), backend=name)
        assert isinstance(out, torch.Tensor)
        return out + 1

    whole_graph = torch.compile(attend, backend="aot_eager", fullgraph=True)
    broken = torch.compile(attend, backend="aot_eager")
    torch.testing.assert_close(whole_graph(q, "sdpa"), attend(q, "sdpa"))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="block lists on the host"):
        whole_graph(q, "flex")
    torch.testing.assert_close(broken(q, "flex"), attend(q, "flex"))


def test_a_block_mask_for_another_length_is_refused() -> None:
    (part,) = plan(Window(9), *whole(300, 300))
    mask = flex.block_mask(part, torch.device("cpu"))
    flex.check_lengths(mask, 300, 300)
    with pytest.raises(ValueError, match="for 300 queries and 300 keys, the tensors have 256"):
        flex.check_lengths(mask, 256, 300)


def test_flex_caps_its_padded_lists_loudly() -> None:
    long = request(q_rows=1 << 20, k_rows=1 << 20, pattern=Window(8))
    with pytest.raises(backend.BackendError, match=f"capped at {FLEX_ROWS} rows.*'torch'"):
        backend.resolve(long, "flex")


def test_auto_on_a_cpu_is_the_tiled_implementation() -> None:
    for pattern in (Dense(), Strided(8), Dilated(4)):
        assert backend.resolve(request(pattern=pattern)).name == "torch"


def test_auto_on_a_gpu_takes_the_fastest_that_serves() -> None:
    """Short dense attention goes to SDPA, the rest to the project's kernels; without optional
    packages nothing else is needed."""
    gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "needs_grad": True}
    long = {"q_rows": 4096, "k_rows": 4096}
    assert backend.resolve(request(**gpu)).name == "sdpa"
    assert backend.resolve(request(**gpu, pattern=Window(4))).name == "triton"
    assert backend.resolve(request(**gpu, return_lse=True)).name == "triton"
    assert backend.resolve(request(**gpu, plain=False)).name == "triton"
    assert backend.resolve(request(**gpu | long)).name == "triton"
    assert backend.resolve(request(**gpu | long, pattern=Strided(8))).name == "triton"
    assert "flash-attn-4 is not installed" in str(backend.refusal("fa4", request(**gpu | long)))


@pytest.fixture
def with_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hopper GPU with flash-attn-4 and cudnn-frontend, as far as refusals ask."""
    for name, kind in (("fa4", FlashAttention4), ("cudnn", CudnnIntervals)):
        monkeypatch.setitem(backend._loaded, name, object.__new__(kind))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    backend.is_hopper.cache_clear()
    yield
    backend.is_hopper.cache_clear()


BLOCKS = 32_768 // 128
EVERY_EIGHTH = BlockList(
    128, tuple(tuple(k for k in range(q + 1) if k % 8 == 7) for q in range(BLOCKS))
)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"pattern": Dense()}, "fa4"),
        ({"pattern": Window(1024)}, "fa4"),
        ({"pattern": Dilated(4)}, "fa4"),
        ({"pattern": SinkWindow(8192, 512)}, "cudnn"),
        ({"pattern": Union((Window(1024), EVERY_EIGHTH))}, "cudnn"),
        ({"pattern": PerHead((EVERY_EIGHTH, BlockList(128, ((0,),) * BLOCKS)))}, "cudnn"),
        ({"pattern": Union((Block(128), Dilated(4)))}, "triton"),
        ({"pattern": Strided(128, "union")}, "triton"),
        ({"pattern": SinkWindow(8192, 512), "plain": False}, "triton"),
        ({"pattern": SinkWindow(8192, 512), "deterministic": True}, "triton"),
        ({"pattern": SinkWindow(8192, 512), "dtype": torch.float32}, "triton"),
        ({"pattern": SinkWindow(8192, 512), "q_rows": 4096, "k_rows": 4096}, "triton"),
        ({"pattern": Dense(), "return_lse": True}, "cudnn"),
        ({"pattern": Dense(), "head_dim": 256}, "triton"),
        ({"pattern": SinkWindow(8192, 512), "head_dim": 256}, "triton"),
        ({"pattern": Dense(), "q_rows": 512, "k_rows": 512, "batch": 16}, "sdpa"),
        ({"pattern": Dense(), "q_rows": 1024, "k_rows": 1024, "batch": 16}, "fa4"),
    ],
)
def test_auto_takes_what_was_measured_fastest(
    with_packages: None, changes: dict[str, object], name: str
) -> None:
    gpu = {
        "device": torch.device("cuda"), "dtype": torch.bfloat16, "needs_grad": True,
        "q_rows": 32_768, "k_rows": 32_768, "head_dim": 128,
    }  # fmt: skip
    assert backend.resolve(request(**gpu | changes)).name == name


def test_a_fused_backward_is_taken_by_name_and_never_where_bits_matter() -> None:
    gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "needs_grad": True}
    assert backend.resolve(request(**gpu), "triton-fused").name == "triton-fused"
    with pytest.raises(backend.BackendError, match=r"triton-fused: .*not deterministic"):
        backend.resolve(request(**gpu, deterministic=True), "triton-fused")
    assert "triton-fused" not in backend.preference(request(**gpu))


def test_a_forward_in_e4m3_is_taken_by_name_and_says_what_serves_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch_fp8 = pytest.importorskip("msa_kernels.triton.launch_fp8")
    gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "needs_grad": True}
    for more in ({}, {"deterministic": True}, {"return_lse": True}, {"head_dim": 96}):
        assert backend.resolve(request(**gpu | more), "triton-fp8").name == "triton-fp8"
    assert "triton-fp8" not in backend.preference(request(**gpu))
    for more, reason in (
        ({"dtype": torch.float32}, "is for bfloat16 and float16, not torch.float32"),
        ({"head_dim": 192}, "head size 192, at most 128"),
        ({"device": torch.device("cpu")}, "needs a GPU"),
        ({"partial": True}, "rounds by the keys of a pass"),
    ):
        with pytest.raises(backend.BackendError, match=f"triton-fp8: {reason}.*Nearest: backend="):
            backend.resolve(request(**gpu | more), "triton-fp8")
    monkeypatch.setattr(launch_fp8, "_capability", lambda device: (8, 6))
    with pytest.raises(backend.BackendError, match=r"8\.9 or newer .*has 8\.6.*'triton'"):
        backend.resolve(request(**gpu, pattern=Window(4)), "triton-fp8")


def test_a_package_that_fails_as_it_loads_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def broken() -> backend.Backend:
        asked.append(1)
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setitem(backend.LOADERS, "cudnn", broken)
    monkeypatch.delitem(backend._loaded, "cudnn", raising=False)
    for _ in range(3):
        reason = backend.refusal("cudnn", request())
    assert reason == (
        "cannot be loaded: it fails as it loads: OSError: libcuda.so.1: cannot open shared "
        "object file"
    )
    assert len(asked) == 1
    with pytest.raises(backend.BackendError, match="cannot open shared object file"):
        backend.resolve(request(), "cudnn")
    monkeypatch.undo()
    backend._loaded.pop("cudnn", None)


def test_what_ran_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    backend.reset()
    q = torch.randn(1, 33, 2, 8)
    with caplog.at_level(logging.INFO, "msa_kernels.backend"):
        for _ in range(3):
            msa_attention(q, q, q, Window(5))
        msa_attention(q, q, q, Window(6), backend="flex")
    records = backend.used()
    assert [(r.backend, r.calls) for r in records] == [("torch", 3), ("flex", 1)]
    assert records[0].pattern == "Window(window=5, causal=True)"
    assert (records[0].q_rows, records[0].head_dim, records[0].dtype) == (33, 8, "float32")
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in ("torch", "sdpa") for dtype in (torch.float32, torch.bfloat16)]
    + [("torch", torch.float16), ("flex", torch.bfloat16)],
)
def test_check_passes_here(name: str, dtype: torch.dtype) -> None:
    # FlexAttention traces every mask anew: a few kinds are enough here.
    cases = check.cases()[:5] if name == "flex" else check.cases()
    outcomes = [check.run(name, case, "cpu", dtype) for case in cases]
    assert all(o.ok for o in outcomes), [o for o in outcomes if not o.ok]
    ran = [o.case for o in outcomes if not o.refused]
    assert len(ran) == (2 if name == "sdpa" else len(cases))


def test_check_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = backend.load("torch")
    monkeypatch.setattr(
        tiles, "forward", lambda *a: tuple(1.01 * t for t in type(tiles).forward(tiles, *a)),
        raising=False,
    )  # fmt: skip
    outcome = check.run("torch", check.cases()[0], "cpu", torch.float32)
    assert not outcome.ok
    assert outcome.errors["out"] == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta"])
def test_a_device_that_is_not_there_is_named(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        check.main(["--device", device])
    assert ended.value.code == 2
    assert f"--device {device} cannot be used: " in capsys.readouterr().err


def test_the_command_prints_json_and_fails_where_a_named_backend_ran_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "msa_kernels.check", "--output", "json",
         "--backend", "torch", "--backend", "triton"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith("triton ran nothing on cpu\n")
    report = json.loads(done.stdout)
    assert report["machine"]["torch"] == torch.__version__
    assert all(row["ok"] for row in report["results"])
    assert {row["backend"] for row in report["results"]} == {"torch", "triton"}


def test_flash_attention_4_reads_lengths_as_they_are_aligned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plain request starts at position 0 on both sides, wherever its last query is."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    kernel = object.__new__(FlashAttention4)
    gpu = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16}
    assert kernel.refuses(request(**gpu)) is None
    reason = kernel.refuses(request(**gpu, q_rows=4096, k_rows=2048))
    assert reason == "needs keys that end where their queries end"


def test_what_ran_stays_bounded_where_every_length_is_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend.reset()
    q = torch.randn(1, 1, 1, 8)
    with caplog.at_level(logging.INFO, logger="msa_kernels"):
        for length in range(backend.SHAPES_KEPT + 50):
            backend.record("torch", q, q.expand(1, length + 1, 1, 8), Dense(), False)
    ran = backend.used()
    assert len(ran) == backend.SHAPES_KEPT + 1 == len(caplog.records)
    assert (ran[0].q_rows, ran[0].k_rows, ran[0].calls) == (0, 0, 50)
    backend.reset()

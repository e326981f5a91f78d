"""Operators, compilation and sizes beyond 32 bits, on the GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from gpucases import relative_error
from msa_kernels import backend, check, ops
from msa_kernels.attention import msa_attention
from msa_kernels.module import MsaAttention
from msa_kernels.pattern import Dense, Pattern, SinkWindow, Strided, Window
from msa_kernels.triton.launch import TritonKernel
from torch import nn
from torch._dynamo.utils import counters
from torch.library import opcheck

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["triton", "auto"])
@pytest.mark.parametrize("packed", [False, True])
def test_operators_are_well_formed(name: str, packed: bool) -> None:
    q, k, v = (
        torch.randn(2, 200, h, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        for h in (4, 2, 2)
    )
    ids = torch.arange(200).ge(90).int().expand(2, -1).contiguous() if packed else None
    rest = (SinkWindow(50, 7).encoded(), 0.125, ids, None, None, "bottom-right", name)
    opcheck(torch.ops.msa.attention.default, (q, k, v, *rest))
    out, lse = ops.attention(q, k, v, *rest)
    tensors = [t.detach() for t in (q, k, v, out, lse, torch.randn_like(out), lse)]
    opcheck(torch.ops.msa.attention_backward.default, (*tensors, *rest))


class TwoLayers(nn.Module):
    def __init__(self, pattern: Pattern, dtype: torch.dtype, name: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MsaAttention(256, 4, pattern, kv_heads=2, backend=name) for _ in range(2)
        )
        self.to("cuda", dtype)

    def forward(self, x: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, documents=documents)
        return x


@pytest.mark.parametrize(
    ("pattern", "dtype", "name", "packed", "limit"),
    [
        (SinkWindow(100, 20), torch.float32, "triton", True, 1e-4),
        (SinkWindow(100, 20), torch.bfloat16, "triton", True, 2e-2),
        (Strided(16, "union"), torch.bfloat16, "auto", False, 2e-2),
        (Dense(), torch.bfloat16, "auto", False, 2e-2),
    ],
)
def test_two_layers_compile_once_for_three_lengths(
    pattern: Pattern, dtype: torch.dtype, name: str, packed: bool, limit: float
) -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = TwoLayers(pattern, dtype, name)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (768, 1300, 2048):
        x = torch.randn(2, length, 256, device="cuda", dtype=dtype)
        ids = None
        if packed:
            ids = torch.arange(length).ge(300).long().expand(2, -1).contiguous().cuda()
        given = (x, ids) if packed else (x,)
        loss = model(*given).float().square().mean()
        plain = torch.autograd.grad(loss, list(model.parameters()))
        loss = compiled(*given).float().square().mean()
        fast = torch.autograd.grad(loss, list(model.parameters()))
        for found, wanted in zip(fast, plain, strict=True):
            size = max(float(wanted.double().norm()), 1e-12)
            assert float((found.double() - wanted.double()).norm()) <= limit * size
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_another_length_compiles_no_kernel() -> None:
    """Lengths, windows, documents and lists are arguments of the kernels."""
    from triton import knobs

    compiled: list[str] = []

    def hook(*_: object, **given: object) -> None:
        compiled.append(str(given.get("repr", "")))

    def run(length: int, what: Pattern, ids: torch.Tensor | None = None) -> None:
        q, k, v = (
            torch.randn(1, length, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for h in (8, 2, 2)
        )
        msa_attention(q, k, v, what, documents=ids, backend="triton").sum().backward()

    run(1024, SinkWindow(300, 20))
    run(1000, SinkWindow(300, 20), torch.arange(1000).ge(77)[None].int())
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        for length, window in ((1025, 17), (4096, 1000), (77, 30)):
            run(length, SinkWindow(window, 5))
            run(length, SinkWindow(window, 5), torch.arange(length).ge(50)[None].int())
    finally:
        knobs.runtime.jit_cache_hook = before
    assert not compiled


def _sampled(q, k, v, out, i: int, window: int) -> float:
    first = max(0, i - window + 1)
    keys, values = (t[0, first : i + 1, 0].double() for t in (k, v))
    group = q.shape[2] // k.shape[2]
    scores = q[0, i, :group].double() @ keys.T * q.shape[3] ** -0.5
    return relative_error(out[0, i, :group], scores.softmax(-1) @ values)


@pytest.mark.parametrize("hopper", [True, False])
def test_tensors_beyond_two_to_the_31_elements(hopper: bool) -> None:
    """Offsets of rows, heads and batch elements need 64 bits; one layout is not contiguous."""
    rows, heads, window = (600_064, 32, 512)
    kernel = TritonKernel(hopper=None if hopper else False)
    before = backend.load("triton")
    backend._loaded["triton"] = kernel
    try:
        wide = torch.empty(1, rows, heads + 2, 128, device="cuda", dtype=torch.bfloat16)
        for some in wide[0].split(50_000):
            some.normal_()
        assert wide.numel() > 1 << 31
        q, k, v = wide[:, :, :heads], wide[:, :, heads : heads + 1], wide[:, :, heads + 1 :]
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = msa_attention(*leaves, Window(window), backend="triton")
        for i in (0, 131_071, 131_072, 262_144, 524_300, rows - 1):
            assert _sampled(q, k, v, out.detach(), i, window) < 8e-3
        grads = torch.autograd.grad(out, leaves, q)
        tail = slice(rows - 2048, rows)
        inputs = [t[:, tail].detach().clone().requires_grad_() for t in (q, k, v)]
        small = msa_attention(*inputs, Window(window), backend="triton")
        wanted = torch.autograd.grad(small, inputs, q[:, tail])
        for grad, exact in zip(grads, wanted, strict=True):
            # Queries within a window of the cut see other keys.
            assert relative_error(grad[:, tail][:, 1024:], exact[:, 1024:].double()) < 8e-3
    finally:
        backend._loaded["triton"] = before


@pytest.mark.parametrize("name", ["triton", "torch", "sdpa", "fa4", "cudnn"])
def test_the_check_command_passes(name: str) -> None:
    """Every backend of this machine on every kind of pattern."""
    try:
        backend.load(name)
    except ImportError as error:
        pytest.skip(str(error))
    outcomes = list(check.check("cuda", torch.bfloat16, [name]))
    assert all(o.ok for o in outcomes), [o for o in outcomes if not o.ok]
    assert any(not o.refused for o in outcomes)


IMPORTS = """
import os, sys, torch
from msa_kernels.attention import msa_attention
from msa_kernels.pattern import Dense, Window
"""

FORKS = """
child = os.fork()
if child == 0:
    q = torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16)
    out = msa_attention(q, q, q, Window(64))
    os._exit(0 if out.isfinite().all() else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

COMPILES = """
def attend(q):
    return msa_attention(q, q, q, Dense(), backend=sys.argv[1])
q = torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
found = torch.compile(attend, fullgraph=True)(q)
torch.testing.assert_close(found, attend(q), atol=1e-2, rtol=2e-2)
"""


@pytest.mark.parametrize("code", [("fork", FORKS), ("auto", COMPILES), ("sdpa", COMPILES)])
def test_a_new_process_forks_or_compiles_first(code: tuple[str, str]) -> None:
    """Imported and nothing more: the GPU is free for forks, and what runs is loaded in time."""
    name, rest = code
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + rest, name], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

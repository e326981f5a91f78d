"""The plain Triton kernels run element by element on the CPU, against the fp64 oracle.

``TRITON_INTERPRET`` must be set before Triton is imported, so that these cases run in a process of
their own: this file is both the test and, as a script, that process.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "backward"), [(0, "two passes"), (1, "two passes"), (2, "fused")]
)
def test_kernels_match_the_oracle(seed: int, backward: str) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), str(seed), backward],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("cases: 24"), done.stdout


def test_heads_further_apart_than_two_to_the_31_elements() -> None:
    """As of (B, H, S, D) storage; nearly none of the memory between them is ever touched. And rows
    whose numbers are apart, and numbers that are none."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), "far"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _far() -> None:
    import torch
    from msa_kernels import engine
    from msa_kernels.fused import row_delta
    from msa_kernels.pattern import Window
    from msa_kernels.plan import whole
    from msa_kernels.reference import reference
    from msa_kernels.triton.launch import TritonKernel

    torch.manual_seed(0)
    # The stride itself fits 32 bits; twice the stride does not.
    apart, shape = 1 << 30, (1, 20, 3, 16)
    storage = torch.empty(2 * apart + 20 * 16, dtype=torch.float16)
    q, dout = (torch.randn(shape).half() for _ in range(2))
    k, v = (torch.randn(1, 20, 1, 16).half() for _ in range(2))
    wide = storage.as_strided(shape, (0, 16, apart, 1)).copy_(q)
    kernel, runs, pattern = TritonKernel(), whole(20, 20), Window(5)
    out, lse = engine.forward(kernel, wide, k, v, pattern, *runs, 0.25)
    delta = row_delta(dout, out, None)
    grads = engine.backward(kernel, wide, k, v, out, dout, lse, delta, pattern, *runs, 0.25)
    right = reference(q, k, v, pattern, dout=dout)
    assert right.grads is not None
    for found, truth in zip((out, *grads), (right.out, *right.grads), strict=True):
        assert (found.double() - truth).abs().max() < 6e-3


def _odd() -> None:
    """Numbers of a row that are not side by side; and what is no number shows."""
    import torch
    from msa_kernels import engine
    from msa_kernels.fused import row_delta
    from msa_kernels.pattern import Window
    from msa_kernels.plan import whole
    from msa_kernels.triton.launch import TritonKernel
    from msa_kernels.triton.launch_fp8 import Fp8Kernel

    torch.manual_seed(0)
    runs, pattern, sees = whole(20, 20), Window(5), slice(7, 12)
    q, k, v, dout = (torch.randn(1, 20, 2, 16).half() for _ in range(4))

    def apart(x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    for kernel in (TritonKernel(), TritonKernel(fused=True), Fp8Kernel()):

        def both(q, k, v, dout, kernel=kernel):
            out, lse = engine.forward(kernel, q, k, v, pattern, *runs, 0.25)
            delta = row_delta(dout, out, None)
            grads = engine.backward(kernel, q, k, v, out, dout, lse, delta, pattern, *runs, 0.25)
            return out, lse, *grads

        found = both(*(apart(x) for x in (q, k, v, dout)))
        for some, other in zip(found, both(q, k, v, dout), strict=True):
            assert torch.equal(some, other), kernel.name
        if isinstance(kernel, Fp8Kernel):
            continue  # the interpreter's e4m3 has nothing that is no number
        for bad in (float("nan"), float("inf")):
            keys = k.clone()
            keys[0, 7, 1, 3] = bad
            out, lse = engine.forward(kernel, q, keys, v, pattern, *runs, 0.25)
            # A key of -inf has no weight: with +inf that depends on the sign of the query.
            shown = torch.ones(5, dtype=torch.bool) if bad != bad else q[0, sees, 1, 3] > 0
            assert shown.any()
            assert out[0, sees, 1][shown].isnan().all(), (kernel.name, bad)
            assert not lse[0, 1, sees][shown].isfinite().any(), (kernel.name, bad)
            assert out[0, :, 0].isfinite().all(), (kernel.name, bad)


def _leaf(rng: random.Random):
    from msa_kernels.pattern import Block, BlockList, Columns, Dense, Dilated, SinkWindow, Window

    length = rng.randint(1, 30)
    size = rng.choice([7, 16, 32])
    rows = tuple(
        tuple(sorted(rng.sample(range(q + 1), rng.randint(0, min(q + 1, 3))))) for q in range(13)
    )
    return rng.choice(
        [
            Dense(),
            Dense(causal=False),
            Window(rng.randint(1, 40)),
            Window(rng.randint(1, 40), causal=False),
            Dilated(rng.randint(1, 5)),
            Dilated(rng.randint(1, 5), rng.randint(1, 9)),
            Block(rng.randint(1, 50)),
            Columns(length, rng.randint(1, length)),
            SinkWindow(rng.randint(1, 30), rng.randint(0, 30)),
            BlockList(size, rows),
            BlockList(size, tuple(tuple(range(4)) for _ in rows), causal=False),
        ]
    )


def _like(pattern, rng: random.Random):
    """A pattern of the same kind with other values."""
    while type(other := _leaf(rng)) is not type(pattern):
        pass
    return other


def _run(seed: int, count: int, fused: bool) -> int:
    import numpy as np
    import torch
    from msa_kernels import engine
    from msa_kernels.blocks import Runs
    from msa_kernels.fused import row_delta
    from msa_kernels.pattern import BlockList, PerHead, Union
    from msa_kernels.plan import packed, varlen, whole
    from msa_kernels.reference import reference
    from msa_kernels.triton.launch import TritonKernel

    kernel = TritonKernel(fused=fused)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(count):
        pattern = _leaf(rng)
        if rng.random() < 0.5:
            other = _leaf(rng)
            if rng.random() < 0.4:
                pattern = PerHead((pattern, other))
            elif not (isinstance(pattern, BlockList) and isinstance(other, BlockList)):
                pattern = Union((pattern, other))
        elif rng.random() < 0.5:
            # Heads that differ in values alone: one launch with lists of their own.
            pattern = PerHead((pattern, _like(pattern, rng)))
        rows, group, heads = rng.randint(1, 90), rng.choice([1, 2, 3]), rng.choice([1, 2])
        dim = rng.choice([16, 20, 32])
        dtype = rng.choice([torch.float32, torch.float16])
        keys = rows
        where = {}
        choice = rng.random()
        if choice < 0.4:
            ids = torch.tensor([sorted(rng.choices(range(4), k=rows))])
            where["documents"] = ids
            runs: tuple[Runs, Runs] = (packed(ids.numpy()),) * 2
        elif choice < 0.6:
            # Sequences of lengths of their own, more queries than keys and empty ones among them.
            keys = rng.randint(1, 90)
            bounds = [[0, *sorted(rng.choices(range(n + 1), k=3)), n] for n in (rows, keys)]
            where["bounds"] = bounds
            runs = varlen(*(np.array(side) for side in bounds))
        else:
            keys = rows if choice < 0.8 else rng.randint(1, 90)
            runs = whole(rows, keys)
        q, dout = (torch.randn(1, rows, heads * group, dim).to(dtype) for _ in range(2))
        k, v = (torch.randn(1, keys, heads, dim).to(dtype) for _ in range(2))
        scale = dim**-0.5
        out, lse = engine.forward(kernel, q, k, v, pattern, *runs, scale)
        dlse = torch.randn_like(lse)
        delta = row_delta(dout, out, dlse)
        grads = engine.backward(kernel, q, k, v, out, dout, lse, delta, pattern, *runs, scale)
        right = reference(q, k, v, pattern, dout=dout, dlse=dlse, **where)
        assert right.grads is not None
        some = torch.isfinite(right.lse)
        assert torch.equal(torch.isfinite(lse), some), pattern
        tolerance = 2e-5 if dtype == torch.float32 else 6e-3
        pairs = {"out": (out, right.out), "lse": (lse[some], right.lse[some])}
        pairs |= dict(zip(("dq", "dk", "dv"), zip(grads, right.grads, strict=True), strict=True))
        for name, (found, truth) in pairs.items():
            size = max(1e-3, truth.abs().max().item() if truth.numel() else 0.0)
            error = (found.double() - truth).abs().max().item() / size if truth.numel() else 0.0
            assert error < tolerance, (name, error, pattern, rows, keys, group, dim, dtype)
    return count


if __name__ == "__main__":
    if sys.argv[1] == "far":
        _far()
        _odd()
    else:
        print("cases:", _run(int(sys.argv[1]), 24, sys.argv[2] == "fused"))

"""The forward in e4m3 in Triton's interpreter: the copies, the kernel on them, and what it costs.

``TRITON_INTERPRET`` must be set before Triton is imported, so that the cases run in a process of
their own: this file is both the test and, as a script, that process. Copies are judged by the
rounding of e4m3, the kernel by the fp64 oracle on what the copies hold, and the result as a whole
by the oracle on the inputs, at the errors that docs/kernels.md gives.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HALF_STEP = 1 / 16
"""Largest relative error of rounding to three bits of mantissa."""
PROBABILITIES = 0.03
"""Norm-wise error that rounding P alone may leave: one rounding's root mean square is 0.026."""
OUTPUT = 0.07
GRADIENTS = 0.1
"""Three rounded factors, for scores of a standard deviation of one: 0.055 is the most that was
seen of outputs, 0.06 of gradients."""


@pytest.mark.parametrize("what", ["copies", "kernel", "outliers"])
def test_in_a_process_that_interprets(what: str) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), what],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _copies() -> None:
    import torch
    from msa_kernels.triton.fp8 import quantised, rotation

    torch.manual_seed(0)
    for rows, dim, width in ((200, 96, 128), (65, 64, 64)):
        q = torch.randn(2, rows, 4, dim).half()
        k = (torch.randn(2, rows, 2, dim) + 3).half()
        v = (torch.randn(2, rows, 2, dim) * torch.logspace(-2, 2, dim)).half()
        v[:, :, 1, 5] = 0
        made = quantised(q, k, v, width, False)
        turn = rotation(width, torch.float64, q.device) / width**0.5
        assert torch.allclose(turn @ turn, torch.eye(width, dtype=torch.float64))
        mean = k.double().mean(1, keepdim=True)
        wide = torch.nn.functional.pad
        for x, copy, scale in (
            (q.double(), made.q, made.q_scale),
            (k.double() - mean, made.k, made.k_scale),
        ):
            exact = wide(x, (0, width - dim)).transpose(1, 2) @ turn
            each = scale.double().repeat_interleave(128, 2)[:, :, :rows, None]
            far = (copy.double() * each - exact).abs()
            assert bool((far <= exact.abs() * HALF_STEP * 1.01 + each * 2**-9).all())
            assert copy.float().abs().amax() == 448
        far = (made.v.double() * made.v_scale.double()[..., None])[:, :, :dim, :rows]
        exact = v.double().permute(0, 2, 3, 1)
        least = made.v_scale.double()[:, :, :dim, None] * 2**-9
        assert bool(((far - exact).abs() <= exact.abs() * HALF_STEP * 1.01 + least).all())
        assert not made.v[..., rows:].float().any()
        shift = torch.einsum("bqhd,bkhd->bhq", q.double(), mean.repeat_interleave(2, 2))
        assert torch.allclose(made.shift.double(), shift, rtol=1e-4, atol=1e-3)
        # In the order of fragments every 16 keys hold 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.
        order = [8 * b + 2 * c + e for c in range(4) for b in range(2) for e in range(2)]
        found = quantised(q, k, v, width, True).v.view(torch.uint8)
        plain = made.v.view(torch.uint8)
        assert torch.equal(found.unflatten(3, (-1, 16)), plain.unflatten(3, (-1, 16))[..., order])


def _held(q, k, v, width: int):
    """What the copies hold, in fp64: queries, keys, values (as wide as those), and the shift."""
    import torch
    from msa_kernels.triton.fp8 import quantised

    made = quantised(q, k, v, width, False)
    rows = [
        (copy.double() * scale.double().repeat_interleave(128, 2)[:, :, : copy.shape[2], None])
        for copy, scale in ((made.q, made.q_scale), (made.k, made.k_scale))
    ]
    values = (made.v.double() * made.v_scale.double()[..., None]).permute(0, 3, 1, 2)
    assert values.dtype == torch.float64
    return *(r.transpose(1, 2) for r in rows), values[:, : v.shape[1]], made.shift.double()


def _compute(q, k, v, pattern, where, runs):
    """Largest errors: of the LSE and of the output against the oracle on the copies, of the output
    and of the gradients against the oracle on the inputs."""
    import torch
    from msa_kernels import engine
    from msa_kernels.fused import row_delta
    from msa_kernels.reference import reference
    from msa_kernels.triton.launch_fp8 import Fp8Kernel

    def far(found, exact) -> float:
        return float((found.double() - exact).norm() / exact.norm().clamp(1e-6))

    kernel, dim = Fp8Kernel(), q.shape[3]
    width, scale = 64 if dim <= 64 else 128, dim**-0.5
    out, lse = engine.forward(kernel, q, k, v, pattern, *runs, scale)
    dout = torch.randn(out.shape).to(out.dtype)
    delta = row_delta(dout, out, None)
    grads = engine.backward(kernel, q, k, v, out, dout, lse, delta, pattern, *runs, scale)
    right = reference(q, k, v, pattern, dout=dout, **where)
    assert right.grads is not None
    seen = torch.isfinite(right.lse)
    assert torch.equal(torch.isfinite(lse), seen)
    *copies, shift = _held(q, k, v, width)
    held = reference(*copies, pattern, scale=scale, **where)
    log = (lse.double() - held.lse - shift * scale)[seen].abs()
    return {
        "lse": float(log.max()) if log.numel() else 0.0,
        "rounding of P": far(out, held.out[..., :dim]),
        "out": far(out, right.out),
        "gradients": max(far(a, b) for a, b in zip(grads, right.grads, strict=True)),
    }


def _kernel() -> None:
    import numpy as np
    import torch
    from msa_kernels.pattern import BlockList, Dense, Dilated, PerHead, SinkWindow, Union, Window
    from msa_kernels.plan import packed, varlen, whole

    torch.manual_seed(0)
    ids = torch.tensor([[0] * 40 + [1] + [2] * 109])
    bounds = [[0, 0, 30, 70], [0, 20, 90, 90]]
    lists = [BlockList(16, tuple(tuple(range(q % n, q + 1, n)) for q in range(6))) for n in (2, 3)]
    every = [
        (SinkWindow(40, 5), 150, 150, 2, 64, {"documents": ids}, (packed(ids.numpy()),) * 2),
        (PerHead(tuple(lists)), 90, 90, 1, 20, {}, whole(90, 90)),
        (Union((Window(9), Dilated(3))), 70, 70, 3, 32, {}, whole(70, 70)),
        (Dense(), 40, 140, 4, 96, {}, whole(40, 140)),
        (Dense(causal=False), 70, 90, 1, 128, {"bounds": bounds},
         varlen(*(np.array(side) for side in bounds))),
    ]  # fmt: skip
    for pattern, rows, keys, group, dim, where, runs in every:
        q = torch.randn(1, rows, 2 * group, dim).half()
        k, v = (torch.randn(1, keys, 2, dim).half() for _ in range(2))
        if isinstance(pattern, Union):
            # Its dilated part has copies of its own: only the whole can be compared.
            found = _compute(q, k, v, pattern, where, runs)
            assert found["out"] < OUTPUT, (pattern, found)
            assert found["gradients"] < GRADIENTS, (pattern, found)
            continue
        found = _compute(q, k, v, pattern, where, runs)
        print(pattern, found)
        assert found["lse"] < 1e-4, (pattern, found)
        assert found["rounding of P"] < PROBABILITIES, (pattern, found)
        assert found["out"] < OUTPUT, (pattern, found)
        assert found["gradients"] < GRADIENTS, (pattern, found)


def _outliers() -> None:
    """Large channels that queries and keys share, and keys with a large mean, cost no more."""
    import torch
    from msa_kernels.pattern import Dense
    from msa_kernels.plan import whole

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 160, 1, 128) for _ in range(3))
    far = torch.tensor([3, 70])
    shared, biased = ((q.clone(), k.clone()) for _ in range(2))
    for x in shared:
        x[..., far] *= 5
    biased[1][..., far] += 20
    v[..., 9] *= 30
    for some, keys in (shared, biased):
        found = _compute(some.half(), keys.half(), v.half(), Dense(), {}, whole(160, 160))
        print(found)
        assert found["lse"] < 1e-4, found
        assert found["out"] < OUTPUT, found


if __name__ == "__main__":
    {"copies": _copies, "kernel": _kernel, "outliers": _outliers}[sys.argv[1]]()

"""``python benchmarks/kernels/fp8_error.py``: what a forward in e4m3 costs, emulated in PyTorch.

One causal head, fp64 but for the roundings of :mod:`msa_kernels.triton.fp8` and of probabilities.
Prints norm-wise errors of the output and of the straight-through gradients (exact scores and
values, with the output and LSE of the rounded forward), per cent. What tensor cores lose as they
add products up is not in it. "Sums of rows" is by how much the probabilities that backward forms
again miss a sum of one, root mean square.
"""

from __future__ import annotations

import math

import arguments
import torch
from msa_kernels.triton.fp8 import LARGEST, TILE, rotation

ROWS, HEAD_DIM = 2048, 128
SCALE = HEAD_DIM**-0.5


def rounded(x: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """``x`` in e4m3 under a scale that takes ``peak`` to the largest."""
    unit = peak.clamp(1e-12) / LARGEST
    return (x / unit).clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn).double() * unit


def by_tile(x: torch.Tensor) -> torch.Tensor:
    tiles = x.view(-1, TILE, x.shape[1])
    return rounded(tiles, tiles.abs().amax((1, 2), keepdim=True)).view(x.shape)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, turned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE; ``turned``: of rotated queries and of rotated keys without their mean."""
    mean = k.mean(0) if turned else torch.zeros_like(k[0])
    turn = (
        rotation(HEAD_DIM, torch.float64, k.device) * SCALE
        if turned
        else torch.eye(HEAD_DIM).double()
    )
    scores = by_tile(q @ turn) @ by_tile((k - mean) @ turn).T * SCALE
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(1, keepdim=True)
    weights = (weights * 256).float().to(torch.float8_e4m3fn).double() / 256
    out = weights @ rounded(v, v.abs().amax(0, keepdim=True)) / total
    return out, (top + total.log())[:, 0] + q @ mean * SCALE


def gradients(q, k, v, dout, weights, out):
    slope = weights * (dout @ v.T - (dout * out).sum(1, keepdim=True))
    return slope @ k * SCALE, slope.T @ q * SCALE, weights.T @ dout


def inputs() -> dict[str, tuple[torch.Tensor, ...]]:
    made: dict[str, tuple[torch.Tensor, ...]] = {}
    far = torch.tensor([3, 70])
    for name in (
        "normal", "values of mean 1 and deviation 1/4",
        "two channels 5 times as large in q and k, one 30 times in v",
        "keys whose mean is 20 in two channels", "0.1 % of entries of deviation 10",
        "queries 4 times as large (scores of deviation 4)", "queries 8 times as large",
        "queries 16 times as large",
    ):  # fmt: skip
        q, k, v = torch.randn(3, ROWS, HEAD_DIM).double()
        if name.startswith("values"):
            v = 1 + v / 4
        elif name.startswith("two channels"):
            q[:, far] *= 5
            k[:, far] *= 5
            v[:, 9] *= 30
        elif name.startswith("keys"):
            k[:, far] += 20
        elif name.startswith("0.1"):
            for x in (q, k, v):
                x += torch.randn_like(x) * 10 * (torch.rand_like(x) < 1e-3)
        elif name.startswith("queries"):
            q *= int(name.split()[1])
        made[name] = tuple(x.bfloat16().double() for x in (q, k, v))
    return made


def main() -> None:
    arguments.parser(__doc__).parse_args()
    torch.manual_seed(0)
    seen = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()

    def far(found: torch.Tensor, exact: torch.Tensor) -> str:
        return f"{float((found - exact).norm() / exact.norm()) * 100:.1f} %"

    print("| inputs | out | dq | dk | dv | sums of rows | out without the two steps |")
    for name, (q, k, v) in inputs().items():
        dout = torch.randn(ROWS, HEAD_DIM).bfloat16().double()
        scores = (q @ k.T * SCALE).masked_fill(~seen, -math.inf)
        weights = scores.softmax(1)
        exact = weights @ v
        out, lse = forward(q, k, v, seen, True)
        again = (scores - lse[:, None]).exp()
        found = gradients(q, k, v, dout, again, out)
        right = gradients(q, k, v, dout, weights, exact)
        sums = float((again.sum(1) - 1).square().mean().sqrt()) * 100
        print(
            f"| {name} | {far(out, exact)} |",
            *(f"{far(a, b)} |" for a, b in zip(found, right, strict=True)),
            f"{sums:.1f} % | {far(forward(q, k, v, seen, False)[0], exact)} |",
        )


if __name__ == "__main__":
    main()

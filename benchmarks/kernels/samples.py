"""Checks a result at the shape that was timed, on sampled query and key rows, against fp64.

Output and dQ of a query need its own row of scores only. dK and dV of a key need every query that
sees it, so that the sampled keys are among the last 256: all patterns measured are causal.
"""

from __future__ import annotations

import torch
from cases import Case

LIMIT = 8e-3
"""2.5 times the error of PyTorch's own attention in bf16 on these inputs (2.4e-3), plus 2e-3."""
FP8_LIMIT = 7e-2
"""Of a forward in e4m3, on normal inputs: docs/kernels.md."""
FP8_FIRST = 64
"""The first query that is sampled of such a forward. The dQ of one that sees a single key is
nothing but for roundings, which are larger here than the dQ of one that sees very many."""
NAMES = ("out", "dq", "dk", "dv")
ROWS = 12
LAST_KEYS = (1, 100, 256)


def check(
    case: Case, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor, out: torch.Tensor,
    grads: tuple[torch.Tensor, ...], limit: float = LIMIT, first: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Norm-wise relative errors in the last batch row, of queries from ``first`` on;
    AssertionError above ``limit``."""
    q, k, v, dout, out, dq, dk, dv = (t[-1].detach() for t in (*inputs, dout, out, *grads))
    wrong, size = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)

    def add(name: str, found: torch.Tensor, exact: torch.Tensor) -> None:
        wrong[name] += float((found.double() - exact).square().sum())
        size[name] += float(exact.square().sum())

    ratio, rows = case.q_heads // case.kv_heads, case.sequence
    sampled = torch.linspace(first, rows - 1, ROWS).round().int().tolist()
    for group in range(0, case.kv_heads, 3):
        heads = slice(group * ratio, (group + 1) * ratio)
        keys, values = k[:, group].double(), v[:, group].double()
        exact, exact_dq, _, _ = _rows(case, group, sampled, q[:, heads], keys, values,
                                      dout[:, heads])  # fmt: skip
        add("out", out[sampled, heads], exact)
        add("dq", dq[sampled, heads], exact_dq)
    last = list(range(max(0, rows - max(LAST_KEYS)), rows))
    _, _, weights, slope = _rows(case, group, last, q[:, heads], keys, values, dout[:, heads])
    for back in LAST_KEYS:
        j = rows - back
        if j >= last[0]:
            sees, query = weights[:, :, j], q[last, heads].double()
            add("dv", dv[j, group], (sees[..., None] * dout[last, heads].double()).sum((0, 1)))
            exact = (slope[:, :, j, None] * query).sum((0, 1)) * case.head_dim**-0.5
            add("dk", dk[j, group], exact)
    errors = {name: (wrong[name] / max(size[name], 1e-12)) ** 0.5 for name in NAMES}
    if not max(errors.values()) < limit:
        raise AssertionError(f"relative errors {errors}")
    return {f"{name}_error": round(error, 5) for name, error in errors.items()}


def _rows(
    case: Case, group: int, rows: list[int], q: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, dout: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Output, dQ, probabilities and score gradients of these queries, fp64 (rows, heads, ...)."""
    pattern = case.pattern.for_group(group)
    seen = torch.stack([_bits(pattern.row(i, case.sequence), case.sequence) for i in rows])
    scale = case.head_dim**-0.5
    scores = torch.einsum("rhd,kd->rhk", q[rows].double(), keys) * scale
    weights = scores.masked_fill_(~seen[:, None], -torch.inf).softmax(-1)
    del scores
    exact = weights @ values
    cotangent = dout[rows].double()
    slope = cotangent @ values.T
    slope = slope.sub_((cotangent * exact).sum(-1, keepdim=True)).mul_(weights)
    return exact, slope @ keys * scale, weights, slope


def _bits(row: int, length: int) -> torch.Tensor:
    """A pattern's row as a mask on the GPU."""
    raw = bytearray(row.to_bytes(-(-length // 8), "little"))
    packed = torch.frombuffer(raw, dtype=torch.uint8).cuda()
    at = torch.arange(length, device="cuda")
    return (packed[at // 8] >> (at % 8)) & 1 == 1

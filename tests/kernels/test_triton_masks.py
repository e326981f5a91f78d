"""Masks of the GPU kernels against the rules they come from, on the CPU.

``TRITON_INTERPRET`` must be set before Triton is imported: this file is both the test and, as a
script, the process that has it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is installed on Linux only")

import triton.language as tl  # noqa: E402
from msa_kernels.rules import Part, Rule  # noqa: E402
from msa_kernels.triton.predicate import encode, seen, token  # noqa: E402


def test_masks_of_tiles_are_what_the_rules_say() -> None:
    """Queries down and keys down, positions counted and read, queries before the first key."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@triton.jit
def tile(
    out, positions, documents, values, table, table_q, table_k, q_at, k_at, q_rows, k_rows,
    q_start, k_start, SIZE: tl.constexpr, FLAGS: tl.constexpr, RULES: tl.constexpr,
    MINUS: tl.constexpr, DOWN: tl.constexpr, SIMPLE: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, SIZE)
    k_positions, k_documents = positions + q_rows, documents + q_rows
    if DOWN:
        i, document = token(q_at + rows, q_rows, q_start, positions, documents, -2, SIMPLE)
        ok = seen(
            i, q_start + q_rows, document, rows, k_at, k_rows, k_start, k_positions,
            k_documents, q_start + q_at, values, table, table_q, table_k, FLAGS, RULES, MINUS,
            2, True, SIMPLE,
        )  # fmt: skip
    else:
        j, document = token(k_at + rows, k_rows, k_start, k_positions, k_documents, -1, SIMPLE)
        ok = seen(
            j, k_start + k_rows, document, rows, q_at, q_rows, q_start, positions, documents,
            k_start + k_at, values, table, table_q, table_k, FLAGS, RULES, MINUS, 2, False,
            SIMPLE,
        )  # fmt: skip
    tl.store(out + rows[:, None] * SIZE + rows[None, :], ok.to(tl.int8))


def main(count: int = 120) -> None:
    size, rng = 16, random.Random(4)
    table = (4, tuple(tuple(sorted(rng.sample(range(9), 3))) for _ in range(12)))

    def rule() -> Rule:
        lo = rng.choice([0, 0, None, 3, -5])
        return Rule(
            lo, rng.choice([None, None, (lo or 0) + rng.randint(1, 30)]),
            rng.choice([1, 1, 1, 3]), rng.choice([None, None, rng.randint(0, 20)]),
            rng.choice([None, None, rng.randint(1, 20)]),
            rng.choice([None, None, None, (7, rng.randint(1, 7))]),
            rng.choice([None, None, None, table]),
        )  # fmt: skip

    for n in range(count):
        part = Part(1, tuple(rule() for _ in range(rng.randint(1, 2))),
                    tuple(rule() for _ in range(rng.randint(0, 1))))  # fmt: skip
        made = encode(part)
        simple, down = n % 2 == 0, n % 4 < 2
        q_rows, k_rows = rng.randint(1, 40), rng.randint(1, 40)
        q_at, k_at = (size * rng.randrange(-(-rows // size)) for rows in (q_rows, k_rows))
        q_start, k_start = rng.randint(-20, 20), rng.randint(0, 20)
        sides = [np.arange(q_rows) + q_start, np.arange(k_rows) + k_start]
        numbers = [np.zeros(q_rows, int), np.zeros(k_rows, int)]
        if not simple:
            sides = [np.array(rng.choices(range(-3, 40), k=len(side))) for side in sides]
            numbers = [np.array(rng.choices(range(-1, 2), k=len(side))) for side in sides]
        values = torch.from_numpy(made.params.copy())
        both = [torch.from_numpy(np.concatenate(a).astype(np.int32)) for a in (sides, numbers)]
        out = torch.full((size, size), -1, dtype=torch.int8)
        tile[(1,)](
            out, *both, values, torch.from_numpy(made.table), *made.table_blocks, q_at, k_at,
            q_rows, k_rows, q_start if simple else 0, k_start if simple else 0, SIZE=size,
            FLAGS=made.flags, RULES=made.rules, MINUS=made.minus, DOWN=down, SIMPLE=simple,
        )  # fmt: skip
        found = out.numpy() if down else out.numpy().T
        here = found[: q_rows - q_at, : k_rows - k_at]
        cut = slice(q_at, q_at + size), slice(k_at, k_at + size)
        i, j = sides[0][cut[0]][:, None], sides[1][cut[1]][None, :]
        one, other = numbers[0][cut[0]][:, None], numbers[1][cut[1]][None, :]
        right = part.allows(i, j) & (one == other) & (one >= 0)
        assert np.array_equal(here.astype(bool), right), (n, part, q_at, k_at, q_start, k_start)
        # Columns that there are not are never seen, nor are keys down.
        assert not (found[:, k_rows - k_at :] if k_rows - k_at < size else found[:0]).any(), n
        assert down or not found[q_rows - q_at :].any(), n


if __name__ == "__main__":
    main()

"""The loss kernel under Triton's interpreter, against torch.

``TRITON_INTERPRET`` must be set before Triton is imported: the cases have their own process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CASES = """
import torch
import torch.nn.functional as F
from msa_workloads import cross_entropy
from msa_workloads.loss import _gradient, _summed

torch.manual_seed(0)
for vocabulary, dtype, block in ((61, torch.float32, 32768), (1000, torch.float32, 256),
                                 (1000, torch.bfloat16, 128), (1024, torch.bfloat16, 1024)):
    cross_entropy.BLOCK = block
    rows = (9 * torch.randn(7, 2 * vocabulary)).to(dtype)[:, :vocabulary]
    labels = torch.randint(vocabulary, (7,))
    labels[2] = -100
    labels[3] = rows[3].argmax()
    exact = rows.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, reduction="none", ignore_index=-100)
    losses.sum().backward()
    found = cross_entropy.cross_entropy_(rows.clone(), labels, -100, False)
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    written = rows.clone()
    found = cross_entropy.cross_entropy_(written, labels, -100, True)
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    error = 4e-3 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(written.double(), exact.grad, rtol=error, atol=error)
    total, lse = _summed(rows, labels)
    torch.testing.assert_close(total.double(), losses.detach().sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(_gradient(rows, labels, lse).double(), written.double(),
                               rtol=error, atol=error)
for beyond in (-1, 1024, 1 << 40):
    labels[1] = beyond
    written = rows.clone()
    found = cross_entropy.cross_entropy_(written, labels, -100, True)
    assert found.isnan().tolist() == [False, True, *[False] * 5], found
    assert written.isnan().any(1).tolist() == found.isnan().tolist()
print("done")
"""


def test_the_kernel_is_the_loss_and_its_gradient() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", CASES], capture_output=True, text=True, timeout=1200, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"

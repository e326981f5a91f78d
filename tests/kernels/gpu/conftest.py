"""GPU tests: what they share. All are marked gpu, and left out visibly where there is no device.

On a machine with a GPU and without the packages of the control plane:
``pytest -m gpu -n 12 --confcutdir=tests/kernels/gpu tests/kernels/gpu``.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _memory():
    """Workers share one device: what a test held goes back before the next one starts."""
    yield
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""What is imported asks for no device and loads no other library's kernels."""

from __future__ import annotations

import subprocess
import sys

TRAP = """
import sys, torch
asked = []
def trap(name):
    def ask(*_, **__):
        asked.append(name)
        return 0
    return ask
for name in ("is_available", "device_count", "_lazy_init"):
    setattr(torch.cuda, name, trap(name))
torch._C._cuda_getDeviceCount = trap("driver")
"""

FIRST_CALL = """
import sys, torch
from msa_kernels.attention import msa_attention
from msa_kernels.pattern import Dense
def attend(q, k, v):
    return msa_attention(q, k, v, Dense(), backend="sdpa")
given = [torch.randn(1, 12, 2, 8) for _ in range(3)]
torch.testing.assert_close(
    torch.compile(attend, backend="aot_eager", fullgraph=True)(*given), attend(*given)
)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_import_asks_for_no_gpu() -> None:
    """CUDA_VISIBLE_DEVICES and forks of whoever imports would come too late."""
    modules = ("attention", "module", "ops", "hf", "check", "pattern", "triton.launch")
    code = "".join(f"import msa_kernels.{module}\n" for module in modules)
    assert run(TRAP + code + "print(asked, 'flash_attn' in sys.modules)") == "[] False\n"


def test_the_first_call_may_be_a_compiled_one() -> None:
    """Of a backend that a graph holds in place of the operator: it is loaded as one is traced."""
    run(FIRST_CALL)

"""Every shipped kernel configuration compiles ahead of time, without a GPU, and fits its card."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is installed on Linux only")

from msa_kernels.triton import (  # noqa: E402
    backward,
    forward,
    fp8,
    fp8_forward,
    hopper_dkv,
    hopper_dq,
    hopper_forward,
    hopper_fp8,
    hopper_fused,
    launch,
    launch_fp8,
    tables,
    tma,
)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448}
"""Bytes a block may use on A100, L40 and H100."""
LISTS = {
    "pointers", "middles", "index", "order", "q_pos", "q_doc", "k_pos", "k_doc", "rule_values",
}  # fmt: skip
TENSORS = {"q", "k", "v", "do", "out", "dq", "dk", "dv"}
# A window with sinks: two rules, (lo, hi) and (lo, sinks).
PREDICATE = {
    "FLAGS": 3 | (9 << 8),
    "RULES": 2,
    "MINUS": 0,
    "LOOKUP": 0,
    "GROUP": 4,
    "PER_HEAD": False,
}


def compile_kernel(
    kernel: Any, target: int, constants: dict[str, Any], options: dict[str, int],
    descriptors: dict[str, str] | None = None, types: dict[str, str] | None = None,
) -> Any:  # fmt: skip
    names = kernel.arg_names
    signature: dict[str, str] = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif descriptors and name in descriptors:
            signature[name] = descriptors[name]
        elif types and name in types:
            signature[name] = types[name]
        elif name in TENSORS:
            signature[name] = "*bf16"
        elif name in ("lse", "delta", "q_scale", "k_scale", "v_scale"):
            signature[name] = "*fp32"
        elif name in LISTS:
            signature[name] = "*i32"
        elif name == "table":
            signature[name] = "*u8"
        elif name in ("scale", "qk_scale"):
            signature[name] = "fp32"
        else:
            signature[name] = "i64" if name.startswith("stride") else "i32"
    make = GluonASTSource if descriptors else ASTSource
    source = make(
        fn=kernel, signature=signature,
        constexprs={(names.index(n),): v for n, v in constants.items()}, attrs={},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def loop_over_full_tiles(sass: str) -> str:
    """The shortest loop that multiplies: that over partial tiles has the mask besides."""
    labels: dict[str, int] = {}
    loops: list[str] = []
    lines = sass.splitlines()
    for at, line in enumerate(lines):
        if found := re.match(r"(\w+):$", line):
            labels[found[1]] = at
        elif (found := re.search(r"\bBRA\b.*?(\w+);", line)) and found[1] in labels:
            loops.append("\n".join(lines[labels[found[1]] : at]))
    return min((loop for loop in loops if "GMMA" in loop), key=len)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "width", "target"),
    [
        *itertools.product(("forward", "dq", "dkv"), (64, 128, 256), (80, 90)),
        ("fused", 128, 90),
        ("fused", 256, 80),
    ],
)
def test_plain_kernels_fit(target: int, kind: str, width: int) -> None:
    """What the tuning tables name first compiles, and fits the card that they are for."""
    kernel = {
        "forward": forward.forward_kernel, "dq": backward.dq_kernel, "dkv": backward.dkv_kernel,
        "fused": backward.dkv_kernel,
    }[kind]  # fmt: skip
    row = tables.candidates(target, "dkv" if kind == "fused" else kind, torch.bfloat16, width)[0]
    tile = tables.Tile.of(row)
    constants = {
        **PREDICATE, "HEAD_DIM": width, "BLOCK_M": tile.query, "BLOCK_N": tile.key,
        "SIMPLE": False, "PRECISION": "tf32",
    }  # fmt: skip
    if kernel is backward.dkv_kernel:
        constants["FUSED"] = kind == "fused"
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compile_kernel(kernel, target, constants, options)
    # How much it is depends a little on Triton's version: the tables have one that was measured.
    assert max(made.metadata.shared, row["shared"]) <= SHARED_MEMORY[target]
    assert re.search(r"wgmma|mma\.sync", made.asm["ptx"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kind", ["forward", "dq", "dkv"])
def test_every_table_has_what_small_cards_hold(
    kind: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """99 KiB: the shared memory of consumer and inference cards since compute capability 8.6."""
    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(tables, "shared_memory", lambda device: 101_376)
    tables.tile.cache_clear()
    tile = tables.tile(card, kind, dtype, width)
    rows = tables.candidates(80, kind, dtype, width)
    assert next(r["shared"] for r in rows if tables.Tile.of(r) == tile) <= 101_376
    tables.tile.cache_clear()
    monkeypatch.setattr(tables, "shared_memory", lambda device: 4096)
    with pytest.raises(ValueError, match=f"head size {width} .*needs at least .*has 4096"):
        tables.tile(card, kind, dtype, width)
    tables.tile.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "width"),
    [*itertools.product(("forward", "dq", "dkv"), (64, 128, 256)), ("fused", 64), ("fused", 128)],
)
def test_hopper_kernels_fit_and_keep_the_tensor_cores_busy(kind: str, width: int) -> None:
    module = {
        "forward": hopper_forward, "dq": hopper_dq, "dkv": hopper_dkv, "fused": hopper_fused
    }[kind]  # fmt: skip
    block, stages = (launch.FUSED if kind == "fused" else launch.HOPPER[kind])[width]
    tile, line, total = (repr(layout) for layout in tma.layouts())

    def rows(count: int) -> str:
        return f"tensordesc<bf16[1, {count}, 1, {width}],{tile}>"

    resident = 64
    streamed_keys = kind in ("forward", "dq")
    descriptors = {
        "q_desc": rows(resident if streamed_keys else block),
        "do_desc": rows(resident if streamed_keys else block),
        "k_desc": rows(block if streamed_keys else resident),
        "v_desc": rows(block if streamed_keys else resident),
        "lse_desc": f"tensordesc<fp32[1, 1, {block}],{line}>",
        "delta_desc": f"tensordesc<fp32[1, 1, {block}],{line}>",
        "dq_desc": f"tensordesc<fp32[1, 64, 1, 64],{total}>",
    }
    constants = {**PREDICATE, "HEAD_DIM": width, "STAGES": stages, "SIMPLE": True}
    constants["BLOCK_N" if streamed_keys else "BLOCK_M"] = block
    kernel = getattr(module, f"{kind}_kernel")
    made = compile_kernel(kernel, 90, constants, {"num_warps": 4}, descriptors)
    assert made.metadata.shared <= SHARED_MEMORY[90]
    ptx = made.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg" in ptx or "setmaxnreg" in made.asm.get("llir", "")
    # ptxas waits after every product where it finds an accumulator touched or registers short.
    full = loop_over_full_tiles(made.asm["sass"])
    assert full.count("WARPGROUP.DEPBAR") <= 4 < full.count("HGMMA") / 2
    assert len(re.findall(r"\b(STL|LDL)\b", full)) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128])
def test_the_hopper_kernel_in_e4m3_keeps_probabilities_in_their_registers(width: int) -> None:
    def tile(rows: int, columns: int) -> str:
        return f"tensordesc<fp8e4nv[1, 1, {rows}, {columns}],{launch_fp8.layout(columns)!r}>"

    descriptors = {
        "q_desc": tile(64, width), "k_desc": tile(fp8.TILE, width), "v_desc": tile(width, fp8.TILE)
    }  # fmt: skip
    constants = {**PREDICATE, **launch_fp8.HOPPER, "HEAD_DIM": width, "SIMPLE": True}
    kernel = hopper_fp8.forward_kernel
    made = compile_kernel(kernel, 90, constants, {"num_warps": 4}, descriptors)
    assert made.metadata.shared <= SHARED_MEMORY[90]
    ptx, code = made.asm["ptx"], loop_over_full_tiles(made.asm["sass"])
    # Scores, and the output: the left operand of the second is four registers.
    assert f"wgmma.mma_async.sync.aligned.m64n{fp8.TILE}k32.f32.e4m3.e4m3" in ptx
    assert f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3" in ptx
    assert re.search(r"QGMMA\S* R\d+, R\d+, gdesc", code)
    assert not re.search(r"\b(STL|LDL)\b", code)
    assert code.count("WARPGROUP.DEPBAR") == 2
    # Nothing crosses lanes but a maximum and a sum of each of two rows a thread, in two steps.
    assert code.count("SHFL") == 8


@pytest.mark.slow
@pytest.mark.parametrize("target", [89, 90])
def test_the_plain_kernels_in_e4m3_fit(target: int) -> None:
    plain, width = launch_fp8.PLAIN, 128
    constants = {
        **PREDICATE, "HEAD_DIM": width, "BLOCK_M": plain.query, "BLOCK_N": plain.key,
        "TILE": fp8.TILE, "SIMPLE": False,
    }  # fmt: skip
    options = {"num_warps": plain.warps, "num_stages": plain.stages}
    eight = dict.fromkeys("qkv", "*fp8e4nv")
    made = compile_kernel(fp8_forward.forward_kernel, target, constants, options, types=eight)
    assert made.metadata.shared <= SHARED_MEMORY[target]
    assert re.search(r"(wgmma|mma\.sync)\S*e4m3\.e4m3", made.asm["ptx"])
    pairs = {"x": "*bf16", "rotation": "*bf16", "out": "*fp8e4nv", "peak_floor": "fp32"}
    pairs |= dict.fromkeys(("scale", "centre", "shift"), "*fp32") | {"unit": "fp32"}
    common = {"LARGEST": fp8.LARGEST, "WIDTH": width, "TILE": fp8.TILE}
    for kernel, more in (
        (fp8._rows_kernel, {"GROUP": 4, "KEYS": True}),
        (fp8._columns_kernel, {"IN_FRAGMENTS": True}),
    ):
        made = compile_kernel(kernel, target, common | more, {"num_warps": 8}, types=pairs)
        assert made.metadata.shared <= SHARED_MEMORY[target]
        assert "cvt.rn.satfinite.e4m3x2" in made.asm["ptx"]
        assert re.search(r"(min|max)(\.xorsign\.abs)?\.NaN", made.asm["ptx"])

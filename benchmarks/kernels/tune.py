"""Write the tuning tables of the plain Triton kernels, one data file per compute capability.

    python benchmarks/kernels/tune.py compile 80 90     # without a GPU: what each candidate needs
    python benchmarks/kernels/tune.py measure           # on a GPU: order them by time

``compile`` builds every candidate ahead of time and records its shared memory; ``measure`` times
those that fit this GPU on causal attention of 8,192 tokens and puts the fastest first. At run time
the first candidate that fits the device's shared memory is taken, so that a table also serves
smaller cards of its capability. Nothing is tuned in a user's first step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import arguments

TABLES = Path(__file__).parents[2] / "kernels" / "msa_kernels" / "triton" / "tuning"
CANDIDATES: dict[tuple[str, str, int], tuple[tuple[int, int, int, int], ...]] = {
    # (kernel, dtype, padded head size): (query tile, key tile, warps, stages), likely best first
    ("forward", "half", 64): ((128, 128, 8, 2), (128, 64, 4, 2)),
    ("forward", "half", 128): ((128, 64, 8, 2), (64, 64, 4, 2)),
    ("forward", "half", 256): ((64, 64, 8, 1), (32, 32, 4, 1)),
    ("dq", "half", 64): ((128, 64, 8, 2), (64, 64, 4, 1)),
    ("dq", "half", 128): ((128, 64, 8, 2), (64, 32, 4, 1)),
    ("dq", "half", 256): ((64, 32, 8, 1), (32, 32, 4, 1)),
    ("dkv", "half", 64): ((64, 128, 8, 2), (64, 64, 4, 1)),
    ("dkv", "half", 128): ((64, 128, 8, 2), (32, 64, 4, 1)),
    ("dkv", "half", 256): ((32, 64, 8, 1), (32, 32, 4, 1)),
    **{
        (kind, "float32", width): ((32, 32, 4, 1), (16, 16, 4, 1))
        for kind in ("forward", "dq", "dkv")
        for width in (64, 128, 256)
    },
}
TOKENS = 8192
LISTS = {
    "pointers", "middles", "index", "order", "q_pos", "q_doc", "k_pos", "k_doc", "rule_values",
}  # fmt: skip
TENSORS = {"q", "k", "v", "do", "out", "dq", "dk", "dv"}
PREDICATE = {
    # A window with sinks and documents: what most runs compile.
    "FLAGS": 3 | (9 << 8), "RULES": 2, "MINUS": 0, "LOOKUP": 0, "GROUP": 4, "PER_HEAD": False,
    "SIMPLE": False,
}  # fmt: skip


def rows(capability: int) -> Iterator[tuple[int, str, str, int, tuple[int, int, int, int]]]:
    for (kind, dtype, width), candidates in CANDIDATES.items():
        for candidate in candidates:
            yield capability, kind, dtype, width, candidate


def compiled(job: tuple[int, str, str, int, tuple[int, int, int, int]]) -> tuple[Any, int]:
    """The job, and the bytes of shared memory that it needs."""
    import triton
    from msa_kernels.triton import backward, forward
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    capability, kind, dtype, width, (block_q, block_k, warps, stages) = job
    kernel: Any = {
        "forward": forward.forward_kernel, "dq": backward.dq_kernel, "dkv": backward.dkv_kernel
    }[kind]  # fmt: skip
    constants = {
        **PREDICATE, "HEAD_DIM": width, "BLOCK_M": block_q, "BLOCK_N": block_k,
        "PRECISION": "ieee" if dtype == "float32" else "tf32",
    }  # fmt: skip
    if kind == "dkv":
        constants["FUSED"] = False
    names = kernel.arg_names
    element = "*fp32" if dtype == "float32" else "*bf16"

    def kind_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in TENSORS:
            return element
        if name in ("lse", "delta"):
            return "*fp32"
        if name in LISTS:
            return "*i32"
        if name == "table":
            return "*u8"
        if name in ("scale", "qk_scale"):
            return "fp32"
        return "i64" if name.startswith("stride") else "i32"

    source = ASTSource(
        fn=kernel, signature={name: kind_of(name) for name in names},
        constexprs={(names.index(n),): v for n, v in constants.items()}, attrs={},
    )  # fmt: skip
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )  # fmt: skip
    return job, made.metadata.shared


def compile_tables(capabilities: list[int], workers: int) -> None:
    jobs = [row for capability in capabilities for row in rows(capability)]
    with ProcessPoolExecutor(workers) as pool:
        found = list(pool.map(compiled, jobs))
    for capability in capabilities:
        table: dict[str, dict[str, dict[str, list]]] = {}
        for (target, kind, dtype, width, (block_q, block_k, warps, stages)), shared in found:
            if target == capability:
                one = {
                    "query_tile": block_q, "key_tile": block_k, "warps": warps,
                    "stages": stages, "shared": shared,
                }  # fmt: skip
                by_width = table.setdefault(kind, {}).setdefault(dtype, {})
                by_width.setdefault(str(width), []).append(one)
        write(capability, {"measured_on": None, "plain": table})


def write(capability: int, table: dict) -> None:
    TABLES.mkdir(exist_ok=True)
    path = TABLES / f"sm_{capability}.json"
    path.write_text(json.dumps(table, indent=1) + "\n")
    print("wrote", path)


def measure(out: Path | None, workers: int) -> None:
    """Order the candidates of this GPU's table by the time of a pass that uses them.

    All are run once in ``workers`` processes beforehand, which fills Triton's cache.
    """
    import torch
    import triton
    from msa_kernels.triton import tables

    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    table = json.loads((TABLES / f"sm_{capability}.json").read_text())
    limit = tables.shared_memory(torch.device("cuda", 0))
    jobs = [
        (kind, dtype, int(width), one)
        for kind, by_dtype in table["plain"].items()
        for dtype, by_width in by_dtype.items()
        for width, candidates in by_width.items()
        for one in candidates
        if one["shared"] <= limit
    ]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(timed, *zip(*jobs, strict=True)))
    for kind, by_dtype in table["plain"].items():
        for dtype, by_width in by_dtype.items():
            for width, candidates in by_width.items():
                for one in candidates:
                    fits = one["shared"] <= limit
                    one["ms"] = timed(kind, dtype, int(width), one) if fits else None
                    print(kind, dtype, width, one, flush=True)
                candidates.sort(key=lambda c: (c["ms"] is None, c["ms"] or 0.0))
    table["measured_on"] = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "tokens": TOKENS, "heads": "16/4",
    }  # fmt: skip
    if out is not None:
        out.write_text(json.dumps(table, indent=1) + "\n")
    else:
        write(capability, table)


def timed(kind: str, dtype: str, width: int, candidate: dict) -> float | None:
    """Milliseconds of a forward, or of a backward in which the other kernel keeps its tiles; None
    where the device cannot hold it after all."""
    import torch
    import triton
    from msa_kernels.pattern import Dense
    from msa_kernels.plan import plan, whole
    from msa_kernels.triton.launch import TritonKernel
    from msa_kernels.triton.tables import Tile

    element = torch.float32 if dtype == "float32" else torch.bfloat16
    rows = TOKENS // 4 if dtype == "float32" else TOKENS
    kernel = TritonKernel(hopper=False, tiles={kind: Tile.of(candidate)})
    q, k, v = (torch.randn(1, rows, h, width, device="cuda", dtype=element) for h in (16, 4, 4))
    (part,) = plan(Dense(), *whole(rows, rows))
    out, lse = kernel.forward(q, k, v, part, width**-0.5, element)

    def run() -> None:
        if kind == "forward":
            kernel.forward(q, k, v, part, width**-0.5, element)
        else:
            kernel.backward(q, k, v, out, q, lse, lse, part, width**-0.5, element)

    try:
        times = [triton.testing.do_bench(run, 5, 25, return_mode="median") for _ in range(2)]
    except triton.runtime.errors.OutOfResources as error:
        print(kind, dtype, width, candidate, error, flush=True)
        return None
    return round(min(times), 4)


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("mode", choices=("compile", "measure"), help="without a GPU, or on one")
    parser.add_argument(
        "capabilities",
        nargs="*",
        type=arguments.number,
        default=[80, 90],
        help="of compile: 80 for an A100, 90 for an H100",
    )
    parser.add_argument("--workers", type=arguments.number, default=2, help="processes")
    parser.add_argument(
        "--out", type=Path, help="of measure: where the table goes, in place of the package's"
    )
    args = parser.parse_args()  # fmt: skip
    if args.mode == "compile":
        compile_tables(args.capabilities, args.workers)
    else:
        arguments.needs_gpu(parser)
        measure(args.out, args.workers)


if __name__ == "__main__":
    main()

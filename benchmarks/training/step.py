"""A whole training step, ours beside a peer, on one GPU or on several under torchrun.

    PYTHONPATH=kernels:workloads python benchmarks/training/step.py --gpus 1 \\
        --out benchmarks/training/step.jsonl
    PYTHONPATH=kernels:workloads python benchmarks/training/step.py --gpus 2 --out ...

    # without GPUs: the same code at a tiny size, to see that it runs
    python benchmarks/training/step.py --gpus 2 --tiny --tokens 512

The model has Llama-3-8B's width and four layers, a vocabulary of 128,256, one sequence of 131,072
random tokens, bf16 parameters and AdamW states, gradients clipped at 1. Several GPUs share the
sequence (context parallelism) and shard the parameters (FSDP2).

Started without ``--worker`` this program starts workers and starts them again without the row
that ended them, so that a crash costs one row. Rows that are on disk are not measured twice.
Times are CUDA events on the slowest rank, medians over ``--steps`` after one warm-up step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

ROWS = (
    "peer/window", "peer/dense", "ours/window", "ours/dense", "ours/sinks", "ours/dilated"
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", help="number of the GPU of a run on one GPU")
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--loss-chunk", type=int, default=8192)
    parser.add_argument("--mlp-chunk", type=int, default=16384)
    parser.add_argument("--checkpointing", default="selective")
    parser.add_argument("--loss-kernel", default="auto")
    parser.add_argument("--keep-projections", type=int, help="default: 2 on one GPU")
    parser.add_argument("--label", default="", help="put beside the name of each row")
    parser.add_argument("--profile", help="folder for a table of kernels of each row's last step")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--seconds", type=float, default=450, help="start no row after this")
    parser.add_argument("--out")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    a = parser.parse_args()
    return work(a) if a.worker else supervise(a)


def supervise(a: argparse.Namespace) -> int:
    """Start workers until every row has a result or an error."""
    import tempfile

    out = a.out or tempfile.mktemp(suffix=".jsonl")
    until = time.time() + a.seconds
    left = list(a.rows)
    while left and time.time() < until:
        before = _said(out)
        # One implementation a process: Liger replaces parts of transformers for all models in it.
        who = left[0].split("/")[0]
        batch = [row for row in left if row.split("/")[0] == who]
        options = sys.argv[1:]
        for name in ("--rows", "--out"):
            options = _without(options, name)
        worker = [
            str(HERE / "step.py"), *options, "--worker", "--until", str(until), "--out", out,
            "--rows", *batch,
        ]  # fmt: skip
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
        if a.device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = a.device
        command = [sys.executable, *worker]
        if a.gpus > 1:
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", str(a.gpus), *worker,
            ]  # fmt: skip
        patience = until - time.time() + 120
        try:
            code = subprocess.run(command, env=environment, timeout=patience).returncode
        except subprocess.TimeoutExpired:
            code = -1
        said = _said(out)[len(before) :]
        begun = [r["row"] for r in said if r["kind"] == "begin"]
        ended = {r["row"] for r in said if r["kind"] in ("step", "error")}
        if not begun:
            _append(out, {"kind": "error", "row": left[0], "error": f"worker ended with {code}"})
            begun = left[:1]
        for row in begun:
            if row not in ended:
                _append(out, {"kind": "error", "row": row, "error": f"worker ended with {code}"})
        left = [row for row in left if row not in begun]
    for row in left:
        _append(out, {"kind": "error", "row": row, "error": f"no time within {a.seconds:g} s"})
    table(_said(out))
    return 0 if not any(r["kind"] == "error" for r in _said(out)) else 1


def _without(options: list[str], name: str) -> list[str]:
    """Command line without an option and its values."""
    kept, skipping = [], False
    for word in options:
        if word.startswith("--"):
            skipping = word == name
        if not skipping:
            kept.append(word)
    return kept


def _said(path: str) -> list[dict[str, Any]]:
    if not os.path.exists(path):
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _append(path: str, row: dict[str, Any]) -> None:
    print(row, flush=True)
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def work(a: argparse.Namespace) -> int:
    """Measure rows in this process; an error is a row's result."""
    import torch
    from common import TINY, Rows, Shape, environment, patterns
    from msa_workloads.parallel.mesh import join_world

    cuda = torch.cuda.is_available() and not a.tiny
    world = join_world("gpu" if cuda else "cpu")
    shape = TINY if a.tiny else Shape()
    rows = Rows(a.out)
    rows.add("environment", **environment(), gpus=world.size)
    known = patterns(a.tokens)
    subject: Any = None
    for row in a.rows:
        if time.time() > a.until:
            break
        rows.add("begin", row=row)
        who, pattern = row.split("/")
        try:
            if subject is None:
                subject = _subject(who, shape, world, a)
            measure(a, rows, row, subject, known[pattern], shape, world)
        except Exception as error:
            rows.add(
                "error", row=row, error=f"{type(error).__name__}: {error}",
                trace=traceback.format_exc(),
            )  # fmt: skip
            print(f"[rank {world.rank}] {traceback.format_exc()}", file=sys.stderr, flush=True)
            if world.size > 1:
                # The other ranks may hang in a collective: the supervisor starts anew.
                os._exit(1)
            subject = None
    sys.stdout.flush()
    os._exit(0)


def _subject(who: str, shape: Any, world: Any, a: argparse.Namespace) -> Any:
    from msa_workloads.runspec import MemorySpec

    if who == "peer":
        from peer import Peer

        return Peer(shape, a.tokens, world)
    from ours import Ours

    projections = a.keep_projections
    if projections is None:
        # What the peer's memory leaves room for.
        projections = 2 if world.size == 1 else 0
    narrow = "bf16" if world.device.type == "cuda" else "fp32"
    memory = MemorySpec(
        checkpointing=a.checkpointing, loss_chunk=a.loss_chunk, mlp_chunk=a.mlp_chunk,
        parameters=narrow, optimizer_states=narrow, loss_kernel=a.loss_kernel,
        keep_projections=projections if a.checkpointing == "selective" else 0,
    )  # fmt: skip
    return Ours(shape, a.tokens, world, memory)


def measure(
    a: argparse.Namespace, rows: Any, row: str, subject: Any, pattern: Any, shape: Any, world: Any
) -> None:
    """One row: a warm-up step and ``a.steps`` timed ones, all from the same weights."""
    import torch
    from common import over_ranks, peak_of

    begun = time.time()
    setting = subject.use(pattern)
    losses, norms, times = [], [], []
    for number in range(1 + a.steps):
        if number == a.steps and a.profile:
            _profile(a, row, subject)
        with peak_of(world.device) as memory:
            loss, norm = subject.step()
        losses.append(round(loss, 5))
        norms.append(round(norm, 5))
        if number == 0:
            rows.add("first", row=row, seconds=round(time.time() - begun, 1), loss=losses[0])
        else:
            times.append(subject.clock.read())
    flat = [t for some in times for t in some]
    everyone = over_ranks([*flat, memory["peak"]], world.device)
    slowest = torch.tensor(everyone).max(0).values[:-1].view(len(times), -1)
    totals = slowest.sum(1).tolist()
    median = slowest.median(0).values.tolist()
    step = statistics.median(totals)
    pairs = pattern.pairs(a.tokens)
    flops = shape.model_flops(a.tokens, pairs)
    used = subject.used()
    sent = sum(m["sent"] for m in used["moved"])
    everyone_sent = [int(v[0]) for v in over_ranks([float(sent)], world.device)]
    names = ("forward_layers", "forward_head_loss", "backward", "optimizer")
    rows.add(
        "step", row=row, label=a.label, gpus=world.size, pattern=pattern.to_dict(),
        tokens=a.tokens, shape=vars(shape), parameters=shape.parameters,
        step_ms=round(step, 1), step_ms_all=[round(t, 1) for t in totals],
        **{f"{n}_ms": round(t, 1) for n, t in zip(names, median, strict=True)},
        tokens_per_second=round(a.tokens / step * 1e3, 1),
        tokens_per_second_per_gpu=round(a.tokens / step * 1e3 / world.size, 1),
        model_flop=flops, model_tflops_per_gpu=round(flops / world.size / step / 1e9, 1),
        peak_gib=[round(v[-1], 2) for v in everyone],
        sent_bytes_per_step=[round(b / (1 + a.steps)) for b in everyone_sent],
        losses=losses, grad_norms=norms, seconds=round(time.time() - begun, 1), **setting, **used,
    )  # fmt: skip


def _profile(a: argparse.Namespace, row: str, subject: Any) -> None:
    """A table of what a step spends its time on, beside the results."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and not a.tiny:
        kinds = [ProfilerActivity.CUDA]
    with profile(activities=kinds) as found:
        subject.step()
    if int(os.environ.get("RANK", "0")) == 0:
        folder = Path(a.profile)
        folder.mkdir(parents=True, exist_ok=True)
        key = (
            "self_cuda_time_total" if kinds[0] == ProfilerActivity.CUDA else "self_cpu_time_total"
        )
        text = found.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90)
        name = f"{row.replace('/', '-')}{a.label}.txt"
        (folder / name).write_text(text)


def table(rows: list[dict[str, Any]]) -> None:
    """The rows for people, with each of ours against the peer of the same pattern."""
    steps = [r for r in rows if r["kind"] == "step"]
    peers = {
        (r["gpus"], json.dumps(r["pattern"])): r for r in steps if r["row"].startswith("peer/")
    }
    print(
        "row | GPUs | tokens/s | step ms | layers | head+loss | backward | optimizer | GiB | ratio"
    )
    for r in steps:
        peer = peers.get((r["gpus"], json.dumps(r["pattern"])))
        ratio = f"{r['tokens_per_second'] / peer['tokens_per_second']:.3f}" if peer else "-"
        print(
            f"{r['row']}{r['label']} | {r['gpus']} | {r['tokens_per_second']:.0f} | "
            f"{r['step_ms']:.0f} | {r['forward_layers_ms']:.0f} | {r['forward_head_loss_ms']:.0f}"
            f" | {r['backward_ms']:.0f} | {r['optimizer_ms']:.0f} | {max(r['peak_gib']):.1f} | "
            f"{ratio}"
        )
    for r in rows:
        if r["kind"] == "error":
            print(f"{r['row']}: {r['error']}")


if __name__ == "__main__":
    sys.exit(main())

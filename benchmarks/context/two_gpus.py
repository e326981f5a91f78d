"""Context-parallel attention against one GPU with the same kernel, forward and backward.

    PYTHONPATH=kernels:workloads torchrun --nproc-per-node 2 benchmarks/context/two_gpus.py \\
        --out benchmarks/context/h200x2.json

    # without GPUs: the same code on gloo, to see that it runs
    torchrun --nproc-per-node 2 benchmarks/context/two_gpus.py --tokens 2048 --heads 4 2 16 \\
        --window 256 --rounds 3

The sides take turns, and every round begins with another of them, so that clocks, heat and what
runs before fall on all alike: each rank computes the whole sequence alone, all ranks at once, its
share of it by our method, and by those of benchmarks/context/peers.py. A side's time is that of
its slowest rank; a speed-up is the ratio of a round's two times, its median over rounds, and a
95 % interval from resampling rounds. Every result is compared with that of one rank at the timed
shape before anything is timed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msa_kernels import backend as backends
from msa_kernels.attention import msa_attention
from msa_kernels.pattern import Dense, Dilated, Pattern, SinkWindow, Window
from msa_workloads.context.attention import ContextPlan, Options, context_attention
from msa_workloads.context.commplan import plan_bytes
from msa_workloads.context.exchange import moved, reset
from msa_workloads.context.layout import Layout, contiguous, residues, zigzag
from msa_workloads.context.solver import measure, solve
from peers import Peer, peers

RESAMPLES = 4000
DEFAULT = Options()


@dataclass(frozen=True)
class Method:
    """One way to split a pattern."""

    name: str
    pattern: Pattern
    layout: Layout
    """Of the ranks that exchange keys; one rank when heads are split instead."""
    options: Options = DEFAULT
    ulysses: bool = False


def methods(a: argparse.Namespace, ranks: int) -> list[Method]:
    tokens, unit = a.tokens, a.multiple
    window, sinks = Window(a.window), SinkWindow(a.window, a.sinks)
    flat, paired = contiguous(tokens, ranks, unit), zigzag(tokens, ranks, unit)
    solved = solve(tokens, ranks, {window: 1}, multiple=unit).layout
    bf16 = Options(gradients="bf16")
    listed = [
        Method("dense, zigzag, split", Dense(), paired, Options(fuse="never")),
        Method("dense, zigzag, fused", Dense(), paired, Options(fuse="always")),
        Method("dense, zigzag, ring", Dense(), paired, Options(method="ring")),
        Method("dense, ulysses", Dense(), contiguous(tokens, 1, unit * ranks), ulysses=True),
        Method("window, solved", window, solved),
        Method("window, solved, bf16 gradients", window, solved, bf16),
        Method("window, contiguous", window, flat),
        Method("window, ulysses", window, contiguous(tokens, 1, unit * ranks), ulysses=True),
        Method("sinks, solved", sinks, solved),
        Method("dilated, residues", Dilated(4), residues(tokens, ranks, 4, multiple=unit)),
    ]
    return [m for m in listed if not a.only or any(word in m.name for word in a.only)]


class Clock:
    """Milliseconds of a call on this rank, by CUDA events or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device

    def __call__(self, parts: list[Callable[[], Any]]) -> list[float]:
        """Times of calls that follow each other without a pause, after a barrier."""
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()
        if not self.cuda:
            marks = [time.perf_counter()]
            for part in parts:
                part()
                marks.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        events[0].record()
        for part, event in zip(parts, events[1:], strict=True):
            part()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def over_ranks(self, values: list[float]) -> np.ndarray:
        """Every rank's values, (ranks, values)."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        all_of = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of, mine)
        return torch.stack(all_of).cpu().numpy()


class Side:
    """A function of leaves with a forward and a backward, run again and again."""

    def __init__(self, attend: Callable[..., Any], rows: dict[str, torch.Tensor]) -> None:
        self.attend, self.dout = attend, rows["dout"]
        self.leaves = [rows[n].detach().contiguous().requires_grad_() for n in "qkv"]
        self.out: Any = None

    def forward(self) -> None:
        self.out = self.attend(*self.leaves)

    def backward(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None
        self.out.backward(self.dout)

    def results(self) -> dict[str, torch.Tensor]:
        self.forward()
        self.backward()
        grads = [leaf.grad for leaf in self.leaves]
        return dict(zip(("out", "dq", "dk", "dv"), [self.out.detach(), *grads], strict=True))


def run(a: argparse.Namespace, method: Method, device: torch.device) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q_heads, kv_heads, dim = a.heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make = torch.Generator(device).manual_seed(0)
    whole = {
        name: torch.randn(1, a.tokens, heads, dim, generator=make, device=device, dtype=dtype)
        for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads), ("dout", q_heads))
    }
    home = method.layout.split(ranks) if method.ulysses else method.layout
    plan = ContextPlan.whole(method.layout, 0 if method.ulysses else rank)
    group = dist.group.WORLD
    groups = {"heads_group": group} if method.ulysses else {}

    def share(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return context_attention(
            q, k, v, plan, None if method.ulysses else group, pattern=method.pattern,
            options=method.options, backend=a.backend, **groups,
        )  # fmt: skip

    def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return msa_attention(q, k, v, method.pattern, backend=a.backend)

    one = Side(alone, whole)
    mine = Side(share, home.shard(whole, rank))
    errors = compare(one, mine, home, rank)
    sides = {"one": one, "mine": mine}
    beside = {}
    for peer in rivals(a, method, device):
        layout = (zigzag if peer.layout == "zigzag" else contiguous)(a.tokens, ranks, a.multiple)
        side = Side(functools.partial(through, peer, method.pattern), layout.shard(whole, rank))
        beside[peer.name] = compare(one, side, layout, rank)
        sides[peer.name] = side
    reset()
    mine.forward()
    sent = {name: count.sent for name, count in moved().items()}
    mine.backward()
    total = {name: count.sent for name, count in moved().items()}
    for side in sides.values():
        side.out = None

    clock = Clock(device)
    times: dict[str, list[np.ndarray]] = {name: [] for name in sides}
    peaks: dict[str, int] = {}
    for number in range(a.warmup + a.rounds):
        for name in _turn(list(sides), number):
            side = sides[name]
            if clock.cuda:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if clock.cuda else 0
            spent = clock.over_ranks(clock([side.forward, side.backward]))
            if clock.cuda:
                peaks[name] = torch.cuda.max_memory_allocated() - before
            side.out = None
            if number >= a.warmup:
                times[name].append(spent)
    needed = plan_bytes(
        method.pattern, kv_heads, dim, whole["k"].element_size(), method.layout, (a.tokens,)
    )
    pairs = sum(method.pattern.for_group(g).pairs(a.tokens) for g in range(kv_heads))
    price = measure(method.name, method.layout, {method.pattern: 1}, (a.tokens,))
    useful = pairs * (q_heads // kv_heads)
    return row(a, method, ranks, times, useful) | {
        "errors": errors,
        "peers": [rival(a, n, times, useful, peaks, beside[n]) for n in beside],
        "balance": round(price.balance, 4),
        "layout": method.layout.describe(),
        "backends": sorted({used.backend for used in backends.used()}),
        "bytes_sent_forward": clock.over_ranks([float(sum(sent.values()))])[:, 0].tolist(),
        "bytes_sent_total": clock.over_ranks([float(sum(total.values()))])[:, 0].tolist(),
        "bytes_needed_forward": needed.sum(0).tolist(),
        "peak_bytes": peaks.get("mine", 0),
        "peak_bytes_one": peaks.get("one", 0),
    }


def _turn(names: list[str], number: int) -> list[str]:
    """The order of a round: each side begins in turn, in one direction and then in the other."""
    first = number % len(names)
    order = [*names[first:], *names[:first]]
    return order if number // len(names) % 2 == 0 else order[::-1]


def rivals(a: argparse.Namespace, method: Method, device: torch.device) -> list[Peer]:
    """Methods of others that do the same work; with each of ours but variants of one."""
    if not a.peers or isinstance(method.pattern, Dense) is isinstance(method.pattern, Window):
        return []
    return peers(device, method.pattern.window if isinstance(method.pattern, Window) else None)


def through(
    peer: Peer, pattern: Pattern, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    return peer.run(q, k, v, pattern.window if isinstance(pattern, Window) else None)


def rival(
    a: argparse.Namespace, name: str, times: dict[str, list[np.ndarray]], pairs: int,
    peaks: dict[str, int], errors: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """A peer's times, and how many times faster ours was in the same rounds."""
    slow = {n: np.stack(times[n]).max(1) for n in (name, "mine")}
    theirs, ours = slow[name].sum(1), slow["mine"].sum(1)
    total = statistics.median(theirs.tolist())
    return {
        "method": f"{name}, {'flash-attn-4' if torch.cuda.is_available() else 'dense PyTorch'}",
        "forward_ms": statistics.median(slow[name][:, 0].tolist()),
        "backward_ms": statistics.median(slow[name][:, 1].tolist()),
        "total_ms": total, "total_ms_interval": interval(theirs, np.median),
        "ours_over_peer": statistics.median((theirs / ours).tolist()),
        "ours_over_peer_interval": interval(theirs / ours, np.median),
        "useful_tflops_per_gpu": 14 * a.heads[2] * pairs / dist.get_world_size() / total / 1e9,
        "peak_bytes": peaks.get(name, 0), "errors": errors,
    }  # fmt: skip


def compare(one: Side, mine: Side, home: Layout, rank: int) -> dict[str, float]:
    """Largest difference of any rank's rows from those of one rank, norm-wise."""
    expected, found = home.shard(one.results(), rank), mine.results()
    real = torch.from_numpy(home.tokens_of(rank) < home.tokens).to(found["out"].device)
    errors = []
    for name, wanted in expected.items():
        rows = found[name][:, real].double(), wanted[:, real].double()
        errors.append(float((rows[0] - rows[1]).norm() / rows[1].norm()))
    table = torch.tensor(errors, device=found["out"].device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(expected, table.tolist(), strict=True))


def row(
    a: argparse.Namespace, method: Method, ranks: int, times: dict[str, list[np.ndarray]],
    pairs: int,
) -> dict[str, Any]:  # fmt: skip
    """Medians over rounds of the slowest rank, and intervals."""
    slow = {name: np.stack(t).max(1) for name, t in times.items()}  # rounds x (fwd, bwd)
    fast_one = np.stack(times["one"]).sum(2).min(1)
    one, mine = slow["one"].sum(1), slow["mine"].sum(1)
    median = statistics.median
    flops = 3.5 * 4 * a.heads[2] * pairs
    total = median(mine.tolist())
    return {
        "method": method.name, "pattern": method.pattern.to_dict(), "sequence": a.tokens,
        "batch": 1, "heads": a.heads, "ranks": ranks, "rounds": len(mine),
        "forward_ms": median(slow["mine"][:, 0].tolist()),
        "backward_ms": median(slow["mine"][:, 1].tolist()),
        "total_ms": total, "total_ms_interval": interval(mine, np.median),
        "one_gpu_ms": median(one.tolist()), "one_gpu_ms_fastest": median(fast_one.tolist()),
        "speed_up": median((one / mine).tolist()),
        "speed_up_interval": interval(one / mine, np.median),
        "useful_tflops_per_gpu": flops / ranks / total / 1e9,
        "tokens_per_second_per_gpu": a.tokens / ranks / total * 1e3,
    }  # fmt: skip


def interval(values: np.ndarray, of: Callable[..., Any]) -> list[float]:
    """95 % bootstrap interval over rounds."""
    draw = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(of(values[draw], axis=1), [0.025, 0.975])
    return [float(low), float(high)]


def machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(), "torch": torch.__version__,
        "device": device.type, "card": platform.processor() or platform.machine(),
        "backend": dist.get_backend(),
    }  # fmt: skip
    if device.type == "cuda":
        import triton

        found |= {
            "card": torch.cuda.get_device_name(device), "triton": triton.__version__,
            "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }  # fmt: skip
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128])
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--sinks", type=int, default=512)
    parser.add_argument("--multiple", type=int, default=128, help="tokens of a layout's unit")
    parser.add_argument("--backend", default="auto", help="the same on both sides")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="words of method names")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no method after this")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    a = arguments()
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    # All ranks meet once before any pair does: NCCL forms its communicator then.
    dist.all_reduce(torch.zeros(1, device=device))
    result = machine(device) | {"ranks": dist.get_world_size(), "rows": []}
    began = time.perf_counter()
    for method in methods(a, dist.get_world_size()):
        late = torch.tensor(float(time.perf_counter() - began > a.seconds), device=device)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late:
            if dist.get_rank() == 0:
                print(f"out of time before {method.name}", flush=True)
            break
        backends.reset()
        found = run(a, method, device)
        result["rows"].append(found)
        if dist.get_rank() == 0:
            low, high = found["speed_up_interval"]
            print(
                f"{method.name:32} {found['total_ms']:9.2f} ms  one {found['one_gpu_ms']:9.2f} ms"
                f"  x{found['speed_up']:.3f} [{low:.3f}, {high:.3f}]  "
                f"sent {max(found['bytes_sent_forward']) / 2**20:.2f} MiB  "
                f"error {max(found['errors'].values()):.1e}  {found['backends']}",
                flush=True,
            )
            for peer in found["peers"]:
                low, high = peer["ours_over_peer_interval"]
                print(
                    f"    {peer['method']:28} {peer['total_ms']:9.2f} ms  ours "
                    f"x{peer['ours_over_peer']:.3f} [{low:.3f}, {high:.3f}]  "
                    f"error {max(peer['errors'].values()):.1e}",
                    flush=True,
                )
            if a.out:
                a.out.write_text(json.dumps(result, indent=1) + "\n")
        if cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

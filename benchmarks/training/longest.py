"""The longest sequence that a whole Llama-3-8B trains: one real optimizer step, loss finite.

    export PYTHONPATH=kernels:workloads:operator
    python benchmarks/training/longest.py --out longest.jsonl
    torchrun --nproc-per-node 2 benchmarks/training/longest.py --tokens 2408448 --out longest.jsonl

    # without a GPU: the same code at a tiny size
    python benchmarks/training/longest.py --tiny --tokens 2048

Window(8192), 32 layers, a vocabulary of 128,256. bf16 weights and gradients stay on the GPU,
AdamW's bf16 states rest in pinned host memory, of every few layers one input is kept, most of
them in host memory, MLP and loss run in tiles. Memory is estimated before the run, term by term,
and measured beside it. Every phase is a line of JSON on disk before the next one begins.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from common import GIB, TINY, Rows, Shape, environment, over_ranks, resident_bytes
from msa_kernels.pattern import Dense, Pattern, Window
from msa_operator.planner.context import price_layouts
from msa_operator.planner.exchange import Ranks, held
from msa_workloads.loss import divisor
from msa_workloads.optimizer import clip_gradients
from msa_workloads.parallel.mesh import join_world
from msa_workloads.runspec import ContextSpec, MemorySpec
from ours import Ours


def _kept(layers: int, memory: MemorySpec) -> tuple[int, int]:
    """How many layers' inputs are kept, and how many of those stay on the device."""
    kept = math.ceil(layers / memory.checkpoint_layers)
    waiting = min(kept, memory.checkpoints_on_device) if memory.offload_checkpoints else kept
    return kept, waiting


def backward_units(shape: Shape, memory: MemorySpec) -> list[float]:
    """Tensors of the size of a layer's input that are alive at most in the backward of each
    segment, the last segment first.

    In backward of a layer these are its input, the normalised input, q, k, v, the attention
    output, the middle residual, its normalised form, and two gradients: 8.5 with 4 query heads a
    key/value head. The inputs of the segment's layers before it come on top, and those kept on
    the device that are not needed yet. In a segment of one layer the next input arrives.
    """
    kept, on_device = _kept(shape.layers, memory)
    found = []
    for number in range(kept - 1, -1, -1):
        layers = min(memory.checkpoint_layers, shape.layers - number * memory.checkpoint_layers)
        waiting = max(0, on_device - (kept - number))
        arriving = int(0 < number <= kept - on_device)
        found.append(8 + 2 * shape.kv_heads / shape.heads + waiting + max(layers - 1, arriving))
    return found


def exchanged(shape: Shape, tokens: int, ranks: int, pattern: Pattern) -> float:
    """Bytes that attention over context ranks holds at its worst moment beyond what a layer's
    backward holds in its MLP, which is more than that of attention on one rank by a layer's input
    less its keys and values."""
    if ranks == 1:
        return 0.0
    weights = ((pattern, shape.kv_heads),)
    layout = price_layouts(weights, tokens, ranks)[0].name
    found = held(
        Ranks(tokens, ranks, ContextSpec(), layout, weights), ((weights, shape.layers),),
        (shape.heads, shape.kv_heads), shape.head_dim, 2,
    )  # fmt: skip
    unit = tokens / ranks * shape.hidden * 2
    return found.layer + max(0.0, found.work - (1 - 2 * shape.kv_heads / shape.heads) * unit)


def estimate(
    shape: Shape, tokens: int, ranks: int, memory: MemorySpec, pattern: Pattern
) -> dict[str, float]:
    """GiB per GPU and on the host, term by term; layers' inputs are counted by
    :func:`backward_units`."""
    unit = tokens / ranks * shape.hidden * 2
    weights = 2 * shape.parameters / ranks
    kept, on_device = _kept(shape.layers, memory)
    gathered = 0.0 if ranks == 1 else 2 * (2 * shape.head_weights + 2 * shape.layer_weights)
    terms = {
        "weights": weights,
        "gathered_weights": gathered,
        "mlp_tile": 3 * shape.inner * memory.mlp_chunk * 2 + 3 * shape.hidden * shape.inner * 4,
        "rotation": tokens / ranks * shape.head_dim * 4,
        "log_sum_exp": tokens / ranks * shape.heads * 4,
        "exchange": exchanged(shape, tokens, ranks, pattern),
    }
    logits = memory.loss_chunk * shape.vocabulary * 2 + shape.head_weights * 4
    # As measured: the embeddings stay alive through forward, and one input on its way out.
    forward = weights + gathered + (7.5 + on_device) * unit + logits
    # Backward goes through the segments from the last one: gradients grow, checkpoints go.
    segments = []
    gradients = 2 * shape.head_weights / ranks
    units = backward_units(shape, memory)
    for number, alive in zip(range(kept - 1, -1, -1), units, strict=True):
        first = number * memory.checkpoint_layers
        layers = min(memory.checkpoint_layers, shape.layers - first)
        gradients += 2 * layers * shape.layer_weights / ranks
        segments.append(sum(terms.values()) + gradients + alive * unit)
    terms["layer_working_set"] = max(units) * unit
    states = 2 * shape.parameters / ranks * (2 if memory.optimizer_states == "bf16" else 4)
    found = {name: value / GIB for name, value in terms.items()}
    found |= {
        "unit": unit / GIB,
        "gpu_forward": forward / GIB,
        "gpu_backward": max(segments) / GIB,
        "gpu_peak": max(forward, *segments) / GIB,
        "host_checkpoints": (kept - on_device) * unit / GIB if memory.offload_checkpoints else 0.0,
        "host_states": states / GIB if memory.offload_optimizer else 0.0,
    }
    found["host"] = found["host_checkpoints"] + found["host_states"]
    return {name: round(value, 2) for name, value in found.items()}


def choose(
    shape: Shape, tokens: int, ranks: int, gpu: float, host: float, base: MemorySpec,
    pattern: Pattern,
) -> MemorySpec:  # fmt: skip
    """The fewest layers a checkpoint, and the most checkpoints on the device, that fit both."""
    for layers in range(1, shape.layers + 1):
        kept = math.ceil(shape.layers / layers)
        for on_device in range(min(kept, 8), -1, -1):
            memory = replace(base, checkpoint_layers=layers, checkpoints_on_device=on_device)
            found = estimate(shape, tokens, ranks, memory, pattern)
            if found["gpu_peak"] <= gpu and found["host"] <= host:
                return memory
    raise ValueError(f"{tokens} tokens fit no plan within {gpu:.0f} GiB and host {host:.0f} GiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1204224, 1048576])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--window", type=int, default=8192, help="0 is dense")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--backend", help="triton on a GPU: flash-attn-4 holds fp32 copies of dQ")
    parser.add_argument("--loss-chunk", type=int, default=8192)
    parser.add_argument("--mlp-chunk", type=int, default=16384)
    parser.add_argument("--gpu-gib", type=float, default=131.0)
    parser.add_argument("--spare-gib", type=float, default=9.0, help="left free by a second try")
    parser.add_argument("--host-gib", type=float, default=108.0, help="of each rank, pinned")
    parser.add_argument("--checkpoint-layers", type=int)
    parser.add_argument("--checkpoints-on-device", type=int)
    parser.add_argument("--seconds", type=float, default=560, help="leave the process after this")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out")
    a = parser.parse_args()
    rows = Rows(a.out)
    cuda = torch.cuda.is_available() and not a.tiny
    world = join_world("gpu" if cuda else "cpu")
    a.backend = a.backend or ("triton" if cuda else "auto")
    _leave_after(a.seconds, rows)
    shape = replace(TINY, layers=6) if a.tiny else Shape(layers=a.layers)
    rows.add("environment", **environment(), gpus=world.size)
    spares = (0.0,) if a.checkpoint_layers else (0.0, a.spare_gib)
    for tokens, spare in itertools.product(a.tokens, spares):
        if _tried(a, rows, world, shape, tokens, cuda, a.gpu_gib - spare):
            break
        # Now that the error's frames are gone, so are the tensors that they held.
        _clear(cuda)
    sys.stdout.flush()
    os._exit(0)


def _tried(
    a: argparse.Namespace, rows: Rows, world: Any, shape: Shape, tokens: int, cuda: bool,
    gpu_gib: float,
) -> bool:  # fmt: skip
    """Whether a length trained; an error is a line of the results."""
    try:
        train(a, rows, world, shape, tokens, cuda, gpu_gib)
        return True
    except Exception as error:
        rows.add(
            "error", tokens=tokens, error=f"{type(error).__name__}: {error}"[:2000],
            trace=traceback.format_exc()[-6000:],
            memory=torch.cuda.memory_summary(abbreviated=True) if cuda else "",
        )  # fmt: skip
        traceback.print_exc()
        if world.size > 1:
            os._exit(1)
        return False


def _leave_after(seconds: float, rows: Rows) -> None:
    """End the process in time, with the stacks of all threads."""
    import faulthandler
    import threading

    def leave() -> None:
        rows.add("error", error=f"not done after {seconds:g} s")
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def _clear(cuda: bool) -> None:
    import gc

    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


def train(
    a: argparse.Namespace, rows: Rows, world: Any, shape: Shape, tokens: int, cuda: bool,
    gpu_gib: float,
) -> None:  # fmt: skip
    began = time.time()
    narrow = "bf16" if cuda else "fp32"
    pattern = Window(a.window) if a.window else Dense()
    base = MemorySpec(
        checkpointing="full", offload_checkpoints=True, offload_optimizer=True,
        optimizer_states=narrow, parameters=narrow, loss_chunk=a.loss_chunk,
        mlp_chunk=a.mlp_chunk,
    )  # fmt: skip
    if a.checkpoint_layers:
        memory = replace(
            base, checkpoint_layers=a.checkpoint_layers,
            checkpoints_on_device=a.checkpoints_on_device or 0,
        )  # fmt: skip
    else:
        memory = choose(shape, tokens, world.size, gpu_gib, a.host_gib, base, pattern)
    expected = estimate(shape, tokens, world.size, memory, pattern)
    rows.add("plan", tokens=tokens, memory=asdict(memory), estimate=expected)

    def phase(name: str, **more: Any) -> None:
        if cuda:
            torch.cuda.synchronize()
            more["gpu_gib"] = round(torch.cuda.memory_allocated() / GIB, 2)
            more["gpu_peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
            more["gpu_reserved_gib"] = round(torch.cuda.memory_reserved() / GIB, 2)
        more["resident_gib"] = round(resident_bytes() / GIB, 2)
        rows.add("phase", phase=name, at=round(time.time() - began, 1), **more)

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    subject = Ours(
        shape, tokens, world, memory, backend=a.backend, keep_start=False,
        rate=1e-4, pattern=pattern,
    )  # fmt: skip
    phase("built")
    activations = subject.model.activations
    unit = (1, subject.batch.tokens.shape[1], shape.hidden)
    kept = math.ceil(shape.layers / memory.checkpoint_layers) - memory.checkpoints_on_device
    subject_dtype = next(subject.model.parameters()).dtype
    if cuda:
        buffers = activations.parking.buffers
        made = [buffers.take(torch.Size(unit), subject_dtype) for _ in range(max(0, kept))]
        for buffer in made:
            buffers.give_back(buffer)
        del made
        phase("pinned", host_checkpoint_gib=round(buffers.bytes / GIB, 2))
        phase("checked", **checks(subject, shape, unit, subject_dtype))
    _watch(subject, phase)
    losses = []
    for number in range(a.steps):
        begun = time.time()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        loss = subject.model(subject.batch) / divisor(subject.valid)
        phase("forward", step=number, loss=float(loss.detach()))
        loss.backward()
        phase("backward", step=number)
        norm = clip_gradients(subject.model, 1.0)
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        phase("optimizer", step=number, grad_norm=norm)
        total = loss.detach().double()
        if world.size > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total))
        seconds = time.time() - begun
        if not math.isfinite(losses[-1]) or not math.isfinite(norm):
            raise ArithmeticError(f"loss {losses[-1]}, gradient norm {norm}")
        peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
        used = subject.used()
        states = subject.optimizer
        pairs = pattern.pairs(tokens)
        flops = shape.model_flops(tokens, pairs)
        rows.add(
            "longest", tokens=tokens, gpus=world.size, window=a.window, layers=shape.layers,
            parameters=shape.parameters, step=number, loss=losses[-1], grad_norm=norm,
            step_seconds=round(seconds, 1), tokens_per_second=round(tokens / seconds, 1),
            model_tflops_per_gpu=round(flops / seconds / world.size / 1e12, 1),
            peak_gib=[round(v[0], 2) for v in over_ranks([peak], world.device)],
            estimate=expected, memory=asdict(memory),
            host_pinned_gib=round(
                ((activations.parking.buffers.bytes if activations.parking else 0)
                 + states.host.bytes) / GIB, 2),
            resident_gib=round(resident_bytes() / GIB, 2),
            copied_gib={
                "checkpoints": round(activations.parking.moved / GIB, 1),
                "states": round(states.moved / GIB, 1),
            },
            recomputed_layers=activations.recomputed_layers, **used,
        )  # fmt: skip


def checks(
    subject: Ours, shape: Shape, unit: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """Steps on more than 2**31 elements against the same steps on their last rows."""
    layer = subject.model.layers[0]
    with torch.no_grad():
        hidden = torch.randn(unit, dtype=dtype, device="cuda")
        found = {}
        for name, step in {
            "norm": layer.input_layernorm, "product": _plain(layer.self_attn.q_proj),
        }.items():  # fmt: skip
            if subject.world.size > 1:
                continue  # parameters are shards here
            whole, few = step(hidden)[:, -64:], step(hidden[:, -64:].contiguous())
            found[name] = float((whole.float() - few.float()).norm() / few.float().norm())
            if not found[name] < 0.01:
                raise ArithmeticError(f"{name} at {unit} differs from its last rows: {found}")
        del hidden
    _clear(True)
    return {"checks": found}


def _plain(linear: Any) -> Any:
    return lambda rows: torch.nn.functional.linear(rows, linear.weight)


def _watch(subject: Ours, phase: Any) -> None:
    """A line whenever every eighth layer is through, forward and backward."""

    def passed(number: int, out: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            phase(f"forward of layer {number}")
            out.register_hook(lambda _: phase(f"backward of layer {number}"))

    for number, layer in enumerate(subject.model.layers):
        if number % 8 == 7:
            layer.register_forward_hook(lambda _m, _i, out, n=number: passed(n, out))


if __name__ == "__main__":
    sys.exit(main())

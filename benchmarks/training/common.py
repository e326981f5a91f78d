"""What the benchmarks of training share: the model, its data, clocks, and rows on disk."""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msa_kernels.pattern import Dense, Dilated, Pattern, SinkWindow, Window
from msa_workloads.data import IGNORE, Sample

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A decoder of Llama's kind."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 4
    vocabulary: int = 128256

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices."""
        kv = self.kv_heads * self.head_dim
        return self.hidden * (2 * self.hidden + 2 * kv + 3 * self.inner)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.hidden
        return self.layers * self.layer_weights + 2 * self.head_weights + norms

    def config(self, tokens: int) -> dict[str, Any]:
        """The Hugging Face config, ``model_type`` included."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": tokens,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        }

    def model_flops(self, tokens: int, pairs: int) -> int:
        """Of one step: 6 per weight and token, 12 D per pair and head; nothing computed twice."""
        weights = self.layers * self.layer_weights + self.head_weights
        return 6 * tokens * weights + 12 * self.layers * self.heads * self.head_dim * pairs


TINY = Shape(hidden=64, inner=160, heads=4, kv_heads=2, layers=4, vocabulary=512)


def patterns(tokens: int) -> dict[str, Pattern]:
    """The patterns by name; windows shrink with very short sequences, so that a CPU can try."""
    window = min(8192, max(16, tokens // 16))
    return {
        "dense": Dense(),
        "window": Window(window),
        "sinks": SinkWindow(window, window // 16),
        "dilated": Dilated(4, window),
    }


class RandomTokens:
    """One sequence of random tokens, one document; the same whatever the number of ranks."""

    def __init__(self, tokens: int, vocabulary: int, seed: int = 3) -> None:
        make = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, vocabulary, (tokens,), generator=make).numpy()

    def sample(self, k: int) -> Sample:
        length = len(self.tokens)
        labels = np.append(self.tokens[1:], IGNORE)
        return Sample(
            k, self.tokens, labels, np.arange(length), np.zeros(length, dtype=np.int32)
        )  # fmt: skip


class Clock:
    """Points in time on this rank, by CUDA events where there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def start(self) -> None:
        """Begin anew, together with the other ranks."""
        self.synchronize()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
            self.synchronize()
        self.marks = []
        self.mark()

    def read(self) -> list[float]:
        """Milliseconds between marks."""
        self.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.device.type == "cuda":
            return [a.elapsed_time(b) for a, b in pairs]
        return [1e3 * (b - a) for a, b in pairs]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def over_ranks(values: list[float], device: torch.device) -> list[list[float]]:
    """Every rank's values."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine.tolist()]
    all_of = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of, mine)
    return [some.tolist() for some in all_of]


class Rows:
    """Results as lines of JSON, each on disk before the next is measured; rank 0 writes."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None
        self.rank = int(os.environ.get("RANK", "0"))

    def add(self, kind: str, **fields: Any) -> None:
        if self.rank:
            return
        line = json.dumps({"kind": kind, **fields})
        print(line if len(line) < 900 else f"{line[:900]} ...", flush=True)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(line + "\n")

    def done(self) -> list[dict[str, Any]]:
        """What is on disk."""
        if self.path is None or not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def environment() -> dict[str, Any]:
    """Card, versions and date."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    names = ("torch", "triton", "transformers", "flash-attn-4", "liger-kernel", "numpy")
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "card": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "cards": torch.cuda.device_count() if cuda else 0,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{name: installed(name) for name in names},
    }


def resident_bytes() -> int:
    """Physical memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def peak_of(device: torch.device) -> Iterator[dict[str, float]]:
    """GiB that were allocated on the device at most while the body ran."""
    found: dict[str, float] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    found["peak"] = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0

"""Tensors that wait in host memory: written and read back by copies beside the computation.

Buffers are pinned in the size they are asked for, and used again in the next step: PyTorch's own
pinned allocator rounds up to powers of two, which long sequences cannot afford.
"""

from __future__ import annotations

import collections
import concurrent.futures
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

THREADS = 16
"""Threads that touch and pin a buffer's pages: one thread needs seconds for each 8 GiB."""


class HostBuffers:
    """Host tensors by shape and dtype, pinned where there is a GPU, used again after use."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.bytes = 0
        """Bytes of all buffers that exist, in use or not."""
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = (
            collections.defaultdict(list)
        )  # fmt: skip

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A buffer of undefined content."""
        free = self._free[shape, dtype]
        return free.pop() if free else self._make(shape, dtype)

    def give_back(self, buffer: Tensor) -> None:
        """Let a later :meth:`take` have the buffer."""
        self._free[buffer.shape, buffer.dtype].append(buffer)

    def _make(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(shape, dtype=dtype)
        self.bytes += buffer.numel() * buffer.element_size()
        return pin(buffer) if self.pinned else buffer


def pin(buffer: Tensor) -> Tensor:
    """Pin a contiguous host tensor's own memory, by several threads; unpinned when it dies.

    Raises RuntimeError when the system refuses, with how much was asked for.
    """
    runtime: Any = torch.cuda.cudart()
    flat = buffer.view(-1).view(torch.uint8)
    parts = _parts(flat.numel())
    first = flat.data_ptr()
    device = torch.cuda.current_device()

    def register(part: tuple[int, int]) -> int:
        torch.cuda.set_device(device)
        at, size = part
        flat[at : at + size].zero_()
        return int(runtime.cudaHostRegister(first + at, size, 0))

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        codes = list(pool.map(register, parts))
    if any(codes):
        raise RuntimeError(
            f"pinning {flat.numel() / 2**30:.1f} GiB of host memory was refused by the system "
            f"(CUDA error {max(codes)}); keep more on the GPU, or raise the limit of locked memory"
        )
    weakref.finalize(buffer, _unpin, first, [at for at, _ in parts]).atexit = False
    return buffer


def _parts(size: int) -> list[tuple[int, int]]:
    """Begin and length of the parts in which ``size`` bytes are pinned."""
    page = 4096
    step = -(-size // THREADS // page) * page or page
    return [(at, min(step, size - at)) for at in range(0, size, step)]


def copy(to: Tensor, source: Tensor) -> None:
    """Copy between the device and a pinned buffer of the same shape and dtype, without waiting.

    Part by part: CUDA refuses a copy that crosses from one registration of host memory into
    another ("invalid argument").
    """
    to_bytes, from_bytes = (t.view(-1).view(torch.uint8) for t in (to, source.contiguous()))
    for at, size in _parts(to_bytes.numel()):
        to_bytes[at : at + size].copy_(from_bytes[at : at + size], non_blocking=True)


def _unpin(first: int, offsets: list[int]) -> None:
    runtime: Any = torch.cuda.cudart()
    for at in offsets:
        runtime.cudaHostUnregister(first + at)


@dataclass(eq=False)
class Parked:
    """A tensor in host memory, or on its way there or back."""

    host: Tensor
    device: torch.device
    back: Tensor | None = None
    done: torch.cuda.Event | None = None


@dataclass(eq=False)
class Parking:
    """Parks tensors of one device in host memory and brings them back.

    Copies run on a stream of their own. Of the tensors on their way out, at most ``depth`` are
    still held on the device: the next one waits for the oldest. On CPUs it copies at once.
    """

    device: torch.device
    depth: int = 1
    buffers: HostBuffers = field(init=False)
    moved: int = 0
    """Bytes copied so far, both ways."""
    _leaving: collections.deque[tuple[Tensor, torch.cuda.Event]] = field(
        default_factory=collections.deque
    )
    _stream: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        cuda = self.device.type == "cuda"
        self.buffers = HostBuffers(pinned=cuda)
        self._stream = torch.cuda.Stream(self.device) if cuda else None

    def park(self, tensor: Tensor) -> Parked:
        """Start copying ``tensor`` out; the caller need not keep it."""
        host = self.buffers.take(tensor.shape, tensor.dtype)
        self.moved += tensor.numel() * tensor.element_size()
        if self._stream is None:
            host.copy_(tensor)
            return Parked(host, tensor.device)
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            copy(host, tensor)
        done = torch.cuda.Event()
        done.record(self._stream)
        # Its memory must not be used again before the copy has read it: whoever allocates next
        # on this stream comes after the event.
        self._leaving.append((tensor, done))
        while len(self._leaving) > self.depth:
            self._let_go(here)
        return Parked(host, tensor.device)

    def settle(self) -> None:
        """Let go of every tensor that is still on its way out."""
        while self._leaving:
            self._let_go(torch.cuda.current_stream(self.device))

    def fetch(self, parked: Parked) -> None:
        """Start copying back, unless that has begun."""
        if parked.back is not None:
            return
        parked.back = torch.empty(
            parked.host.shape, dtype=parked.host.dtype, device=parked.device
        )  # fmt: skip
        self.moved += parked.back.numel() * parked.back.element_size()
        if self._stream is None:
            parked.back.copy_(parked.host)
            return
        # The new tensor's memory may still be read or written by what was queued before.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            copy(parked.back, parked.host)
        parked.done = torch.cuda.Event()
        parked.done.record(self._stream)

    def take(self, parked: Parked) -> Tensor:
        """The tensor, on its device; its place in host memory is free again afterwards."""
        self.fetch(parked)
        tensor, parked.back = parked.back, None
        assert tensor is not None
        if parked.done is not None:
            torch.cuda.current_stream(self.device).wait_event(parked.done)
        # Later copies into the buffer run on the same stream, after this one.
        self.buffers.give_back(parked.host)
        return tensor

    def _let_go(self, here: torch.cuda.Stream) -> None:
        tensor, done = self._leaving.popleft()
        here.wait_event(done)
        del tensor

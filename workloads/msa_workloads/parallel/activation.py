"""What of a forward pass is kept for backward: everything, what is dear, or what must be.

Every choice gives the same losses and gradients. ``none`` keeps everything. ``full`` keeps the
input of each layer and computes the layer again. ``selective`` also keeps what attention returned,
so that everything but attention is computed again. The inputs that are kept can wait in host
memory, and of several layers in a row only the first one's input needs to be kept at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from msa_workloads.parallel import elementwise
from msa_workloads.parallel.mesh import UnsupportedError
from msa_workloads.parallel.offload import Parked, Parking
from msa_workloads.parallel.tiled_mlp import tile_mlps
from msa_workloads.runspec import MemorySpec, RunSpec

ATTENTION = (
    "msa::attention",
    "msa::context_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
"""Operators whose results ``selective`` keeps: their cost grows faster than their output."""

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Operators of linear layers."""


@dataclass
class Activations:
    """How a model's layers keep what they need, and what that has cost so far."""

    parking: Parking | None = None
    fused: list[str] = field(default_factory=list)
    recomputed_layers: int = 0
    """Layers that were run once more because their input had not been kept."""


def check(spec: RunSpec) -> None:
    """Raise :class:`~msa_workloads.parallel.mesh.UnsupportedError` for switches that contradict
    each other or the rest of a run; the message says what to change."""
    memory = spec.memory
    if memory.checkpointing == "none":
        for name, off in (("offload_checkpoints", False), ("checkpoint_layers", 1)):
            if (found := getattr(memory, name)) != off:
                raise UnsupportedError(
                    f"memory.{name}: found {found!r} with checkpointing 'none', which keeps no "
                    f"checkpoints; use checkpointing: selective or full, or {name}: {off!r}"
                )
    if memory.keep_projections and memory.checkpointing != "selective":
        raise UnsupportedError(
            f"memory.keep_projections: found {memory.keep_projections} with checkpointing "
            f"{memory.checkpointing!r}; use checkpointing: selective, or keep_projections: 0"
        )
    for name in (
        "checkpoint_layers", "checkpoints_on_device", "keep_projections", "mlp_chunk", "loss_chunk"
    ):  # fmt: skip
        least = 1 if name == "checkpoint_layers" else 0
        if (found := getattr(memory, name)) < least:
            raise UnsupportedError(f"memory.{name}: found {found}, must be at least {least}")
    if memory.checkpoints_on_device and not memory.offload_checkpoints:
        raise UnsupportedError(
            f"memory.checkpoints_on_device: found {memory.checkpoints_on_device} without "
            "offload_checkpoints, where all of them stay there; use 0"
        )
    if memory.parameters == "bf16" and spec.training.precision != "bf16":
        raise UnsupportedError(
            f"memory.parameters: found 'bf16' with training.precision {spec.training.precision!r},"
            " which computes with fp32 weights; use precision: bf16 or parameters: fp32"
        )
    if memory.loss_kernel == "liger" and (spec.device != "gpu" or not memory.loss_chunk):
        raise UnsupportedError(
            f"memory.loss_kernel: found 'liger' with device {spec.device!r} and loss_chunk "
            f"{memory.loss_chunk}; Liger's kernels need device: gpu and a loss_chunk (it picks "
            "its own size); use loss_kernel: auto"
        )


def apply(
    model: Any, memory: MemorySpec, device: torch.device, *, fused: bool | None = None
) -> Activations:
    """Make a causal language model's layers work as ``memory`` says.

    Call it before anything else gives modules another forward, splits or shards them.

    ``fused`` compiles the steps between matrix products; None does so on GPUs. Raises
    :class:`~msa_workloads.parallel.mesh.UnsupportedError` for what the model cannot do.
    """
    fused = elementwise.wants(device) if fused is None else fused
    done = Activations(fused=elementwise.fuse(model) if fused else [])
    if memory.mlp_chunk or fused:
        tile_mlps(model.base_model.layers, memory.mlp_chunk, compile_steps=fused)
    if memory.checkpointing == "none":
        return done
    if memory.checkpoint_layers > 1:
        _refuse_dropout(model)
    if memory.offload_checkpoints:
        done.parking = Parking(device)
    _Stack(model.base_model.layers, memory, done).install()
    return done


def _refuse_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise UnsupportedError(
                f"memory.checkpoint_layers: {name} drops out at a rate of {module.p}, and layers "
                "that are run again between checkpoints would drop others; use checkpoint_layers: "
                "1, or a dropout of 0"
            )


@functools.cache
def _kept_operators() -> list[Any]:
    """Those of :data:`ATTENTION` that exist in this process."""
    found = []
    for name in ATTENTION:
        space, operator = name.split("::")
        packet = getattr(getattr(torch.ops, space), operator, None)
        if packet is not None:
            found.append(packet.default)
    return found


class _Policy:
    """Which operators' results a layer keeps through its checkpoint."""

    def __init__(self, layer: Any, projections: bool) -> None:
        self.inside = False
        """Whether the layer's attention module runs at the moment."""
        if projections:
            layer.self_attn.register_forward_pre_hook(functools.partial(self._mark, True))
            layer.self_attn.register_forward_hook(
                functools.partial(self._mark, False), always_call=True
            )

    def _mark(self, inside: bool, *_: Any) -> None:
        self.inside = inside

    def __call__(self, _context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator in _kept_operators() or (self.inside and operator in PRODUCTS):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


Inner = Callable[..., Tensor]


class _Stack:
    """The layers of one model, and the inputs that one forward pass has kept of them."""

    def __init__(self, layers: nn.ModuleList, memory: MemorySpec, done: Activations) -> None:
        self.layers, self.memory, self.done = list(layers), memory, done
        self.inner: list[Inner] = [layer.forward for layer in layers]
        more = len(self.layers) - memory.keep_projections
        self.policies = [_Policy(layer, n >= more) for n, layer in enumerate(self.layers)]
        self.kept: dict[int, _Input] = {}
        """Inputs of the pass at hand that are in host memory, by layer."""
        starts = range(0, len(self.layers), memory.checkpoint_layers)
        on_device = memory.checkpoints_on_device
        self.stored = set(starts[: len(starts) - on_device]) if done.parking else set()
        """Layers whose inputs go to host memory: not the last ones, which are needed first."""

    def install(self) -> None:
        for number, layer in enumerate(self.layers):
            layer.forward = functools.partial(self.forward, number)

    def forward(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Layer ``number``'s forward, under a checkpoint when there will be a backward."""
        run = functools.partial(self._run, number, args, kwargs)
        if not (torch.is_grad_enabled() and self.layers[number].training):
            return run(hidden)
        kept = self._keep(number, run)
        contexts = {}
        if self.memory.checkpointing == "selective":
            contexts["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, self.policies[number]
            )
        if kept is None:
            return checkpoint(run, hidden, use_reentrant=False, **contexts)
        with kept.as_saved(hidden):
            return checkpoint(run, hidden, use_reentrant=False, **contexts)

    def _run(self, number: int, args: Any, kwargs: Any, hidden: Tensor) -> Tensor:
        return self.inner[number](hidden, *args, **kwargs)

    def _keep(self, number: int, run: Callable[[Tensor], Tensor]) -> _Input | None:
        """A place for the layer's input; None where autograd keeps it like any other tensor."""
        if self.memory.checkpoint_layers == 1 and not self.stored:
            return None
        first = number - number % self.memory.checkpoint_layers
        if number == 0:
            self.kept = {}
        before = self.kept[number - 1] if number > first else None
        kept = self.kept[number] = _Input(self, number, run, before)
        return kept


class _Input:
    """The input of one layer: on the device, in host memory, or to be computed again."""

    def __init__(
        self, stack: _Stack, number: int, run: Callable[[Tensor], Tensor], before: _Input | None
    ) -> None:
        self.stack, self.number, self.run, self.before = stack, number, run, before
        self.inputs = stack.kept
        self.value: Tensor | None = None
        self.parked: Parked | None = None

    @contextmanager
    def as_saved(self, hidden: Tensor) -> Iterator[None]:
        """Within, what autograd saves of ``hidden`` is this object; all else is saved as it is."""
        # Autograd holds both hooks as long as what they packed: they must not hold the input.
        place, shape = hidden.data_ptr(), hidden.shape
        taken = False

        def pack(tensor: Tensor) -> Any:
            nonlocal taken
            if taken or (tensor.data_ptr(), tensor.shape) != (place, shape):
                return tensor
            taken = True
            self._put(tensor.detach())
            return self

        def unpack(saved: Any) -> Tensor:
            return saved.take() if isinstance(saved, _Input) else saved

        with saved_tensors_hooks(pack, unpack):
            yield

    def _put(self, hidden: Tensor) -> None:
        if self.before is not None:
            return
        parking = self.stack.done.parking
        if parking is not None and self.number in self.stack.stored:
            self.parked = parking.park(hidden)
        else:
            self.value = hidden

    def take(self) -> Tensor:
        """The input on the device, once: for the layer's own backward."""
        parking = self.stack.done.parking
        if parking is not None:
            # The last one that left is still held here, and backward needs the room.
            parking.settle()
        value = self._value()
        self.value = None
        self._prefetch()
        return value

    def _value(self) -> Tensor:
        """The input on the device; inputs computed on the way stay for their own layers."""
        parking = self.stack.done.parking
        if self.value is None and self.parked is not None and parking is not None:
            self.value = parking.take(self.parked)
            self.parked = None
        elif self.value is None:
            if self.before is None:
                raise RuntimeError(
                    f"backward ran twice through layer {self.number}, whose input was kept for "
                    "once; use checkpoint_layers: 1 and offload_checkpoints: false"
                )
            self.value = self.before._next()
        return self.value

    def _next(self) -> Tensor:
        """This layer's output, computed without keeping what happens inside it."""
        value = self._value()
        layer = self.stack.layers[self.number]
        self.stack.done.recomputed_layers += 1
        # Its parameters are gathered here: it is not this layer's turn in backward yet.
        if isinstance(layer, FSDPModule):
            layer.unshard()
        with torch.no_grad():
            out = self.run(value)
        if isinstance(layer, FSDPModule):
            layer.reshard()
        return out

    def _prefetch(self) -> None:
        """Start bringing back the input that backward asks for after this layer's segment.

        Not before: where that one is on the device, an earlier one would lie beside it unused.
        """
        parking = self.stack.done.parking
        if parking is None or self.before is not None:
            return
        earlier = self.inputs.get(self.number - self.stack.memory.checkpoint_layers)
        if earlier is not None and earlier.parked is not None:
            parking.fetch(earlier.parked)

"""FSDP2: parameters, gradients and optimizer states sharded over ``dp_shard`` x ``cp``.

Gradients are summed over ranks, never averaged: the loss is divided by the number of valid tokens
of all ranks before backward, so that a sum is exact whatever each rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from msa_workloads.parallel.mesh import Mesh


def shard_module(
    module: nn.Module, mesh: Mesh, precision: str, *, reshard: bool | None = None
) -> None:
    """Shard one module's own parameters (those of sharded submodules stay theirs).

    They are given back after forward and gathered again for backward unless ``reshard`` is False;
    None is FSDP's own choice, which does so for all but the outermost module.
    Master weights and the gradient reduction are fp32; with ``bf16`` compute is bf16.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.float32,
        # Inputs are token ids and what modules before made of them, in the right dtype already;
        # a batch's plans, which travel with them, are no tensors to cast.
        cast_forward_inputs=False,
    )
    fully_shard(module, mesh=mesh.shard, mp_policy=policy, reshard_after_forward=reshard)


def sum_gradients(modules: Iterable[nn.Module]) -> None:
    """Make every FSDP module in ``modules`` sum gradients instead of averaging them.

    Both calls are needed, on every module: neither is recursive, and a divide factor without
    forced sums needs a reduction that gloo does not have.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def accumulate(model: nn.Module, last: bool) -> None:
    """How the gradients of the next micro-batch are added up; ``last`` of its step.

    They are reduced in every micro-batch, and each rank adds up its own shard in fp32: a sum of
    whole gradients would be four bytes for every parameter of the model on every rank. Over
    replicas they are reduced in the last one.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_all_reduce(last)
    if all(p.dtype.itemsize >= 4 for p in model.parameters()):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if module not in _sums and not last:
                _sums[module] = _Sum()
                module.set_all_reduce_hook(_sums[module])
            if module in _sums:
                _sums[module].begin(last)


class _Sum:
    """The sum of one module's reduced gradients over a step, in fp32, where FSDP would round each
    summand to the dtype of the weights: it is given zeros until the last, and then the sum."""

    def __init__(self) -> None:
        self.last = True
        self.calls = 0
        self.held: dict[int, torch.Tensor] = {}
        """By call within a backward pass."""

    def begin(self, last: bool) -> None:
        self.last, self.calls = last, 0

    def __call__(self, reduced: torch.Tensor) -> None:
        """Change what has been reduced, before it is rounded. Of replicas nothing comes here
        before the last micro-batch: FSDP adds that up itself, in the dtype of the reduction."""
        number, self.calls = self.calls, self.calls + 1
        if reduced.is_cuda:
            # It was made on another stream than this one.
            reduced.record_stream(torch.cuda.current_stream())
        before = self.held.pop(number, None)
        if before is not None:
            reduced.add_(before)
        if not self.last:
            self.held[number] = reduced.clone() if before is None else before.copy_(reduced)
            reduced.zero_()


_sums: WeakKeyDictionary[nn.Module, _Sum] = WeakKeyDictionary()

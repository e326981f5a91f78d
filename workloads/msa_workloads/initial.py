"""First values of a model's tensors: drawn by module and seed, or read, the same on every rank."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from msa_workloads.parallel.mesh import UnsupportedError
from msa_workloads.permutation import key
from msa_workloads.weights import Weights, in_stored_order


@torch.no_grad()
def make_real(
    model: Any, root: nn.Module, names: dict[nn.Module, str], seed: int,
    device: torch.device, weights: Weights | None,
) -> None:  # fmt: skip
    """Give every meta tensor below ``root`` storage and its initial value.

    Values are those of ``weights``, where there are any, and otherwise drawn; a tensor that
    neither sets is refused. ``names`` are those that modules had before anything wrapped them:
    values follow them. A tensor that two modules share (tied embeddings) stays shared; one that is
    split over tensor ranks is made whole, its heads are put in the order that the layer stores,
    and its part is kept; modules that are real already are left alone.
    """
    made: dict[int, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    buffers: list[tuple[nn.Module, str]] = []
    for module in root.modules():
        own = {**module._parameters, **module._buffers}
        fresh = {n: t for n, t in own.items() if t is not None and t.is_meta}
        if not fresh:
            continue
        for field, tensor in fresh.items():
            if isinstance(tensor, nn.Parameter):
                if id(tensor) not in made:
                    real = _unset(tensor, device)
                    made[id(tensor)] = nn.Parameter(real, tensor.requires_grad)
                module._parameters[field] = made[id(tensor)]
                places.append((module, field, tensor))
            else:
                module._buffers[field] = _unset(tensor, device)
                buffers.append((module, field))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else ()):
            torch.manual_seed(key(seed, zlib.crc32(names[module].encode())))
            model.model._init_weights(module)
    for module, field in buffers:
        value, name = module._buffers[field], f"{names[module]}.{field}".removeprefix("model.")
        assert value is not None
        if weights is not None and field not in module._non_persistent_buffers_set:
            weights.copy(name, value)
        _check_set(name, value)
    parts: dict[int, nn.Parameter] = {}
    for module, field, tensor in places:
        if id(tensor) not in parts:
            whole = made.pop(id(tensor))
            name = f"{names[module]}.{field}".removeprefix("model.")
            if weights is not None:
                weights.copy(name, whole)
            _check_set(name, whole)
            whole.copy_(in_stored_order(name, whole, model.head_orders))
            parts[id(tensor)] = _like(whole, tensor)
        module._parameters[field] = parts[id(tensor)]


def stored_names(model: nn.Module) -> list[str]:
    """What a file of the model's weights has to hold: a tensor that modules share but once."""
    kept = model.state_dict().keys()
    return [
        *(name for name, _ in model.named_parameters()),
        *(name for name, _ in model.named_buffers() if name in kept),
    ]


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory of the shape of ``like`` in which it shows that nobody has set it."""
    value = torch.empty(like.shape, dtype=like.dtype, device=device)
    return value.fill_(math.nan) if value.is_floating_point() else value.zero_()


def _check_set(name: str, value: torch.Tensor) -> None:
    """Refuse a tensor of which nothing was set: every rank would train with numbers of its own."""
    if value.is_floating_point() and value.numel() and bool(value.flatten()[-1].isnan()):
        raise UnsupportedError(
            f"model.config.model_type: this kind of model has no rule for the first values of "
            f"{name}; use another kind, or weights that hold it (model.source)"
        )


def _like(whole: nn.Parameter, meta: torch.Tensor) -> nn.Parameter:
    """This rank's part of ``whole``, split as ``meta`` is; the same numbers on every rank."""
    if not isinstance(meta, DTensor):
        return whole
    part = distribute_tensor(
        whole.detach(), meta.device_mesh, meta.placements, src_data_rank=None
    )  # fmt: skip
    return nn.Parameter(part, whole.requires_grad)

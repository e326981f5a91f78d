"""Weights of a Hugging Face model, one tensor at a time: no rank reads a model whole.

A layer may store its heads in an order of its own (:func:`msa_workloads.heads.stored_order`): the
rows of its query, key and value projections and the columns of the one after attention.
:func:`in_stored_order` and :func:`in_model_order` go between that and the model's.

Safetensors files are mapped into memory and a tensor is copied out when its module is made. Files
of other kinds, and those that name tensors otherwise than the model's modules, are left to
transformers, which reads them whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from msa_workloads.heads import Order
from msa_workloads.parallel.mesh import UnsupportedError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

OF_HEADS = re.compile(
    r"\blayers\.(\d+)\.self_attn\.(?:[qkv]_proj\.(?:weight|bias)|(o)_proj\.weight)$"
)
"""Parameters with a part for each head: a layer's number, and ``o`` where parts are columns."""


class WeightsError(UnsupportedError):
    """Weights that do not fit the model; the message names the tensor."""


class Weights:
    """Tensors by name, in one or several safetensors files."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, Any] = {}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that no file holds."""
        return [name for name in names if name not in self._files]

    def copy(self, name: str, into: Tensor) -> None:
        """Copy a tensor's values; raises :class:`WeightsError` when the shapes differ."""
        found = self._file(self._files[name]).get_tensor(name)
        if found.shape != into.shape:
            raise WeightsError(
                f"model.source: {name} has shape {tuple(found.shape)}, the model's config asks "
                f"for {tuple(into.shape)}"
            )
        into.copy_(found)

    def _file(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = safe_open(str(path), framework="pt")
        return self._open[path]


def in_stored_order(name: str, tensor: Tensor, orders: Mapping[int, Order]) -> Tensor:
    """The whole parameter ``name``, from the model's order of heads to the one it is stored in.

    ``orders`` are those of layers with another order than the model's. Parameters of other layers,
    and those without a part for each head, come back as they are.
    """
    return _reordered(name, tensor, orders)


def in_model_order(name: str, tensor: Tensor, orders: Mapping[int, Order]) -> Tensor:
    """The inverse of :func:`in_stored_order`, for parameters, gradients and optimizer states."""
    back = {n: tuple(map(order.index, range(len(order)))) for n, order in orders.items()}
    return _reordered(name, tensor, back)


@torch.no_grad()
def reorder_heads(model: nn.Module, orders: Mapping[int, Order]) -> None:
    """Put the heads of a model that is whole in the order in which its layers store them; what is
    still on the meta device is left alone."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            parameter.copy_(in_stored_order(name, parameter, orders))


def _reordered(name: str, tensor: Tensor, orders: Mapping[int, Order]) -> Tensor:
    found = OF_HEADS.search(name)
    order = orders.get(int(found[1])) if found else None
    if found is None or order is None:
        return tensor
    dim = 1 if found[2] else 0
    index = torch.tensor(order, device=tensor.device)
    return tensor.unflatten(dim, (len(order), -1)).index_select(dim, index).flatten(dim, dim + 1)


def open_weights(source: str) -> Weights | None:
    """The weights of a folder or of a model on the hub (fetched into its cache); None without
    safetensors."""
    from safetensors import safe_open

    index = _find(source, INDEX)
    if index is not None:
        where = json.loads(index.read_text())["weight_map"]
        files = {name: _find(source, name) for name in sorted(set(where.values()))}
        if absent := [name for name, path in files.items() if path is None]:
            raise WeightsError(f"model.source: {source} lacks {absent[0]}, which its index names")
        return Weights({tensor: path for tensor, f in where.items() if (path := files[f])})
    single = _find(source, SINGLE)
    if single is None:
        return None
    with safe_open(str(single), framework="pt") as file:
        return Weights(dict.fromkeys(file.keys(), single))


def _find(source: str, name: str) -> Path | None:
    from transformers.utils.hub import cached_file

    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)

"""Weights of a Hugging Face model, one tensor at a time: no rank reads a model whole.

Safetensors files are mapped into memory and a tensor is copied out when its module is made. Files
of other kinds, and those that name tensors otherwise than the model's modules, are left to
transformers, which reads them whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from msa_workloads.parallel.mesh import UnsupportedError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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

"""Counts the storages that are alive, which PyTorch keeps no account of on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Storages of at least ``least`` bytes that operators have made and that live."""

    def __init__(self, least: int = 1) -> None:
        super().__init__()
        self.least = least
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.apart: set[int] = set()
        """Storages that do not count."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add(out)
        return out

    def add(self, found: Any) -> None:
        """Count the storages of tensors that no operator within has made, too."""
        for tensor in torch.utils._pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self.least:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def bytes(self) -> int:
        """Of all of them together, now."""
        self.made = {at: one for at, one in self.made.items() if not one[0].expired()}
        return sum(size for at, (_, size) in self.made.items() if at not in self.apart)

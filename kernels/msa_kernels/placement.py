"""Placement: where the rows of one call sit, as given by its documents, bounds or alignment.

Values are read from the device once per tensor and remembered while the tensor lives unchanged:
all layers of a model that are given the same document ids share one read. A tensor on the CPU is
compared with what it was, whoever wrote it; one elsewhere counts as changed when an in-place
operation of PyTorch has written it in this process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

import numpy as np
import torch

from msa_kernels.blocks import Runs
from msa_kernels.plan import Align, packed, varlen, whole

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Placement:
    """At most one of ``documents`` and the pair of bounds is set."""

    documents: torch.Tensor | None = None
    """Document ids (B, S) of queries and keys alike; a change of id starts a new document."""
    q_bounds: torch.Tensor | None = None
    """Cumulative query bounds (sequences + 1,) of a batch of one packed row."""
    k_bounds: torch.Tensor | None = None
    align: Align = "bottom-right"
    """Where queries sit when there are more or fewer of them than keys."""

    @property
    def flattens(self) -> bool:
        """The batch is seen as one sequence of B * S rows, a document never crossing a row."""
        return self.documents is not None

    def plain(self, q_rows: int, k_rows: int) -> bool:
        """One document per batch row, its queries and keys starting at position 0."""
        shifted = q_rows != k_rows and self.align == "bottom-right"
        return self.documents is None and self.q_bounds is None and not shifted

    def runs(self, q_rows: int, k_rows: int) -> tuple[Runs, Runs]:
        """Runs of queries and keys; raises ValueError where the values make no sense."""
        if self.documents is not None:
            ids = self.documents
            runs = remember(ids, "packed", lambda: packed(_host(ids)))
            return runs, runs
        if self.q_bounds is not None and self.k_bounds is not None:
            q_bounds, k_bounds = self.q_bounds, self.k_bounds
            queries = remember(q_bounds, "bounds", lambda: _host(q_bounds).copy())
            keys = remember(k_bounds, "bounds", lambda: _host(k_bounds).copy())
            _check_bounds("cu_q", queries, q_rows)
            _check_bounds("cu_k", keys, k_rows)
            return varlen(queries, keys, self.align)
        return whole(q_rows, k_rows, self.align)


def remember(tensor: torch.Tensor, name: str, make: Callable[[], T]) -> T:
    """``make()``, once per tensor object and content; forgotten with the tensor."""
    key = (id(tensor), name)
    with _lock:
        kept = _kept.get(key)
    content = _content(tensor)
    if kept is not None and kept[0]() is tensor and _equal(kept[1], content):
        return cast(T, kept[2])
    if isinstance(content, np.ndarray):
        content = content.copy()  # before it is read: what changes meanwhile is then noticed
    value = make()
    if content is None:
        return value

    def forget(_: object, kept: dict = _kept) -> None:  # as the process ends, names go first
        kept.pop(key, None)

    with _lock:
        _kept[key] = (weakref.ref(tensor, forget), content, value)
    return value


Content: TypeAlias = np.ndarray | int | None
_kept: dict[tuple[int, str], tuple[Callable[[], torch.Tensor | None], Content, object]] = {}
_lock = threading.Lock()


def _content(tensor: torch.Tensor) -> Content:
    """What tells that a tensor has changed: on the CPU its elements, elsewhere its version, where
    it has one."""
    if tensor.device.type == "cpu":
        return _host(tensor)
    return None if tensor.is_inference() else tensor._version


def _equal(before: Content, now: Content) -> bool:
    if isinstance(before, np.ndarray):  # several times as fast as torch.equal
        return isinstance(now, np.ndarray) and np.array_equal(before, now)
    return before is not None and before == now


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _check_bounds(name: str, bounds: np.ndarray, rows: int) -> None:
    if bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise ValueError(f"{name} must start at 0 and never fall, found {_brief(bounds)}")
    if bounds[-1] != rows:
        raise ValueError(
            f"{name} ends at {int(bounds[-1])} but the tensor has {rows} rows; "
            "bounds must cover the packed sequence exactly"
        )


def _brief(bounds: np.ndarray) -> str:
    head = ", ".join(str(int(b)) for b in bounds[:8])
    return f"[{head}{', ...' if len(bounds) > 8 else ''}]"

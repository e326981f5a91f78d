"""What the Hugging Face door needs while ``torch.compile`` traces a model, without a graph break.

Values of tensors are not there then: what depends on them is decided in operators, as they run.
Nor can a function that is made while tracing be taken apart: a mask function is called with
indices that note what it does with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from msa_kernels.backend import BackendError


class _Index(Tensor):
    """An index of a mask function. ``notes`` has what is done with it; what that yields does not
    matter."""

    notes: list[str | int]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types, kwargs
        name: str = func.__name__
        first = args[0]
        if name in _SILENT:
            return first
        if name == "sub" and isinstance(first, _Query) and isinstance(args[1], int):
            first.notes.append(args[1])
            return first.far
        if name == "gt" and isinstance(first, _Key) and isinstance(args[1], _Far):
            return first
        if name == "le" and isinstance(first, _Key) and isinstance(args[1], _Query):
            first.notes.append("causal")
        elif name == "ge" and isinstance(first, _Query) and isinstance(args[1], int):
            first.notes.append("bidirectional")
        else:
            first.notes.append(name)
        return first


class _Query(_Index):
    far: _Far


class _Key(_Index):
    pass


class _Far(_Index):
    """A query's index less a window."""


_SILENT = ("new_ones", "to", "__get__", "__and__")


def _made(kind: type[_Index], notes: list[str | int]) -> _Index:
    index = torch.zeros(1, dtype=torch.long).as_subclass(kind)  # type: ignore[arg-type]
    index.notes = notes
    return index


def read_mask(function: Callable[..., Any]) -> tuple[list[int], bool] | None:
    """The windows of a mask function, and whether it hides what it does: transformers counts
    positions within documents by indices of its own. None for one that is not known, which the
    caller takes apart outside of the graph."""
    notes: list[str | int] = []
    far: Any = _made(_Far, notes)
    query, key = _made(_Query, notes), _made(_Key, notes)
    query.far = far  # type: ignore[attr-defined]
    function(0, 0, query, key)
    windows: list[int] = []
    for note in notes:
        if isinstance(note, int):
            windows.append(note)
        elif note not in ("causal", "bidirectional"):
            return None
    return windows, not notes


def check_padding(mask: Tensor) -> None:
    """Refuse a 2-D padding mask that hides tokens."""
    if not bool(mask.all()):
        raise BackendError(
            "a padding mask that hides tokens is not implemented; pack the batch without padding "
            "and pass msa_document_ids (padding as a document of its own), or attention_mask=None"
        )


def document_ids(positions: Tensor, batch: int) -> Tensor | None:
    """Document ids (``batch``, S) of position ids that restart at 0; None when there is one
    document per row."""
    if positions.dim() != 2:
        raise BackendError(
            f"position ids of shape {tuple(positions.shape)} do not tell documents apart; "
            "pass msa_document_ids"
        )
    step = torch.diff(positions, dim=1)
    restarts = positions[:, 1:] == 0
    if bool(((step != 1) & ~restarts).any()):
        raise BackendError(
            "position ids jump without restarting at 0: pass msa_document_ids for packed "
            "documents, or msa_positions for a permuted sequence"
        )
    if not bool(restarts.any()):
        return None
    ids = functional.pad(restarts.cumsum(1), (1, 0)).to(torch.int32)
    return ids.expand(batch, -1)


@torch.library.custom_op("msa::document_ids", mutates_args=())
def traced_document_ids(positions: Tensor, batch: int) -> Tensor:
    """Like :func:`document_ids`, with one document per row said as such."""
    ids = document_ids(positions, batch)
    if ids is None:
        return positions.new_zeros((batch, positions.shape[1]), dtype=torch.int32)
    return ids.contiguous()


@traced_document_ids.register_fake
def _(positions: Tensor, batch: int) -> Tensor:
    return positions.new_empty((batch, positions.shape[1]), dtype=torch.int32)


@torch.library.custom_op("msa::unpadded", mutates_args=())
def unpadded(ids: Tensor, mask: Tensor) -> Tensor:
    """The ids, once :func:`check_padding` has passed: a check alone would be left out."""
    check_padding(mask)
    return ids.clone()


@unpadded.register_fake
def _(ids: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(ids)

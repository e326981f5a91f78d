"""Sparse attention on tensors: :func:`msa_attention`, checked before anything is launched.

Layout everywhere is (batch, sequence, heads, head size). See docs/attention.md.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeAlias

import torch
from torch.autograd import forward_ad

from msa_kernels import backend as backends
from msa_kernels.capabilities import LIMITS
from msa_kernels.ops import attention
from msa_kernels.pattern import (
    BlockTopK,
    Documented,
    Documents,
    Limited,
    Pattern,
    PerHead,
    Union,
)
from msa_kernels.placement import Placement
from msa_kernels.plan import Align, Request, holds_no_values

Packing: TypeAlias = Documents | torch.Tensor | tuple[torch.Tensor, torch.Tensor]

DIRECT = tuple(name for name, limits in LIMITS.items() if limits.whole_calls)
"""Backends that are PyTorch functions, which a compiled graph holds in place of an operator."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
"""What the registers and shared memory of a GPU hold as one tile; also the limit of every fused
kernel in PyTorch, so that a model that works here works there."""


def msa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    documents: Packing | None = None,
    align: Align | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact softmax attention over the pairs that ``pattern`` allows.

    q is (B, Sq, Hq, D), k and v (B, Sk, Hkv, D); Hq is a multiple of Hkv and query head h reads
    key/value head ``h // (Hq // Hkv)``. Any strides; fp64, fp32, bf16 or fp16; D at most 256.
    Returns (B, Sq, Hq, D) in q's dtype and, with ``return_lse``, also the natural logarithm of
    the softmax denominators (B, Hq, Sq) in fp32 (fp64 for fp64 inputs), differentiable too. A
    query that sees no key gives output 0, LSE -inf and gradients 0.

    ``scale`` multiplies the scores, D ** -0.5 when None. ``documents`` packs several sequences
    into a row, each computed as if alone: a :class:`Documents`, ids (B, S) in which a change
    starts a new document, or a pair of cumulative bounds ``(cu_q, cu_k)`` for a batch of one row
    with query and key lengths of their own. ``align`` is required for a causal pattern when
    query and key lengths differ: "bottom-right" puts the last query on the last key (decoding,
    chunked prefill), "top-left" the first on the first; bounds are "bottom-right" unless it says
    otherwise. ``backend`` is "auto" or a name of :data:`msa_kernels.backend.LOADERS`.

    Raises ValueError for arguments that make no sense (a BlockList shorter than the longest
    document is one), TypeError for wrong types, and
    :class:`msa_kernels.backend.BackendError` where nothing implements the request.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, found {type(tensor).__name__}")
    check_reverse(q, k, v)
    q, k, v = (autocast(tensor) for tensor in (q, k, v))
    check_tensors(q, k, v)
    if isinstance(pattern, Documented):
        if documents is not None:
            raise ValueError("documents are given twice: by the pattern and by documents=")
        pattern, documents = pattern.pattern, pattern.documents
    check_pattern(pattern)
    placement = _placement(q, k, pattern, documents, align)
    factor = check_scale(scale, q.shape[3])
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    compiling = torch.compiler.is_compiling()
    direct = None
    if not compiling or backend in DIRECT:
        if compiling:
            backends.preload()
        request = Request(
            device=q.device, dtype=q.dtype, batch=q.shape[0], q_rows=q.shape[1],
            k_rows=k.shape[1], q_heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3],
            pattern=pattern, plain=placement.plain(q.shape[1], k.shape[1]), needs_grad=needs_grad,
            return_lse=return_lse, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        chosen = backends.resolve(request, backend)
        backend = chosen.name
        direct = chosen if isinstance(chosen, backends.Direct) else None
        if direct is not None and not compiling:
            backends.record(backend, q, k, pattern, not request.plain)
    # Inside a compiled graph the operator itself resolves the backend, when it runs: lengths that
    # decide between implementations would otherwise be compiled in.
    if direct is not None:
        out, lse = direct.attend(q, k, v, pattern, placement, factor, return_lse)
    else:
        # Its text becomes a constant of a compiled graph; reading the mark guards the graph by it.
        assert pattern.mark
        out, lse = attention(
            q, k, v, pattern.encoded(), factor, placement.documents, placement.q_bounds,
            placement.k_bounds, placement.align, backend,
        )  # fmt: skip
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in autocast's dtype where that is on; like PyTorch's attention it leaves fp64
    and whatever is not floating point as they are."""
    device = tensor.device.type
    wide = tensor.dtype == torch.float64 or not tensor.is_floating_point()
    # "meta" has no autocast and cannot be asked whether it is on; asking which devices have one
    # breaks the graph of a compiled model with PyTorch 2.11.
    if wide or device == "meta" or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def check_reverse(*tensors: torch.Tensor) -> None:
    """Raises where a tensor carries a forward-mode tangent: operators drop it without a word."""
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise backends.BackendError(
                "forward-mode derivatives (jvp, jacfwd, dual tensors) are not implemented; "
                "nearest: reverse mode, as of torch.autograd.grad and backward()"
            )


def check_scale(scale: float | None, head_dim: int) -> float:
    """The number that scores are multiplied by; raises unless it is positive and finite."""
    factor = head_dim**-0.5 if scale is None else float(scale)
    if not 0 < factor < math.inf:
        raise ValueError(
            f"scale multiplies the scores and must be positive, found {factor}; negate q for a "
            "negative one"
        )
    return factor


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises unless q, k and v fit together; the message gives what was found and is allowed."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, sequence, heads, head size), found {tensor.dim()} "
                f"dimensions {tuple(tensor.shape)}; a packed (tokens, heads, head size) needs "
                "unsqueeze(0) and documents=(cu_q, cu_k)"
            )
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(d).split(".")[-1] for d in DTYPES)
            raise ValueError(f"{name} is {tensor.dtype}; supported: {known}")
        if 0 in tensor.shape:
            raise ValueError(f"{name} is empty: {tuple(tensor.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}")
    if k.shape != v.shape:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must have the same shape; "
            "pad v's head size with zeros if it is smaller"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and head size"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads"
            "; the layout is (batch, sequence, heads, head size): use transpose(1, 2) where "
            "heads come first"
        )
    if q.shape[3] > MAX_HEAD_DIM:
        raise ValueError(
            f"head size {q.shape[3]} exceeds {MAX_HEAD_DIM}; supported: 1 to {MAX_HEAD_DIM} "
            "(split a larger head into several)"
        )


def check_pattern(pattern: Pattern) -> None:
    """Raises where the pattern cannot be computed whatever the tensors."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, found {pattern!r}; see docs/patterns.md")
    for leaf in _leaves(pattern):
        if isinstance(leaf, BlockTopK):
            raise backends.BackendError(
                "BlockTopK selects its blocks at run time from an index head, which no backend "
                "here does; nearest: BlockList with the selected blocks, or SinkWindow"
            )


def _leaves(pattern: Pattern) -> tuple[Pattern, ...]:
    if isinstance(pattern, Union | PerHead):
        return tuple(leaf for member in pattern.members for leaf in _leaves(member))
    if isinstance(pattern, Limited | Documented):
        return _leaves(pattern.pattern)
    return (pattern,)


def _placement(
    q: torch.Tensor,
    k: torch.Tensor,
    pattern: Pattern,
    documents: Packing | None,
    align: Align | None,
) -> Placement:
    if align not in (None, "bottom-right", "top-left"):
        raise ValueError(f"align must be 'bottom-right' or 'top-left', found {align!r}")
    batch, q_rows, k_rows = q.shape[0], q.shape[1], k.shape[1]
    if isinstance(documents, tuple) and not isinstance(documents, Documents):
        return _varlen(documents, batch, align)
    if q_rows != k_rows:
        if documents is not None:
            raise ValueError(
                f"documents by ids or lengths need equal lengths, found {q_rows} queries and "
                f"{k_rows} keys; give documents=(cu_q, cu_k) instead"
            )
        if align is None and pattern.causal:
            raise ValueError(
                f"{q_rows} queries and {k_rows} keys with a causal pattern: say where queries "
                "sit, align='bottom-right' (the last query on the last key) or 'top-left'"
            )
    if isinstance(documents, Documents):
        if documents.total != q_rows:
            raise ValueError(f"documents hold {documents.total} tokens, the sequence {q_rows}")
        documents = _ids(documents, batch)
    if documents is not None:
        if not isinstance(documents, torch.Tensor):
            raise TypeError(
                "documents must be Documents, a tensor of ids (B, S) or a pair (cu_q, cu_k), "
                f"found {type(documents).__name__}"
            )
        if documents.shape != (batch, q_rows):
            raise ValueError(
                f"document ids are {tuple(documents.shape)}, must be (batch, sequence) = "
                f"{(batch, q_rows)}; cumulative bounds go in as a pair (cu_q, cu_k)"
            )
        _check_integers("documents", documents)
    return Placement(documents, align=align or "bottom-right")


def _varlen(bounds: tuple[torch.Tensor, ...], batch: int, align: Align | None) -> Placement:
    if len(bounds) != 2:
        raise ValueError(f"documents as bounds are a pair (cu_q, cu_k), found {len(bounds)}")
    q_bounds, k_bounds = bounds
    for name, side in (("cu_q", q_bounds), ("cu_k", k_bounds)):
        if not isinstance(side, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, found {type(side).__name__}")
        _check_integers(name, side)
        if side.dim() != 1 or len(side) < 2:
            raise ValueError(f"{name} must be (sequences + 1,), found {tuple(side.shape)}")
    if len(q_bounds) != len(k_bounds):
        raise ValueError(
            f"cu_q has {len(q_bounds) - 1} sequences and cu_k has {len(k_bounds) - 1}"
        )
    if batch != 1:
        raise ValueError(f"bounds describe one packed row, the batch has {batch}")
    return Placement(None, q_bounds, k_bounds, align or "bottom-right")


def _check_integers(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64, torch.int16):
        raise ValueError(f"{name} must be int16, int32 or int64, found {tensor.dtype}")


def _ids(documents: Documents, batch: int) -> torch.Tensor:
    """Ids (B, S) on the CPU, one tensor for equal documents, which is read once."""
    if torch.compiler.is_compiling() or holds_no_values():
        return _made_ids(documents, batch)
    return _kept_ids(documents, batch)


@lru_cache(maxsize=64)
def _kept_ids(documents: Documents, batch: int) -> torch.Tensor:
    # Kept for later calls, which may train: an inference tensor could not be saved for backward.
    with torch.inference_mode(False):
        return _made_ids(documents, batch)


def _made_ids(documents: Documents, batch: int) -> torch.Tensor:
    lengths = torch.tensor(documents.lengths, device="cpu")
    numbers = torch.arange(len(documents.lengths), device="cpu")
    # Where tensors hold no values, nor does their sum.
    ids = torch.repeat_interleave(numbers, lengths, output_size=documents.total)
    return ids.expand(batch, -1)

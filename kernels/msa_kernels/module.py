"""A multi-head attention layer with a sparse pattern, to put in a model's place of one."""

from __future__ import annotations

import torch
from torch import nn

from msa_kernels.attention import Packing, check_pattern, msa_attention
from msa_kernels.backend import check_name
from msa_kernels.pattern import Pattern


class MsaAttention(nn.Module):
    """Self-attention over (batch, sequence, hidden) with projections and a pattern.

    Grouped queries when ``kv_heads`` is below ``heads``. ``qk_norm`` normalises each head's
    queries and keys by their root mean square (as Qwen3 does), before rotation. Raises ValueError
    for sizes that do not divide, PatternError or BackendError for a pattern that cannot run.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        pattern: Pattern,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, found {size}")
        if heads % kv_heads:
            raise ValueError(f"{heads} heads are not a multiple of {kv_heads} key/value heads")
        if head_dim is None:
            if hidden % heads:
                raise ValueError(f"hidden size {hidden} does not divide by {heads} heads")
            head_dim = hidden // heads
        check_pattern(pattern)
        check_name(backend)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.pattern = pattern
        self.backend = backend
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim) if qk_norm else nn.Identity()

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        documents: Packing | None = None,
    ) -> torch.Tensor:
        """(B, S, hidden) to (B, S, hidden).

        ``rotary`` is a pair of cosines and sines, (S, D) or (B, S, D) or (1, S, D), in the
        half-split convention of Llama, for an even head size D; ``documents`` as in
        :func:`msa_attention`. Raises ValueError for other shapes.
        """
        if hidden.dim() != 3:
            raise ValueError(
                f"the layer takes (batch, sequence, hidden), found {tuple(hidden.shape)}; one "
                "sequence needs unsqueeze(0)"
            )
        shape = (*hidden.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden).view(shape))
        k = self.k_norm(self.k_proj(hidden).view(shape))
        v = self.v_proj(hidden).view(shape)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        out = msa_attention(q, k, v, self.pattern, documents=documents, backend=self.backend)
        assert isinstance(out, torch.Tensor)
        return self.o_proj(out.flatten(2))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, pattern={self.pattern}"


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (B, S, H, D): pairs are dimensions n and n + D/2.

    Raises ValueError for an odd D, and unless both are (S, D), (1, S, D) or (B, S, D).
    """
    batch, length, _, dim = x.shape
    if dim % 2:
        raise ValueError(f"rotation turns pairs of dimensions: the head size {dim} is odd")
    for name, table in (("cosines", cos), ("sines", sin)):
        if table.shape not in ((length, dim), (1, length, dim), (batch, length, dim)):
            raise ValueError(
                f"{name} are {tuple(table.shape)}, must be (sequence, head size) = "
                f"{(length, dim)}, or that for every batch row"
            )
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(-2).to(x.dtype) + turned * sin.unsqueeze(-2).to(x.dtype)

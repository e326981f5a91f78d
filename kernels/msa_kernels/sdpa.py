"""Dense attention through ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from msa_kernels.backend import Direct
from msa_kernels.capabilities import refuses_pattern
from msa_kernels.pattern import Pattern
from msa_kernels.placement import Placement
from msa_kernels.plan import Request

FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Never the unfused path: it would hold all scores in memory at once."""
DETERMINISTIC = [SDPBackend.FLASH_ATTENTION]


class Sdpa(Direct):
    """:class:`msa_kernels.backend.Direct` for Dense, one document per row, equal lengths."""

    name = "sdpa"

    def refuses(self, request: Request) -> str | None:
        if why := refuses_pattern(self.name, request.pattern, request.kv_heads):
            return why
        if not request.plain:
            return "serves one document per row only, starting at position 0"
        if request.pattern.causal and request.q_rows != request.k_rows:
            return "serves causal attention for equal query and key lengths only"
        if request.return_lse:
            return "does not return the LSE"
        return request.outside(self.name)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern,
        placement: Placement, scale: float, return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        q, k, v = (_dense_rows(tensor) for tensor in (q, k, v))
        heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        fused = DETERMINISTIC if torch.are_deterministic_algorithms_enabled() else FUSED
        with sdpa_kernel(fused):
            out = F.scaled_dot_product_attention(
                *heads, is_causal=pattern.causal, scale=scale, enable_gqa=q.shape[2] != k.shape[2]
            )
        return out.transpose(1, 2).contiguous(), None


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with neighbours along a head, which is all that fused kernels read; a copy where
    they are not. Not ``contiguous()``, to which a head of one number always is."""
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)

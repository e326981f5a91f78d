"""flash-attn-4 (package ``flash-attn-4``) where it is the fastest: dense and windowed parts.

Optional: present only when the package is installed. It serves patterns of a single part that is
one band in one document, which a dilated pattern is too once its residues are heads.
"""

from __future__ import annotations

import importlib.util

import torch

from msa_kernels.pattern import PatternError
from msa_kernels.plan import PartPlan, Request
from msa_kernels.rules import Part, Rule

HEAD_DIMS = (64, 96, 128)


class FlashAttention4:
    """:class:`msa_kernels.plan.TileKernel` on flash-attn-4's CuTe kernels (Hopper and newer)."""

    name = "fa4"

    def __init__(self) -> None:
        if importlib.util.find_spec("flash_attn") is None:
            raise ImportError("the package flash-attn-4 is not installed")
        from flash_attn.cute import interface  # type: ignore[import-not-found]

        self._interface = interface

    def refuses(self, request: Request) -> str | None:
        if request.device.type != "cuda" or torch.version.cuda is None:
            return "needs an NVIDIA GPU"
        if torch.cuda.get_device_capability(request.device) < (9, 0):
            return "needs compute capability 9.0 or newer"
        if request.dtype not in (torch.bfloat16, torch.float16):
            return f"serves bfloat16 and float16, not {request.dtype}"
        if request.head_dim not in HEAD_DIMS:
            return f"is used for head sizes {HEAD_DIMS}, not {request.head_dim}"
        if request.deterministic:
            return "its backward accumulates dQ with atomics: not deterministic"
        if request.return_lse and request.needs_grad:
            return "is used where the LSE has no gradient of its own"
        if not request.plain or request.q_rows != request.k_rows:
            return "is used for one document per row, of equal query and key lengths"
        try:
            groups = {request.pattern.for_group(g) for g in range(request.kv_heads)}
            parts = [group.parts() for group in groups]
        except PatternError as error:
            return str(error)
        if any(len(some) != 1 for some in parts):
            return "rounds its output, which partial results of a union must not be"
        reasons = (_not_a_band(some[0], request.q_rows) for some in parts)
        return next((reason for reason in reasons if reason), None)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PartPlan, scale: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        out, lse, *_ = self._interface._flash_attn_fwd(
            q, k, v, softmax_scale=scale, return_lse=True, **_mask(plan)
        )
        return out.to(out_dtype), lse

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, plan: PartPlan, scale: float,
        grad_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        del delta  # it forms rowsum(dout * out) itself
        dq, dk, dv = self._interface._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=scale, **_mask(plan)
        )
        return dq.to(grad_dtype), dk.to(grad_dtype), dv.to(grad_dtype)


def _not_a_band(part: Part, rows: int) -> str | None:
    if part.minus or len(part.rules) != 1:
        return "serves one band of distances, not several rules"
    rule = part.rules[0]
    if rule != Rule(rule.lo, rule.hi) or (rule.lo, rule.hi is None) not in (
        (0, True), (0, False), (None, True),
    ):  # fmt: skip
        return "serves dense and causal windows only"
    if rows % part.fold:
        return f"needs a length that the dilation {part.fold} divides, found {rows}"
    return None


def _mask(plan: PartPlan) -> dict[str, object]:
    rule = plan.part.rules[0]
    if rule.lo is None:
        return {"causal": False}
    if rule.hi is None:
        return {"causal": True}
    # Its window does not count the token itself.
    return {"causal": True, "window_size_left": rule.hi - 1, "window_size_right": 0}

"""flash-attn-4 (package ``flash-attn-4``) where it is the fastest: dense and windowed parts.

Optional: present only when the package is installed. It serves patterns of a single part that is
made of a few bands (:mod:`msa_kernels.bands`): a document, its residues as heads, or the stretches
that a rank of a context-parallel group holds.
"""

from __future__ import annotations

import importlib.util

import torch

from msa_kernels.bands import Band, Banded, Gradients, bands
from msa_kernels.capabilities import LIMITS, refuses_pattern
from msa_kernels.plan import Request, plan, whole


class FlashAttention4(Banded):
    """:class:`msa_kernels.plan.TileKernel` on flash-attn-4's CuTe kernels (Hopper and newer)."""

    name = "fa4"

    def __init__(self) -> None:
        if importlib.util.find_spec("flash_attn") is None:
            raise ImportError(f"the package {LIMITS[self.name].package} is not installed")
        from flash_attn.cute import interface  # type: ignore[import-not-found]

        self._interface = interface

    def refuses(self, request: Request) -> str | None:
        if request.device.type != "cuda" or torch.version.cuda is None:
            return "needs an NVIDIA GPU"
        if why := request.outside(self.name):
            return why
        if request.deterministic:
            return "its backward accumulates dQ with atomics: not deterministic"
        if request.return_lse and request.needs_grad:
            return "is used where the LSE has no gradient of its own"
        if request.partial:
            return "rounds its output, which pieces of a softmax must not be"
        places = request.places
        if request.plain:
            places = (whole(request.q_rows, request.k_rows, "top-left"),)
        if not places:
            return "is used for one document per row, or the known runs of a rank"
        if why := refuses_pattern(self.name, request.pattern, request.kv_heads):
            return why
        groups = {request.pattern.for_group(g) for g in range(request.kv_heads)}
        reasons = (bands(plan(group, *place)[0]) for group in groups for place in places)
        return next((reason for reason in reasons if isinstance(reason, str)), None)

    def band_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scale: float,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        found, lse, *_ = self._interface._flash_attn_fwd(
            q, k, v, softmax_scale=scale, return_lse=True, out=out, **_mask(band)
        )
        return found, lse

    def band_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        dout: torch.Tensor, lse: torch.Tensor, band: Band, scale: float,
        grads: Gradients | None,
    ) -> Gradients:  # fmt: skip
        given = dict(zip(("dq", "dk", "dv"), grads, strict=True)) if grads else {}
        dq, dk, dv = self._interface._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=scale, **given, **_mask(band)
        )
        return dq, dk, dv


def _mask(band: Band) -> dict[str, object]:
    if band.window is None:
        return {"causal": band.causal}
    # Its window does not count the token itself.
    return {"causal": True, "window_size_left": band.window - 1, "window_size_right": 0}

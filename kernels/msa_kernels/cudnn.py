"""cudnn-frontend (package ``nvidia-cudnn-frontend``) where it is the fastest: unions of intervals.

Optional: present only when the package is installed, with nvidia-cutlass-dsl. Its kernels take any
mask that is a few key intervals per query (:mod:`msa_kernels.intervals`), so that windows with
sinks, block lists, different ones for every head too, and their unions are one call with nothing
to merge. They form delta themselves, accumulate dQ in fp32, and need a plan of the mask, which is
built on the device once per pattern and shape and kept with ours.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable
from typing import Any

import torch

from msa_kernels import intervals
from msa_kernels.capabilities import LIMITS, few_intervals, refuses_pattern
from msa_kernels.capabilities import intervals as most_intervals
from msa_kernels.fused import row_delta
from msa_kernels.plan import GradDtypes, PartPlan, Request

STRETCHES = 8
"""Of keys, in the runs of a rank: many come with packed documents, and change with every batch."""
TABLE_BYTES = 2 << 30
"""Most memory for the table of interval ends while a plan is built."""


class CudnnIntervals:
    """:class:`msa_kernels.plan.TileKernel` on ``cudnn.flex_attention``."""

    name = "cudnn"
    forms_delta = True
    rounds = True
    """Gradients leave the library in the dtype of its inputs, whatever dtype is asked for."""

    def __init__(self) -> None:
        if importlib.util.find_spec("cudnn") is None:
            raise ImportError(f"the package {LIMITS[self.name].package} is not installed")
        from cudnn import flex_attention  # type: ignore[import-not-found]

        self._library = flex_attention

    def refuses(self, request: Request) -> str | None:
        if request.device.type != "cuda" or torch.version.cuda is None:
            return "needs an NVIDIA GPU"
        if why := request.outside(self.name):
            return why
        newer = torch.cuda.get_device_capability(request.device) > (9, 0)
        if newer and request.head_dim == 256 and request.return_lse and request.needs_grad:
            return "has no gradient of the LSE at head size 256 on this GPU"
        if request.partial:
            return "rounds its output, which pieces of a softmax must not be"
        if not (request.places or (request.plain and request.q_rows == request.k_rows)):
            return "is used for one document per row, of equal query and key lengths"
        if any(len(keys.begin) > STRETCHES for _, keys in request.places):
            return (
                f"is used for at most {STRETCHES} stretches of keys: its plans cost milliseconds"
            )
        if why := refuses_pattern(self.name, request.pattern, request.kv_heads):
            return why
        groups = {request.pattern.for_group(g) for g in range(request.kv_heads)}
        parts = [group.parts()[0] for group in groups]
        fold = max(part.fold for part in parts)
        if fold > 1 and (len(groups) > 1 or request.q_rows % fold):
            return f"needs a length that the dilation {fold} divides, the same for all heads"
        heads = 1 if len(groups) == 1 else request.q_heads
        pieces = max((len(keys.begin) for _, keys in request.places), default=1)
        ends = 1 + 2 * pieces * max(map(most_intervals, parts))
        if heads * ends * request.batch * request.q_rows * 4 > TABLE_BYTES:
            return f"its table of intervals is capped at {TABLE_BYTES >> 30} GiB"
        return None

    def stacks(self, plan: PartPlan) -> bool:
        """Heads of different rules run in one launch."""
        return plan.kept(
            "cudnn stacks",
            lambda: all(few_intervals(head.part) is None for head in plan.heads),
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PartPlan, scale: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        q, k, v = (_native(t) for t in (q, k, v))
        mask = self._mask(plan, q, k, v, any(t.requires_grad for t in (q, k, v)))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        runner = plan.kept(
            ("cudnn forward", id(mask), _layout(q, k, v)),
            lambda: _compiled(self._library.FlexAttentionFwd(q, k, v, out, mask, lse)),
        )
        runner.execute(
            q, k, v, out, mask, lse, workspace=_workspace(runner, q.device), softmax_scale=scale
        )
        return out.to(out_dtype), lse

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor | None, plan: PartPlan,
        scale: float, grad_dtypes: GradDtypes,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        q, k, v, out = (_native(t) for t in (q, k, v, out))
        dout = _native(dout.to(q.dtype))
        lse = lse.contiguous()
        # The library takes the cotangent of the LSE, not delta = rowsum(dout * out) - dlse.
        dlse = None if delta is None else row_delta(dout, out, delta)
        mask = self._mask(plan, q, k, v, True)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        deterministic = torch.are_deterministic_algorithms_enabled()
        layout = _layout(q, k, v, out, dout)
        runner = plan.kept(
            ("cudnn backward", id(mask), layout, dlse is None, deterministic),
            lambda: _compiled(
                self._library.FlexAttentionBwd(
                    q, k, v, out, dout, lse, dq, dk, dv, mask, dlse, deterministic=deterministic
                )
            ),
        )
        runner.execute(
            q, k, v, out, dout, lse, dq, dk, dv, mask, dlse,
            workspace=_workspace(runner, q.device), softmax_scale=scale,
        )  # fmt: skip
        return dq.to(grad_dtypes[0]), dk.to(grad_dtypes[1]), dv.to(grad_dtypes[1])

    def _mask(
        self, plan: PartPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backward: bool
    ) -> Any:
        """The library's plan for these shapes, with what its backward needs where asked for."""
        key = ("cudnn mask", q.device, q.dtype, q.shape, k.shape)
        full = plan.kept((*key, "all"), dict)
        if backward and not full:
            full["plan"] = self._build(plan, q, k, v, True)
        if full:
            return full["plan"]
        return plan.kept((*key, "forward"), lambda: self._build(plan, q, k, v, False))

    def _build(
        self, plan: PartPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backward: bool
    ) -> Any:
        each = [intervals.ends(p.part, p.queries, p.keys, q.device) for p in plan.heads or (plan,)]
        width = max(len(ends) for ends in each)
        # Heads with fewer intervals repeat their last end: empty intervals.
        each = [torch.cat([e, e[-1:].expand(width - len(e), -1)]) for e in each]
        table = torch.stack(each)
        if plan.heads:
            table = table.repeat_interleave(q.shape[2] // k.shape[2], 0)
        table = table.repeat(1, 1, q.shape[0]).contiguous()
        return self._library.create_mask_plan(
            table, q.detach(), k.detach(), v.detach(), build_backward=backward
        )


def _compiled(runner: Any) -> Any:
    runner.check_support()
    runner.compile()
    return runner


def _workspace(runner: Any, device: torch.device) -> torch.Tensor | None:
    if not runner.workspace_size:
        return None
    return torch.empty(runner.workspace_size, dtype=torch.uint8, device=device)


def _native(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, copied where the library could not read it: it loads 16 bytes at a time."""
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(-1) == 1
    if aligned and all(stride and stride % 8 == 0 for stride in tensor.stride()[:-1]):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _layout(*tensors: torch.Tensor) -> Hashable:
    return tuple((t.shape, t.stride()) for t in tensors)

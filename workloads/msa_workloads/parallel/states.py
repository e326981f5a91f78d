"""AdamW whose states rest in another dtype or in host memory than where they are used.

The arithmetic is torch's own. Between steps the states of a bucket of parameters lie in two flat
buffers; in a step they are brought to the parameters, used, and brought back, one bucket being
copied while another is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from msa_workloads.parallel.offload import HostBuffers, copy

BUCKET = 256 * 2**20
"""Elements of a bucket, about a decoder layer's: what is on the device beside the model is a few
times that."""

NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(eq=False)
class _Bucket:
    """Parameters that step together, and where their states rest."""

    group: int
    parameters: list[nn.Parameter]
    rest: tuple[Tensor, Tensor]

    def views(self, flat: Tensor) -> list[Tensor]:
        """``flat`` cut into the shapes of this rank's parts of the parameters."""
        shapes = [local(p).shape for p in self.parameters]
        parts = flat.split([s.numel() for s in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class RestingAdamW(torch.optim.AdamW):
    """:class:`torch.optim.AdamW` with states of ``dtype``, on the host if ``on_host``.

    Parameters and states of one dtype are used as they are; others are widened to fp32 for the
    step and rounded once after it. Every parameter of a step has a gradient or none has.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float],
        dtype: torch.dtype, on_host: bool,
    ) -> None:  # fmt: skip
        super().__init__(groups, lr=lr, betas=betas)
        self.dtype, self.on_host = dtype, on_host
        device = next(local(p).device for g in self.param_groups for p in g["params"])
        self.device = device
        self.cuda = device.type == "cuda"
        self.host = HostBuffers(pinned=self.cuda and on_host)
        self.moved = 0
        """Bytes of states copied between host and device so far."""
        self.buckets = [
            _Bucket(number, some, (self._rest(some), self._rest(some)))
            for number, group in enumerate(self.param_groups)
            for some in _split(group["params"])
        ]
        self._copying = torch.cuda.Stream(device) if self.cuda and on_host else None

    def _rest(self, parameters: list[nn.Parameter]) -> Tensor:
        size = torch.Size([sum(local(p).numel() for p in parameters)])
        if self.on_host:
            return self.host.take(size, self.dtype).zero_()
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update; gradients stay."""
        if closure is not None:
            raise ValueError("a closure is not supported")
        used = [b for b in self.buckets if any(p.grad is not None for p in b.parameters)]
        arriving = self._bring(used[0]) if used else None
        for number, bucket in enumerate(used):
            states, there = arriving  # type: ignore[misc]
            arriving = self._bring(used[number + 1]) if number + 1 < len(used) else None
            if there is not None:
                torch.cuda.current_stream(self.device).wait_event(there)
            self._update(bucket, states)
            self._put_back(bucket, states)
        if self._copying is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._copying)

    def _bring(self, bucket: _Bucket) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """A bucket's flat states on the device, and what to wait for before they are read."""
        if not self.on_host or not self.cuda:
            return list(bucket.rest), None
        assert self._copying is not None
        made = [torch.empty_like(rest, device=self.device) for rest in bucket.rest]
        self._copying.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copying):
            for there, here in zip(made, bucket.rest, strict=True):
                copy(there, here)
                self.moved += 2 * here.numel() * here.element_size()
        there = torch.cuda.Event()
        there.record(self._copying)
        return made, there

    def _put_back(self, bucket: _Bucket, states: list[Tensor]) -> None:
        if self._copying is None:
            return
        self._copying.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copying):
            for there, here in zip(states, bucket.rest, strict=True):
                copy(here, there)
                there.record_stream(self._copying)

    def _update(self, bucket: _Bucket, states: list[Tensor]) -> None:
        group = self.param_groups[bucket.group]
        beta1, beta2 = group["betas"]
        parameters = [local(p) for p in bucket.parameters]
        gradients = [local(p.grad) for p in bucket.parameters if p.grad is not None]
        if len(gradients) != len(parameters):
            raise RuntimeError("some parameters of a bucket have a gradient and some have none")
        moments = [bucket.views(flat) for flat in states]
        same = {t.dtype for t in (*parameters, *gradients, *states)} == {self.dtype}
        if not same:
            wide = [[t.float() for t in some] for some in (parameters, gradients, *moments)]
        else:
            wide = [parameters, gradients, *moments]
        adamw(
            wide[0], wide[1], wide[2], wide[3], [], self._steps(bucket),
            foreach=not self.cuda, fused=self.cuda, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        if not same:
            for narrow, some in zip((parameters, *moments), (wide[0], *wide[2:]), strict=True):
                torch._foreach_copy_(narrow, some)

    def _steps(self, bucket: _Bucket) -> list[Tensor]:
        """Each parameter's count of steps; gives its state a place at the first one."""
        rest = [bucket.views(flat) for flat in bucket.rest]
        for number, parameter in enumerate(bucket.parameters):
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), device=self.device)
                for name, parts in zip(NAMES, rest, strict=True):
                    state[name] = _wrapped(parts[number], parameter)
        return [self.state[p]["step"] for p in bucket.parameters]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the values; they rest where and as this optimizer says.

        Moments keep the precision in which they come: torch would cast them to the parameters'
        dtype, and bring them to the parameters' device, first.
        """
        given = state_dict["state"]
        plain = {
            key: {name: value for name, value in state.items() if name not in NAMES}
            for key, state in given.items()
        }
        super().load_state_dict({**state_dict, "state": plain})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        moments = {p: given[key] for key, p in zip(keys, own, strict=True) if key in given}
        for bucket in self.buckets:
            rest = [bucket.views(flat) for flat in bucket.rest]
            for number, parameter in enumerate(bucket.parameters):
                state = self.state[parameter]
                if "step" not in state:
                    continue
                state["step"] = state["step"].to(self.device, torch.float32)
                for name, parts in zip(NAMES, rest, strict=True):
                    parts[number].copy_(local(moments[parameter][name]))
                    state[name] = _wrapped(parts[number], parameter)


def _split(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one dtype of about :data:`BUCKET` elements."""
    some: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        count = local(parameter).numel()
        if some and (size + count > BUCKET or parameter.dtype != some[0].dtype):
            yield some
            some, size = [], 0
        some.append(parameter)
        size += count
    if some:
        yield some


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _wrapped(part: Tensor, parameter: Tensor) -> Tensor:
    """A state as checkpoints see it: split over ranks like its parameter."""
    if not isinstance(parameter, DTensor):
        return part
    state: Any = torch.empty_like(parameter.detach())
    state._local_tensor = part
    return state

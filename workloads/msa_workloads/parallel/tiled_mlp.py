"""Gated MLPs over tiles of tokens: a tile's activations live only while it is computed.

The function keeps its input and nothing else; backward computes each tile's two inner products
again, and never the outer one. Gradients of the weights are added up over tiles in fp32.

What is kept is saved *before* anything is computed. A checkpoint around the layer stops computing
again as soon as it has all that was saved, so the MLP that ends a layer is not computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from msa_workloads.parallel import elementwise
from msa_workloads.parallel.matmul import Sum
from msa_workloads.parallel.mesh import UnsupportedError
from msa_workloads.parallel.rows import own_part, scatter_rows
from msa_workloads.stand_ins import GATED, is_gated


def tile_mlps(layers: nn.ModuleList, tile: int, *, compile_steps: bool) -> None:
    """Make every layer's MLP run over tiles of ``tile`` tokens.

    With a ``tile`` of 0 gated MLPs run over one tile, and others are left as they are. Otherwise
    raises :class:`~msa_workloads.parallel.mesh.UnsupportedError` for a layer whose MLP is not
    ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``.
    """
    for number, layer in enumerate(layers):
        mlp = getattr(layer, "mlp", None)
        if mlp is not None and is_gated(mlp):
            mlp.forward = TiledMlp(mlp, tile, compile_steps)
        elif tile:
            kind = type(mlp).__name__ if mlp is not None else type(layer).__name__
            raise UnsupportedError(
                f"memory.mlp_chunk: layer {number} has {kind}, which is not a gated MLP of "
                f"{', '.join(GATED)} and nothing else; use mlp_chunk: 0"
            )


class TiledMlp:
    """A gated MLP's forward, tile by tile; (..., hidden) to (..., hidden)."""

    def __init__(self, mlp: nn.Module, tile: int, compile_steps: bool) -> None:
        self.mlp, self.tile = mlp, tile
        self.gate, self.gate_backward = _gated(mlp.act_fn), _gated_backward(mlp.act_fn)
        # Others differentiate by autograd, which is not for compiling.
        if compile_steps and type(mlp.act_fn).__name__ in _STEPS:
            self.gate = elementwise.compiled(self.gate)
            self.gate_backward = elementwise.compiled(self.gate_backward)

    def __call__(self, hidden: Tensor) -> Tensor:
        projections = [getattr(self.mlp, name) for name in GATED[:3]]
        down = projections[2].weight
        # Each tensor rank computes its part of the inner size for all rows, and keeps its slice
        # of the sum of all parts.
        group = down.device_mesh.get_group() if isinstance(down, DTensor) else None
        weights = [own_part(p.weight) for p in projections]
        weights += [None if p.bias is None else own_part(p.bias) for p in projections]
        if group is None:
            return self._tiles(hidden, weights)
        bias = weights.pop()
        out = scatter_rows(self._tiles(hidden, [*weights, None]), group)
        return out if bias is None else out + bias

    def _tiles(self, hidden: Tensor, weights: list[Tensor | None]) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        token = torch.empty(0, requires_grad=torch.is_grad_enabled())
        # In a tuple: as an argument of its own, the tensor would become a part of the graph.
        kept = (_Keep.apply(token, rows, *weights),)
        return _Tiles.apply(self, kept, rows, *weights).view(*hidden.shape[:-1], -1)

    def bounds(self, rows: int) -> list[slice]:
        """The tiles of so many rows."""
        size = self.tile or rows
        return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


class _Keep(torch.autograd.Function):
    """Saves tensors for another function; its own output is never used."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nothing depends on what this function returns")


class _Tiles(torch.autograd.Function):
    """The MLP; reads its tensors in backward from the node of :class:`_Keep`."""

    @staticmethod
    def forward(
        ctx: Any, mlp: TiledMlp, kept: tuple[Tensor], rows: Tensor, gate: Tensor, up: Tensor,
        down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, down_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.mlp, ctx.kept = mlp, kept
        out = rows.new_empty(rows.shape[0], down.shape[0])
        for tile in mlp.bounds(rows.shape[0]):
            g, u = _product(rows[tile], gate, gate_bias), _product(rows[tile], up, up_bias)
            torch.mm(mlp.gate(g, u), down.t(), out=out[tile])
            if down_bias is not None:
                out[tile] += down_bias
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:  # type: ignore[override]
        (kept,), mlp = ctx.kept, ctx.mlp
        ctx.kept = None
        rows, gate, up, down, gate_bias, up_bias, down_bias = kept.grad_fn.saved_tensors
        del kept
        drows = torch.empty_like(rows)
        tiles = mlp.bounds(rows.shape[0])
        dgate, dup, ddown = (Sum(weight, len(tiles)) for weight in (gate, up, down))
        biases = [None if b is None else Sum(b, len(tiles)) for b in (gate_bias, up_bias)]
        for tile in tiles:
            x, dy = rows[tile], dout[tile]
            g, u = _product(x, gate, gate_bias), _product(x, up, up_bias)
            active, dg, du = mlp.gate_backward(g, u, dy @ down)
            del g, u
            ddown.add_product(dy, active)
            del active
            torch.mm(dg, gate, out=drows[tile])
            drows[tile].addmm_(du, up)
            dgate.add_product(dg, x)
            dup.add_product(du, x)
            for bias, gradient in zip(biases, (dg, du), strict=True):
                if bias is not None:
                    bias.add_rows(gradient)
        ddown_bias = None if down_bias is None else dout.sum(0)
        return (
            None, None, drows, dgate.total, dup.total, ddown.total,
            *(None if bias is None else bias.total for bias in biases), ddown_bias,
        )  # fmt: skip


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())


def _gated(activation: Any) -> Any:
    """act(g) * u of g and u."""
    known = _STEPS.get(type(activation).__name__)
    if known is not None:
        return known[0]

    def gate(g: Tensor, u: Tensor) -> Tensor:
        return activation(g) * u

    return gate


def _gated_backward(activation: Any) -> Any:
    """act(g) * u, dg and du of g, u and the gradient of act(g) * u.

    All three at once, because each needs the others' parts; new tensors, because compilers have
    been seen to write over what they still had to read.
    """
    known = _STEPS.get(type(activation).__name__)
    if known is not None:
        return known[1]

    def gate_backward(g: Tensor, u: Tensor, da: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            leaves = g.detach().requires_grad_(), u.detach().requires_grad_()
            a = activation(leaves[0]) * leaves[1]
            dg, du = torch.autograd.grad(a, leaves, da)
        return a.detach(), dg, du

    return gate_backward


def _silu(g: Tensor, u: Tensor) -> Tensor:
    wide = _wide(g)
    return (wide * torch.sigmoid(wide)).to(g.dtype) * u


def _silu_backward(g: Tensor, u: Tensor, da: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide, up, gradient = _wide(g), _wide(u), _wide(da)
    share = torch.sigmoid(wide)
    active = wide * share
    dg = gradient * up * share * (1 + wide * (1 - share))
    return active.to(g.dtype) * u, dg.to(g.dtype), (gradient * active).to(g.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


_STEPS = {"SiLU": (_silu, _silu_backward), "SiLUActivation": (_silu, _silu_backward)}
"""Activations whose derivative is written out, so that one pass computes all three results."""

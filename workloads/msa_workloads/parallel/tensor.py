"""Tensor parallelism of Llama-like Hugging Face models: heads, MLP, vocabulary and rows split.

Every parameter becomes a DTensor on the tensor mesh, under its own name and whole shape, so that
FSDP2, checkpoints on other meshes, optimizers and clipping treat it as any other. Activations are
plain tensors. Between attention and MLP each rank holds a slice of the rows (sequence
parallelism): they are gathered before the products that split columns, and summed and scattered
after those that split rows of a matrix.

Nothing outside the given model changes: two models of different heads live in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from msa_workloads.heads import HeadsError, HeadSplit, check_tensor
from msa_workloads.parallel.mesh import UnsupportedError
from msa_workloads.parallel.rows import (
    check_ids,
    gather_rows,
    own_part,
    pad_rows,
    part_bounds,
    scatter_rows,
)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a Hugging Face causal language model over the 1-D tensor ``mesh``, in place, once.

    Of each parameter a rank keeps only its part, on the mesh's device. Every rank must start from
    equal values; parameters on the meta device stay there, with the placements of their parts.
    Whatever gives modules another forward comes before this call. A layer's pattern
    (:func:`msa_kernels.hf.set_patterns`) becomes that of the rank's own heads.

    Raises :class:`UnsupportedError` for models and degrees that
    :func:`msa_workloads.heads.check_tensor` refuses, and for a parameter that no plan knows.
    """
    config: Any = model.config
    try:
        check_tensor(config.to_dict(), mesh.size())
    except HeadsError as error:
        raise UnsupportedError(f"mesh.tensor: {error}") from None
    split = HeadSplit(config.num_attention_heads, config.num_key_value_heads, mesh.size())
    for layer in model.base_model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, _layer_plan(split))
    _split_ends(model, mesh)
    plain = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    if plain:
        raise UnsupportedError(
            f"tensor parallelism has no rule for {plain[0]} of a {config.model_type} model"
            + (f" and {len(plain) - 1} more" if plain[1:] else "")
        )


def _layer_plan(split: HeadSplit) -> dict[str, ParallelStyle]:
    return {
        "input_layernorm": Rowwise(),
        "self_attn": Attention(split),
        "post_attention_layernorm": Rowwise(),
        "mlp": Mlp(),
    }


def _split_ends(model: Any, mesh: DeviceMesh) -> None:
    """Embedding, last norm and output head of a causal language model; tied ones stay tied."""
    body, head = model.model, model.lm_head
    tied = head.weight is body.embed_tokens.weight
    parallelize_module(body, mesh, {"embed_tokens": Embedding(), "norm": Rowwise()})
    if tied:
        head.weight = body.embed_tokens.weight
    parallelize_module(head, mesh, Head())


class Rowwise(ParallelStyle):
    """A module whose output row depends on that row only: replicated, each rank its own rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, {})
        _replace(module, _on_own_parts(module.forward))
        return module


class Column(ParallelStyle):
    """A linear layer split by output: whole rows in, this rank's columns out.

    With ``copies`` > 1 each output part of ``size`` columns belongs to that many ranks: the
    weights are replicated, and each rank computes its part alone.
    """

    def __init__(self, copies: int = 1, size: int = 0) -> None:
        self._copies, self._size = copies, size

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self._copies == 1:
            _distribute(module, device_mesh, {"weight": Shard(0), "bias": Shard(0)})
            _replace(module, _column_part)
            return module
        _distribute(module, device_mesh, {})
        begin = device_mesh.get_local_rank() // self._copies * self._size
        _replace(module, _column_copy(slice(begin, begin + self._size)))
        return module


class Row(ParallelStyle):
    """A linear layer split by input: this rank's columns in, this rank's slice of rows out."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, {"weight": Shard(1)})
        _replace(module, _row_part(device_mesh.get_group()))
        return module


class Attention(ParallelStyle):
    """Attention with each rank's own heads; rows are gathered before and scattered after it."""

    def __init__(self, split: HeadSplit) -> None:
        self._split = split

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split, rank = self._split, device_mesh.get_local_rank()
        key_value = Column(split.copies, module.head_dim)  # type: ignore[arg-type]
        plan: dict[str, ParallelStyle] = {
            "q_proj": Column(), "k_proj": key_value, "v_proj": key_value, "o_proj": Row(),
        }  # fmt: skip
        plan |= {name: Rowwise() for name in ("q_norm", "k_norm") if hasattr(module, name)}
        parallelize_module(module, device_mesh, plan)  # type: ignore[arg-type]
        shared = split.q_heads // split.degree // len(split.groups(rank))
        module.num_key_value_groups = shared  # type: ignore[assignment]
        if (pattern := getattr(module, "msa_pattern", None)) is not None:
            module.msa_pattern = split.pattern(pattern, rank)  # type: ignore[arg-type]
        group = device_mesh.get_group()

        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rows = kwargs["position_embeddings"][0].shape[1]
            whole = gather_rows(kwargs["hidden_states"], group)[:, :rows]
            return args, {**kwargs, "hidden_states": whole}

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class Mlp(ParallelStyle):
    """A gated MLP split by its inner size; rows are gathered before and scattered after it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        plan = {"gate_proj": Column(), "up_proj": Column(), "down_proj": Row()}
        parallelize_module(module, device_mesh, plan)  # type: ignore[arg-type]
        group = device_mesh.get_group()
        module.register_forward_pre_hook(lambda _, args: (gather_rows(args[0], group), *args[1:]))
        return module


class Embedding(ParallelStyle):
    """An embedding split by vocabulary: token ids (B, S) in, this rank's slice of rows out."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, {"weight": Shard(0)})
        _replace(module, _embed(device_mesh))
        return module


class Head(ParallelStyle):
    """The output head split by vocabulary, for :mod:`msa_workloads.parallel.vocab` to multiply."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, {"weight": Shard(0)})
        _replace(module, _no_logits)
        return module


Forward = Callable[..., Tensor]


def _replace(module: nn.Module, forward: Forward) -> None:
    """Give one module, and not its class, another forward."""
    module.forward = MethodType(forward, module)


def _on_own_parts(bound: Any) -> Forward:
    """The forward of a module whose parameters are this rank's plain tensors."""
    function = bound.__func__

    def forward(module: nn.Module, *args: Any) -> Tensor:
        return function(_OwnParts(module), *args)

    return forward


class _OwnParts:
    """Everything that a module's forward reads of it, parameters as plain tensors."""

    def __init__(self, module: nn.Module) -> None:
        vars(self).update(vars(module))
        for name, parameter in module._parameters.items():
            setattr(self, name, None if parameter is None else own_part(parameter))


def _column_part(module: Any, rows: Tensor) -> Tensor:
    bias = None if module.bias is None else own_part(module.bias)
    return F.linear(rows, own_part(module.weight), bias)


def _column_copy(mine: slice) -> Forward:
    def forward(module: Any, rows: Tensor) -> Tensor:
        bias = None if module.bias is None else own_part(module.bias)[mine]
        return F.linear(rows, own_part(module.weight)[mine], bias)

    return forward


def _row_part(group: dist.ProcessGroup) -> Forward:
    def forward(module: Any, columns: Tensor) -> Tensor:
        rows = scatter_rows(F.linear(columns, own_part(module.weight)), group)
        return rows if module.bias is None else rows + own_part(module.bias)

    return forward


def _embed(mesh: DeviceMesh) -> Forward:
    group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def forward(module: Any, tokens: Tensor) -> Tensor:
        begin, end = part_bounds(module.num_embeddings, ranks, rank)
        check_ids("token ids", tokens, module.num_embeddings)
        padded = pad_rows(tokens, ranks, -1)
        mine = (padded >= begin) & (padded < end)
        padding = module.padding_idx
        if padding is not None:
            padding = padding - begin if begin <= padding < end else None
        found = F.embedding((padded - begin).where(mine, 0), own_part(module.weight), padding)
        return scatter_rows(found.where(mine.unsqueeze(-1), 0), group)

    return forward


def _no_logits(module: Any, rows: Tensor) -> Tensor:
    raise UnsupportedError(
        "logits are never whole under tensor parallelism; take losses from "
        "msa_workloads.parallel.vocab, or use tensor: 1"
    )


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Make the module's own parameters DTensors, replicated unless ``placements`` says else.

    A parameter that modules share stays shared.
    """
    for name, parameter in list(module._parameters.items()):
        if parameter is None or isinstance(parameter, DTensor):
            continue
        placement = placements.get(name, Replicate())
        # Every rank has the whole: nothing is sent. The clone frees the rest of its storage.
        part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        made = nn.Parameter(part.clone(), requires_grad=parameter.requires_grad)
        module._parameters[name] = made

"""On any number of ranks the same weights, the same loss and the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msa_workloads.parallel.mesh import (
    UnsupportedError,
    check_supported,
    join_world,
    process_group_backend,
)
from msa_workloads.runspec import RunSpec


def all_gradients(specs: list[str]) -> list[dict[str, Any]]:
    """:func:`gradients` of several runs in one process: starting Python is the slow part."""
    return [gradients(spec) for spec in specs]


def gradients(spec: str) -> dict[str, Any]:
    """One step's loss, gradients and weights, whole, in plain tensors."""
    from msa_workloads.data import Loader
    from msa_workloads.model import build_model
    from msa_workloads.optimizer import clip_gradients
    from msa_workloads.parallel.collective import sum_over_ranks
    from msa_workloads.parallel.mesh import build_mesh
    from msa_workloads.train import open_data, train_step
    from torch.distributed.tensor import DTensor

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    run = RunSpec.from_json(spec)
    world = join_world(run.device)
    mesh = build_mesh(run.mesh, world)
    data = open_data(run)
    sharded = world.size > 1 or run.training.precision == "bf16"
    model = build_model(run, 260, mesh if sharded else None, world.device)
    weights = {name: whole(p) for name, p in model.named_parameters()}
    loader = Loader(
        data.training, mesh.data_rank, mesh.data_ranks, run.sequence.micro_batch,
        run.sequence.accumulation,
    )  # fmt: skip
    read = loader.step(0)
    valid, digest = sum_over_ranks(read.valid, read.digest, device=world.device)
    loss = train_step(model, read, int(valid), mesh)
    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    norm = clip_gradients(model, 0.0)
    return {
        "loss": loss, "grads": grads, "weights": weights, "norm": norm,
        "valid": valid, "digest": int(digest) % 2**62, "samples": read.samples,
    }  # fmt: skip


SPLITS = {
    1: [({}, 4, 1), ({}, 1, 4)],
    2: [({"data_shard": 2}, 2, 1), ({"data_replicate": 2}, 1, 2)],
    4: [({"data_shard": 2, "data_replicate": 2}, 1, 1)],
}
"""By number of ranks: mesh, micro-batch and accumulation of steps that read the same samples."""


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_number_of_ranks(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    def run(ranks: int) -> list[list[Any]]:
        specs = [
            make_spec(mesh=mesh, sequence={"micro_batch": micro, "accumulation": accumulation})
            for mesh, micro, accumulation in SPLITS[ranks]
        ]
        by_rank = on_ranks(all_gradients, ranks, specs=[spec.to_json() for spec in specs])
        return [list(results) for results in zip(*by_rank, strict=True)]

    (alone,), *others = run(1)
    for results in [*others, *run(2), *run(4)]:
        assert sorted(k for r in results for k in r["samples"]) == [0, 1, 2, 3]
        for result in results:
            assert result["valid"] == alone["valid"]
            assert result["digest"] == alone["digest"]
            assert result["loss"] == pytest.approx(alone["loss"], rel=1e-6)
            assert result["norm"] == pytest.approx(alone["norm"], rel=1e-5)
            for key, weight in alone["weights"].items():
                assert torch.equal(result["weights"][key], weight), key
            assert result["grads"].keys() == alone["grads"].keys()
            for key, grad in alone["grads"].items():
                torch.testing.assert_close(result["grads"][key], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_memory_savers_and_bf16_keep_the_gradients(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    specs = [
        make_spec(),
        make_spec(memory={"checkpointing": "full", "loss_chunk": 50}),
        make_spec(training={"precision": "bf16"}),
    ]
    ((plain, saving, coarse),) = on_ranks(all_gradients, 1, specs=[s.to_json() for s in specs])
    for key, grad in plain["grads"].items():
        torch.testing.assert_close(saving["grads"][key], grad, rtol=1e-4, atol=1e-6)
    assert coarse["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    for key, grad in plain["grads"].items():
        assert coarse["grads"][key].dtype == torch.float32
        error = (coarse["grads"][key] - grad).norm() / grad.norm()
        assert error < 0.1, (key, error)


def test_tied_embeddings_and_the_seed(make_spec: Callable[..., RunSpec]) -> None:
    from dataclasses import replace

    from msa_workloads.model import build_model

    spec = make_spec()
    config = {**spec.model.config, "tie_word_embeddings": True}
    tied = replace(spec, model=replace(spec.model, config=config))
    device = torch.device("cpu")
    model = build_model(tied, 260, None, device).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    one, two = (build_model(make_spec(training={"seed": s}), 260, None, device) for s in (0, 1))
    pairs = zip(one.named_parameters(), two.named_parameters(), strict=True)
    same = [name for (name, a), (_, b) in pairs if torch.equal(a, b)]
    assert all("norm" in name for name in same)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"mesh": {"context": 97}}, "found 97 for sequences of 96 tokens; .* at most 96"),
        ({"mesh": {"data_shard": 0}}, "mesh.data_shard: found 0, must be at least 1"),
        (
            {"mesh": {"context": 6}, "context": {"heads": 4}},
            "context.heads: found 4, which does not divide .* valid: 1, 2, 3, 6",
        ),
        (
            {"mesh": {"context": 12}, "context": {"heads": 3}},
            "4 query heads and 2 key/value heads do not split over 3 ranks; valid: 1, 2, 4",
        ),
        (
            {"mesh": {"context": 60}, "context": {"layout": "zigzag"}},
            "a sequence of 96 tokens is too short for zigzag over 60 ranks, .*nearest: zigzag",
        ),
        ({"mesh": {"tensor": 3}}, r"mesh.tensor: found 3, allowed: 1, 2, 4 \(4 query and 2"),
        ({"memory": {"checkpoint_layers": 0}}, "checkpoint_layers: found 0"),
        ({"attention": {"backend": "tritn"}}, "backend: found 'tritn', allowed: auto, .*triton,"),
    ],
)
def test_what_this_release_cannot_do_is_refused(
    make_spec: Callable[..., RunSpec], parts: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        check_supported(make_spec(**parts))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "lama"}, "Unrecognized model identifier: lama"),
        ({"vocab_size": 100}, "found 100, tokenizer 'bytes' needs at least 260"),
        ({"max_position_embeddings": 64}, "found 96, the model's max_position_embeddings"),
        ({"pad_token_id": 128_001}, "pad_token_id: found 128001, the vocabulary ends at 259"),
        ({"attention_dropout": 0.1}, "attention_dropout: found 0.1, and .*; use 0"),
        ({"model_type": "mixtral", "output_router_logits": True}, "output_router_logits: .*false"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(
    make_spec: Callable[..., RunSpec], change: dict[str, Any], says: str
) -> None:
    from dataclasses import replace

    from msa_workloads.model import build_model

    spec = make_spec()
    spec = replace(spec, model=replace(spec.model, config={**spec.model.config, **change}))
    with pytest.raises(UnsupportedError, match=says):
        build_model(spec, 260, None, torch.device("cpu"))


def test_layers_that_do_not_exist_are_refused() -> None:
    from msa_kernels.pattern import Dense, Window
    from msa_workloads.model import layer_patterns
    from msa_workloads.runspec import AttentionSpec

    window = {"type": "Window", "window": 3}
    patterns = layer_patterns(AttentionSpec(pattern=window, dense_layers=(1,)), 3)
    assert patterns == [Window(3), Dense(), Window(3)]
    with pytest.raises(UnsupportedError, match=r"found 3, allowed: 0 to 2"):
        layer_patterns(AttentionSpec(pattern=window, dense_layers=(3,)), 3)
    with pytest.raises(UnsupportedError, match=r"attention.pattern.window: must be at least 1"):
        layer_patterns(AttentionSpec(pattern={"type": "Window", "window": 0}), 3)


def test_the_backend_pairs_gloo_with_nccl_only_on_gpus() -> None:
    assert process_group_backend("cpu") == "gloo"
    built_in = torch.distributed.is_nccl_available()
    assert process_group_backend("gpu") == ("cpu:gloo,cuda:nccl" if built_in else "gloo")


def mesh_of_wrong_size(spec: str) -> str:
    from msa_workloads.parallel.mesh import build_mesh

    try:
        build_mesh(RunSpec.from_json(spec).mesh, join_world("cpu"))
    except UnsupportedError as error:
        return str(error)
    return "built"


@pytest.mark.slow
def test_degrees_and_ranks_must_agree(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    spec = make_spec(mesh={"data_shard": 3}).to_json()
    assert "= 3 ranks, 1 were started" in on_ranks(mesh_of_wrong_size, 1, spec=spec)[0]

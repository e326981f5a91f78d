"""What tensor parallelism does to a model: parts, patterns, loss, checkpoints, refusals."""

from __future__ import annotations

import itertools
import sys
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_kernels import hf
from msa_kernels.pattern import Dense, Dilated, PerHead, SinkWindow, Window
from msa_workloads.data import IGNORE, Batch
from msa_workloads.heads import HeadsError, HeadSplit, check_tensor, tensor_degrees, valid_degrees
from msa_workloads.loss import token_losses
from msa_workloads.model import LanguageModel
from msa_workloads.parallel import vocab
from msa_workloads.parallel.fsdp import shard_module, sum_gradients
from msa_workloads.parallel.mesh import Mesh, UnsupportedError, build_mesh, join_world
from msa_workloads.parallel.tensor import parallelize
from msa_workloads.runspec import MeshSpec
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks

TOLERANCE = 1e-5
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 53,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    "max_position_embeddings": 128,
}  # fmt: skip
PATTERNS = [PerHead((Window(9), Dense())), SinkWindow(9, 2)]


def build(kind: str, **config: Any) -> Any:
    """A tiny model in which no parameter is 0 or 1, biases and norms included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf.register()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**TINY, **config}), attn_implementation="msa",
        dtype=torch.float32,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    hf.set_patterns(model, PATTERNS)
    return model


def batch_of(sequences: int, length: int, seed: int = 3) -> Batch:
    make = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(TINY["vocab_size"], (2, sequences, length), generator=make)
    labels[:, ::5] = IGNORE
    each = torch.arange(length)
    return Batch(
        tokens=tokens, labels=labels, positions=each.expand(sequences, -1),
        documents=(each > 12).int().expand(sequences, -1),
    )  # fmt: skip


def tensor_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def error(found: Any, wanted: Any) -> float:
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return float((whole - wanted).abs().max() / wanted.abs().max())


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {"num_key_value_heads": 2}),
    ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    ("mistral", {"num_key_value_heads": 1, "pad_token_id": 7}),
]


def families() -> dict[str, float]:
    """Worst errors of loss, losses per token and gradients, by case; two models at a time."""
    mesh, errors = tensor_mesh(), {}
    for (kind, config), batch in itertools.product(KINDS, (batch_of(1, 29), batch_of(2, 32))):
        alone = build(kind, **config)
        wanted = LanguageModel(alone, 0)
        total = wanted(batch)
        total.backward()
        split = build(kind, **config)
        parallelize(split, mesh)
        # Another model, of other heads, is built and split before this one runs.
        other = build("llama", num_attention_heads=4, hidden_size=16)
        parallelize(other, mesh)
        for chunk in (0, 7):
            found = LanguageModel(split, chunk, split=True)
            found.zero_grad()
            loss = found(batch)
            loss.backward()
            worst = [error(loss, total)]
            worst.append(error(found(batch, per_token=True), wanted(batch, per_token=True)))
            with torch.no_grad():
                worst.append(error(found(batch), total))
            pairs = zip(split.named_parameters(), alone.named_parameters(), strict=True)
            for (name, part), (same, whole) in pairs:
                assert name == same and part.shape == whole.shape
                worst.append(error(part.grad, whole.grad))
            errors[f"{kind}, {len(batch.tokens)} sequences, chunk {chunk}"] = max(worst)
        assert LanguageModel(other, 0, split=True)(batch).isfinite()
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_family_equals_one_process(ranks: int):
    for errors in on_forks(families, ranks):
        assert len(errors) == 4 * len(KINDS)
        for case, worst in errors.items():
            assert worst <= TOLERANCE, case


def parts() -> dict[str, Any]:
    """How parameters lie on this rank, and what patterns its layers have."""
    mesh = tensor_mesh()
    model = build("qwen3", num_key_value_heads=2, tie_word_embeddings=True)
    parallelize(model, mesh)
    with pytest.raises(UnsupportedError) as refused:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    return {
        "placements": {n: str(p.placements[0]) for n, p in model.named_parameters()},
        "own": all(
            p.to_local().untyped_storage().nbytes() == p.to_local().numel() * 4
            for p in model.parameters()
        ),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "patterns": [layer.msa_pattern for layer in hf.attention_layers(model)],
        "logits": str(refused.value),
    }


@pytest.mark.slow
def test_ranks_keep_their_parts_and_their_patterns():
    for rank, found in enumerate(on_forks(parts, 4)):
        assert found["own"], "a part must not keep the whole's storage alive"
        assert found["tied"]
        layer = "model.layers.1."
        placed = found["placements"]
        assert {n.removeprefix(layer): p for n, p in placed.items() if layer in n} == {
            "self_attn.q_proj.weight": "S(0)", "self_attn.o_proj.weight": "S(1)",
            # Two key/value heads on four ranks: both weights are whole on each.
            "self_attn.k_proj.weight": "R", "self_attn.v_proj.weight": "R",
            "self_attn.q_norm.weight": "R", "self_attn.k_norm.weight": "R",
            "mlp.gate_proj.weight": "S(0)", "mlp.up_proj.weight": "S(0)",
            "mlp.down_proj.weight": "S(1)",
            "input_layernorm.weight": "R", "post_attention_layernorm.weight": "R",
        }  # fmt: skip
        assert found["placements"]["model.embed_tokens.weight"] == "S(0)"
        assert found["patterns"] == [(Window(9), Dense())[rank // 2], SinkWindow(9, 2)]
        assert "logits are never whole" in found["logits"]


def sharded(spec: MeshSpec, kind: str, **config: Any) -> tuple[Mesh, LanguageModel, Any]:
    mesh = build_mesh(spec, join_world("cpu"))
    inner = build(kind, **config)
    if spec.tensor > 1:
        parallelize(inner, mesh["tp"])
    model = LanguageModel(inner, 0, split=spec.tensor > 1)
    for layer in model.layers:
        shard_module(layer, mesh, "fp32")
    shard_module(model, mesh, "fp32")
    sum_gradients(model.modules())
    return mesh, model, torch.optim.AdamW(model.parameters(), lr=1e-2)


MESHES = [
    MeshSpec(tensor=4), MeshSpec(tensor=2, data_shard=2), MeshSpec(tensor=2, data_replicate=2),
    MeshSpec(data_shard=4),
]  # fmt: skip


def reshard() -> dict[str, float]:
    """Errors of the third step's loss: on one mesh throughout, and after two steps on another."""
    dist.init_process_group("gloo")
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    config = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    batches = [batch_of(1, 29, seed) for seed in range(4)]

    def step(mesh: Mesh, model: LanguageModel, optimizer: Any) -> torch.Tensor:
        total = torch.zeros(())
        for batch in batches[mesh.data_rank :: mesh.data_ranks]:
            loss = model(batch)
            loss.backward()
            total += loss.detach() if mesh.owns_tokens else 0
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        return total

    inner = build("qwen3", **config)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    wanted = torch.zeros(())
    for _ in range(3):
        wanted = torch.stack([LanguageModel(inner, 0)(batch) for batch in batches]).sum()
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()

    errors = {}
    for n, spec in enumerate(MESHES):
        run = sharded(spec, "qwen3", **config)
        for _ in range(2):
            step(*run)
        states, optimizers = get_state_dict(*run[1:])
        dcp.save({"m": states, "o": optimizers}, checkpoint_id=f"{folder[0]}/{n}")
        errors[f"{spec}"] = error(step(*run), wanted.detach())
    for n, spec in itertools.product((0, 1, 3), MESHES):
        if MESHES[n] == spec:
            continue
        run = sharded(spec, "qwen3", **config)
        states, optimizers = get_state_dict(*run[1:])
        state = {"m": states, "o": optimizers}
        dcp.load(state, checkpoint_id=f"{folder[0]}/{n}")
        set_state_dict(*run[1:], model_state_dict=state["m"], optim_state_dict=state["o"])
        errors[f"{MESHES[n]} to {spec}"] = error(step(*run), wanted.detach())
    return errors


@pytest.mark.slow
def test_checkpoints_and_optimizer_states_move_between_tensor_degrees():
    errors = on_forks(reshard, 4)[0]
    assert len(errors) == 4 + 9
    for case, worst in errors.items():
        assert worst <= TOLERANCE, case


class Alive(TorchDispatchMode):
    """Most bytes of tensors that lived at once since the mode began, views counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[override]
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            # The storage of a DTensor is none: its part is a tensor of its own.
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def making() -> dict[str, Any]:
    """Bytes alive while a model is made, bytes of its parts, and whether its weights are those of
    one process."""
    from mesh_cases import Case
    from msa_workloads.model import build_model

    spec = Case((1, 1, 1, 2)).spec()
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 12, "head_dim": 16}
    spec = replace(spec, model=replace(spec.model, config={**spec.model.config, **sizes}))
    mesh = build_mesh(spec.mesh, join_world("cpu"))
    with Alive() as alive:
        model = build_model(spec, 52, mesh, mesh.device)
    whole = build_model(replace(spec, mesh=MeshSpec()), 52, None, mesh.device)
    equal = all(
        torch.equal(part.full_tensor(), full)  # type: ignore[union-attr]
        for part, full in zip(model.parameters(), whole.parameters(), strict=True)
    )
    sizes = [sum(p.numel() * 4 for p in m.parameters()) for m in (whole, whole.layers[0])]
    parts = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())  # type: ignore[operator]
    return {
        "most": alive.most,
        "model": sizes[0],
        "layer": sizes[1],
        "parts": parts,
        "equal": equal,
    }


@pytest.mark.slow
def test_no_rank_holds_more_than_its_parts_and_one_layer():
    for found in on_forks(making, 2):
        assert found["equal"], "weights depend on seed and name, not on the split"
        ends = found["model"] - 12 * found["layer"]
        assert found["parts"] < 0.6 * found["model"]
        assert found["most"] <= found["parts"] + 2 * max(found["layer"], ends), found


def compiled() -> dict[str, float]:
    """Errors of a model whose layers are compiled, each into one graph."""
    mesh = tensor_mesh()
    batch = batch_of(1, 29)
    plain = build("qwen3")
    parallelize(plain, mesh)
    wanted = LanguageModel(plain, 0, split=True)
    total = wanted(batch)
    total.backward()
    model = build("qwen3")
    parallelize(model, mesh)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    loss = LanguageModel(model, 0, split=True)(batch)
    loss.backward()
    return {"loss": error(loss, total)} | {
        name: error(found.grad.full_tensor(), whole.grad.full_tensor())
        for (name, found), whole in zip(model.named_parameters(), plain.parameters(), strict=True)
    }


@pytest.mark.slow
def test_split_layers_compile_into_one_graph():
    for errors in on_forks(compiled, 2):
        assert max(errors.values()) <= TOLERANCE


def vocabularies() -> dict[str, float]:
    """Errors of loss and gradients over vocabularies that ranks do not divide."""
    mesh, errors = tensor_mesh(), {}
    make = torch.Generator().manual_seed(5)
    for size, rows, chunk in itertools.product((7, 64, 101), (1, 6, 13), (0, 1, 5, 100)):
        hidden = torch.randn(2, rows, 12, generator=make)
        matrix = torch.randn(size, 12, generator=make)
        labels = torch.randint(size, (2, rows), generator=make)
        labels[0, rows // 2 :] = IGNORE
        leaves = hidden.clone().requires_grad_(), matrix.clone().requires_grad_()
        per_token = token_losses(leaves[0] @ leaves[1].T, labels)
        (3 * per_token.sum()).backward()
        ranks, rank = mesh.size(), mesh.get_local_rank()
        mine = F.pad(hidden, (0, 0, 0, -rows % ranks)).chunk(ranks, 1)[rank].clone()
        mine.requires_grad_()
        weight: Any = torch.nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)]))
        loss = vocab.summed_loss(mine, weight, labels, chunk)
        (3 * loss).backward()
        slices = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(slices, mine.grad)
        worst = [
            error(loss, per_token.sum()),
            error(vocab.token_losses(mine, weight, labels, chunk), per_token),
            error(torch.cat(slices, 1)[:, :rows], leaves[0].grad),
            error(weight.grad, leaves[1].grad),
        ]
        errors[f"vocabulary {size}, {rows} rows, chunk {chunk}"] = max(worst)
    nothing = torch.full((2, 5), IGNORE)
    hidden: Any = torch.randn(2, 2, 12).requires_grad_()
    weight = torch.nn.Parameter(distribute_tensor(torch.randn(9, 12), mesh, [Shard(0)]))
    loss = vocab.summed_loss(hidden[:, : -(-5 // mesh.size())], weight, nothing, 2)
    loss.backward()
    errors["all ignored"] = float(loss.detach().abs() + hidden.grad.abs().max())
    return errors


@pytest.mark.slow
def test_the_loss_over_a_split_vocabulary_is_that_of_the_whole():
    for errors in on_forks(vocabularies, 3):
        for case, worst in errors.items():
            assert worst <= TOLERANCE, case


def beyond() -> list[str]:
    """What is said of labels and token ids that the vocabulary does not have."""
    mesh, said = tensor_mesh(), []
    model = build("llama")
    parallelize(model, mesh)
    split = LanguageModel(model, 0, split=True)
    for name in ("labels", "tokens"):
        for found in (-1, TINY["vocab_size"]):
            batch = batch_of(1, 8)
            getattr(batch, name)[0, 3] = found
            for more in ({}, {"per_token": True}):
                with pytest.raises(RuntimeError) as refused:
                    split(batch, **more)
                said.append(str(refused.value))
    return said


def test_ids_beyond_a_split_vocabulary_are_an_error_on_every_rank():
    for said in on_forks(beyond, 2):
        for name, texts in (("labels", said[:4]), ("token ids", said[4:])):
            assert len(texts) == 4
            assert all(f"{name}: found one outside the vocabulary, 0 to 52" in t for t in texts)


def narrow() -> list[float]:
    """In bf16, gradients of a divided loss along those of fp64, over their squares: 1 without
    bias; of hidden states and of the vocabulary's part, computed at once and in chunks."""
    mesh = tensor_mesh()
    torch.manual_seed(2)
    hidden, matrix = torch.randn(1, 96, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    labels = torch.randint(128, (1, 96))
    divided = 48629.0  # its inverse lies between two numbers of bf16
    leaves = hidden.double().requires_grad_(), matrix.double().requires_grad_()
    (token_losses(leaves[0] @ leaves[1].T, labels).sum() / divided).backward()
    found = []
    for chunk in (0, 16):
        mine = hidden.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone().requires_grad_()
        weight: Any = torch.nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)]))
        (vocab.summed_loss(mine, weight, labels, chunk) / divided).backward()
        for got, leaf, dim in ((mine.grad, leaves[0], 1), (weight.grad.to_local(), leaves[1], 0)):
            assert got is not None and leaf.grad is not None
            want = leaf.grad.chunk(mesh.size(), dim)[mesh.get_local_rank()]
            found.append(float((got.double() * want).sum() / want.square().sum()))
    return found


def test_a_divided_loss_has_no_bias_in_bf16():
    for found in on_forks(narrow, 2):
        assert found == pytest.approx([1.0] * 4, abs=1e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "valid"),
    [
        (28, 4, 18944, [1, 2, 4]), (40, 8, 13824, [1, 2, 4, 8]), (12, 2, 8960, [1, 2, 4]),
        (32, 8, 14336, [1, 2, 4, 8, 16, 32]), (12, 12, 3072, [1, 2, 3, 4, 6, 12]),
        (52, 52, 13312, [1, 2, 4, 13, 26, 52]),
    ],
)  # fmt: skip
def test_degrees_split_heads_by_group_and_the_mlp_evenly(
    heads: int, kv_heads: int, inner: int, valid: list[int]
):
    assert tensor_degrees(heads, kv_heads, inner) == valid


@pytest.mark.parametrize(
    ("config", "degree", "says"),
    [
        ({"model_type": "qwen2", "num_attention_heads": 28, "num_key_value_heads": 4,
          "intermediate_size": 18944}, 8,
         r"found 8, allowed: 1, 2, 4 \(28 query and 4 key/value heads, an MLP of 18944\); near"),
        ({"model_type": "llama", "num_attention_heads": 8}, 3, "allowed: 1, 2, 4, 8 .8 query"),
        ({"model_type": "gemma2"}, 2, "type 'gemma2', allowed: 1; .* llama, mistral, qwen2, qwe"),
        ({"model_type": "llama", "num_attention_heads": 8, "vocab_size": 9}, 8,
         "a vocabulary of 9 leaves the last rank without an entry"),
    ],
)  # fmt: skip
def test_a_degree_that_cannot_be_is_refused_with_those_that_can(
    config: dict[str, Any], degree: int, says: str
):
    with pytest.raises(HeadsError, match=says):
        check_tensor(config, degree)
    check_tensor(config, 1)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_every_query_head_meets_its_own_group(data: st.DataObject):
    kv_heads = data.draw(st.integers(1, 12))
    share = data.draw(st.integers(1, 6))
    heads = kv_heads * share
    degree = data.draw(st.sampled_from(valid_degrees(heads, kv_heads)))
    split = HeadSplit(heads, kv_heads, degree)
    for rank in range(degree):
        queries = range(rank * heads // degree, (rank + 1) * heads // degree)
        assert sorted({query // share for query in queries}) == list(split.groups(rank))


MEMBERS = (Window(512), Dense(), SinkWindow(256, 16), Dilated(8))


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_ranks_are_balanced_where_members_alternate_over_their_groups(members: int, degree: int):
    split = HeadSplit(64, 16, degree)
    pattern = PerHead(MEMBERS[:members])
    assert split.balance(pattern, 8192) <= 1.03
    areas = [
        sum(split.pattern(pattern, rank).for_group(g).pairs(8192) for g in range(16 // degree))
        for rank in range(degree)
    ]
    assert max(areas) * degree <= 1.03 * sum(areas)

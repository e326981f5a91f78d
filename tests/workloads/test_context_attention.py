"""On any number of ranks the outputs, LSE and gradients of one process, for every pattern."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msa_kernels import backend as backends
from msa_kernels.attention import msa_attention
from msa_kernels.backend import BackendError
from msa_kernels.pattern import BlockTopK, Columns, Dense, Dilated, Pattern, PerHead, Window
from msa_kernels.plan import Request
from msa_kernels.reference import reference
from msa_kernels.testing import DenseBands
from msa_kernels.tiled import TorchTiles
from msa_workloads.context.attention import ContextPlan, Options, context_attention
from msa_workloads.context.commplan import plan_bytes
from msa_workloads.context.exchange import moved, reset
from msa_workloads.context.kernel import choose
from msa_workloads.context.layout import Layout, LayoutError, contiguous, residues, zigzag
from msa_workloads.context.solver import solve
from msa_workloads.context.ulysses import HeadsError, HeadSplit, valid_degrees
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parent))
from context_cases import LAYOUTS, PATTERNS, PER_HEAD
from forked_ranks import on_forks

TOLERANCE = 1e-5
"""Of the largest value of the single process, in fp32."""
DOCUMENTS = {
    97: [(97,), (13, 1, 40, 43), (5, 88, 4)],
    83: [(83,), (41, 42), (1, 1, 1, 80)],
}
HEADS = {"grouped": (4, 2), "one pair": (2, 1), "equal": (4, 4)}


def tensors(
    tokens: int, heads: tuple[int, int], seed: int, batch: int = 1, dim: int = 8
) -> list[torch.Tensor]:
    """q, k, v and the cotangents of the output and of the LSE, the same on every rank."""
    make = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    shapes = [(batch, tokens, h, dim) for h in (q_heads, kv_heads, kv_heads, q_heads)]
    return [torch.randn(s, generator=make) for s in (*shapes, (batch, q_heads, tokens))]


def document_ids(rows: list[tuple[int, ...]]) -> torch.Tensor:
    return torch.tensor([[d for d, n in enumerate(row) for _ in range(n)] for row in rows])


def alone(
    inputs: list[torch.Tensor], pattern: Pattern, ids: torch.Tensor | None
) -> list[torch.Tensor]:
    """Output, LSE and the three gradients of one process."""
    q, k, v = (t.clone().requires_grad_() for t in inputs[:3])
    out, lse = msa_attention(q, k, v, pattern, documents=ids, return_lse=True)
    seen = torch.where(lse == -torch.inf, 0.0, lse)
    ((out * inputs[3]).sum() + (seen * inputs[4]).sum()).backward()
    return [t.detach() for t in (out, lse.transpose(1, 2), q.grad, k.grad, v.grad)]


def together(
    inputs: list[torch.Tensor], wanted: list[torch.Tensor], home: Layout, rank: int,
    with_lse: bool = True, **call: Any,
) -> tuple[float, int, int]:  # fmt: skip
    """Largest error of this rank's rows, relative to the largest value of the single process; and
    the bytes of keys received and sent in forward."""
    names = ("q", "k", "v", "dout", "dlse")
    whole = dict(zip(names, [*inputs[:4], inputs[4].transpose(1, 2)], strict=True))
    whole["lse"] = wanted[1]
    mine = home.shard(whole, rank)
    q, k, v = (mine[n].requires_grad_() for n in names[:3])
    reset()
    found = context_attention(q, k, v, **call, return_lse=with_lse)
    # Where the LSE is not asked for, the expected one stands in for it.
    out, lse = found if isinstance(found, tuple) else (found, mine["lse"].transpose(1, 2))
    keys = moved().get("keys")
    seen = torch.where(lse == -torch.inf, 0.0, lse).transpose(1, 2)
    ((out * mine["dout"]).sum() + (seen * mine["dlse"]).sum()).backward()
    expected = home.shard(dict(zip("abcde", wanted, strict=True)), rank)
    real = torch.from_numpy(home.tokens_of(rank) < home.tokens)
    found = (out, lse.transpose(1, 2), q.grad, k.grad, v.grad)
    worst = 0.0
    for rows, name, full in zip(found, "abcde", wanted, strict=True):
        scale = float(full[full != -torch.inf].abs().max())
        rows, want = rows.detach(), expected[name][:, real]
        assert torch.equal(rows[:, real] == -torch.inf, want == -torch.inf), (name, call)
        difference = torch.where(want == -torch.inf, 0.0, rows[:, real] - want)
        worst = max(worst, float(difference.abs().max()) / scale if real.any() else 0.0)
        padding = rows[:, ~real]
        assert ((padding == 0) | (padding == -torch.inf)).all(), (name, call)
    return (worst, keys.received, keys.sent) if keys else (worst, 0, 0)


def cases(world: int) -> list[dict[str, Any]]:
    """Every pattern on every layout, with documents, heads, methods and fusing dealt over them."""
    found = []
    methods = [
        Options(), Options(fuse="always"), Options(fuse="never"), Options(method="p2p"),
        Options(keep_ratio=0.0), Options(method="ring"), Options(fuse="never", keep_ratio=0.0),
        Options(method="p2p", fuse="always", keep_ratio=0.0),
    ]  # fmt: skip
    number = world
    for pattern_name, pattern in {**PATTERNS, **PER_HEAD}.items():
        for layout in LAYOUTS:
            number += 1
            tokens = (97, 83)[number % 2]
            if pattern_name.startswith("listed"):
                tokens = 83
            heads = list(HEADS)[number % 3]
            if isinstance(pattern, PerHead) and heads == "one pair":
                heads = "grouped"
            found.append({
                "pattern": pattern, "layout": layout, "tokens": tokens,
                "documents": DOCUMENTS[tokens][number % 3], "heads": HEADS[heads],
                "options": methods[number * 5 % len(methods)], "seed": number,
            })  # fmt: skip
    return found


def invariance() -> dict[str, Any]:
    """All cases on this rank: errors, and bytes counted where they are not those planned."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    worst, differ = [], []
    for number, case in enumerate(cases(world)):
        inputs = tensors(case["tokens"], case["heads"], case["seed"])
        wanted = alone(inputs, case["pattern"], document_ids([case["documents"]]))
        layout, options = LAYOUTS[case["layout"]](case["tokens"], world), case["options"]
        plan = ContextPlan(layout, case["documents"], rank)
        error, received, sent = together(
            inputs, wanted, layout, rank, plan=plan, group=dist.group.WORLD,
            pattern=case["pattern"], options=options,
        )  # fmt: skip
        worst.append((error, number))
        planned = plan_bytes(case["pattern"], case["heads"][1], 8, 4, layout, case["documents"])
        most, into, out_of = planned.sum(1).max(), planned[rank].sum(), planned[:, rank].sum()
        after = moved()
        keys, back = after.get("keys"), after.get("gradients")
        totals = (keys.received, keys.sent, back.received, back.sent) if keys and back else ()
        # Keys that were not kept travel again in backward; gradients go the other way, once.
        again = options.method == "ring" or not options.keep_ratio
        times = (2,) if again else (1, 2)
        right = [(n * into, n * out_of, out_of, into) for n in times]
        if (received, sent) != (into, out_of) or (most and totals not in right):
            differ.append((number, (received, sent), totals, right))
    dist.destroy_process_group()
    return {"worst": max(worst), "bytes": differ, "cases": len(worst)}


def only_others() -> tuple[float, int]:
    """The largest error where queries see keys of other ranks alone, and how many passes of this
    rank do, with keys in another order than they arrived in."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pattern, documents = Columns(32, 4), (24, 24, 49)
    plan, inputs = ContextPlan(zigzag(97, world), documents, rank), tensors(97, (4, 2), 3)
    wanted, worst, passes = alone(inputs, pattern, document_ids([documents])), 0.0, 0
    for options in (Options(), Options(fuse="always", keep_ratio=0.0)):
        error, *_ = together(
            inputs, wanted, plan.layout, rank, plan=plan, group=dist.group.WORLD,
            pattern=pattern, options=options,
        )  # fmt: skip
        worst = max(worst, error)
        late = plan.prepare(pattern, options).late
        passes += sum(one.local[0] == one.local[1] and one.order is not None for one in late)
    return worst, passes


def in_bands() -> list[tuple[float, str]]:
    """Errors with a kernel that takes one band at a time and merges nothing, by case."""
    dist.init_process_group("gloo")
    backends.LOADERS[DenseBands.name] = DenseBands
    rank, world, tokens, errors = dist.get_rank(), dist.get_world_size(), 192, []
    layouts = [zigzag(tokens, world), contiguous(tokens, world)]
    for pattern in (Dense(), Window(40), Dilated(world, 9)):
        solved = solve(tokens, world, {pattern: 1}, multiple=8).layout
        for layout in {
            "Dense": layouts, "Window": [*layouts, solved],
            "Dilated": [residues(tokens, world, world), residues(tokens, world, 2 * world)],
        }[pattern.kind]:  # fmt: skip
            inputs = tensors(tokens, (4, 2), 7)
            inputs[4].zero_()
            for fuse in ("always", "whole"):
                error, *_ = together(
                    inputs, alone(inputs, pattern, None), layout, rank,
                    plan=ContextPlan.whole(layout, rank), group=dist.group.WORLD,
                    pattern=pattern, options=Options(fuse=fuse), backend=DenseBands.name,
                    with_lse=False,
                )  # fmt: skip
                errors.append((error, f"{pattern} on {layout.describe()}, {fuse}"))
    return errors


class Picky(TorchTiles):
    """Rounds its gradients, and refuses many stretches: on some ranks and not on others."""

    name = "picky"
    rounds = True

    def refuses(self, request: Request) -> str | None:
        if request.partial:
            return "rounds"
        many = any(len(runs.begin) > 4 for place in request.places for runs in place)
        return "too many stretches" if many else None


def kernels_apart() -> dict[str, Any]:
    """Errors where ranks choose other kernels, and what each says where a named one refuses."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    place, keys = rank // 2, across[rank % 2]
    backends.LOADERS["picky"] = Picky
    documents = (4,) * 6 + (104,)  # all but one of them on the first rank
    inputs = [t.bfloat16() for t in tensors(128, (4, 2), 5)[:4]]
    wanted = alone([*inputs, torch.zeros(1, 4, 128)], Dense(), document_ids([documents]))
    errors, used, bytes_back, said = [], set(), [], []

    def attend(home: Layout, backend: str = "auto", **call: Any) -> None:
        names = ("q", "k", "v", "dout", "dq", "dk", "dv")
        mine = home.shard(dict(zip(names, (*inputs, *wanted[2:]), strict=True)), call.pop("at"))
        q, k, v = (mine[n].requires_grad_() for n in names[:3])
        backends.reset()
        reset()
        out = context_attention(q, k, v, pattern=Dense(), backend=backend, **call)
        assert isinstance(out, torch.Tensor)
        out.backward(mine["dout"])
        used.add(backends.used()[0].backend)
        bytes_back.append(moved()["gradients"].sent + moved()["gradients"].received)
        for found, name in ((q.grad, "dq"), (k.grad, "dk"), (v.grad, "dv")):
            assert found is not None
            errors.append(float((found - mine[name]).norm() / mine[name].norm()))

    outer = contiguous(128, 2, multiple=2)
    plan = ContextPlan(outer, documents, place)
    call = {"plan": plan, "group": keys, "at": place}
    auto, backends.preference = backends.preference, lambda _: ("picky", "torch")
    for options in (Options(fuse="whole"), Options(method="ring"), Options(fuse="never")):
        attend(outer, options=options, **call)
    one = ContextPlan.whole(outer, place)
    wanted = alone([*inputs, torch.zeros(1, 4, 128)], Dense(), None)
    attend(outer, options=Options(fuse="whole"), **{**call, "plan": one})
    backends.preference = auto
    for home, more in (
        (outer, call), (outer.split(2), {**call, "heads_group": pairs[place], "at": rank}),
    ):  # fmt: skip
        try:
            attend(home, "picky", options=Options(fuse="whole"), **more)
        except BackendError as error:
            said.append(str(error))
    return {"errors": errors, "used": sorted(used), "back": bytes_back, "said": said}


def test_ranks_may_choose_other_kernels_and_fail_together():
    ranks = on_forks(kernels_apart, 4)
    assert ranks[0]["used"] == ["context/picky", "context/torch"]
    for number, result in enumerate(ranks):
        assert len(result["errors"]) == 12 and max(result["errors"]) < 0.01, result["errors"]
        # fp32 unless the kernels of all ranks round, as in the last case: half the bytes then.
        *wide, narrow = result["back"]
        assert wide == [40 * 2 * 2 * 8 * 4] * 3 and narrow == 64 * 2 * 2 * 8 * 2
        assert len(result["said"]) == 2
        for text in result["said"]:
            assert "picky: too many stretches" in text
            assert ("another rank cannot compute its part. rank " in text) == (number >= 2)


@pytest.mark.parametrize("name", ["triton", "triton-fp8"])
def test_queries_wait_for_all_keys_where_results_of_some_cannot_be_merged(name: str):
    pytest.importorskip("triton")
    with FakeTensorMode():
        q = torch.empty(1, 2048, 4, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(1, 2048, 2, 64, dtype=torch.bfloat16, device="cuda")
        for rank in range(2):
            plan = ContextPlan.whole(zigzag(4096, 2), rank)
            groups, kernel = choose(q, k, plan, Dense(), Options(), name, False)
            assert kernel.name == name
            assert [part.split for _, part in groups] == [name == "triton" and rank == 1]
        with pytest.raises(BackendError, match="Nearest"):
            choose(q, k, plan, Dense(), Options(method="ring"), "triton-fp8", False)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_made_of_bands_need_no_merge(world: int):
    for errors in on_forks(in_bands, world):
        worst, case = max(errors)
        assert worst <= TOLERANCE, case
        assert len(errors) == 14


def test_keys_of_others_alone_are_put_in_order():
    found = on_forks(only_others, 4)
    assert max(error for error, _ in found) <= TOLERANCE
    assert max(passes for _, passes in found) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [2, 3, *(pytest.param(world, marks=pytest.mark.full) for world in (1, 4, 8))]
)
def test_ranks_give_what_one_process_gives(world: int):
    for rank, result in enumerate(on_forks(invariance, world)):
        error, number = result["worst"]
        assert error <= TOLERANCE, (rank, cases(world)[number])
        assert not result["bytes"], (rank, result["bytes"])
        assert result["cases"] == (len(PATTERNS) + len(PER_HEAD)) * len(LAYOUTS)


def heads_and_rings() -> dict[str, Any]:
    """Ulysses over 4, Ulysses 2 x keys 2, every pattern; key/value heads copied where few."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    worst = []
    documents = (13, 1, 40, 43)
    for number, (name, pattern) in enumerate({**PATTERNS, **PER_HEAD}.items()):
        tokens = 97
        if name.startswith("listed"):
            tokens, documents = 83, (41, 42)
        heads = [(8, 8), (8, 4), (4, 2), (8, 2), (4, 1)][number % 5]
        inputs = tensors(tokens, heads, number)
        lengths = documents if sum(documents) == tokens else (tokens,)
        wanted = alone(inputs, pattern, document_ids([lengths]))
        outer = contiguous(tokens, 1, 4)
        plan = ContextPlan(outer, lengths, 0)
        error, *_ = together(
            inputs, wanted, outer.split(4), rank, plan=plan, group=None,
            heads_group=dist.group.WORLD, pattern=pattern,
        )  # fmt: skip
        worst.append((error, f"ulysses 4, {name}"))
        for kind, outer in {
            "zigzag": zigzag(tokens, 2, 2),
            "residues": residues(tokens, 2, 4, multiple=2),
        }.items():
            plan = ContextPlan(outer, lengths, rank // 2)
            error, *_ = together(
                inputs, wanted, outer.split(2), rank, plan=plan, group=across[rank % 2],
                heads_group=pairs[rank // 2], pattern=pattern,
                options=Options(method=("ring", "all_to_all")[number % 2]),
            )  # fmt: skip
            worst.append((error, f"ulysses 2 x 2 {kind}, {name}"))
    # Two groups a rank and four patterns: the most and the least of them come together.
    uneven = PerHead((Dense(), Window(40), Window(20), Window(3)))
    inputs = tensors(97, (8, 8), 0)
    wanted = alone(inputs, uneven, document_ids([(97,)]))
    outer = contiguous(97, 1, 4)
    error, *_ = together(
        inputs, wanted, outer.split(4), rank, plan=ContextPlan(outer, (97,), 0), group=None,
        heads_group=dist.group.WORLD, pattern=uneven,
    )  # fmt: skip
    worst.append((error, "ulysses 4, reordered"))
    return {"worst": max(worst), "heads": moved()["heads"].received}


@pytest.mark.slow
def test_heads_may_be_split_beside_the_sequence():
    for result in on_forks(heads_and_rings, 4):
        error, name = result["worst"]
        assert error <= TOLERANCE, name
        assert result["heads"] > 0


def corners() -> dict[str, Any]:
    """What the table of cases leaves out, on eight ranks."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    call = {"group": dist.group.WORLD}
    errors: dict[str, float] = {}

    # Nine tokens: three ranks hold nothing but padding.
    inputs = tensors(9, (4, 2), 1)
    layout = contiguous(9, world)
    wanted = alone(inputs, Dense(), None)
    plan = ContextPlan.whole(layout, rank)
    errors["padding only"], *_ = together(
        inputs, wanted, layout, rank, plan=plan, pattern=Dense(), **call
    )

    # Batch rows with documents of their own, and two that share theirs.
    rows = [(20, 45), (65,), (65,), (1, 2, 62)]
    ids = document_ids(rows)
    inputs = tensors(65, (4, 2), 2, batch=4)
    for name, pattern in {"window": Window(7), "heads": PerHead((Dense(), Dilated(3)))}.items():
        layout = zigzag(65, world)
        plans = ContextPlan.of_ids(layout, ids, rank)
        assert plans[1] is plans[2]
        wanted = alone(inputs, pattern, ids)
        errors[f"batch, {name}"], *_ = together(
            inputs, wanted, layout, rank, plan=plans, pattern=pattern, **call
        )

    # A layout solved for its documents.
    documents = (50, 3, 200, 44, 7, 96)
    solved = solve(400, world, {Dense(): 1}, documents).layout
    inputs = tensors(400, (2, 1), 3)
    wanted = alone(inputs, Dense(), document_ids([documents]))
    plan = ContextPlan(solved, documents, rank)
    errors["solved"], *_ = together(
        inputs, wanted, solved, rank, plan=plan, pattern=Dense(), **call
    )

    # Rows of one rank without any label: nothing of its output is used, others need its keys.
    layout = zigzag(64, world)
    inputs = tensors(64, (4, 2), 4)
    masked = torch.from_numpy(layout.tokens_of(3))
    inputs[3][:, masked] = 0
    inputs[4][:, :, masked] = 0
    wanted = alone(inputs, Window(20), None)
    plan = ContextPlan.whole(layout, rank)
    errors["masked rank"], *_ = together(
        inputs, wanted, layout, rank, plan=plan, pattern=Window(20), **call
    )
    q, k, v, dout = layout.shard(dict(zip("qkvo", inputs[:4], strict=True)), rank).values()
    for t in (q, k, v):
        t.requires_grad_()
    out = context_attention(q, k, v, plan, pattern=Window(20), **call)
    loss = (out * dout).sum() if rank != 3 else out[:, :1].sum() * 0.0
    loss.backward()
    expected = layout.shard({"k": alone([*inputs[:4], inputs[4] * 0], Window(20), None)[3]}, rank)
    errors["unused rank"] = float((k.grad - expected["k"]).abs().max())
    first = k.grad.clone()
    k.grad = None
    out = context_attention(q, k, v, plan, pattern=Window(20), **call)
    ((out * dout).sum() if rank != 3 else out[:, :1].sum() * 0.0).backward()
    return {"errors": errors, "repeats": torch.equal(first, k.grad)}


@pytest.mark.slow
def test_corners():
    for result in on_forks(corners, 8):
        assert result["repeats"]
        for name, error in result["errors"].items():
            assert error <= TOLERANCE, (name, error)


def half_precision() -> dict[str, Any]:
    """Errors in bf16 against fp64, of one process and of this group, norm-wise."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    layout, documents = zigzag(256, world), (256,)
    inputs = [t.bfloat16() for t in tensors(256, (4, 2), 5, dim=32)]
    exact = reference(*inputs[:3], Dense(), dout=inputs[3])
    assert exact.grads is not None
    wanted = [exact.out, *exact.grads]
    q, k, v = (t.clone().requires_grad_() for t in inputs[:3])
    out = msa_attention(q, k, v, Dense())
    out.backward(inputs[3])
    single = [out.detach(), q.grad, k.grad, v.grad]
    plan = ContextPlan(layout, documents, rank)
    result: dict[str, Any] = {"single": list(map(norm_error, single, wanted))}
    for name, options in {
        "ring": Options(method="ring"), "split": Options(fuse="never"),
        "bf16 gradients": Options(gradients="bf16"),
    }.items():  # fmt: skip
        mine = layout.shard(dict(zip("qkvo", inputs[:4], strict=True)), rank)
        for key in "qkv":
            mine[key].requires_grad_()
        out = context_attention(
            mine["q"], mine["k"], mine["v"], plan, dist.group.WORLD, pattern=Dense(),
            options=options,
        )  # fmt: skip
        out.backward(mine["o"])
        whole = []
        for part in (out.detach(), *(mine[key].grad for key in "qkv")):
            shards = [torch.empty(part.shape) for _ in range(world)]
            dist.all_gather(shards, part.float().contiguous())
            whole.append(layout.gather(shards))
        result[name] = [norm_error(a, b) for a, b in zip(whole, wanted, strict=True)]
    return result


def norm_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.slow
def test_the_error_in_bf16_does_not_grow_with_the_ranks():
    result = on_forks(half_precision, 8)[0]
    single = result.pop("single")
    # Partial results in bf16 would be 1.3 to 2.8 times as far off, still within what is usual.
    bounds = {"ring": 1.1, "split": 1.1, "bf16 gradients": 1.5}
    for name, errors in result.items():
        for error, alone_ in zip(errors, single, strict=True):
            assert error <= bounds[name] * alone_, (name, errors, single)


def checkpointed() -> dict[str, Any]:
    """How often keys travel and are needed in a checkpointed step, with and without a policy that
    keeps them."""
    from functools import partial

    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = contiguous(64, world)
    plan = ContextPlan.whole(layout, rank)

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kept = operator is torch.ops.msa.context_attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = context_attention(q * 1.0, k, v, plan, dist.group.WORLD, pattern=Window(9))
        assert isinstance(out, torch.Tensor)
        return out.sin()

    found, calls = [], {}
    context = partial(create_selective_checkpoint_contexts, policy)
    for name, more in {"none": None, "full": {}, "kept": {"context_fn": context}}.items():
        q, k, v = (t.requires_grad_() for t in tensors(64 // world, (4, 2), 7 + rank)[:3])
        reset()
        out = (
            attend(q, k, v) if more is None
            else checkpoint(attend, q, k, v, use_reentrant=False, **more)
        )  # fmt: skip
        out.sum().backward()
        calls[name] = moved()["keys"].calls, moved()["needed"].calls
        found.append(k.grad)
    return {"calls": calls, "equal": all(torch.equal(found[0], f) for f in found[1:])}


def test_checkpointing_can_keep_the_result():
    for result in on_forks(checkpointed, 2):
        assert result["equal"]
        assert result["calls"] == {"none": (1, 1), "full": (2, 1), "kept": (1, 1)}


def test_degrees_over_which_heads_split():
    assert valid_degrees(40, 8) == [1, 2, 4, 8, 40]
    with pytest.raises(HeadsError, match="over 16 ranks; valid: 1, 2, 4, 8, 40; nearest: 8"):
        HeadSplit(40, 8, 16)
    shares = [len(HeadSplit(12, 12, 4).groups(rank)) for rank in range(4)]
    assert shares == [3, 3, 3, 3]
    # Two models with other heads in one process: nothing is remembered.
    assert [len(HeadSplit(8, 4, 4).groups(rank)) for rank in range(4)] == [1, 1, 1, 1]
    copied = HeadSplit(8, 2, 4)
    assert [list(copied.groups(rank)) for rank in range(4)] == [[0], [0], [1], [1]]


@pytest.mark.parametrize(("kv_heads", "degree"), [(8, 2), (8, 4), (16, 4), (4, 2)])
def test_heads_of_different_patterns_are_spread_evenly(kv_heads: int, degree: int):
    pattern = PerHead((Window(64), Dense()))
    split = HeadSplit(kv_heads * 2, kv_heads, degree)
    area = []
    for rank in range(degree):
        mine = split.pattern(pattern, rank)
        area.append(sum(mine.for_group(g).pairs(1024) for g in range(len(split.groups(rank)))))
    assert max(area) * degree / sum(area) <= 1.03


def test_a_residue_layout_runs_as_a_shorter_dilation():
    layout = residues(64, 2, 4)
    plan = ContextPlan.whole(layout, 1).prepare(Dilated(4))
    assert not plan.late and not plan.stages[0].happens
    assert plan.early is not None
    assert plan.early.queries.position.tolist() == [0] and plan.early.queries.rows == 32
    assert plan.pattern.parts() == Dilated(2).parts()


def test_a_window_computes_most_rows_before_the_halo_arrives():
    layout = contiguous(1024, 4)
    plan = ContextPlan.whole(layout, 2).prepare(Window(17))
    assert not plan.split and plan.early is not None
    assert plan.early.queries.length.sum() == 256 - 16
    (late,) = plan.late
    assert (late.rows.slices, late.local, late.keys.length.sum()) == (((0, 16),), (0, 16), 32)
    dense = ContextPlan.whole(zigzag(1024, 4), 2).prepare(Dense())
    assert dense.split and dense.early is not None
    assert dense.early.queries.length.sum() == 256


def attempt(**change: Any) -> Any:
    shapes = {"q": (1, 16, 4, 8), "k": (1, 16, 2, 8)} | change.pop("shapes", {})
    plan = change.pop("plan", None) or ContextPlan.whole(contiguous(16, 1), 0)
    q, k, v = torch.randn(shapes["q"]), torch.randn(shapes["k"]), torch.randn(shapes["k"])
    return context_attention(q, k, v, plan, None, **{"pattern": Window(3), **change})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"plan": ContextPlan.whole(contiguous(16, 2), 1)}, LayoutError,
         "the plan is for rank 1 of 2, this is rank 0 of a group of 1"),
        ({"plan": ContextPlan.whole(contiguous(17, 1), 0)}, LayoutError,
         r"q has 16 rows, this rank owns 17 of 17"),
        ({"plan": [ContextPlan.whole(contiguous(16, 1), 0)] * 2}, LayoutError,
         "2 plans for a batch of 1"),
        ({"shapes": {"q": (16, 4, 8)}}, ValueError, "3 dimensions"),
        ({"shapes": {"q": (1, 16, 3, 8)}}, ValueError, "not a multiple"),
        ({"pattern": BlockTopK(4, 2)}, BackendError, "at run time"),
        ({"backend": "sdpa"}, BackendError, "sdpa: .*Nearest: backend='auto'"),
        ({"backend": "cuda"}, BackendError, "no backend 'cuda'"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_sent(change, error, says):
    with pytest.raises(error, match=says):
        attempt(**change)


def test_options_and_plans_are_checked():
    with pytest.raises(ValueError, match="method: found 'tree', allowed: all_to_all, p2p, ring"):
        Options(method="tree")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="documents hold 15 tokens, the layout is for 16"):
        ContextPlan(contiguous(16, 2), (8, 7), 0)
    with pytest.raises(LayoutError, match="rank 2, the layout has ranks 0 to 1"):
        ContextPlan.whole(contiguous(16, 2), 2)


def test_autocast_decides_the_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attempt().dtype == torch.bfloat16


def test_flops_are_those_of_the_pairs_that_a_rank_attends():
    from torch.utils.flop_counter import FlopCounterMode

    pattern, documents = PerHead((Window(5), Dense())), (9, 7)
    pairs = sum(p.pairs(n) for p in pattern.members for n in documents) * 2  # query heads of each
    plan = ContextPlan(contiguous(16, 1), documents, 0)
    q, k, v = (t.requires_grad_() for t in tensors(16, (4, 2), 1)[:3])
    with FlopCounterMode(display=False) as counter:
        out = context_attention(q, k, v, plan, None, pattern=pattern)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    assert counted[torch.ops.msa.context_attention] == 2 * 2 * 8 * pairs
    assert counted[torch.ops.msa.context_attention_backward] == 5 * 2 * 8 * pairs


def test_shapes_are_known_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    plan = ContextPlan.whole(contiguous(16, 1), 0)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 16, h, 8, requires_grad=True) for h in (4, 2, 2))
        out, lse = context_attention(q, k, v, plan, None, pattern=Window(3), return_lse=True)
        out.sum().backward()
    assert (out.shape, lse.shape) == ((2, 16, 4, 8), (2, 4, 16))
    assert q.grad is not None and q.grad.shape == q.shape
    assert k.grad is not None and k.grad.shape == k.shape

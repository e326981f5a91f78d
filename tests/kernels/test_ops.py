"""The operators are well formed, compile without breaks, and count FLOPs by attended pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msa_kernels import ops
from msa_kernels.attention import msa_attention
from msa_kernels.backend import BackendError
from msa_kernels.encoding import KEPT, decode
from msa_kernels.module import MsaAttention
from msa_kernels.pattern import (
    BlockList,
    Dense,
    Dilated,
    Documents,
    Pattern,
    PerHead,
    SinkWindow,
    Window,
)
from msa_kernels.placement import Placement
from msa_kernels.testing import seen_pairs
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

IDS = torch.tensor([[0] * 7 + [1] * 13, [0] * 20])
BOUNDS = torch.tensor([0, 7, 20])


def arguments(
    batch: int, pattern: Pattern, ids: torch.Tensor | None, bounds: torch.Tensor | None
) -> tuple[object, ...]:
    q, k, v = (torch.randn(batch, 20, h, 8, requires_grad=True) for h in (4, 2, 2))
    return (
        q, k, v, pattern.encoded(), 0.3, ids, bounds, bounds, "bottom-right", "torch"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "pattern", "ids", "bounds"),
    [
        (2, SinkWindow(5, 2), None, None),
        (2, Dilated(3), IDS, None),
        (1, PerHead((Window(4), Dense())), None, BOUNDS),
    ],
)
def test_operators_are_well_formed(
    batch: int, pattern: Pattern, ids: torch.Tensor | None, bounds: torch.Tensor | None
) -> None:
    given = arguments(batch, pattern, ids, bounds)
    opcheck(torch.ops.msa.attention.default, given)
    out, lse = ops.attention(*given)  # type: ignore[arg-type]
    tensors = [t.detach() for t in (*given[:3], out, lse, out, lse)]  # type: ignore[union-attr]
    opcheck(torch.ops.msa.attention_backward.default, (*tensors, *given[3:]))


class TwoLayers(nn.Module):
    def __init__(self, pattern: Pattern) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MsaAttention(32, 4, pattern, kv_heads=2) for _ in range(2))

    def forward(self, x: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, documents=documents)
        return x


def test_two_layers_compile_once_for_three_lengths() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = TwoLayers(SinkWindow(5, 2))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (30, 47, 64):
        x = torch.randn(2, length, 32)
        ids = torch.arange(length).ge(11).long().expand(2, -1).contiguous()
        plain = torch.autograd.grad(model(x, ids).square().sum(), list(model.parameters()))
        fast = torch.autograd.grad(compiled(x, ids).square().sum(), list(model.parameters()))
        for found, wanted in zip(fast, plain, strict=True):
            torch.testing.assert_close(found, wanted)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_compiled_code_is_used_for_its_own_pattern_only() -> None:
    """Layers share code, and patterns of one kind look alike: their values tell them apart."""
    torch._dynamo.reset()
    lists = [((0,), (0, 1), (1, 2), (3,)), ((0,), (0,), (0,), (0,))]
    kinds: list[list[Pattern]] = [
        [Window(3), Window(30), Window(3).limited(2)],
        [BlockList(16, rows) for rows in lists],
        [PerHead((Window(3), Dense())), PerHead((Window(3), Window(9)))],
    ]
    x = torch.randn(1, 64, 32)
    for patterns in kinds:
        layers = [MsaAttention(32, 4, pattern, kv_heads=2) for pattern in patterns]
        expected = [layer(x) for layer in layers]
        for layer in layers:
            layer.compile(backend="aot_eager")
        for layer, wanted in zip(layers, expected, strict=True):
            torch.testing.assert_close(layer(x), wanted)
        layers[0].pattern = patterns[-1]
        again = layers[0](x)
        torch.compiler.reset()
        torch.testing.assert_close(again, layers[0](x))


@pytest.mark.parametrize(
    ("pattern", "placement", "rows"),
    [
        (SinkWindow(5, 2), Placement(), (20, 20)),
        (SinkWindow(5, 2), Placement(IDS), (20, 20)),
        (Window(3, causal=False), Placement(), (20, 20)),
        (Dense(), Placement(align="bottom-right"), (8, 20)),
        (SinkWindow(3, 2), Placement(align="top-left"), (8, 20)),
        (SinkWindow(3, 2), Placement(align="bottom-right"), (20, 8)),
        (Dense(causal=False), Placement(), (8, 20)),
        (Dilated(3), Placement(None, BOUNDS, torch.tensor([0, 2, 20])), (20, 20)),
    ],
)
def test_attended_pairs_are_exact(
    pattern: Pattern, placement: Placement, rows: tuple[int, int]
) -> None:
    counted = ops.attended_pairs(pattern, placement, 2, *rows, kv_heads=3)
    batch = 1 if placement.flattens else 2
    seen = np.asarray(seen_pairs(pattern.allows, *placement.runs(*rows)))
    assert counted == 3 * batch * int(seen.sum())


def test_flops_count_attended_pairs_only() -> None:
    q, k, v = (torch.randn(2, 128, h, 16, requires_grad=True) for h in (4, 2, 2))
    with FlopCounterMode(display=False) as counter:
        out = msa_attention(q, k, v, Window(8))
        assert isinstance(out, torch.Tensor)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 4 * Window(8).pairs(128) * 16 * 4 * 2
    assert counter.get_total_flops() == 3.5 * forward


def test_equal_patterns_have_equal_names() -> None:
    pattern = PerHead((SinkWindow(8, 2), Dilated(3).limited(9)))
    assert pattern.encoded() == decode(pattern.encoded()).encoded()
    assert decode(pattern.encoded()) == pattern


def test_long_patterns_travel_by_their_hash() -> None:
    rows = tuple(tuple(range(q + 1)) for q in range(60))
    pattern = PerHead((BlockList(2, rows), BlockList(2, (*rows[:-1], (1,)))))
    text = pattern.encoded()
    assert len(text) < 100
    assert decode(text) == pattern
    assert text == PerHead(pattern.members).encoded() != pattern.members[0].encoded()
    with pytest.raises(ValueError, match="is not known in this process"):
        decode("sha256:0")


def long_pattern(n: int) -> BlockList:
    """Different for every ``n`` below 900, all of them too long for their text."""
    row = tuple(range(0, 2000, 2))
    return BlockList(8, (row, (*row[:n], *row[n + 1 :])), causal=False)


def test_more_long_patterns_than_are_held_wait_for_their_gradients() -> None:
    q = torch.randn(1, 16, 1, 8, requires_grad=True)
    outs = [msa_attention(q, q, q, long_pattern(n)) for n in range(KEPT + 10)]
    torch.stack([out.sum() for out in outs if isinstance(out, torch.Tensor)]).sum().backward()
    assert q.grad is not None


def test_a_compiled_graph_finds_its_long_pattern_however_many_came_since() -> None:
    torch._dynamo.reset()
    attend = torch.compile(
        lambda q, pattern: msa_attention(q, q, q, pattern), backend="aot_eager", fullgraph=True
    )
    q = torch.randn(1, 16, 1, 8)
    expected = attend(q, long_pattern(0))
    for n in range(1, KEPT + 10):
        long_pattern(n).encoded()
    torch.testing.assert_close(attend(q, long_pattern(0)), expected)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3))
    out = msa_attention(q, k, v, Window(4))
    assert isinstance(out, torch.Tensor)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex"])
def test_forward_mode_derivatives_are_refused(backend: str) -> None:
    """Operators have none, and PyTorch would take a tangent of 0 for it."""
    q, k = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)

    def attend(keys: torch.Tensor) -> torch.Tensor:
        out = msa_attention(q, keys, k, Dense(), backend=backend)
        assert isinstance(out, torch.Tensor)
        return out

    with pytest.raises(BackendError, match=r"jvp.*nearest: reverse mode"):
        torch.func.jvp(attend, (k,), (k,))
    with pytest.raises(BackendError, match="jacfwd"):
        torch.func.jacfwd(attend)(k)
    with forward_ad.dual_level():
        attend(k)
        with pytest.raises(BackendError, match="dual tensors"):
            attend(forward_ad.make_dual(k, k))


def test_kernels_launch_where_their_tensors_are() -> None:
    """Whatever device is the current one; a CPU has none to make current."""
    second = ops.launching_on(torch.device("cuda", 1))
    assert isinstance(second, torch.cuda.device)
    assert second.idx == 1
    assert not isinstance(ops.launching_on(torch.device("cpu")), torch.cuda.device)


@pytest.mark.parametrize("dynamic", [None, True])
def test_documents_by_length_compile_without_breaks(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    x, pattern, documents = torch.randn(2, 20, 2, 8), SinkWindow(5, 2), Documents((7, 13))
    packed = pattern & documents
    wanted = msa_attention(x, x, x, packed)

    calls = [
        lambda t: msa_attention(t, t, t, pattern, documents=documents),
        lambda t: msa_attention(t, t, t, packed),
    ]
    if torch.__version__ >= (2, 13):  # before, patterns that a graph makes break it
        calls.append(lambda t: msa_attention(t, t, t, pattern & documents))
    for attend in calls:
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        torch.testing.assert_close(compiled(x), wanted)


@pytest.mark.parametrize("documents", [None, Documents((3, 5))])
@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_tensors_without_values_have_shapes_and_leave_nothing(
    backend: str, documents: Documents | None
) -> None:
    """A model is planned on the meta device or under a fake mode, and then runs."""
    where = {"backend": backend, "documents": documents}
    meta = torch.empty(1, 8, 2, 16, device="meta")
    if backend == "auto":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = msa_attention(meta, meta, meta, Window(3), documents=documents)
        assert isinstance(out, torch.Tensor)
        assert (out.shape, out.device.type) == (meta.shape, "meta")
    if documents is None or backend == "auto":
        with FakeTensorMode():
            fake = torch.empty(1, 8, 2, 16)
            out = msa_attention(fake, fake, fake, Window(3), **where)
        assert isinstance(out, FakeTensor)
        assert out.shape == fake.shape
    q = torch.randn(1, 8, 2, 16)
    found = msa_attention(q, q, q, Window(3), **where)
    ids = torch.tensor([[0] * 8 if documents is None else [0] * 3 + [1] * 5])
    wanted = msa_attention(q, q, q, Window(3), backend="torch", documents=ids)
    torch.testing.assert_close(found, wanted)

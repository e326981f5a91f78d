"""AdamW whose states rest elsewhere is AdamW."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msa_workloads.optimizer import build_optimizer
from msa_workloads.parallel import states
from msa_workloads.parallel.states import RestingAdamW
from msa_workloads.runspec import MemorySpec, RunSpec, TrainingSpec
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

TRAINING = TrainingSpec(max_steps=9, learning_rate=1e-2, weight_decay=0.3)


def trained(
    memory: MemorySpec, dtype: torch.dtype = torch.float32, steps: int = 5, start: Any = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model after steps on gradients that depend on the step alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)
    optimizer = build_optimizer(model, TRAINING, memory)
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
    begin = 0 if start is None else 3
    for step in range(begin, begin + steps):
        make = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=make).to(dtype)
        optimizer.step()
    return model, optimizer


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


OFFLOAD = MemorySpec(offload_optimizer=True)


def test_states_in_host_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = trained(MemorySpec())
    for bucket in (10**9, 30, 1):
        monkeypatch.setattr(states, "BUCKET", bucket)
        resting, optimizer = trained(OFFLOAD)
        assert isinstance(optimizer, RestingAdamW)
        assert torch.equal(weights(resting), weights(plain))


def test_the_dtype_of_states_and_of_weights_are_choices_of_their_own() -> None:
    exact = weights(trained(MemorySpec())[0])
    moved = (exact - weights(trained(MemorySpec(), steps=0)[0])).norm()
    narrow = MemorySpec(optimizer_states="bf16")
    model, optimizer = trained(narrow)
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.bfloat16}
    assert (weights(model) - exact).norm() < 0.02 * moved
    # bf16 weights: with bf16 states torch's own AdamW, with fp32 states sums in fp32.
    for memory, kind in ((narrow, torch.optim.AdamW), (MemorySpec(), RestingAdamW)):
        model, optimizer = trained(memory, torch.bfloat16)
        assert type(optimizer) is kind
        assert (weights(model).float() - exact).norm() < 0.2 * moved


@pytest.mark.parametrize("memory", [OFFLOAD, MemorySpec(optimizer_states="bf16")])
def test_states_survive_a_state_dict(memory: MemorySpec) -> None:
    whole, _ = trained(memory, steps=6)
    model, optimizer = trained(memory, steps=3)
    saved = {n: t.clone() for n, t in model.state_dict().items()}, optimizer.state_dict()
    resumed, again = trained(memory, steps=3, start=saved)
    assert torch.equal(weights(resumed), weights(whole))
    assert isinstance(again, RestingAdamW)
    rest = {t.untyped_storage().data_ptr() for b in again.buckets for t in b.rest}
    for state in again.state.values():
        assert state["exp_avg"].untyped_storage().data_ptr() in rest
    # States of another optimizer's kind are taken over as well.
    plain, other = trained(MemorySpec(), steps=3)
    moved = {n: t.clone() for n, t in plain.state_dict().items()}, other.state_dict()
    found = weights(trained(OFFLOAD, steps=3, start=moved)[0])
    assert torch.equal(found, weights(trained(MemorySpec(), steps=6)[0]))


def test_states_keep_their_precision_beside_narrower_weights() -> None:
    model, optimizer = trained(MemorySpec(parameters="bf16"), torch.bfloat16, steps=3)
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    other, again = trained(MemorySpec(parameters="bf16"), torch.bfloat16, steps=1)
    assert isinstance(again, RestingAdamW)
    set_state_dict(other, again, model_state_dict=saved[0], optim_state_dict=saved[1])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[one].items():
            assert value.dtype == torch.float32
            assert torch.equal(again.state[two][name], value), name


def test_parameters_without_gradients_are_an_error_only_beside_others() -> None:
    model, optimizer = trained(OFFLOAD, steps=1)
    before = weights(model).clone()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(weights(model), before)
    next(model.parameters()).grad = torch.ones(7, 5)
    with pytest.raises(RuntimeError, match="some have none"):
        optimizer.step()


def losses(specs: list[str]) -> list[list[float]]:
    """Every run's losses; the runs follow each other, so that a later one resumes."""
    from msa_workloads.progress import Sink
    from msa_workloads.train import run

    class Silent(Sink):
        def begin(self, history: Any, plan: Any) -> None: ...

        def add(self, row: Any) -> None: ...

    return [[r["loss"] for r in run(RunSpec.from_json(s), Silent())["history"]] for s in specs]


@pytest.mark.slow
def test_a_run_with_resting_states_resumes_as_if_it_had_not_stopped(
    on_ranks: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    parts: dict[str, Any] = {
        "memory": {"offload_optimizer": True, "optimizer_states": "bf16"},
        "mesh": {"data_shard": 2},
    }
    # A rate that does not depend on how many steps are to come.
    flat = {"min_learning_rate_ratio": 1.0}
    whole = make_spec("whole", training=flat, **parts)
    first, rest = (
        make_spec("parts", training={"max_steps": steps, **flat}, **parts) for steps in (4, 6)
    )
    for found in on_ranks(losses, 2, specs=[s.to_json() for s in (whole, first, rest)]):
        uninterrupted, begun, resumed = found
        assert resumed == uninterrupted
        assert begun[0] == uninterrupted[0]

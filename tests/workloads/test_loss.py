"""The loss is a sum over tokens, divided once: no split of a step may change it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_workloads.data import IGNORE
from msa_workloads.loss import chunked_linear_loss, divisor, summed_loss, token_losses
from msa_workloads.optimizer import build_optimizer, clip_gradients, learning_rate
from msa_workloads.runspec import TrainingSpec
from torch import nn


def test_a_mean_over_tokens_is_not_a_mean_of_means() -> None:
    # Sums of 10 over 2 tokens and of 30 over 10 tokens are 40 / 12, not (5 + 3) / 2.
    assert (10 + 30) / divisor(2 + 10) == pytest.approx(3.3333, abs=1e-4)


@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(1, 30), st.floats(0, 1))
@settings(deadline=None, max_examples=50)
def test_micro_batches_do_not_change_loss_or_gradients(
    seed: int, tokens: int, split: int, ignored: float
) -> None:
    torch.manual_seed(seed)
    head, hidden = nn.Linear(8, 13).double(), torch.randn(tokens, 8).double()
    labels = torch.where(torch.rand(tokens) < ignored, IGNORE, torch.randint(13, (tokens,)))
    valid = int((labels != IGNORE).sum())

    def run(size: int) -> tuple[float, torch.Tensor]:
        head.zero_grad()
        total = 0.0
        for h, y in zip(hidden.split(size), labels.split(size), strict=True):
            loss = summed_loss(head(h), y) / divisor(valid)
            loss.backward()
            total += loss.item()
        assert head.weight.grad is not None
        return total, head.weight.grad.clone()

    whole, parts = run(tokens), run(min(split, tokens))
    assert parts[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-5, atol=1e-6)


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 50))
@settings(deadline=None, max_examples=40)
def test_the_chunked_loss_is_the_loss(seed: int, tokens: int, chunk: int) -> None:
    torch.manual_seed(seed)
    head = nn.Linear(8, 13)
    hidden = torch.randn(2, tokens, 8, requires_grad=True)
    labels = torch.randint(13, (2, tokens))
    labels[0, ::3] = IGNORE
    results = []
    for loss in (
        summed_loss(head(hidden), labels),
        chunked_linear_loss(hidden, head, labels, chunk),
    ):
        results.append((loss, *torch.autograd.grad(loss, [hidden, head.weight])))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


def test_no_valid_token_gives_zero_loss_and_zero_gradients() -> None:
    logits = torch.randn(2, 5, 7, requires_grad=True)
    labels = torch.full((2, 5), IGNORE)
    for loss in (summed_loss(logits, labels), token_losses(logits, labels).sum()):
        (grad,) = torch.autograd.grad(loss / divisor(0), logits, retain_graph=True)
        assert loss.item() == 0
        assert not grad.any()


def test_token_losses_are_in_nats() -> None:
    nats = token_losses(torch.zeros(1, 3, 5), torch.tensor([[0, 4, IGNORE]]))
    assert nats[0].tolist() == pytest.approx([math.log(5), math.log(5), 0.0])


def test_the_schedule_warms_up_and_falls_along_a_cosine() -> None:
    training = TrainingSpec(
        max_steps=110, warmup_steps=10, learning_rate=1.0, min_learning_rate_ratio=0.1
    )
    rates = [learning_rate(step, training) for step in range(1, 121)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)
    assert rates[109:] == pytest.approx([0.1] * 11)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert learning_rate(1, TrainingSpec(max_steps=1, learning_rate=2.0)) < 2.0


def test_only_matrices_decay_and_the_global_norm_is_clipped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    groups = build_optimizer(model, TrainingSpec(max_steps=1, weight_decay=0.3)).param_groups
    assert [(g["weight_decay"], len(g["params"])) for g in groups] == [(0.3, 1), (0.0, 3)]
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    expected = 2.0 * math.sqrt(sum(p.numel() for p in model.parameters()))
    assert clip_gradients(model, 0) == pytest.approx(expected)
    assert clip_gradients(model, 1.0) == pytest.approx(expected)
    assert clip_gradients(model, 1.0) == pytest.approx(1.0, rel=1e-4)

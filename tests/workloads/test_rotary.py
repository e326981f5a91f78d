"""Rotary embeddings of a rank's tokens are a slice of those of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from msa_workloads.context.layout import zigzag
from msa_workloads.runspec import RunSpec

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_a_rank_rotates_as_one_process_does(kind: str, make_spec: Callable[..., RunSpec]):
    from msa_workloads.model import build_model

    spec = make_spec()
    positions = 64 if kind == "dynamic" else 4096
    config = {**spec.model.config, "rope_parameters": ROPES[kind]}
    spec = replace(
        spec,
        model=replace(
            spec.model, config={**config, "max_position_embeddings": max(96, positions)}
        ),
    )
    rotary = build_model(spec, 260, None, torch.device("cpu")).model.model.rotary_emb
    whole = torch.arange(96)[None]
    x = torch.zeros(1, 1, 32)
    wanted = rotary(x, whole)
    layout = zigzag(96, 4)
    for rank in (1, 3, 0):
        mine = torch.from_numpy(layout.tokens_of(rank))
        found = rotary(x, whole[:, mine])
        for one, full in zip(found, wanted, strict=True):
            assert torch.equal(one, full[:, mine])
    # Packed documents restart their positions; the run's length decides nevertheless.
    short = torch.arange(8)[None]
    for one, full in zip(rotary(x, short), wanted, strict=True):
        assert torch.equal(one, full[:, :8])

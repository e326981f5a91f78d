"""Element masks: the predicate of a part on tensors of positions, for partial tiles.

:meth:`Rule.allows` compares with every entry of a block table in turn, which suits single pairs;
here a table is a sorted list of (query block, key block) numbers searched for all pairs at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from msa_kernels.plan import PartPlan
from msa_kernels.rules import Rule


def element_mask(
    plan: PartPlan,
    q_position: torch.Tensor,
    q_document: torch.Tensor,
    k_position: torch.Tensor,
    k_document: torch.Tensor,
) -> torch.Tensor:
    """Whether each query sees each key, bool, of the broadcast shape of the arguments."""
    seen = (q_document == k_document) & (q_document >= 0)
    allowed = torch.zeros_like(seen)
    for rule in plan.part.rules:
        allowed |= rule_mask(plan, rule, q_position, k_position)
    for rule in plan.part.minus:
        allowed &= ~rule_mask(plan, rule, q_position, k_position)
    return seen & allowed


def rule_mask(plan: PartPlan, rule: Rule, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """:meth:`Rule.allows` for tensors."""
    if rule.table is None:
        return rule.allows(i, j)
    size, rows = rule.table
    width = max((row[-1] + 1 for row in rows if row), default=1)
    listed = plan.kept(("table", id(rule), i.device), lambda: _listed(rows, width, i.device))
    q_block, k_block = i // size, j // size
    number = q_block.long() * width + k_block
    at = torch.searchsorted(listed, number).clamp_(max=max(0, len(listed) - 1))
    hit = listed[at] == number if len(listed) else torch.zeros_like(number, dtype=torch.bool)
    inside = (q_block >= 0) & (q_block < len(rows)) & (k_block < width)
    return hit & inside & replace(rule, table=None).allows(i, j)


def _listed(rows: tuple[tuple[int, ...], ...], width: int, device: torch.device) -> torch.Tensor:
    numbers = [q * width + k for q, row in enumerate(rows) for k in row]
    return torch.tensor(numbers, dtype=torch.int64, device=device)

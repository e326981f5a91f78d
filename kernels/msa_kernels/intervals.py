"""Intervals: a part as the stretches of keys that each query sees.

The form that interval-mask kernels take. Bands, sinks, blocks and block lists are intervals, and
so is any union of them; dilation and columns are not (they would need one interval per key).
"""

from __future__ import annotations

import numpy as np
import torch

from msa_kernels.blocks import Runs
from msa_kernels.listed import stretches
from msa_kernels.rules import Part, Rule

_FAR = 1 << 40


def ends(part: Part, queries: Runs, keys: Runs, device: torch.device) -> torch.Tensor:
    """Int32 (odd, query rows): query row ``r`` sees the key rows ``[0, F0)`` and ``[F1, F2)``,
    ``[F3, F4)``, ...

    Ends never fall along the first axis; F0 is 0 and unused pairs are empty. ``part`` is one that
    :func:`msa_kernels.capabilities.few_intervals` lets through. Made for every stretch of keys
    that a document has: a few of them.
    """
    k_rows = keys.rows
    position, document = (torch.from_numpy(m).to(device).long() for m in queries.token_maps())
    spans = [
        _here(span, stretch, document)
        for rule in part.rules
        for span in _spans(rule, position)
        for stretch in _stretches_of(keys, device)
    ]
    start = torch.stack([s for s, _ in spans])
    stop = torch.stack([s for _, s in spans])
    stop = torch.maximum(start, stop)
    start, order = torch.where(stop > start, start, k_rows).sort(dim=0, stable=True)
    stop = torch.where(start < k_rows, stop.gather(0, order), k_rows)
    reach = stop.cummax(0).values
    before = torch.cat([torch.full_like(reach[:1], -1), reach[:-1]])
    # An interval begins where nothing earlier reaches; those that overlap or touch are one.
    first = (start > before) & (start < k_rows)
    number = first.cumsum(0) - 1
    most = int(first.sum(0).max()) if queries.rows else 0
    made = torch.full((2 * most + 1, queries.rows), k_rows, dtype=torch.int64, device=device)
    made[0] = 0
    at = torch.where(start < k_rows, number, most)
    padded = made.new_full((most + 1, queries.rows), k_rows)
    begin = padded.scatter_reduce(0, at, start, "amin")
    end = padded.zero_().scatter_reduce(0, at, stop, "amax")
    made[1::2] = begin[:-1]
    made[2::2] = torch.where(begin[:-1] < k_rows, end[:-1], k_rows)
    return made.to(torch.int32)


def _stretches_of(keys: Runs, device: torch.device) -> list[torch.Tensor]:
    """One stretch of every document at a time: int64 (documents, 3) of row, position and length;
    length 0 where a document has no more of them."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for row, position, length, document in zip(
        *(a.tolist() for a in (keys.begin, keys.position, keys.length, keys.document)),
        strict=True,
    ):
        found.setdefault(document, []).append((row, position, length))
    most = max((len(runs) for runs in found.values()), default=0)
    table = torch.zeros((most, max(found, default=-1) + 1, 3), dtype=torch.int64)
    for document, runs in found.items():
        table[: len(runs), document] = torch.tensor(runs)
    return list(table.to(device)) or [torch.zeros((1, 3), dtype=torch.int64, device=device)]


def _here(
    span: tuple[torch.Tensor, torch.Tensor], stretch: torch.Tensor, document: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The key rows of a span of positions that lie in the stretch of each query's document."""
    known = (document >= 0) & (document < len(stretch))
    row, position, length = stretch[document.clamp(0, len(stretch) - 1)].unbind(1)
    low = torch.maximum(span[0], position)
    high = torch.minimum(span[1], position + length * known)
    shift = row - position
    return low + shift, torch.maximum(low, high) + shift


def _spans(rule: Rule, i: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """First position and the one after the last, per query: one pair, or one for each listed
    block."""
    low = torch.zeros_like(i) if rule.hi is None else (i - rule.hi + 1).clamp_(min=0)
    high = torch.full_like(i, _FAR) if rule.lo is None else i - rule.lo + 1
    if rule.sinks is not None:
        high = high.clamp(max=rule.sinks)
    if rule.block is not None:
        block = i // rule.block * rule.block
        low, high = torch.maximum(low, block), torch.minimum(high, block + rule.block)
    if rule.table is None:
        return [(low, high)]
    size, rows = rule.table
    ptr, first, stop = stretches(rows)
    count = np.diff(ptr)
    most = int(count.max(initial=0))
    if not most:
        return [(low, low)]
    row = np.repeat(np.arange(len(rows)), count)
    made = np.zeros((len(rows), most, 2), np.int64)
    made[row, np.arange(len(row)) - ptr[row]] = np.stack([first, stop], 1) * size
    table = torch.from_numpy(made).to(i.device)
    inside = (i >= 0) & (i < len(rows) * size)
    mine = table[(i // size).clamp_(0, len(rows) - 1)] * inside[:, None, None]
    return [
        (torch.maximum(low, mine[:, n, 0]), torch.minimum(high, mine[:, n, 1]))
        for n in range(most)
    ]

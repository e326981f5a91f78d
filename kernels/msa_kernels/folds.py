"""Folds: the rows of each residue class brought together, for kernels that know no dilation.

Where every run begins and ends at a multiple of the fold, in rows and in positions, a fold is a
view of the tensor in which residues become heads, and its runs shrink. Elsewhere it is a
permutation of the rows, in which every residue class of a document is a document of its own. What
is made is the size of what occurs: a fold may be larger than any sequence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from msa_kernels.blocks import Runs

Order = NDArray[np.int64]


def brought_together(
    queries: Runs, keys: Runs, fold: int
) -> tuple[Runs, Runs, Order | None, Order | None]:
    """Runs of queries and keys in class coordinates, and the order in which rows of each come:
    row ``n`` is row ``order[n]`` of the tensor. No orders where the fold is a view."""
    if _even(queries, fold) and _even(keys, fold):
        return _shrunk(queries, fold), _shrunk(keys, fold), None, None
    q_order, folded = _permuted(queries, fold)
    k_order, folded_keys = (q_order, folded) if keys is queries else _permuted(keys, fold)
    return *_renumbered(folded, folded_keys), q_order, k_order


def _even(runs: Runs, fold: int) -> bool:
    """Every run starts and ends at a multiple of ``fold``, in rows and in positions."""
    columns = (runs.begin, runs.length, runs.position)
    return runs.rows % fold == 0 and not any((c % fold).any() for c in columns)


def _shrunk(runs: Runs, fold: int) -> Runs:
    return Runs(
        runs.begin // fold, runs.length // fold, runs.position // fold, runs.document,
        runs.rows // fold,
    )  # fmt: skip


def _permuted(runs: Runs, fold: int) -> tuple[NDArray[np.int64], Runs]:
    """Rows ordered by (document, residue, run): each residue class becomes a document of its own.

    Rows in no run come last, so that the order is a permutation of all rows.
    """
    # Only residues that occur: a run of a few rows has as few of them, whatever the fold.
    classes = np.minimum(runs.length, fold)
    of = np.repeat(np.arange(len(classes)), classes)
    skip = np.arange(len(of)) - (np.cumsum(classes) - classes)[of]
    position = runs.position[of] + skip
    document = runs.document[of] * fold + position % fold
    by = np.argsort(document, kind="stable")
    count = -((skip - runs.length[of]) // fold)[by]
    first_row = (runs.begin[of] + skip)[by]
    begin = np.cumsum(count) - count
    run = np.repeat(np.arange(len(count)), count)
    order = first_row[run] + (np.arange(len(run)) - begin[run]) * fold
    outside = np.ones(runs.rows, bool)
    outside[order] = False
    folded = Runs(begin, count, position[by] // fold, document[by], runs.rows)
    return np.concatenate([order, np.flatnonzero(outside)]), folded


def _renumbered(queries: Runs, keys: Runs) -> tuple[Runs, Runs]:
    """The same documents by their rank: residue classes that do not occur leave gaps between
    numbers, which would not fit 32 bits. Documents ascend."""
    if keys is queries:
        changes = np.diff(queries.document, prepend=queries.document[:1]) != 0
        same = replace(queries, document=np.cumsum(changes))
        return same, same
    every = np.union1d(queries.document, keys.document)
    numbers = [np.searchsorted(every, side.document) for side in (queries, keys)]
    return replace(queries, document=numbers[0]), replace(keys, document=numbers[1])

"""The tables of docs/lifecycle.md, made from the ones that the operator runs on."""

from __future__ import annotations

import re

from msa_operator.reconcile.attempts import KINDS
from msa_operator.reconcile.lifecycle import TABLE


def transitions() -> str:
    """Every change of phase, in the order in which it is tried."""
    rows = [(t.source, t.when, " or ".join(t.targets)) for t in TABLE]
    return _table(("in", "when", "then"), rows)


def reasons() -> str:
    """Every reason for which an attempt ends."""
    rows = [
        (name, _yes(kind.counts), _next(kind.retried, kind.replaced), kind.why)
        for name, kind in KINDS.items()
    ]
    return _table(("reason", "counts", "next attempt", "why"), rows)


def fill(page: str) -> str:
    """The page with its generated tables as they should be."""
    for name, made in (("transitions", transitions()), ("reasons", reasons())):
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        page = re.sub(
            f"{begin}.*?{end}", lambda _, b=begin, m=made, e=end: f"{b}\n{m}\n{e}", page,
            flags=re.DOTALL,
        )  # fmt: skip
    return page


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _next(retried: bool, replaced: bool) -> str:
    if not retried:
        return "none"
    return "new cluster" if replaced else "same cluster"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

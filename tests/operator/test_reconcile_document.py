"""The documented life cycle is the one that runs."""

from __future__ import annotations

from pathlib import Path

from msa_operator.reconcile import document
from msa_operator.reconcile.intent import PHASES, TERMINAL
from msa_operator.reconcile.lifecycle import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "lifecycle.md"


def test_the_page_has_the_tables_that_run():
    page = PAGE.read_text()
    assert page.count("<!-- begin") == page.count("<!-- end") == 2
    made = document.fill(page)
    assert page == made, "docs/lifecycle.md is old: write document.fill(page) to it"


def test_every_phase_is_explained():
    page = PAGE.read_text()
    assert all(f"\n| {phase} |" in page for phase in PHASES)


def test_every_phase_can_be_left_but_the_last_ones():
    assert {t.source for t in TABLE} == {*PHASES} - TERMINAL
    known = {"Pending"}
    for _ in PHASES:
        known |= {target for t in TABLE if t.source in known for target in t.targets}
    assert known == {*PHASES}

"""What a watch tells late, or as the last of several events, is neither lost nor waited for."""

from __future__ import annotations

from typing import Any

import pytest
from msa_operator.runtime.kube import JOBS
from msa_operator.runtime.store import CATCH_UP_S, Store

KEY = ("team", "small")


def job(version: int, generation: int = 1, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "flashmsa.dev/v1alpha1", "kind": "LongContextJob", "spec": {},
        "metadata": {"namespace": "team", "name": "small", "uid": "u", "generation": generation,
                     "resourceVersion": str(version), **metadata},
    }  # fmt: skip


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def store(now: list[float]) -> Store:
    """A job of which we wrote version 5, and whose watch has not brought that yet."""
    made = Store(lambda: now[0])
    made.event(JOBS, "ADDED", job(4))
    made.wrote(JOBS, job(5))
    return made


def version(store: Store) -> str:
    found = store.job(KEY)
    assert found is not None
    return found.meta.version


def test_an_edit_counts_though_our_own_version_was_never_told(store: Store):
    store.event(JOBS, "MODIFIED", job(6, generation=2))
    assert version(store) == "6" and store.unsettled(KEY) is None


def test_a_deletion_counts_at_once(store: Store):
    store.event(JOBS, "MODIFIED", job(6, deletionTimestamp="2026-11-30T00:00:00Z"))
    assert version(store) == "6"


def test_what_may_be_older_waits_and_is_looked_at_again(store: Store, now: list[float]):
    assert store.unsettled(KEY) is None
    store.event(JOBS, "MODIFIED", job(6))
    assert version(store) == "5"
    left = store.unsettled(KEY)
    assert left is not None and 0 < left <= CATCH_UP_S
    now[0] += left
    assert version(store) == "6" and store.unsettled(KEY) is None


def test_our_own_version_settles_it(store: Store):
    store.event(JOBS, "MODIFIED", job(4))
    store.event(JOBS, "MODIFIED", job(5))
    assert version(store) == "5" and store.unsettled(KEY) is None

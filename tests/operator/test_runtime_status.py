"""Status and intent: what is written is read back as the same, whatever was decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_operator.api import JobError, JobStatus
from msa_operator.api.read import Reader
from msa_operator.crd import schema
from msa_operator.reconcile import status
from msa_operator.reconcile.conditions import Condition
from msa_operator.reconcile.intent import PHASES, Attempt, Intent

TIMES = st.floats(min_value=1.0, max_value=4e9)
COUNTS = st.integers(min_value=0, max_value=1 << 40)
TEXTS = st.text(max_size=1200)
ATTEMPTS = st.builds(
    Attempt, number=COUNTS, submission_id=st.text(max_size=60), head=st.text(max_size=60),
    workers=st.text(max_size=16), started=TIMES, from_step=COUNTS, to_step=COUNTS,
    checkpoint_step=COUNTS, ended=st.none() | TIMES, reason=st.text(max_size=30), message=TEXTS,
)  # fmt: skip
INTENTS = st.builds(
    Intent, phase=st.sampled_from(PHASES), since=st.just(0.0) | TIMES, epoch=COUNTS,
    cluster=st.text(min_size=1, max_size=53), attempts=st.lists(ATTEMPTS, max_size=3).map(tuple),
    failures=st.lists(st.tuples(COUNTS, COUNTS), max_size=25).map(tuple), in_a_row=COUNTS,
    retry_at=st.just(0.0) | TIMES, replace=st.booleans(), losses_tried=COUNTS,
    machines=st.none() | st.integers(min_value=1, max_value=4096), after=st.sampled_from(PHASES),
    reason=st.text(max_size=30), message=TEXTS, active_used=st.just(0.0) | TIMES,
    since_active=st.none() | TIMES, ended=st.none() | TIMES,
    accepted=st.dictionaries(st.text(max_size=20), st.text(max_size=8), max_size=20)
    .map(lambda d: tuple(sorted(d.items()))),
)  # fmt: skip


@given(INTENTS)
@settings(deadline=None, max_examples=200)
def test_an_intent_survives_the_status(intent: Intent):
    kept = status.canonical(intent)
    assert status.canonical(kept) == kept
    assert status.read(status.write(kept, status.Shown())) == kept


def test_a_new_job_has_a_new_intent():
    assert status.read(None) == status.read({}) == Intent()
    assert status.read(status.write(Intent(), status.Shown())) == Intent()


def test_what_a_newer_version_wrote_is_passed_over():
    raw = status.write(Intent(phase="Running", epoch=3, cluster="c"), status.Shown())
    raw["intent"]["later"] = 1
    raw["later"] = {"x": 1}
    assert status.read(raw).epoch == 3


@pytest.mark.parametrize("raw", [
    {"phase": "Asleep"}, {"intent": {"since": "yesterday"}}, {"attempts": [{"number": "one"}]},
    {"intent": {"since": "2026-99-99T00:00:00Z"}}, {"ray": {"epoch": -1}}, {"attempts": "none"},
    {"phase": "Complete"}, {"phase": "Running", "attempts": []},
])  # fmt: skip
def test_a_status_that_cannot_be_read_is_an_error(raw: dict[str, Any]):
    with pytest.raises(JobError):
        status.read(raw)


VALUES: Any = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=2), VALUES, max_size=4)


def merged(base: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    out = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merged(out.get(key), value)
    return out


@given(OBJECTS, OBJECTS)
@settings(deadline=None)
def test_a_difference_is_a_merge_patch(old: dict[str, Any], new: dict[str, Any]):
    assert merged(old, status.difference(old, new)) == new
    assert status.difference(new, new) == {}


@given(st.integers(min_value=0, max_value=4 * 10**12))
def test_times_are_exact_to_the_millisecond(ms: int):
    assert status.seconds_of(status.time_text(ms / 1000)) == ms / 1000


def test_conditions_are_read_back_and_broken_ones_left_out():
    made = (
        Condition(type="Planned", status="True", reason="Planned", message="m", changed=5.0),
        Condition(type="Ready", status="False", reason="Pending", observed_generation=2,
                  changed=6.5),
    )  # fmt: skip
    raw = status.write(Intent(), status.Shown(conditions=made))
    assert status.conditions(raw) == made
    raw["conditions"] += [{"type": "X"}, None, 3, {"lastTransitionTime": "no"}]
    assert status.conditions(raw) == made
    assert status.conditions({"conditions": 3}) == ()


def test_the_longest_message_fits():
    kept = status.canonical(replace(Intent(), message="x" * 5000))
    assert len(kept.message) == status.MESSAGE
    written = status.write(kept, status.Shown())
    assert Reader(lambda _: "").read(JobStatus, written) is not None


@given(INTENTS)
@settings(deadline=None, max_examples=50)
def test_the_api_server_adds_no_field_to_what_is_written(intent: Intent):
    written = status.write(status.canonical(intent), status.Shown())
    assert filled(schema(JobStatus), written) == written


def filled(node: Any, value: Any) -> Any:
    """``value`` with the defaults of a structural schema, as an API server fills them in."""
    if isinstance(value, list):
        return [filled(node["items"], v) for v in value]
    if not isinstance(value, dict) or "properties" not in node:
        return value
    out = {k: filled(node["properties"][k], v) for k, v in value.items()}
    for key, inner in node["properties"].items():
        if key not in out and "default" in inner:
            out[key] = filled(inner, inner["default"])
    return out

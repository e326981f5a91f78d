"""Durations, quantities, addresses and names: what is read, and what a near miss meant."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_operator.api import values


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0s", 0), ("90s", 90), ("30m", 1800), ("1h30m", 5400), ("7d", 604_800), ("240h", 864_000)],
)
def test_durations(text: str, expected: int):
    assert values.seconds(text) == expected


@pytest.mark.parametrize(
    "text", ["", "30", "30 m", "30mins", "1.5h", "m", "30m1h", "-1m", "00s", "05m", "1w", "30M"]
)
def test_what_is_no_duration(text: str):
    with pytest.raises(ValueError, match="a duration such as"):
        values.seconds(text)


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_durations_are_written_and_read_alike(total: int):
    assert values.seconds(values.duration(total)) == total


@pytest.mark.parametrize(
    ("found", "nearest"),
    [
        ("30 m", "30m"), ("30mins", "30m"), ("1.5h", "1h30m"), ("2 weeks", "14d"),
        ("1 day", "1d"), ("1h 30 min", "1h30m"), (90, "1m30s"), ("90", "1m30s"), (0, "0s"),
        ("soon", ""), ("3 months", ""), (None, ""), (True, ""), ("", ""), ("5ms", ""),
    ],
)  # fmt: skip
def test_nearest_durations(found: object, nearest: str):
    assert values.nearest_duration(found) == nearest


@settings(deadline=None)
@given(st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.none()))
def test_a_nearest_duration_is_a_duration(found: object):
    if nearest := values.nearest_duration(found):
        values.seconds(nearest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500m", 0.5), ("8", 8), ("64Gi", 64 << 30), ("1.5G", 1.5e9), ("1938410Mi", 1938410 << 20)],
)
def test_quantities(text: str, expected: float):
    assert values.quantity(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("found", "nearest"),
    [("64GB", "64G"), ("64 Gi", "64Gi"), ("64gib", "64Gi"), (64, "64"), ("lots", ""), (-1, "")],
)
def test_nearest_quantities(found: object, nearest: str):
    with pytest.raises(ValueError, match="a quantity such as"):
        values.quantity(str(found) if found != 64 else "64 ")
    assert values.nearest_quantity(found) == nearest


@pytest.mark.parametrize(
    ("found", "nearest"),
    [
        ("s3:/bucket/key", "s3://bucket/key"),
        ("S3://bucket/key", "s3://bucket/key"),
        ("s3a://bucket/key", "s3://bucket/key"),
        ("s3://bucket", "s3://bucket/*"),
        ("file:/data/x", "file:///data/x"),
        ("/data/x.txt", "file:///data/x.txt"),
        ("file://data/x", f"file://{os.path.abspath('data/x')}"),
        ("data/x", f"file://{os.path.abspath('data/x')}"),
        ("python-stdlib", ""),
        ("python-stdlib:", "python-stdlib://"),
        ("https://example.com/x", ""),
        (5, ""),
    ],
)
def test_nearest_addresses(found: object, nearest: str):
    assert values.nearest_uri(found, ("python-stdlib", "file", "s3")) == nearest


def test_a_hub_name_alone_becomes_an_address():
    assert values.nearest_uri("Qwen/Qwen3-8B", ("hf", "file")) == "hf://Qwen/Qwen3-8B"


@settings(deadline=None)
@given(st.text(max_size=60))
def test_a_nearest_name_is_a_name(found: str):
    import re

    name = values.nearest_name(found)
    assert not name or (re.fullmatch(values.NAME, name) and len(name) <= values.JOB_NAME_LENGTH)

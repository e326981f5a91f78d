"""YAML 1.2 core schema: values, lines, and everything that is refused."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_operator.yaml12 import MAX_DEPTH, MAX_NODES, YamlError, load

VALUES = {
    "2e-5": 2e-5,
    "2.0e-5": 2e-5,
    "1e3": 1000.0,
    ".5": 0.5,
    "1.": 1.0,
    "+1": 1,
    "-3": -3,
    "010": 10,
    "0o10": 8,
    "0x1F": 31,
    "on": "on",
    "off": "off",
    "yes": "yes",
    "No": "No",
    "y": "y",
    "true": True,
    "False": False,
    "tRUE": "tRUE",
    "1_000": "1_000",
    "0b11": "0b11",
    "12:30:00": "12:30:00",
    "2001-01-01": "2001-01-01",
    ".inf": math.inf,
    "-.Inf": -math.inf,
    "~": None,
    "null": None,
    "": None,
    "'5'": "5",
    '"true"': "true",
    "!!str 5": "5",
    "!!float 3": 3.0,
    "! 7": "7",
    "=": "=",
    "1e": "1e",
    "0x": "0x",
    "--1": "--1",
}


@pytest.mark.parametrize("text", VALUES)
def test_scalars_follow_the_core_schema(text: str):
    value = load(f"a: {text}").value["a"]
    assert value == VALUES[text] and type(value) is type(VALUES[text])


def test_nan_is_a_float():
    assert math.isnan(load("a: .nan").value["a"])


REFUSED = {
    "a: 1\nb: 2\na: 3": (3, "given twice, first on line 1"),
    "a: {b: 1, b: 2}": (1, "given twice"),
    "a: 1\n---\nb: 2": (2, "more than one document"),
    "": (1, "is empty"),
    "# only a comment": (1, "is empty"),
    "a: [1, 2": (1, "expected"),
    "a:\n\t- b": (2, "cannot start any token"),
    "a: *b": (1, "no anchor"),
    "a: &a [*a]": (1, "inside its own anchor"),
    "1: x": (1, "must be text"),
    "true: x": (1, "must be text"),
    "? [a]\n: b": (1, "plain text"),
    "&k a: 1": (1, "anchor"),
    "a: !!python/object:os.system x": (1, "core schema"),
    "a: !!int x": (1, "does not fit its tag"),
    "a: !!binary aGk=": (1, "core schema"),
    "a: !!map [1]": (1, "core schema"),
    "%YAML 1.1\n---\na: 1": (1, "1.1"),
    "a: {<<: 5}": (1, "mapping"),
    "a: " + "9" * 5000: (1, "too long"),
    "[" * 100 + "]" * 100: (1, "deeper"),
    "a: \x00": (0, "unacceptable character"),
    'a: "\\UFFFFFFFF"': (0, "does not exist"),
    'b: 1\na: "\\uD800"': (2, "surrogate"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_one_clean_document_is_refused_with_its_line(text: str):
    line, problem = REFUSED[text]
    with pytest.raises(YamlError, match=problem) as caught:
        load(text)
    assert caught.value.line == line


def test_bytes_that_are_not_utf8_are_refused_with_their_line():
    with pytest.raises(YamlError, match="UTF-8") as caught:
        load(b"a: 1\nb: \xff\n")
    assert caught.value.line == 2
    assert load("\ufeffa: 1".encode()).value == {"a": 1}


def test_lines_of_everything():
    document = load("a: 1\nb:\n  - x\n  - c: 2\n    d:\n      e: 3\n")
    assert document.line(("a",)) == 1
    assert document.line(("b",)) == 2
    assert document.line(("b", 1, "c")) == 4
    assert document.line(("b", 1, "d", "e")) == 6
    assert document.line(("b", 1, "missing", "deeper")) == 4, "the nearest parent that is written"


def test_merge_keys_and_aliases():
    text = "base: &b {x: 1, y: 2}\nc: {<<: *b, y: 3}\nd: {<<: [*b, {z: 9}]}\ne: *b\n"
    value = load(text).value
    assert value["c"] == {"x": 1, "y": 3}
    assert value["d"] == {"x": 1, "y": 2, "z": 9}
    assert value["e"] == {"x": 1, "y": 2}
    assert load('a: {"<<": 1}').value == {"a": {"<<": 1}}, "quoted, it is a key like any other"


def test_alias_bombs_are_refused():
    names = "abcdefghij"
    bomb = "a: &a [" + ",".join("x" * 10) + "]\n"
    for before, name in itertools.pairwise(names):
        bomb += f"{name}: &{name} [" + ",".join([f"*{before}"] * 10) + "]\n"
    with pytest.raises(YamlError, match=f"{MAX_NODES:,}"):
        load(bomb)
    chain = "a0: &a0 {x: 1}\n"
    chain += "".join(f"a{n}: &a{n} {{x: *a{n - 1}}}\n" for n in range(1, MAX_DEPTH + 5))
    with pytest.raises(YamlError, match="deeper"):
        load(chain)


def test_large_files_are_refused():
    with pytest.raises(YamlError, match="1 MiB"):
        load("a: " + "x" * (1 << 20))


keys = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=6)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, max_examples=150)
@given(trees)
def test_json_reads_as_itself(tree: object):
    text = json.dumps(tree)
    read = load(text).value
    assert json.dumps(read) == text


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str):
    try:
        load(text)
    except YamlError as error:
        assert error.problem

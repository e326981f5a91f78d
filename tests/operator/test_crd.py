"""The custom resource definitions: structural, bounded, current, and true to the types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msa_operator import crd
from msa_operator.api import JobError, parse_job
from msa_operator.yaml12 import load
from operator_jobs import SAMPLES, job
from test_api_job import BROKEN

REPO = Path(__file__).parents[2]
FILES = crd.definitions()
TYPES = {"object", "array", "string", "integer", "number", "boolean"}
KEYWORDS = {
    "type", "description", "default", "properties", "required", "items", "additionalProperties",
    "enum", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "minLength",
    "maxLength", "minItems", "maxItems", "maxProperties", "x-kubernetes-validations",
    "x-kubernetes-list-type", "x-kubernetes-preserve-unknown-fields",
}  # fmt: skip


def schema_of(name: str) -> dict[str, Any]:
    (version,) = FILES[name]["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from nodes(schema[name], f"{path}[]")


@pytest.mark.parametrize("name", FILES)
def test_schemas_are_structural(name: str):
    for path, node in nodes(schema_of(name)):
        assert node.get("type") in TYPES, path
        assert set(node) <= KEYWORDS, path
        # A structural schema cannot both list and map, nor refer to another part.
        assert not ("properties" in node and "additionalProperties" in node), path
        if node["type"] == "array":
            assert "items" in node, path
        if node["type"] != "object":
            assert not {"properties", "required", "additionalProperties"} & set(node), path
        assert set(node.get("required", ())) <= set(node.get("properties", ())), path
        if node.get("x-kubernetes-preserve-unknown-fields"):
            assert "properties" not in node, path


@pytest.mark.parametrize("name", FILES)
def test_everything_has_a_bound_so_that_rules_have_a_cost(name: str):
    for path, node in nodes(schema_of(name)):
        kind = node["type"]
        if path in ("", ".apiVersion", ".kind", ".metadata"):
            continue
        if kind == "string":
            assert "maxLength" in node or "enum" in node, path
        elif kind == "array":
            assert "maxItems" in node, path
        elif kind in ("integer", "number"):
            assert {"minimum", "maximum"} <= set(node), path
            assert abs(node["maximum"]) < 1 << 53, f"{path}: not exact in JSON"
        elif "additionalProperties" in node:
            assert "maxProperties" in node, path


@pytest.mark.parametrize("name", FILES)
def test_rules_read_only_fields_that_exist(name: str):
    for path, node in nodes(schema_of(name)):
        for rule in node.get("x-kubernetes-validations", ()):
            assert set(rule) <= {"rule", "message", "fieldPath"}, path
            assert rule["message"] and "\n" not in rule["rule"]
            for used in re.findall(r"\b(?:self|oldSelf)((?:\.[a-zA-Z]+)+)", rule["rule"]):
                at = node
                for part in used.removeprefix(".").split("."):
                    if part in ("metadata", "exists", "all"):
                        break  # the API server's own, or a function of CEL
                    assert part in at.get("properties", {}), f"{path}: {rule['rule']}"
                    at = at["properties"][part]
            if "fieldPath" in rule:
                at = node
                for part in rule["fieldPath"].removeprefix(".").split("."):
                    at = at["properties"][part]


@pytest.mark.parametrize("name", FILES)
def test_defaults_fit_their_own_schema(name: str):
    for path, node in nodes(schema_of(name)):
        if "default" in node:
            jsonschema.validate(node["default"], as_json_schema(node)), path


def as_json_schema(node: dict[str, Any]) -> dict[str, Any]:
    """The node as JSON Schema: closed objects, and draft 4's exclusiveMinimum."""
    out = {k: v for k, v in node.items() if not k.startswith("x-") and k != "default"}
    if "properties" in out:
        out["properties"] = {k: as_json_schema(v) for k, v in out["properties"].items()}
        if "metadata" not in out["properties"]:
            out["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(out.get(name), dict):
            out[name] = as_json_schema(out[name])
    if out.pop("exclusiveMinimum", False):
        out["exclusiveMinimum"] = out.pop("minimum")
    return out


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_samples_fit_the_schema(path: Path):
    document = load(path.read_bytes()).value
    names = {"LongContextJob": "longcontextjobs.yaml", "HardwareProfile": "hardwareprofiles.yaml"}
    jsonschema.validate(document, as_json_schema(schema_of(names[document["kind"]])))


# What the schema alone cannot say is said by rules; the API server's name is checked by rules too.
BY_RULE = {
    "two models", "no model", "batch", "warm-up", "fixed without degrees", "degrees and workers",
    "degrees and accelerators", "cpu without workers", "cpu with accelerators",
    "gpu with workers", "min above max", "fail first", "empty order", "unused reservation",
    "env twice", "name", "columns", "bidirectional", "short block list", "pattern missing",
    "repeated", "repeated layer", "kind", "version",
}  # fmt: skip


@pytest.mark.parametrize("kind", [k for k in BROKEN if k not in BY_RULE])
def test_the_schema_refuses_what_the_reader_refuses(kind: str):
    broken = job(BROKEN[kind][0])
    with pytest.raises(JobError):
        parse_job(broken)
    if kind == "not finite":
        return  # JSON has no such number
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, as_json_schema(schema_of("longcontextjobs.yaml")))


def test_names_columns_and_subresources():
    definition = FILES["longcontextjobs.yaml"]
    assert definition["spec"]["names"]["shortNames"] == ["lcj"]
    assert FILES["hardwareprofiles.yaml"]["spec"]["names"]["shortNames"] == ["hwp"]
    assert FILES["hardwareprofiles.yaml"]["spec"]["scope"] == "Cluster"
    (version,) = definition["spec"]["versions"]
    assert version["subresources"] == {"status": {}}
    columns = {c["name"]: c["jsonPath"] for c in version["additionalPrinterColumns"]}
    assert list(columns) == [
        "Phase", "Nodes", "Plan", "Step", "Tokens/s", "ETA", "Loss", "Age",
    ]  # fmt: skip
    for path in columns.values():
        at = schema_of("longcontextjobs.yaml")
        for part in path.removeprefix(".").split("."):
            if part == "metadata":
                break
            at = at["properties"][part]


def test_files_are_current_and_small():
    assert crd.main(["--check", "--root", str(REPO)]) == 0
    for path in (REPO / "manifests" / "crds").glob("*.yaml"):
        assert path.stat().st_size < crd.MAX_BYTES


def test_older_yaml_readers_see_the_same_values():
    yaml = pytest.importorskip("yaml")
    for name, definition in FILES.items():
        text = crd.render(definition)
        assert yaml.safe_load(text) == definition == load(text).value, name


def test_stale_files_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "docs").mkdir()
    document = (REPO / "docs" / "job.md").read_text()
    (tmp_path / "docs" / "job.md").write_text(document)
    arguments = ["--root", str(tmp_path)]
    assert crd.main([*arguments, "--check"]) == 1
    assert "run make crd" in capsys.readouterr().err
    assert crd.main(arguments) == 0
    assert crd.main([*arguments, "--check"]) == 0
    assert (tmp_path / "docs" / "job.md").read_text() == document
    path = tmp_path / "manifests" / "crds" / "longcontextjobs.yaml"
    path.write_text(path.read_text().replace("maxItems: 64", "maxItems: 65"))
    assert crd.main([*arguments, "--check"]) == 1

"""What a real API server accepts and refuses: the generated CRDs, samples, and wrong specs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.apiserver import ApiServer
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from msa_operator import crd
from msa_operator.api.pattern import _MEMBERS, _SHAPES, _TOP
from msa_operator.yaml12 import load
from operator_jobs import GONE, GPU, SAMPLES, job
from test_api_job import BROKEN

CRDS = Path(__file__).parents[2] / "manifests" / "crds"
JOBS = ("flashmsa.dev", "v1alpha1", "default", "longcontextjobs")
PROFILES = ("flashmsa.dev", "v1alpha1", "hardwareprofiles")
NAMES = [f"crd/{at[-1]}.flashmsa.dev" for at in (JOBS, PROFILES)]

ACCELERATOR = {"name": "X", "count": 2, "memoryMiB": 1024, "peakTflops": 1, "memoryGBps": 1}

# The server takes these without a word, each for a reason; the command refuses them.
ACCEPTED = {
    "not finite": "JSON has no NaN",
}


class Door:
    """Creates objects by dry run; a refusal is returned as the server's words."""

    def __init__(self, server: ApiServer) -> None:
        api_client = config.new_client_from_config(str(server.kubeconfig))
        self.objects = client.CustomObjectsApi(api_client)

    def refusal(self, body: dict[str, Any]) -> str | None:
        """None when the object is accepted."""
        options: dict[str, Any] = {"dry_run": "All", "field_validation": "Strict"}
        try:
            if body["kind"] == "HardwareProfile":
                self.objects.create_cluster_custom_object(*PROFILES, body, **options)
            else:
                self.objects.create_namespaced_custom_object(*JOBS, body, **options)
        except ApiException as error:
            return _said(error)
        return None

    def change(self, name: str, patch: dict[str, Any]) -> str | None:
        try:
            self.objects.patch_namespaced_custom_object(*JOBS, name, patch)
        except ApiException as error:
            return _said(error)
        return None


def _said(error: ApiException) -> str:
    assert error.status in (400, 422), error
    return json.loads(error.body or "{}")["message"]


@pytest.fixture(scope="module")
def door(api_server: ApiServer) -> Door:
    api_server.apply(CRDS)
    api_server.kubectl(
        "wait", "--for=condition=Established", "--timeout=30s", *NAMES
    )  # fmt: skip
    return Door(api_server)


def profile(changes: dict[str, Any]) -> dict[str, Any]:
    body = sample(SAMPLES / "hardware-profile.yaml")
    body["spec"] |= changes
    return body


def sample(path: Path) -> dict[str, Any]:
    return load(path.read_text()).value


def test_crds_have_no_complaint(door: Door, api_server: ApiServer):
    for name in NAMES:
        text = api_server.kubectl("get", name, "-o", "json")
        conditions = {c["type"]: c["status"] for c in json.loads(text)["status"]["conditions"]}
        assert conditions["Established"] == conditions["NamesAccepted"] == "True"
        # A schema that is not structural is stored with this condition.
        assert conditions.get("NonStructuralSchema", "False") == "False"


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_samples_are_accepted(door: Door, path: Path):
    assert door.refusal(sample(path)) is None


@pytest.mark.parametrize("kind", sorted(BROKEN.keys() - ACCEPTED.keys()))
def test_what_the_command_refuses_the_server_refuses(door: Door, kind: str):
    changes, path, *_ = BROKEN[kind]
    said = door.refusal(job(changes))
    assert said is not None, f"accepted: {changes}"
    # The words lead to the field, or to what holds it where a rule compares several.
    fields = re.sub(r"\[\d+\]", "", path).split(".")
    assert fields[-1] in said or ".".join(fields[:-1]) in said, said


# What changes the rules of the custom resource know beyond those of the patterns.
RULES: dict[str, dict[str, Any]] = {
    "give exactly one of source, preset and config": {"spec.model": {}},
    "globalBatchTokens must be a multiple of length": {"spec.sequence.globalBatchTokens": 10_000},
    "warmupSteps must be at most maxSteps": {"spec.training.warmupSteps": 200},
    "policy Fixed needs at least one of": {"spec.parallelism.policy": "Fixed"},
    "min must be at most max": {**GPU, "spec.hardware": {"accelerators": {"min": 9, "max": 8}}},
    "device cpu needs workers": {"spec.hardware.workers": GONE},
    "device cpu has workers, not accelerators": {"spec.hardware.accelerators": {"min": 1}},
    "device gpu has accelerators, not workers": {"spec.hardware": {"device": "gpu", "workers": 2}},
    "order must name at least one kind": {"spec.capacity.order": []},
    "reservation ids are used only when": {
        "spec.capacity": {"order": ["OnDemand"], "reservation": {"ids": ["cr-0123456789abcdef0"]}}
    },
    "nothing is tried after Fail": {"spec.failure.onNodeLoss": ["Fail", "Replan"]},
    "value and valueFrom exclude each other": {
        "spec.pod.env": [
            {"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
        ]
    },
    "the degrees' product must equal hardware.workers": {
        "spec.parallelism": {"policy": "Fixed", "dataShard": 3}
    },
    "the degrees' product must lie within": {
        **GPU,
        "spec.parallelism": {"policy": "Fixed", "tensor": 4, "dataShard": 32},
    },
    "a BlockList needs a row for every block": {
        "spec.attention.pattern": {"type": "BlockList", "block": 64, "rows": [[0], [1]]}
    },
    "metadata.name may have 38 characters": {"metadata.name": "a" * 39},
    "metadata.name: lower case letters, digits": {"metadata.name": "4096"},
    "a pattern must not see later tokens": {
        "spec.attention.pattern": {"type": "Dense", "causal": False}
    },
    "columns must be at most length": {
        "spec.attention.pattern": {"type": "Columns", "length": 8, "columns": 9}
    },
    "a Union holds up to 16 patterns": {
        "spec.attention.pattern": {
            "type": "Union",
            "members": [{"type": "BlockTopK", "block": 64, "topk": 4}],
        }
    },
}


@pytest.mark.parametrize("message", RULES)
def test_rules_refuse_with_their_message(door: Door, message: str):
    said = door.refusal(job(RULES[message]))
    assert said is not None and message in said, said


PROFILE_RULES: dict[str, dict[str, Any]] = {
    "domain must be at most the machine's count": {"accelerator": ACCELERATOR | {"domain": 4}},
    "allocatableMemoryMiB must be at most memoryMiB": {"allocatableMemoryMiB": 1 << 22},
}


def wrong_patterns() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind at every depth, once without what it needs or with what it has not."""
    for kind in _TOP:
        yield kind, _wrong(kind)
    for kind in _MEMBERS["PerHead"][1]:
        yield kind, {"type": "PerHead", "members": [_wrong(kind)]}
    for kind in _MEMBERS["Union"][1]:
        union = {"type": "Union", "members": [_wrong(kind)]}
        yield kind, {"type": "PerHead", "members": [union]}


def _wrong(kind: str) -> dict[str, Any]:
    required, optional = _SHAPES[kind]
    if required:
        return {"type": kind}
    extra = next(name for name in ("window", "sinks") if name not in optional)
    return {"type": kind, extra: 4}


@pytest.mark.parametrize(
    ("kind", "pattern"),
    list(wrong_patterns()),
    ids=lambda value: value if type(value) is str else "",
)
def test_each_pattern_says_what_it_needs(door: Door, kind: str, pattern: dict[str, Any]):
    said = door.refusal(job({"spec.attention.pattern": pattern}))
    assert said is not None and f"{kind} needs" in said, said


@pytest.mark.parametrize("field", ["model", "data", "sequence", "attention"])
def test_what_checkpoints_depend_on_cannot_change(door: Door, field: str):
    name = f"fixed-{field}"
    body = job({"metadata.name": name})
    door.objects.create_namespaced_custom_object(*JOBS, body)
    other = {
        "model": {"preset": "llama-3-8b"},
        "data": {"source": "file:///data/*.jsonl"},
        "sequence": {"globalBatchTokens": 16384},
        "attention": {"denseLayers": [0]},
    }
    said = door.change(name, {"spec": {field: other[field]}})
    assert said is not None and f"{field} cannot change" in said, said
    if field == "attention":
        said = door.change(name, {"spec": {field: {"backend": "triton"}}})
        assert said is not None and f"{field} cannot change" in said, said
        assert door.change(name, {"spec": {field: {"backend": "auto"}}}) is None, "the default"
    # The same edit beside them is free.
    assert door.change(name, {"spec": {"training": {"maxSteps": 200}}}) is None


@pytest.mark.parametrize("message", PROFILE_RULES)
def test_profiles_are_checked(door: Door, message: str):
    said = door.refusal(profile(PROFILE_RULES[message]))
    assert said is not None and message in said, said


def test_status_is_apart_from_the_spec(door: Door):
    name = "apart"
    body = job({"metadata.name": name}) | {"status": {"phase": "Running"}}
    made: Any = door.objects.create_namespaced_custom_object(*JOBS, body)
    assert "status" not in made
    patch = {"spec": {"training": {"maxSteps": 7}}, "status": {"phase": "Planned"}}
    after: Any = door.objects.patch_namespaced_custom_object_status(*JOBS, name, patch)
    assert after["status"]["phase"] == "Planned"
    assert after["spec"]["training"]["maxSteps"] == 100
    assert after["metadata"]["generation"] == 1


def test_every_rule_has_a_spec_that_it_refuses(door: Door):
    """Keeps the tables above complete when a rule is added."""
    bodies = [job(changes) for changes in RULES.values()]
    bodies += [job({"spec.attention.pattern": pattern}) for _, pattern in wrong_patterns()]
    bodies += [profile(changes) for changes in PROFILE_RULES.values()]
    said = "\n".join(door.refusal(body) or "" for body in bodies)
    silent = [
        rule["message"]
        for definition in crd.definitions().values()
        for rule in rules(definition)
        if rule["message"] not in said and "oldSelf" not in rule["rule"]
    ]
    assert not silent


def rules(node: Any) -> Iterator[dict[str, str]]:
    if isinstance(node, dict):
        yield from node.get("x-kubernetes-validations", ())
    for inner in node.values() if isinstance(node, dict) else node:
        if isinstance(inner, dict | list):
            yield from rules(inner)

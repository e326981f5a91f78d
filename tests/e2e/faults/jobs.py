"""Small jobs, made from the sample that the documentation starts with."""

from __future__ import annotations

from typing import Any

from msa_operator.api import parse_job
from msa_operator.models import resolve
from msa_operator.planner.hardware import local
from msa_operator.planner.runtime import EVERYTHING
from msa_operator.reconcile import pods
from msa_operator.reconcile.desired import Owner, Rendered, render
from msa_operator.runs import machines_of, plan_job, run_spec
from msa_operator.yaml12 import load

from ..paths import REPOSITORY

SAMPLE = REPOSITORY / "manifests" / "samples" / "stdlib-4k.yaml"
JOBS = "/apis/flashmsa.dev/v1alpha1/namespaces/{}/longcontextjobs"


def job(name: str, namespace: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The sample with another name, 20 steps and checkpoints that two pods may share.

    changes: values by dotted path below the spec.
    """
    made: Any = load(SAMPLE.read_text()).value
    made["metadata"] = {"name": name, "namespace": namespace}
    usual: dict[str, Any] = {
        "training.maxSteps": 20,
        "training.warmupSteps": 2,
        "checkpoint.everySteps": 5,
        "checkpoint.uri": f"s3://checkpoints/{namespace}/{name}",
    }
    for path, value in {**usual, **(changes or {})}.items():
        *parents, last = path.split(".")
        at = made["spec"]
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
    return made


def rendered(body: dict[str, Any], uid: str) -> Rendered:
    """The children that the operator would make for a job object."""
    parsed = parse_job(body)
    model = resolve(parsed.spec.model)
    host = local(cpus=4, memory_mib=32_000)
    plan = plan_job(parsed, model, machines_of(parsed, (), lambda: host), EVERYTHING)
    uri = parsed.spec.checkpoint.uri or ""
    run = run_spec(parsed, plan, model, output="/out", checkpoint_uri=uri, owner="operator")
    meta = body["metadata"]
    owner = Owner(meta["name"], meta["namespace"], uid)
    return render(parsed, plan, run, owner, pods.Settings(image="w:1", ray_version="2.60.0"))

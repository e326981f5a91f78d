"""A valid job to break: as a mapping, with changes by path, and as a file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from msa_operator.api.problems import split

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
GONE = object()

JOB: dict[str, Any] = {
    "apiVersion": "flashmsa.dev/v1alpha1",
    "kind": "LongContextJob",
    "metadata": {"name": "small"},
    "spec": {
        "model": {"preset": "tiny-llama"},
        "data": {"source": "python-stdlib://"},
        "sequence": {"length": 4096, "globalBatchTokens": 8192},
        "attention": {"pattern": {"type": "SinkWindow", "window": 512, "sinks": 64}},
        "training": {"maxSteps": 100, "precision": "fp32"},
        "hardware": {"device": "cpu", "workers": 2},
    },
}

GPU: dict[str, Any] = {
    "spec.model": {"preset": "qwen3-8b"},
    "spec.sequence": {"length": 131072, "globalBatchTokens": 4194304},
    "spec.training": {"maxSteps": 1000},
    "spec.hardware": {
        "accelerators": {"min": 8, "max": 64},
        "instanceTypes": ["p5.48xlarge", "p5en.48xlarge"],
    },
}


def job(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A copy of :data:`JOB` with values set by path; ``GONE`` removes one."""
    out = copy.deepcopy(JOB)
    for path, value in (changes or {}).items():
        *parents, last = split(path)
        at: Any = out
        for part in parents:
            at = at[part] if isinstance(part, int) else at.setdefault(part, {})
        if value is GONE:
            at.pop(last, None)
        else:
            at[last] = copy.deepcopy(value)
    return out


def write(folder: Path, changes: dict[str, Any] | None = None, name: str = "job.yaml") -> Path:
    """The job as a file. JSON is YAML too, and keeps every type as it is."""
    path = folder / name
    path.write_text(json.dumps(job(changes), indent=1))
    return path

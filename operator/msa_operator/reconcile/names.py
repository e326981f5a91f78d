"""Names and labels of a job's children: within every limit, and the same after any restart."""

from __future__ import annotations

import hashlib
import json
from typing import Any

CLUSTER_LENGTH = 53
"""KubeRay names services and pods after a cluster and accepts no longer name."""
HASH_VERSION = "v1"
"""Part of every hash: a release that renders alike but hashes otherwise raises it."""

JOB = "flashmsa.dev/job"
JOB_UID = "flashmsa.dev/job-uid"
MANAGED_BY = "app.kubernetes.io/managed-by"
OPERATOR = "flash-msa-operator"
QUEUE = "kueue.x-k8s.io/queue-name"
FINALIZER = "flashmsa.dev/cleanup"

SAFE = frozenset({"suspend", "failure", "hang", "deadlines", "cleanup"})
"""Parts of the spec that the operator alone reads: they may change at any time."""


def content_hash(rendered: Any) -> str:
    """Hash of plain JSON values: equal exactly when the values are."""
    text = json.dumps(rendered, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def cluster_name(job: str, uid: str, content: str, epoch: int) -> str:
    """``<job>-<uid5>-<hash8>``: the job object, what is rendered for it, and its epoch.

    Raises :class:`ValueError` when the job's name is longer than the custom resource allows.
    """
    digest = content_hash([HASH_VERSION, epoch, content])[:8]
    name = f"{job}-{uid[:5]}-{digest}"
    if len(name) > CLUSTER_LENGTH:
        raise ValueError(f"{name}: {len(name)} characters, KubeRay allows {CLUSTER_LENGTH}")
    return name


def submission_id(cluster: str, attempt: int) -> str:
    """The id under which one attempt is submitted, so that a second POST is a duplicate."""
    return f"{cluster}-{attempt}"


def labels(job: str, uid: str) -> dict[str, str]:
    """Labels by which the children of one job object are found and told from a namesake's."""
    return {JOB: job, JOB_UID: uid, MANAGED_BY: OPERATOR}

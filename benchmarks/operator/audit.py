"""What the API server itself wrote down of one user's requests: counted by verb and resource."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

APART = ("events", "leases")
"""Written beside a job's life; counted, but not among its writes."""
WRITES = frozenset({"create", "update", "patch", "delete"})


def flags(folder: Path, user: str) -> list[str]:
    """Flags with which the API server writes down that user's requests alone."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "rules": [{"level": "Metadata", "users": [user]}, {"level": "None"}],
    }
    (folder / "policy.json").write_text(json.dumps(policy))
    return [
        f"--audit-policy-file={folder / 'policy.json'}",
        f"--audit-log-path={folder / 'audit.log'}",
        "--audit-log-mode=batch",
    ]


def count(folder: Path) -> Counter[tuple[str, str, int]]:
    """Requests by (verb, resource with its subresource, code)."""
    found: Counter[tuple[str, str, int]] = Counter()
    for path in folder.glob("audit*.log"):
        with path.open() as lines:
            for line in lines:
                event = json.loads(line)
                thing = event.get("objectRef") or {}
                names = [thing.get("resource", event["requestURI"]), thing.get("subresource", "")]
                code = (event.get("responseStatus") or {}).get("code", 0)
                found[event["verb"], "/".join(n for n in names if n), code] += 1
    return found


def per_job(counts: Counter[tuple[str, str, int]], jobs: int) -> dict[str, float]:
    """Requests per job, the most frequent first."""
    sums: Counter[str] = Counter()
    for (verb, resource, _), number in counts.items():
        sums[f"{verb} {resource}"] += number
    return {what: round(number / jobs, 2) for what, number in sums.most_common()}


def writes_per_job(counts: Counter[tuple[str, str, int]], jobs: int) -> float:
    """Writes that belong to a job's life: events and the Lease apart."""
    mine = sum(
        number
        for (verb, resource, _), number in counts.items()
        if verb in WRITES and resource not in APART
    )
    return round(mine / jobs, 2)

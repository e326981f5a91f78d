"""A job as people read it: one value with every number that the status holds."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNSEEN_SECONDS = 30.0
"""A job that no operator has looked at for so long has none: it looks within a second."""

TERMINAL = ("Complete", "Failed")

NO_OPERATOR = (
    "no operator has looked at this job; is it running? kubectl get pods "
    "--all-namespaces --selector app.kubernetes.io/name=flash-msa-operator, msa doctor --cluster"
)


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What ``msa status`` shows of a job; numbers that nobody knows yet are None."""

    namespace: str
    name: str
    uid: str
    phase: str
    message: str
    """What stands in the way, or what a person has to do; empty when all is well."""
    suspend: bool
    deleting: bool
    held: bool
    """A finalizer of the operator's is on it."""
    age: float
    plan: str
    nodes: str
    step: int | None
    max_steps: int | None
    loss: float | None
    tokens_per_second: int | None
    mfu: float | None
    eta: str
    checkpoint: int | None
    checkpoint_uri: str
    updated: float | None
    """Seconds since progress was last heard."""
    cluster: str
    attempts: tuple[Mapping[str, Any], ...]
    conditions: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def over(self) -> bool:
        return self.phase in TERMINAL

    def condition(self, name: str) -> Mapping[str, Any]:
        """The condition of that type; empty when there is none."""
        return next((c for c in self.conditions if c.get("type") == name), {})


def view(raw: Mapping[str, Any], now: datetime.datetime) -> JobView:
    """A job object of the API server; fields that are missing or odd are passed over."""
    meta, spec, status = (_map(raw.get(part)) for part in ("metadata", "spec", "status"))
    progress, plan = _map(status.get("progress")), _map(status.get("plan"))
    conditions = tuple(map(_map, _list(status.get("conditions"))))
    age = _since(meta.get("creationTimestamp"), now) or 0.0
    maxed = progress.get("maxSteps") or _map(spec.get("training")).get("maxSteps")
    return JobView(
        namespace=str(meta.get("namespace", "")),
        name=str(meta.get("name", "")),
        uid=str(meta.get("uid", "")),
        phase=str(status.get("phase") or "New"),
        message=_message(status, conditions, age),
        suspend=spec.get("suspend") is True,
        deleting=bool(meta.get("deletionTimestamp")),
        held="flashmsa.dev/cleanup" in _list(meta.get("finalizers")),
        age=age,
        plan=str(plan.get("summary", "")),
        nodes=str(_map(status.get("nodes")).get("summary", "")),
        step=_number(progress.get("step")),
        max_steps=_number(maxed),
        loss=_number(progress.get("loss")),
        tokens_per_second=_number(progress.get("tokensPerSecond")),
        mfu=_number(progress.get("mfu")),
        eta=str(progress.get("eta", "")),
        checkpoint=_number(progress.get("checkpointStep")),
        checkpoint_uri=str(progress.get("checkpointUri", "")),
        updated=_since(progress.get("updated"), now),
        cluster=str(_map(status.get("ray")).get("cluster", "")),
        attempts=tuple(map(_map, _list(status.get("attempts")))),
        conditions=conditions,
        notes=tuple(map(str, _list(plan.get("notes")))),
    )


def _message(
    status: Mapping[str, Any], conditions: tuple[Mapping[str, Any], ...], age: float
) -> str:
    if not status.get("observedGeneration"):
        return NO_OPERATOR if age > UNSEEN_SECONDS else ""
    by_type = {c.get("type"): c for c in conditions}

    def text(name: str, status: str) -> str:
        found = _map(by_type.get(name))
        if found.get("status") != status:
            return ""
        return str(found.get("message") or found.get("reason") or "")

    planned = _map(by_type.get("Planned"))
    edit = text("Planned", "True") if planned.get("reason") == "EditRefused" else ""
    return (
        text("Failed", "True") or text("Planned", "False") or text("Stalled", "True")
        or text("Degraded", "True") or edit
        or (text("CapacityReady", "False") if status.get("phase") == "Provisioning" else "")
    )  # fmt: skip


def short(seconds: float | None) -> str:
    """``42s``, ``17m``, ``5h12m``, ``3d4h``."""
    if seconds is None:
        return ""
    whole = max(0, int(seconds))
    for size, unit, lesser, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= size:
            rest = whole % size // lesser
            return f"{whole // size}{unit}" + (f"{rest}{small}" if rest else "")
    return f"{whole // 60}m" if whole >= 60 else f"{whole}s"


def _since(text: object, now: datetime.datetime) -> float | None:
    try:
        at = datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00"))
        return (now - at).total_seconds()
    except (ValueError, TypeError):
        return None


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _number(value: object) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None

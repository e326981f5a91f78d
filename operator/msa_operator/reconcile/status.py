"""Intent and status of a job, both ways: what is written is read back as the same intent; pure.

Times are kept to the millisecond, texts to the length that the custom resource allows, so an
intent is made :func:`canonical` before it is acted on.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from msa_operator.api import status as api
from msa_operator.api.problems import JobError, Problem
from msa_operator.api.read import Reader, model_of
from msa_operator.api.schema import Model
from msa_operator.reconcile.conditions import Condition
from msa_operator.reconcile.intent import Attempt, Intent, Phase

MESSAGE = 1024
"""Longest message of an intent or an attempt, in characters; an event holds as many bytes."""
_READ = ("phase", "attempts", "ray", "intent")
"""Parts of a status that an intent is read from."""
_UTC = datetime.UTC
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=_UTC)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a status says beside the intent."""

    generation: int = 0
    conditions: tuple[Condition, ...] = ()
    plan: Mapping[str, Any] | None = None
    """As in the custom resource; None keeps the plan that is there."""
    nodes: Mapping[str, Any] | None = None
    head_service: str = ""
    namespace: str = ""
    node_hours: float = 0.0


def time_text(seconds: float) -> str:
    """Seconds since 1970 as RFC 3339 with milliseconds."""
    at = _EPOCH + datetime.timedelta(milliseconds=round(seconds * 1000))
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(text: str) -> float:
    """The reverse of :func:`time_text`; any RFC 3339 time. Raises :class:`ValueError`."""
    found = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    if found.tzinfo is None:
        found = found.replace(tzinfo=_UTC)
    return round((found - _EPOCH) / datetime.timedelta(milliseconds=1)) / 1000


def canonical(intent: Intent) -> Intent:
    """The intent as it will be read back."""
    return replace(
        intent,
        since=_ms(intent.since),
        retry_at=_ms(intent.retry_at),
        message=_cut(intent.message),
        active_used=_ms(intent.active_used),
        since_active=None if intent.since_active is None else _ms(intent.since_active),
        ended=None if intent.ended is None else _ms(intent.ended),
        attempts=tuple(
            replace(
                a, started=_ms(a.started), message=_cut(a.message),
                ended=None if a.ended is None else _ms(a.ended),
            )
            for a in intent.attempts
        ),
    )  # fmt: skip


def read(raw: Any) -> Intent:
    """The intent in a status; a new job's when it has none. Raises :class:`JobError`.

    Fields that this version does not know are passed over: a newer one may have written them.
    """
    if not isinstance(raw, Mapping) or not raw:
        return Intent()
    wanted = {k: raw[k] for k in _READ if raw.get(k) is not None}
    reader = Reader(lambda _: "status")
    found = reader.read(api.JobStatus, _known(api.JobStatus, wanted))
    if found is None:
        raise JobError(reader.problems)
    if found.intent is None and found.phase not in (None, "Pending"):
        # Its deadlines would count from 1970, and the job be failed or deleted at once.
        raise JobError([Problem(
            "status.intent", f"is missing in phase {found.phase}",
            "what the operator wrote; without it the job is left alone",
        )])  # fmt: skip
    kept, ray = found.intent or api.Intent(), found.ray or api.Ray()
    try:
        return Intent(
            phase=cast(Phase, found.phase or "Pending"),
            since=_time(kept.since) or 0.0,
            epoch=ray.epoch,
            cluster=ray.cluster,
            attempts=tuple(_attempt(a) for a in found.attempts),
            failures=tuple((f.hour, f.count) for f in kept.failures),
            in_a_row=kept.in_a_row,
            retry_at=_time(kept.retry_at) or 0.0,
            replace=kept.replace,
            losses_tried=kept.losses_tried,
            machines=kept.machines,
            after=cast(Phase, kept.after),
            reason=kept.reason,
            message=kept.message,
            active_used=kept.active_seconds,
            since_active=_time(kept.active_since),
            ended=_time(kept.ended),
            accepted=tuple(sorted(kept.accepted.items())),
        )
    except ValueError as error:  # a text that only looks like a time
        raise JobError([Problem("status", str(error))]) from error


def digest(raw: Any) -> bytes:
    """Equal where :func:`read` gives the same intent; found without reading it."""
    wanted = [raw.get(k) for k in _READ] if isinstance(raw, Mapping) else []
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).digest()


def conditions(raw: Any) -> tuple[Condition, ...]:
    """The conditions in a status; those that cannot be read are left out."""
    found = raw.get("conditions") if isinstance(raw, Mapping) else None
    out = []
    for each in found if isinstance(found, list) else []:
        try:
            out.append(Condition(
                type=each["type"], status=each["status"], reason=each["reason"],
                message=each.get("message", ""),
                observed_generation=each.get("observedGeneration", 0),
                changed=seconds_of(each["lastTransitionTime"]),
            ))  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return tuple(out)


def write(intent: Intent, shown: Shown) -> dict[str, Any]:
    """The status of a job, without its progress, which has a writer of its own.

    Every field that has a default is there: the API server would add it, and the next
    :func:`difference` would take it away.
    """
    kept = {
        "since": _text(intent.since or None),
        "reason": intent.reason,
        "message": intent.message,
        "failures": [{"hour": h, "count": n} for h, n in intent.failures],
        "inARow": intent.in_a_row,
        "retryAt": _text(intent.retry_at or None),
        "replace": intent.replace,
        "lossesTried": intent.losses_tried,
        "machines": intent.machines,
        "after": intent.after,
        "activeSeconds": intent.active_used,
        "activeSince": _text(intent.since_active),
        "ended": _text(intent.ended),
        "accepted": dict(intent.accepted),
    }
    out: dict[str, Any] = {
        "observedGeneration": shown.generation,
        "phase": intent.phase,
        "conditions": [_condition(c) for c in shown.conditions],
        "attempts": [_attempt_status(a) for a in intent.attempts],
        "intent": {k: v for k, v in kept.items() if v is not None},
    }
    if shown.plan is not None:
        out["plan"] = dict(shown.plan)
    if shown.nodes is not None:
        out["nodes"] = dict(shown.nodes)
    if shown.node_hours:
        out["cost"] = {"nodeHours": round(shown.node_hours, 3)}
    if intent.cluster:
        service = shown.head_service
        board = f"http://{service}.{shown.namespace}.svc:8265" if service else ""
        out["ray"] = {
            "cluster": intent.cluster, "epoch": intent.epoch, "headService": service,
            "dashboard": board,
        }  # fmt: skip
    return out


def difference(old: Any, new: dict[str, Any], keep: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON merge patch that makes ``old`` into ``new``; empty when there is nothing to do.

    Top-level fields named in ``keep`` stay when ``new`` has none.
    """
    patch: dict[str, Any] = {}
    before = old if isinstance(old, Mapping) else {}
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            if inner := difference(before[key], value):
                patch[key] = inner
        elif key not in before or before[key] != value:
            patch[key] = value
    for key in before:
        if key not in new and key not in keep:
            patch[key] = None
    return patch


def _ms(seconds: float) -> float:
    return round(seconds * 1000) / 1000


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE else text[: MESSAGE - 3] + "..."


def _text(seconds: float | None) -> str | None:
    return None if seconds is None else time_text(seconds)


def _time(text: str | None) -> float | None:
    return None if text is None else seconds_of(text)


def _attempt(a: api.Attempt) -> Attempt:
    return Attempt(
        number=a.number, submission_id=a.submission_id, head=a.head, workers=a.workers,
        started=_time(a.started) or 0.0, from_step=a.from_step, to_step=a.to_step,
        checkpoint_step=a.checkpoint_step, ended=_time(a.ended), reason=a.reason,
        message=a.message,
    )  # fmt: skip


def _attempt_status(a: Attempt) -> dict[str, Any]:
    out = {
        "number": a.number, "submissionId": a.submission_id, "state": "Over" if a.over else "Open",
        "head": a.head, "workers": a.workers, "started": time_text(a.started),
        "fromStep": a.from_step, "toStep": a.to_step, "checkpointStep": a.checkpoint_step,
        "reason": a.reason, "message": a.message,
    }  # fmt: skip
    return out if a.ended is None else out | {"ended": time_text(a.ended)}


def _condition(c: Condition) -> dict[str, Any]:
    return {
        "type": c.type, "status": c.status, "reason": c.reason or "Unknown",
        "message": c.message[:4096], "lastTransitionTime": time_text(c.changed),
        "observedGeneration": c.observed_generation,
    }  # fmt: skip


def _known(kind: type[Model], raw: Any) -> Any:
    """``raw`` without the fields that ``kind`` lacks."""
    if not isinstance(raw, Mapping):
        return raw
    fields = {info.alias or name: info for name, info in kind.model_fields.items()}
    out: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in fields:
            continue
        model, many = model_of(fields[key])
        if model is not None and many and isinstance(value, list):
            value = [_known(model, v) for v in value]
        elif model is not None:
            value = _known(model, value)
        out[key] = value
    return out

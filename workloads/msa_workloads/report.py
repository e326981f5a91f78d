"""What a run leaves: ``summary.json`` for programs, ``report.html`` for people.

The report is one file without scripts or links to elsewhere; its pictures are inline SVG.
"""

from __future__ import annotations

import io
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from msa_kernels.pattern import Pattern, PatternError, PerHead, from_dict

from msa_workloads.display import spans, summary_lines
from msa_workloads.progress import METRICS
from msa_workloads.runspec import RunSpec

SUMMARY, REPORT = "summary.json", "report.html"

PACKAGES = ("flash-msa-operator", "torch", "triton", "ray", "transformers", "numpy")
"""Packages whose versions a summary records."""

CELLS = 256
"""Sampled positions per side of a pattern's picture."""

LAST_STEPS = 10
"""Steps whose losses are averaged to ``loss.last_mean``."""


def write_report(
    spec: RunSpec, outcome: dict[str, Any], *, wall_seconds: float, restarts: int
) -> dict[str, Any]:
    """Write both files to the spec's output folder; returns the summary."""
    output = Path(spec.output)
    output.mkdir(parents=True, exist_ok=True)
    summary = summarise(spec, outcome, wall_seconds=wall_seconds, restarts=restarts)
    _replace(output / REPORT, render(spec, summary, outcome["history"]))
    _replace(output / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


def summarise(
    spec: RunSpec, outcome: dict[str, Any], *, wall_seconds: float, restarts: int
) -> dict[str, Any]:
    """The summary as a mapping; every number in it comes from the run itself."""
    history = outcome["history"]
    losses = [row["loss"] for row in history]
    seconds = history[-1]["elapsed"] if history else 0.0
    tokens = outcome["samples"] * spec.sequence.length
    output = Path(spec.output)
    kept = (
        "steps", "samples", "sequences_per_epoch", "resumed_from_step", "last_checkpoint_step",
        "checkpoint_uri", "held_out", "order1", "training_documents", "held_out_documents",
        "parameters", "attention", "ranks", "threads",
    )  # fmt: skip
    return {
        "name": spec.name,
        **{name: outcome[name] for name in kept},
        "heads": outcome.get("heads", []),
        "context": outcome.get("context"),
        "loss": {
            "first": losses[0] if losses else None,
            "last": losses[-1] if losses else None,
            "last_mean": sum(losses[-LAST_STEPS:]) / len(losses[-LAST_STEPS:]) if losses else None,
        },
        "losses": losses,
        "data": {"source": spec.data.source, **outcome["content"]},
        "speed": {
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "tokens": tokens,
            "seconds": seconds,
        },
        "memory_bytes": max((row["memory_bytes"] for row in history), default=0),
        "wall_seconds": wall_seconds,
        "restarts": restarts,
        "seed": spec.training.seed,
        "pattern": spec.attention.pattern,
        "dense_layers": list(spec.attention.dense_layers),
        "backend": spec.attention.backend,
        "plan": spec.plan,
        "versions": versions(),
        "files": {
            "summary": str(output / SUMMARY),
            "report": str(output / REPORT),
            "metrics": str(output / METRICS),
        },
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter for the numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def render(spec: RunSpec, summary: dict[str, Any], history: list[dict[str, Any]]) -> str:
    """The report as HTML."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    rejected = spec.plan.get("rejected") or []
    chosen = {k: v for k, v in spec.plan.items() if k != "rejected"}
    return environment.from_string(_TEMPLATE).render(
        name=spec.name,
        lines=summary_lines(summary),
        loss=_loss_picture(summary, history),
        patterns=_pattern_pictures(spec),
        dense=spans(sorted(spec.attention.dense_layers)),
        plan=[(key, _plain(value)) for key, value in chosen.items()],
        rejected=[(item["plan"], item["reason"]) for item in rejected],
        versions=summary["versions"],
        spec=spec.to_json(),
    )


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and all(not isinstance(v, dict | list) for v in value.values()):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return json.dumps(value)


def _loss_picture(summary: dict[str, Any], history: list[dict[str, Any]]) -> str:
    figure, axes = _figure(8, 3.2)
    axes.plot([r["step"] for r in history], [r["loss"] for r in history], linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    if held := summary["held_out"]:
        axes.axhline(
            held["nats_per_token"], color="tab:green", linewidth=1, label="held out at the end"
        )
        axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return _svg(figure)


def _pattern_pictures(spec: RunSpec) -> list[dict[str, Any]]:
    """One picture per distinct pattern of a key/value group."""
    pattern = from_dict(spec.attention.pattern)
    members = pattern.members if isinstance(pattern, PerHead) else (pattern,)
    return [_pattern_picture(member, spec.sequence.length) for member in members]


def _pattern_picture(pattern: Pattern, length: int) -> dict[str, Any]:
    try:
        count = min(CELLS, length)
        at = (np.arange(count) * length) // count
        seen = np.broadcast_to(pattern.allows(at[:, None], at[None, :]), (count, count))
        density = pattern.density(length)
    except PatternError as error:
        return {"title": pattern.kind, "note": error.problem, "svg": ""}
    figure, axes = _figure(3.4, 3.4)
    axes.imshow(
        seen,
        extent=(0, length, length, 0),
        cmap="Blues",
        interpolation="nearest",
        vmin=0,
        vmax=1.3,
    )
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    note = f"{density:.2%} of the pairs of dense causal attention"
    return {"title": json.dumps(pattern.to_dict()), "note": note, "svg": _svg(figure)}


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ name }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td { padding: .2rem .8rem .2rem 0; vertical-align: top; }
td:first-child { font-weight: 600; white-space: nowrap; } svg { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; } .note { color: #666; }
td, code { overflow-wrap: anywhere; }
</style></head><body>
<h1>{{ name }}</h1>
<table>{% for label, value in lines %}<tr><td>{{ label }}</td><td>{{ value }}</td></tr>
{% endfor %}</table>
<h2>Loss</h2>{{ loss | safe }}
<h2>Attention pattern</h2>
{% for p in patterns %}<p><code>{{ p.title }}</code> <span class="note">{{ p.note }}</span></p>
{{ p.svg | safe }}{% endfor %}
{% if dense %}<p>Layers {{ dense }} keep dense attention, counted from 0.</p>{% endif %}
<h2>Plan</h2>
{% if plan %}<table>{% for key, value in plan %}<tr><td>{{ key }}</td><td>{{ value }}</td></tr>
{% endfor %}</table>{% else %}<p class="note">This run was started without a plan.</p>{% endif %}
{% if rejected %}<h2>Rejected alternatives</h2><table>{% for plan, reason in rejected %}
<tr><td>{{ plan }}</td><td>{{ reason }}</td></tr>{% endfor %}</table>{% endif %}
<h2>Versions</h2>
<table>{% for key, value in versions.items() %}<tr><td>{{ key }}</td><td>{{ value }}</td></tr>
{% endfor %}</table>
<h2>RunSpec</h2><pre>{{ spec }}</pre>
</body></html>
"""

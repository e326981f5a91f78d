"""What a run leaves and shows."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msa_workloads.display import Display, clock, print_summary
from msa_workloads.logs import short_traceback
from msa_workloads.progress import MetricsFile, Tee, read_rows
from msa_workloads.report import render, summarise, write_report
from msa_workloads.runspec import RunSpec
from rich.console import Console


def row(step: int) -> dict[str, Any]:
    return {
        "step": step, "loss": 5.0 / step, "seconds": 0.5, "elapsed": 0.5 * step,
        "tokens_per_second": 100.0, "memory_bytes": 1 << 20,
    }  # fmt: skip


def outcome(steps: int) -> dict[str, Any]:
    return {
        "steps": steps, "samples": 2 * steps, "sequences_per_epoch": 9, "resumed_from_step": None,
        "last_checkpoint_step": steps, "checkpoint_uri": "/c", "training_documents": 3,
        "held_out_documents": 1, "parameters": 10, "ranks": 1, "threads": 1,
        "held_out": {
            "bits_per_byte": 2.5, "nats_per_token": 1.7, "predicted": 99, "unit": "bytes",
            "sequences": 1,
        },
        "order1": {"bits_per_byte": 3.5, "predicted": 99, "fitted_bytes": 1000},
        "attention": [],
        "content": {"sha256": "ab" * 32, "objects": 4, "bytes": 100, "method": "names and bytes"},
        "history": [row(n) for n in range(1, steps + 1)],
    }  # fmt: skip


def test_the_report_is_one_safe_file(make_spec: Callable[..., RunSpec]) -> None:
    plan = {
        "summary": "1 rank <b>",
        "degrees": {"data_shard": 1},
        "rejected": [{"plan": "tp2", "reason": "94.1 GiB per GPU, 88 usable"}],
    }
    spec = make_spec(plan=plan)
    summary = write_report(spec, outcome(3), wall_seconds=9.0, restarts=1)
    html = (Path(spec.output) / "report.html").read_text()
    assert html.count("<svg") == 2
    assert "94.1 GiB per GPU, 88 usable" in html
    assert "1 rank &lt;b&gt;" in html
    assert not re.search(r"<script|<link|src=\"http", html)
    assert json.loads((Path(spec.output) / "summary.json").read_text()) == summary
    assert summary["restarts"] == 1
    assert summary["loss"] == {"first": 5.0, "last": 5 / 3, "last_mean": pytest.approx(55 / 18)}
    assert summary["speed"]["tokens"] == 6 * spec.sequence.length
    assert summary["versions"]["torch"] != "not installed"


def test_dense_layers_and_a_resume_are_on_record(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec(attention={"dense_layers": (0, 1)})
    resumed = {**outcome(3), "resumed_from_step": 2}
    summary = write_report(spec, resumed, wall_seconds=1.0, restarts=0)
    html = (Path(spec.output) / "report.html").read_text()
    assert summary["dense_layers"] == [0, 1] and "Layers 0-1 keep dense attention" in html
    assert "0:01 since it was resumed, 0:02 in steps from the first one on" in html


def test_the_report_says_what_was_asked_for_and_what_ran(
    make_spec: Callable[..., RunSpec],
) -> None:
    attention = {"pattern": {"type": "Dense"}, "backend": "triton"}
    ran = {"pattern": "Dense(causal=True)", "device": "cuda:0", "dtype": "bfloat16",
           "q_rows": 64, "packed": True, "calls": 6}  # fmt: skip
    for used, said in (
        ([{**ran, "backend": "triton"}], "triton was asked for, triton ran"),
        ([{**ran, "backend": n} for n in ("context/triton", "triton", "triton")],
         "triton was asked for, context/triton and triton ran"),
        ([], "triton was asked for, none ran"),
    ):  # fmt: skip
        result = {**outcome(1), "attention": used}
        spec = make_spec(attention=attention)
        summary = summarise(spec, result, wall_seconds=1.0, restarts=0)
        assert summary["backend"] == "triton"
        assert said in render(spec, summary, result["history"])


@pytest.mark.parametrize(
    ("pattern", "pictures"),
    [
        ({"type": "Strided", "length": 8}, 2),
        ({"type": "Dense"}, 1),
        ({"type": "BlockTopK", "block": 16, "topk": 2}, 0),
    ],
)
def test_every_pattern_has_a_picture_or_a_reason(
    make_spec: Callable[..., RunSpec], pattern: dict[str, Any], pictures: int
) -> None:
    spec = make_spec(attention={"pattern": pattern})
    result = outcome(2)
    summary = summarise(spec, result, wall_seconds=1.0, restarts=0)
    html = render(spec, summary, result["history"])
    assert html.count("<svg") == 1 + pictures
    assert ("selected at run time" in html) == (pictures == 0)


def test_a_run_without_steps_or_held_out_text_still_reports(
    make_spec: Callable[..., RunSpec],
) -> None:
    result = {**outcome(0), "held_out": None, "order1": None}
    summary = write_report(make_spec(), result, wall_seconds=1.0, restarts=0)
    assert summary["loss"]["last"] is None
    console = Console(file=io.StringIO(), width=200)
    print_summary(console, summary)
    assert "nothing: the data is a single document" in console.file.getvalue()  # type: ignore[attr-defined]


def test_away_from_a_terminal_progress_is_a_few_lines(make_spec: Callable[..., RunSpec]) -> None:
    out = io.StringIO()
    spec = make_spec(training={"max_steps": 1000})
    display = Display(Console(file=out, width=200), spec)
    with display:
        display.begin([], {})
        for step in range(1, 1001):
            display.add(row(step))
    lines = out.getvalue().splitlines()
    assert 20 <= len(lines) <= 25
    assert lines[-1] == "step 1000/1000  loss 0.0050  100 tokens/s  ETA 0:00"
    assert re.fullmatch(r"step 500/1000  loss 0.0100  100 tokens/s  ETA 4:10", lines[10])


def test_on_a_terminal_progress_is_live(make_spec: Callable[..., RunSpec]) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    display = Display(console, make_spec())
    with display:
        display.begin([row(2)], {})
        for step in (3, 4):
            display.add(row(step))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "resumed from the checkpoint of step 2" in shown
    assert re.search(r"step 4/6 .*loss 1.2500  100 tokens/s  ETA 0:01", shown)


def test_metrics_are_one_history(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    both = Tee(metrics)
    both.begin([], {})
    for step in (1, 2, 3):
        both.add(row(step))
    with metrics.path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [r["step"] for r in metrics.rows()] == [1, 2, 3]
    both.begin([row(1)], {})
    both.add(row(2))
    assert read_rows(metrics.path.read_text()) == [row(1), row(2)]


def test_small_forms() -> None:
    assert [clock(s) for s in (0.4, 61, 3600, 7325)] == ["0:00", "1:01", "1:00:00", "2:02:05"]

    def deep(n: int) -> None:
        if n == 0:
            raise ValueError("the cause")
        deep(n - 1)

    try:
        deep(20)
    except ValueError as error:
        text = short_traceback(error)
    assert text.splitlines()[1] == "  ... 16 outer frames"
    assert text.endswith("ValueError: the cause")


def test_what_context_ranks_moved_is_said_in_lines() -> None:
    from msa_workloads.display import context_lines

    kind = {
        "pattern": {"type": "PerHead", "members": [{"type": "Window", "window": 8}]},
        "layers": 3, "balance": 1.02, "heads_balance": 1.25,
        "needed": {"most": 1 << 20, "total": 1 << 22},
        "keys": {"most": 2 << 20, "total": 2 << 22}, "gradients": {"most": 3000, "total": 9000},
        "alone": {"layout": "contiguous", "received": 10, "received_here": 40},
    }  # fmt: skip
    report = {
        "ranks": 4, "heads": 2, "method": "ring", "gradients": "bf16", "layout": "zigzag",
        "heads_bytes": {"most": 512, "total": 2048}, "kinds": [kind], "hidden": None,
    }  # fmt: skip
    lines = dict(context_lines(report))
    assert lines["context"] == (
        "4 ranks, zigzag layout, ring, gradients bf16, heads over 2 ranks (512 B a step)"
    )
    text = lines["  3 x PerHead(Window(window 8))"]
    assert "2.0 MiB keys and values a step to the busiest rank, 2.00 x the minimum" in text
    assert "2.9 KiB gradients; area max/mean 1.020, over ranks that split heads 1.250;" in text
    assert "alone contiguous would move 25%" in text
    assert "not measured" in lines["  hidden"]
    measured = {"share": 0.97, "milliseconds": 12.0, "waited_milliseconds": 0.4}
    assert "97.0% of 12.0 ms" in dict(context_lines({**report, "hidden": measured}))["  hidden"]
    assert context_lines(None) == []


def test_the_order_of_heads_is_said_where_it_is_not_the_models(
    make_spec: Callable[..., RunSpec],
) -> None:
    from msa_workloads.display import heads_line

    kind = {"layers": [0, 1, 2, 5], "order": [0, 2, 1, 3], "balance": 1.019, "plain": 1.445}
    text = heads_line(kind)
    assert text == (
        "layers 0-2, 5: key/value heads stored as 0 2 1 3 of the model's, in checkpoints too; "
        "area max/mean 1.019 over ranks that split them, 1.445 in the model's order"
    )
    assert "in the model's order, area max/mean 1.200" in heads_line(
        {"layers": [3], "order": None, "balance": 1.2, "plain": 1.2}
    )
    summary = summarise(make_spec(), {**outcome(1), "heads": [kind]}, wall_seconds=1, restarts=0)
    assert summary["heads"] == [kind]
    assert "stored as 0 2 1 3" in render(make_spec(), summary, [row(1)])

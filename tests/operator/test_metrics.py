"""The operator's metrics: what they count, and that series end with the job that they describe."""

from __future__ import annotations

from dataclasses import replace

from msa_operator.metrics import CONTENT_TYPE, RUN, Metrics, Progress
from msa_operator.reconcile.intent import PHASES
from msa_workloads.control import RankReport, RunState
from msa_workloads.runspec import RunSpec
from prometheus_client.parser import text_string_to_metric_families
from test_reconcile_desired import rendered


def _samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Read back with the reader that Prometheus' own Python library has."""
    text = metrics.render().decode()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def _jobs(metrics: Metrics, namespace: str = "team") -> dict[str, float]:
    return {
        dict(labels)["phase"]: value
        for (name, labels), value in _samples(metrics).items()
        if name == "msa_jobs" and dict(labels)["namespace"] == namespace
    }


def test_what_is_served_is_text_that_prometheus_reads():
    metrics = Metrics()
    metrics.started("1.2.3")
    metrics.leads(True)
    found = _samples(metrics)
    assert CONTENT_TYPE.startswith("text/plain")
    assert found["msa_operator_build_info", (("version", "1.2.3"),)] == 1
    assert found["msa_operator_leader", ()] == 1
    assert found["process_resident_memory_bytes", ()] > 0


def test_jobs_are_counted_in_the_phase_they_are_in():
    metrics = Metrics()
    metrics.phase("team", "a", "Pending")
    metrics.phase("team", "b", "Pending")
    metrics.phase("team", "a", "Running")
    metrics.phase("team", "a", "Running")
    found = _jobs(metrics)
    assert set(found) == set(PHASES)
    assert {phase for phase, count in found.items() if count} == {"Pending", "Running"}
    assert found["Running"] == found["Pending"] == 1
    metrics.forget("team", "a")
    metrics.forget("team", "a")
    assert _jobs(metrics)["Running"] == 0


def test_the_series_of_a_job_end_with_it():
    metrics = Metrics()
    before = len(_samples(metrics))
    for n in range(100):
        metrics.progress("team", f"job-{n}", Progress(step=n, loss=2.5, accelerators=8))
    assert len(_samples(metrics)) == before + 300
    for n in range(100):
        metrics.forget("team", f"job-{n}")
    assert len(_samples(metrics)) == before


def test_what_a_run_no_longer_says_has_no_series():
    metrics = Metrics()
    key = ("msa_job_mfu", (("job", "a"), ("namespace", "team")))
    metrics.progress("team", "a", Progress(step=1, mfu=0.4))
    assert _samples(metrics)[key] == 0.4
    metrics.progress("team", "a", Progress(step=2))
    assert key not in _samples(metrics)


def test_a_job_that_holds_nothing_says_how_far_it_came_and_no_more():
    # An alert on silence would otherwise follow every run that is over.
    metrics = Metrics()
    metrics.phase("team", "a", "Running")
    said = Progress(
        step=9, max_steps=9, loss=2.0, tokens_per_second=1e3, accelerators=8, workers=1,
        eta_seconds=0.0, mfu=0.3, checkpoint_step=9, received=1e9,
    )  # fmt: skip
    metrics.progress("team", "a", said)

    def shown() -> set[str]:
        labels = (("job", "a"), ("namespace", "team"))
        return {name for name, found in _samples(metrics) if found == labels}

    assert len(shown()) == 10
    metrics.phase("team", "a", "Complete")
    metrics.phase("team", "a", "Complete")
    assert shown() == {
        "msa_job_step", "msa_job_max_steps", "msa_job_loss", "msa_job_checkpoint_step",
    }  # fmt: skip


def test_a_runs_own_metrics_are_known_by_their_names():
    text = rendered().config["runspec.json"]
    spec = replace(RunSpec.from_json(text), plan={"flops": {"step": 1e12, "peak": 1e12}})
    state = RunState(spec, "a-1", lambda: 0.0)
    state.begin([], {})
    state.add({"step": 1, "loss": 2.0, "seconds": 1.0, "tokens_per_second": 10.0})
    state.heard(RankReport(rank=0, pid=1, node="n", step=1, doing="", waits=False, memory_bytes=1))
    families = text_string_to_metric_families(state.metrics())
    assert {family.name for family in families} == set(RUN)


def test_two_of_a_kind_do_not_share_anything():
    # A process that made its metrics in a global registry could not be tested twice.
    one, other = Metrics(), Metrics()
    one.reconciled("ok", 0.01)
    assert ("msa_operator_reconciles_total", (("result", "ok"),)) in _samples(one)
    assert ("msa_operator_reconciles_total", (("result", "ok"),)) not in _samples(other)


def test_calls_durations_and_ends_are_counted():
    metrics = Metrics()
    metrics.requested("PATCH", "longcontextjobs", 409, 0.02)
    metrics.requested("GET", "pods", "timeout", 15.0)
    metrics.asked_head("progress", "ok")
    metrics.event("pods", "MODIFIED")
    metrics.heard("pods", 12.5)
    metrics.acted("CreateCluster", "ok")
    metrics.renewed("ok")
    metrics.queued(3, 2)
    metrics.shown(0.5)
    metrics.left("Provisioning", 90.0)
    metrics.attempt_ended("team", "NodeLost")
    found = _samples(metrics)
    code = (("code", "409"), ("resource", "longcontextjobs"), ("verb", "PATCH"))
    assert found["msa_operator_api_requests_total", code] == 1
    assert found["msa_operator_watch_heard_timestamp_seconds", (("resource", "pods"),)] == 12.5
    assert found["msa_operator_queue_depth", ()] == 3
    ended = (("namespace", "team"), ("reason", "NodeLost"))
    assert found["msa_job_attempts_ended_total", ended] == 1
    assert found["msa_operator_event_to_status_seconds_sum", ()] == 0.5
    phase = found["msa_job_phase_seconds_bucket", (("le", "120.0"), ("phase", "Provisioning"))]
    assert phase == 1

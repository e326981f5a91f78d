"""Parts of the runtime by themselves: queue, store, views of objects, plans on record."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_operator.api import JobError, parse_job
from msa_operator.reconcile.desired import Owner
from msa_operator.reconcile.intent import Intent
from msa_operator.reconcile.lifecycle import parts
from msa_operator.reconcile.observe import Job, State
from msa_operator.runtime import look, views
from msa_operator.runtime.gate import Gate
from msa_operator.runtime.kube import CLUSTERS, JOBS, PODS
from msa_operator.runtime.planning import Planner, read_record
from msa_operator.runtime.queue import BACKOFF_MAX_S, GAP_S, WorkQueue
from msa_operator.runtime.store import CATCH_UP_S, Store
from operator_jobs import GPU, job
from runtime_operator import settings as operator_settings

OWNER = Owner("small", "team", "6f1d2c3b-0000-4000-8000-000000000001")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def due(queue: WorkQueue[str], clock: Clock, after: float = 0.0) -> str:
    """The key that comes within so many seconds."""
    clock.now += after
    found = queue.get()
    assert found is not None
    return found[0]


def test_a_key_is_in_the_queue_once_and_comes_again_when_it_has_news_meanwhile():
    clock = Clock()
    queue: WorkQueue[str] = WorkQueue(clock)
    queue.add("a", news=True)
    queue.add("a", news=True)
    queue.add("a", after=5)
    assert due(queue, clock) == "a"
    assert queue.load().waiting == 0 and queue.load().busy == 1
    queue.add("a", news=True)
    assert queue.load().waiting == 0
    queue.done("a", None)
    assert due(queue, clock, GAP_S) == "a"
    queue.done("a", None)
    assert queue.load() == queue.load().__class__(0, 0, 0.0, 0.0)


def test_the_earlier_of_two_times_counts():
    clock = Clock()
    queue: WorkQueue[str] = WorkQueue(clock)
    queue.add("late", after=50)
    queue.add("a", after=30)
    queue.add("a", after=10)
    queue.add("a", after=20)
    assert due(queue, clock, 10) == "a"
    queue.done("a", None)
    assert due(queue, clock, 40) == "late"


def test_a_key_that_fails_waits_longer_each_time_and_news_does_not_shorten_it():
    clock = Clock()
    queue: WorkQueue[str] = WorkQueue(clock)
    queue.add("a")
    waits = []
    for _ in range(12):
        assert due(queue, clock) == "a"
        queue.done("a", None, failed=True)
        queue.add("a", news=True)
        began = clock.now
        queue.add("marker", after=0)
        assert due(queue, clock) == "marker"
        queue.done("marker", None)
        clock.now = began + BACKOFF_MAX_S * 2
        waits.append(queue.load().overdue)
    # Overdue for less each time: due later each time, up to the longest wait.
    assert waits == sorted(waits, reverse=True) or waits[-1] <= BACKOFF_MAX_S * 1.25
    assert waits[0] > waits[6] and min(waits) >= BACKOFF_MAX_S * 0.74


def test_news_goes_before_looks_that_are_merely_due_but_not_for_ever():
    clock = Clock()
    queue: WorkQueue[str] = WorkQueue(clock)
    for n in range(4):
        queue.add(f"usual-{n}")
    assert due(queue, clock, 1) == "usual-0"
    for n in range(5):
        queue.add(f"news-{n}", news=True)
    queue.add("usual-3", news=True)
    order = [due(queue, clock) for _ in range(8)]
    assert order == ["usual-3", "news-0", "news-1", "usual-1", "news-2", "news-3", "news-4",
                     "usual-2"]  # fmt: skip
    clock.now += 1
    assert queue.load().waiting == 0


def test_what_a_person_asks_for_goes_before_news():
    clock = Clock()
    queue: WorkQueue[str] = WorkQueue(clock)
    for n in range(6):
        queue.add(f"news-{n}", news=True)
    assert due(queue, clock) == "news-0"
    queue.add("news-4", news=True, asked=True)
    queue.add("edited", news=True, asked=True)
    queue.add("usual")
    order = [due(queue, clock) for _ in range(7)]
    assert order == ["news-4", "edited", "usual", "news-1", "news-2", "news-3", "news-5"]
    assert queue.load().waiting == 0
    queue.done("edited", None)
    queue.add("edited", news=True)
    clock.now += GAP_S
    queue.add("other", news=True, asked=True)
    assert due(queue, clock) == "other"


def test_an_edit_asks_until_the_status_shows_it_and_a_new_job_does_not():
    def asks(generation: int, shown: int | None, **meta: Any) -> bool:
        found = raw("u", "1")
        found["metadata"] |= {"generation": generation, **meta}
        return views.asks(found | {"status": {"observedGeneration": shown}})

    assert asks(3, 2) and not asks(3, 3) and not asks(1, None)
    assert asks(1, 1, deletionTimestamp="2026-01-01T00:00:00Z")


def test_few_compute_at_once_and_who_waits_lets_others_on():
    gate, inside, most = Gate(2), [0], [0]
    lock, met = threading.Lock(), threading.Barrier(6, timeout=30)

    def work() -> None:
        with gate.computing():
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            with lock:
                inside[0] -= 1
            with gate.waiting():
                met.wait()  # all six are here at once

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not met.broken and 1 <= most[0] <= 2
    with gate.waiting():
        pass  # a thread that computes nothing is not counted
    with gate.computing(), gate.computing():
        pass


def test_what_a_server_asks_to_wait_is_waited():
    clock = Clock()
    queue: WorkQueue[str] = WorkQueue(clock)
    queue.add("a")
    assert due(queue, clock) == "a"
    queue.done("a", 300.0, failed=True)
    clock.now += 299
    assert queue.load().waiting == 0
    assert due(queue, clock, 1) == "a"


def test_workers_never_share_a_key_and_lose_none():
    queue: WorkQueue[int] = WorkQueue()
    busy: set[int] = set()
    seen: list[int] = []
    lock, shared = threading.Lock(), []

    def work() -> None:
        while (taken := queue.get()) is not None:
            with lock:
                if taken[0] in busy:
                    shared.append(taken[0])
                busy.add(taken[0])
            with lock:
                busy.discard(taken[0])
                seen.append(taken[0])
                last = len(set(seen)) == 50
            queue.done(taken[0], None)
            if last:
                queue.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for n in [*range(50), *range(50)]:
        queue.add(n)
    for thread in threads:
        thread.join(30)
    assert not shared and set(seen) == set(range(50))


def raw(uid: str, version: str, name: str = "small", **more: Any) -> dict[str, Any]:
    meta = {
        "name": name, "namespace": "team", "uid": uid, "resourceVersion": version,
        "labels": {"flashmsa.dev/job": "small", "flashmsa.dev/job-uid": "u"},
    }  # fmt: skip
    return {"metadata": meta, "spec": {}, **more}


def version(store: Store) -> str:
    found = store.job(("team", "small"))
    assert found is not None
    return found.meta.version


def test_what_we_wrote_counts_until_the_watch_has_it():
    clock = Clock()
    store = Store(clock)
    store.event(JOBS, "ADDED", raw("u", "1"))
    store.wrote(JOBS, raw("u", "3"))
    store.event(JOBS, "MODIFIED", raw("u", "2"))
    assert version(store) == "3"
    store.event(JOBS, "MODIFIED", raw("u", "3"))
    store.event(JOBS, "MODIFIED", raw("u", "4"))
    assert version(store) == "4"


def test_an_answer_that_the_watch_has_overtaken_is_not_news():
    store = Store(Clock())
    store.event(JOBS, "ADDED", raw("u", "1"))
    store.event(JOBS, "MODIFIED", raw("u", "2"))
    store.event(JOBS, "MODIFIED", raw("u", "3"))
    store.wrote(JOBS, raw("u", "2"))
    assert version(store) == "3"
    store.event(JOBS, "MODIFIED", raw("u", "4"))
    assert version(store) == "4"


def test_a_watch_that_jumped_over_what_we_wrote_counts_in_the_end():
    clock = Clock()
    store = Store(clock)
    store.event(JOBS, "ADDED", raw("u", "1"))
    store.wrote(JOBS, raw("u", "3"))
    store.event(JOBS, None, raw("u", "9"))
    assert version(store) == "3"
    clock.now += CATCH_UP_S
    assert version(store) == "9"


def test_a_list_finds_what_was_missed_and_undoes_nothing_that_is_newer():
    clock = Clock()
    store = Store(clock)
    for name in ("gone", "small", "fresh"):
        store.event(JOBS, "ADDED", raw(name, "1", name))
    clock.now += 1
    began = clock.now
    clock.now += 1
    store.event(JOBS, "MODIFIED", raw("fresh", "5", "fresh"))
    changed = store.replace(JOBS, [raw("small", "2"), raw("fresh", "4", "fresh")], began)
    assert changed == {("team", "small"), ("team", "gone")}
    assert version(store) == "2"
    fresh = store.job(("team", "fresh"))
    assert fresh is not None and fresh.meta.version == "5"
    assert store.job(("team", "gone")) is None


def test_a_list_of_one_namespace_says_nothing_of_another():
    store = Store()
    store.event(JOBS, "ADDED", raw("u", "1"))
    assert store.replace(JOBS, [], store._clock() + 1, ["elsewhere"]) == set()
    assert store.known() == [("team", "small")]


def test_objects_go_with_their_deletion_and_strangers_are_kept_apart():
    store = Store()
    key = ("team", "small")
    assert store.event(PODS, "ADDED", raw("p", "1", "pod")) == key
    assert store.event(CLUSTERS, "ADDED", raw("c", "1", "cluster")) == key
    assert [c.meta.name for c in store.clusters(key)] == ["cluster"]
    stranger = views.cluster(raw("s", "1", "taken"))
    assert stranger is not None
    store.stranger(key, stranger)
    assert {c.meta.name for c in store.clusters(key)} == {"cluster", "taken"}
    assert store.event(PODS, "DELETED", raw("p", "2", "pod")) == key
    assert store.pods(key) == [] and store.counts()["pods"] == 0


FIELDS = st.sampled_from([
    "metadata", "name", "uid", "labels", "ownerReferences", "spec", "status", "phase",
    "conditions", "containerStatuses", "initContainerStatuses", "state", "waiting", "terminated",
    "reason", "workerGroupSpecs", "replicas", "head", "serviceName", "type", "containers", "env",
    "valueFrom", "secretKeyRef", "taints", "key", "submission_id", "message", "submission", "step",
    "loss", "mfu", "numOfHosts", "generation",
])  # fmt: skip
LEAVES: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANYTHING: Any = st.deferred(
    lambda: LEAVES | st.lists(ANYTHING, max_size=3) | st.dictionaries(FIELDS, ANYTHING, max_size=6)
)


@given(ANYTHING)
@settings(deadline=None, max_examples=300)
def test_no_answer_whatever_it_is_raises(found: Any):
    for read in (views.meta, views.cluster, views.pod, views.node_state, views.submissions,
                 views.report):  # fmt: skip
        read(found)


def test_a_pod_says_why_it_waits():
    def said(**status: Any) -> str:
        found = views.pod(raw("p", "1", "pod", status=status))
        assert found is not None
        return found.pod.message

    pull = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    assert said(containerStatuses=[{"state": pull}]) == "ImagePullBackOff: no such image"
    failed = {"terminated": {"exitCode": 3, "reason": "Error"}}
    assert said(initContainerStatuses=[{"name": "wait", "state": failed}]) == (
        "wait ended with 3 Error"
    )
    unplaced = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    assert said(conditions=[unplaced]) == "0/3 nodes are available"
    assert said(containerStatuses=[{"state": {"waiting": {"reason": "PodInitializing"}}}]) == ""


def test_a_node_is_gone_silent_or_there():
    ready = {"type": "Ready", "status": "True"}
    assert views.node_state({"status": {"conditions": [ready]}}) == "there"
    assert views.node_state({"status": {"conditions": [ready | {"status": "Unknown"}]}}) == (
        "silent"
    )
    taint = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}
    assert views.node_state({"spec": {"taints": [taint]}}) == "gone"


def planner(**changes: Any) -> Planner:
    return Planner(operator_settings(**changes), "system")


SHARED = {"spec.checkpoint.uri": "s3://bucket/x"}


def test_a_plan_is_read_back_from_its_record_as_it_was():
    parsed = parse_job(job(SHARED))
    planned = planner().plan(parsed, OWNER)
    config = planned.rendered.children("c")[0]
    again, accepted = read_record(OWNER, config["data"])
    assert again.content == planned.content and again.status() == planned.status()
    assert again.rendered.children("c") == planned.rendered.children("c")
    assert accepted.spec == parsed.spec


def test_a_field_that_only_a_newer_version_knows_is_no_edit():
    spec = parse_job(job(SHARED)).spec
    now = parts(spec)
    older = tuple((k, f"v1-{v}" if k == "network" else v) for k, v in now if k != "queue")
    job_ = Job(name="small", uid="u", spec=spec, parts=now)
    state = State(job=job_, intent=Intent(accepted=older), now=1.0)
    assert look._as_accepted(state, now) == older
    edited = tuple((k, "other" if k == "training" else v) for k, v in now)
    state = State(job=replace(job_, parts=edited), intent=Intent(accepted=older), now=1.0)
    found = dict(look._as_accepted(state, now))
    assert {k for k, v in found.items() if dict(older).get(k) != v} == {"training"}


@pytest.mark.parametrize("data", [None, {}, {"cluster.json": "{}"}, {"cluster.json": 3}, [], "x"])
def test_what_is_no_record_is_said_to_be_none(data: Any):
    with pytest.raises(ValueError, match="no record"):
        read_record(OWNER, data)


def test_default_storage_makes_several_pods_possible():
    with pytest.raises(JobError, match="lies in each pod alone"):
        planner().plan(parse_job(job()), OWNER)
    found = planner(checkpoint={"claim": "shared"}).plan(parse_job(job()), OWNER)
    (config, _, cluster) = found.rendered.children("c")
    assert '"uri": "file:///checkpoints/small-6f1d2"' in config["data"]["runspec.json"]
    worker = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "shared"}} in (
        worker["volumes"]
    )


def test_cpu_workers_are_planned_for_their_nodes_and_pods_not_for_the_operator():
    small = Planner(operator_settings(), "system", largest_node=lambda: 1 << 30)
    with pytest.raises(JobError, match="nothing fits"):
        small.plan(parse_job(job(SHARED)), OWNER)
    with pytest.raises(JobError, match="nothing fits"):
        planner().plan(parse_job(job({**SHARED, "spec.pod.memory": "256Mi"})), OWNER)
    found = planner().plan(parse_job(job({**SHARED, "spec.pod": {"memory": "8Gi", "cpu": "3"}})),
                           OWNER)  # fmt: skip
    worker = found.rendered.cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"]["memory"] == str(8 << 30)
    assert '"threads": 3' in found.rendered.config["runspec.json"]
    assert found.summary == "fsdp2 on 2 CPU workers of the cluster"


EXISTING = {**GPU, "spec.capacity.provisioner": "Existing", **SHARED}


@pytest.mark.parametrize("maker", ["Karpenter", "NodeGroup"])
def test_nodes_that_would_have_to_be_made_are_refused_with_what_works(maker: str):
    by_us = {**GPU, "spec.capacity.provisioner": maker, **SHARED}
    with pytest.raises(JobError, match=r"capacity: \{provisioner: Existing\}.*nearest: Existing"):
        planner().plan(parse_job(job(by_us)), OWNER)
    # What is not asked for is not refused: the default takes the nodes that exist.
    unasked = planner().plan(parse_job(job({**GPU, **SHARED})), OWNER)
    assert unasked.summary == planner().plan(parse_job(job(EXISTING)), OWNER).summary
    reserved = {**EXISTING, "spec.capacity.reservation": {"ids": ["cr-0123456789abcdef0"]}}
    with pytest.raises(JobError, match="reservation"):
        planner().plan(parse_job(job(reserved)), OWNER)


def test_a_smaller_plan_keeps_to_the_machines_that_are_left():
    one = parse_job(job({
        **EXISTING, "spec.model": {"preset": "tiny-llama"},
        "spec.sequence": {"length": 4096, "globalBatchTokens": 4096 * 64},
        "spec.hardware": {"accelerators": {"min": 1, "max": 32}, "instanceTypes": ["p5.48xlarge"]},
        "spec.parallelism": {"policy": "Auto", "dataShard": 8},
    }))  # fmt: skip
    found = planner()
    whole = found.plan(one, OWNER)
    smaller = found.fewer(one, OWNER, whole)
    if whole.machines == 1:
        assert smaller is None
    else:
        assert smaller is not None and smaller.machines < whole.machines
        assert smaller.content != whole.content
    assert found.plan(one, OWNER, machines=1).machines == 1

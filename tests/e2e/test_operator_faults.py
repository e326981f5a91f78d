"""What the API server, the network, Ray and the clock do wrong: every row ends as if they had not.

The API server is real and so are its refusals; a proxy before it does the harm.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.apiserver import ApiServer
from e2e.faults.jobs import JOBS, job
from e2e.faults.life import Life, live
from e2e.faults.rules import Answer, Delay, Expired, Lost, Reset, Rule, Silent, on
from e2e.faults.running import Operator
from e2e.faults.simulator import TOKEN
from e2e.faults.stand import Stand, standing
from e2e.faults.world import World
from e2e.fixtures import not_here
from e2e.paths import Unavailable
from e2e.process import wait_for

pytestmark = pytest.mark.slow
RETRY_S = 2
READS = "get list"
LIFE_S = 150
DAY = 86_400.0


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    try:
        with standing(tmp_path_factory.mktemp("faults")) as made:
            yield made
    except Unavailable as reason:
        not_here(reason)


@pytest.fixture
def operator(stand: Stand) -> Iterator[Operator]:
    """One that serves all tests which need no other; it has to live through all of them."""
    yield shared(stand)
    stand.calm()


def shared(stand: Stand) -> Operator:
    there = [o for o in stand.operators if o.name == "shared" and o.alive]
    return there[0] if there else stand.operator("shared").start()


@pytest.fixture
def alone(stand: Stand) -> Iterator[Stand]:
    """No operator but those that the test starts."""
    stand.clear()
    yield stand
    stand.clear()


def lived(stand: Stand, *lives: Life, between: Any = lambda: None) -> None:
    """Every life ends as an undisturbed one, and leaves nothing."""
    live(list(lives), LIFE_S, between)
    for life in lives:
        life.check()
        life.world.clean()
    assert stand.simulator.violations == []


ROWS: dict[str, list[Rule]] = {
    "409 to writes": [on(Answer(409, "Conflict"), "write", share=0.3)],
    "410 to the first lists": [on(Answer(410, "Expired"), "list", times=6)],
    "410 as an event of the first watches": [on(Expired(), "watch", times=6)],
    "429 to any request": [
        on(Answer(429, "TooManyRequests", RETRY_S), f"write {READS}", share=0.15)],
    "429 to the first watches": [
        on(Answer(429, "TooManyRequests", RETRY_S), "watch", times=4)],
    "500 to writes": [on(Answer(500, "InternalError"), "write", share=0.3)],
    "500 to reads": [on(Answer(500, "InternalError"), READS, share=0.2)],
    "503 to the first watches": [on(Answer(503, "ServiceUnavailable"), "watch", times=6)],
    "writes are reset": [on(Reset(), "write", share=0.3)],
    "reads are reset": [on(Reset(), READS, share=0.2)],
    "watches are reset at once": [on(Reset(), "watch", times=6)],
    "writes are done and their answers lost": [on(Lost(), "write", share=0.3)],
    "every answer comes half a second late": [on(Delay(0.5), f"write {READS}")],
    "every answer to creating a RayCluster is lost": [on(Lost(), "create", "rayclusters")],
}  # fmt: skip


BY_DEFAULT = (
    "409 to writes", "500 to reads", "reads are reset", "every answer comes half a second late",
)  # fmt: skip
"""And 429 to any request, of which the next test knows more."""


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(rules, id=name, marks=[] if name in BY_DEFAULT else [pytest.mark.full])
        for name, rules in ROWS.items()
    ],
)
def test_the_api_server_does_wrong(stand: Stand, rules: list[Rule]):
    if any("watch" in rule.verbs for rule in rules):
        stand.clear()  # an operator that runs has its watches already
    stand.proxy.rules = rules
    operator = shared(stand)
    lived(stand, Life(stand.world("wrong"), loses=False))
    assert all(rule.done for rule in rules)
    assert operator.alive and operator.healthy()
    stand.calm()


def test_a_client_that_is_told_to_wait_waits(stand: Stand, operator: Operator):
    often = on(
        Answer(429, "TooManyRequests", RETRY_S), "patch", "longcontextjobs/status", share=0.3
    )
    stand.proxy.rules = [often, *ROWS["429 to any request"]]
    lived(stand, Life(stand.world("patient"), loses=False))
    assert all(rule.done for rule in stand.proxy.rules)
    assert operator.alive and operator.healthy()
    records = [r for r in stand.proxy.records if r.call.resource == "longcontextjobs/status"]
    space = records[-1].call.namespace
    mine = [r for r in records if r.call.namespace == space]
    waits = [b.came - a.came for a, b in itertools.pairwise(mine) if a.code == 429]
    assert waits and min(waits) >= RETRY_S


def test_a_watch_falls_silent_and_the_resync_sees(alone: Stand):
    alone.proxy.rules = [on(Silent(), "watch")]
    operator = alone.operator(resyncSeconds=1).start()
    lived(alone, Life(alone.world("silent"), loses=False))
    assert operator.healthy()


def test_a_watch_that_stays_silent_turns_the_probe_red(alone: Stand):
    limits = {"watchSeconds": 3, "silenceSeconds": 5}
    operator = alone.operator(timeouts=limits).start()
    assert operator.healthy()
    alone.proxy.rules = [on(Silent(), "watch")]
    wait_for(lambda: not operator.healthy(), "the probe was red", 60)
    alone.proxy.clear()
    wait_for(operator.healthy, "the probe was green again", 60)


@pytest.mark.parametrize("jump", [DAY, -DAY], ids=["forwards", "backwards"])
def test_the_clock_is_set(stand: Stand, operator: Operator, jump: float):
    """A day, whenever the phase has changed; and again with an operator that starts after it."""
    life = Life(stand.world("clock"))
    seen: list[str] = []
    offsets = itertools.count(1)

    def between() -> None:
        phase = life.last.get("phase", "")
        if phase and (not seen or seen[-1] != phase):
            seen.append(phase)
            stand.zygote.set_clock(next(offsets) * jump)

    lived(stand, life, between=between)
    assert len(seen) >= 4, seen
    assert operator.starts == 1 and operator.alive


def test_an_operator_starts_with_another_clock(alone: Stand):
    """The one before it wrote times that are a day ahead."""
    alone.zygote.set_clock(DAY)
    first = alone.operator().start()
    life = Life(alone.world("ahead"))
    wait_for(lambda: life.look() or len(life.last.get("attempts", ())) == 2, "its second attempt",
             60)  # fmt: skip
    first.kill()
    alone.release()
    alone.zygote.set_clock(0.0)
    alone.operator().start()
    lived(alone, life)


def running(stand: Stand, prefix: str, changes: dict[str, Any] | None = None) -> World:
    """A job that has come to step 10 and waits there."""
    world = stand.world(prefix)
    world.create("job", {
        "training.maxSteps": 30, "checkpoint.everySteps": 5, **(changes or {})
    })  # fmt: skip
    stand.simulator.heads.limits[world.uid("job")] = 10
    world.until("job", "Running", 60)
    wait_for(lambda: world.status("job").get("progress", {}).get("step") == 10, "step 10", 30)
    return world


def ends(stand: Stand, world: World, reasons: list[str], steps: list[int]) -> None:
    """It completes, with those attempts, and holds nothing."""
    stand.simulator.heads.limits.pop(world.uid("job"), None)
    found = world.until("job", "Complete", LIFE_S)
    assert [a["reason"] for a in found["attempts"]] == reasons
    assert [a["fromStep"] for a in found["attempts"]] == steps
    assert [step for _, step in world.submissions("job")] == steps
    world.clean()


def restarts_the_head(stand: Stand, world: World):
    stand.simulator.restart_head(world.namespace, world.cluster("job"))


def deletes_the_head(stand: Stand, world: World):
    stand.simulator.delete_pod(world.namespace, world.cluster("job"), "head")


def empties_the_store(stand: Stand, world: World):
    stand.simulator.heads.heads[world.namespace, world.cluster("job")].runs.clear()


def ends_the_driver(stand: Stand, world: World):
    run = stand.simulator.heads.current(world.namespace, world.cluster("job"))
    assert run is not None
    run.end("FAILED", 1, "CUDA error: an illegal memory access")


LOSSES = {
    "the head's container is another": (restarts_the_head, "HeadLost"),
    "the head's pod is deleted": (deletes_the_head, "HeadLost"),
    "the store of the head is empty": (empties_the_store, "HeadLost"),
    "the driver fails": (ends_the_driver, "TrainingFailed"),
}


def test_a_run_that_is_lost_goes_on(stand: Stand, operator: Operator):
    """Side by side: every one of them waits out the same backoff."""
    worlds = {what: running(stand, "lost") for what in LOSSES}
    for what, (harm, _) in LOSSES.items():
        harm(stand, worlds[what])
    for what, (_, reason) in LOSSES.items():
        ends(stand, worlds[what], [reason, "Succeeded"], [0, 10])
    message = worlds["the driver fails"].status("job")["attempts"][0]["message"]
    assert "illegal memory access" in message


def test_a_node_is_lost_and_its_pods_would_stay_for_ever(stand: Stand, operator: Operator):
    world = running(stand, "powerless")
    lost = stand.simulator.nodes[1]
    stand.simulator.lose_node(lost)
    stand.simulator.forget_node(lost)
    try:
        stand.simulator.heads.limits.pop(world.uid("job"))
        found = world.until("job", "Complete", LIFE_S)
    finally:
        stand.simulator.add_node(lost)
    first = found["attempts"][0]
    assert first["reason"] in ("NodeLost", "HeadLost", "WorkerLost"), first
    assert found["attempts"][1]["fromStep"] == 10
    forced = [r for r in stand.proxy.records if str(r.call).startswith(
        f"delete pods {world.namespace}/")]  # fmt: skip
    assert forced
    world.clean()


def test_the_answer_to_a_submission_is_lost(stand: Stand, operator: Operator):
    lost: list[str] = []

    async def lose(call: Any, _: bytes) -> bool:
        if call.resource != "head/submit":
            return True
        lost.append(str(call))
        return False

    stand.simulator.heads.after = lose
    world = running(stand, "unanswered")
    ends(stand, world, ["Succeeded"], [0])
    assert lost


def test_a_head_that_is_deaf_for_a_while_is_waited_for(stand: Stand, operator: Operator):
    world = running(stand, "deaf")
    key = (world.namespace, world.cluster("job"))
    asked = stand.simulator.heads.turned_away[key]
    stand.simulator.heads.deaf.add(key)
    wait_for(lambda: stand.simulator.heads.turned_away[key] >= asked + 3, "it was asked", 60)
    stand.simulator.heads.deaf.discard(key)
    ends(stand, world, ["Succeeded"], [0])


def test_the_token_changes_in_mid_run(stand: Stand, operator: Operator):
    world = running(stand, "token")
    cluster = world.cluster("job")
    stand.server.kubectl(
        "patch", "secret", cluster, f"--namespace={world.namespace}", "--patch",
        json.dumps({"stringData": {"auth_token": "another"}}),
    )  # fmt: skip
    stand.simulator.heads.heads[world.namespace, cluster].token = "another"
    assert TOKEN != "another"
    ends(stand, world, ["Succeeded"], [0])


def test_the_namespace_is_deleted_with_a_live_job(stand: Stand, operator: Operator):
    world = running(stand, "doomed")
    stand.server.kubectl("delete", "namespace", world.namespace, "--timeout=90s", timeout_s=100)
    assert stand.simulator.heads.live("") == []
    lived(stand, Life(stand.world("after"), loses=False))
    assert operator.alive and operator.healthy()


@pytest.mark.parametrize(
    "phase",
    [
        "Provisioning", "Running",
        *(pytest.param(p, marks=pytest.mark.full) for p in ("Starting", "Draining", "Complete")),
    ],
)  # fmt: skip
def test_deleted_in_any_phase_nothing_is_left(stand: Stand, operator: Operator, phase: str):
    world = stand.world("deleted")
    if phase == "Provisioning":
        stand.simulator.paused = True
    world.create("job", {"training.maxSteps": 30})
    uid = world.uid("job")
    if phase != "Complete":
        stand.simulator.heads.limits[uid] = 0 if phase == "Starting" else 10
    try:
        if phase == "Draining":
            world.until("job", "Running", 60)
            key = (world.namespace, world.cluster("job"))
            stand.simulator.heads.deaf.add(key)
            world.patch("job", {"suspend": True})
        world.until("job", phase, 60)
        world.delete("job")
        wait_for(lambda: not world.job("job") and not world.records(), "it was gone", 60)
    finally:
        stand.simulator.paused = False
        stand.simulator.heads.deaf.clear()
    world.clean()
    assert stand.simulator.heads.live(uid) == []


def test_what_nobody_could_have_written_stops_nobody_else(stand: Stand, operator: Operator):
    world = stand.world("poison")
    healthy = Life(stand.world("healthy"), loses=False)
    for name, status in POISON.items():
        body = json.dumps(job(name, world.namespace, {"suspend": True}))
        stand.server.kubectl("create", "-f", "-", stdin=body)
        world.until(name, "Suspended", 60)
        words = ["patch", "longcontextjob", name, f"--namespace={world.namespace}"]
        stand.server.kubectl(*words, "--subresource=status", "--type=merge", "--patch",
                             json.dumps({"status": status}))  # fmt: skip
        world.patch(name, {"suspend": False})
    for thing in strangers(stand.server, world):
        stand.server.kubectl("create", "-f", "-", stdin=json.dumps(thing))
    live([healthy], LIFE_S)
    healthy.check()
    assert operator.alive and operator.healthy()
    for name in POISON:
        world.delete(name)
    wait_for(lambda: not any(world.job(name) for name in POISON), "they could be deleted", 60)
    stand.simulator.violations.clear()


POISON: dict[str, dict[str, Any]] = {
    "no-cluster": {"phase": "Running", "ray": None, "attempts": []},
    "another-cluster": {"phase": "Provisioning", "ray": {"cluster": "not-mine", "epoch": 7}},
    "no-phase": {"phase": None},
    "no-intent": {"phase": "Draining", "intent": None},
    "odd-attempts": {"phase": "Running", "attempts": [{"number": 0}, {"number": 0}]},
}


def strangers(server: ApiServer, world: World) -> list[dict[str, Any]]:
    """Objects with the labels of a job that none of ours would have."""
    labels = {"flashmsa.dev/job": "no-phase", "flashmsa.dev/job-uid": "nobody"}
    meta = {"namespace": world.namespace, "labels": labels}
    pod = {"containers": [{"name": "c", "image": "i"}]}
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**meta, "name": "bare"}, "spec": pod},
        {"apiVersion": "v1", "kind": "Pod", "spec": pod,
         "metadata": {**meta, "name": "odd", "labels": {**labels, "ray.io/node-type": "odd"}}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**meta, "name": "odd"},
         "data": {"runspec.json": "{"}},
    ]  # fmt: skip


def test_jobs_of_a_namespace_that_is_not_ours_are_left_alone(alone: Stand):
    ours, theirs = alone.world("ours"), alone.world("theirs")
    alone.operator(namespaces=[ours.namespace]).start()
    path = f"{JOBS.format(theirs.namespace)}/job"
    theirs.create("job")
    lived(alone, Life(ours, loses=False))
    assert "status" not in json.loads(alone.server.get(path))
    theirs.delete("job")

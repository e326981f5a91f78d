"""What the control endpoint serves, without a cluster: state, HTTP, stacks, abandoned folders."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msa_workloads import control_worker
from msa_workloads.cluster import (
    OWNER,
    ClusterError,
    check_answers,
    remove_abandoned,
    temporary_folder,
)
from msa_workloads.container_log import container_log
from msa_workloads.control import SILENT_SECONDS, RankReport, RunState
from msa_workloads.control_http import ControlServer, cluster_token
from msa_workloads.control_stacks import dump_stacks, file_name
from msa_workloads.control_worker import DUMP_SIGNAL, Orders, RankControl, dump_by_signal, waits
from msa_workloads.failures import reason
from msa_workloads.runspec import RunSpec

TOKEN = "a-token"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(make_spec: Callable[..., RunSpec], clock: Clock) -> RunState:
    plan = {"flops": {"step": 6e12, "peak": 4e12}}
    return RunState(replace(make_spec(), plan=plan), "tiny-1", clock)


def row(step: int, seconds: float = 3.0, loss: float = 2.5) -> dict[str, Any]:
    return {"step": step, "loss": loss, "seconds": seconds, "tokens_per_second": 192 / seconds}


def report(rank: int, step: int, doing: str = "training", waits: bool = False) -> RankReport:
    return RankReport(
        rank=rank, pid=1, node=f"10.0.0.{rank}", step=step, doing=doing, waits=waits,
        memory_bytes=1000 + rank,
    )  # fmt: skip


def test_progress_from_start_to_end(state: RunState) -> None:
    assert state.progress() == {
        "submission": "tiny-1", "state": "starting", "step": 0, "maxSteps": 6, "loss": None,
        "tokensPerSecond": None, "mfu": None, "etaSeconds": None, "checkpointStep": 0,
        "checkpointUri": state.checkpoint_uri, "drained": False, "ranks": [], "error": "",
    }  # fmt: skip
    state.begin([row(1), row(2)], {})
    state.add(row(3))
    state.heard(report(0, 3))
    now = state.progress()
    assert (now["state"], now["step"], now["checkpointStep"]) == ("running", 3, 2)
    assert now["tokensPerSecond"] == pytest.approx(64)
    assert now["mfu"] == pytest.approx(6e12 / (3 * 4e12))
    assert now["etaSeconds"] == pytest.approx(9)
    assert now["ranks"] == [{"rank": 0, "step": 3, "node": "10.0.0.0", "doing": "training"}]
    state.heard(replace(report(0, 4), checkpoint_step=4))
    assert state.progress()["checkpointStep"] == 4
    state.ended("failed", error="rank 1 failed")
    now = state.progress()
    assert (now["state"], now["error"], now["etaSeconds"]) == ("failed", "rank 1 failed", None)


def test_a_drain_can_be_asked_for_twice_and_ends_nothing_that_is_over(state: RunState) -> None:
    state.begin([], {})
    state.drain()
    state.drain()
    assert state.progress()["state"] == "draining"
    state.ended("drained", checkpoint_step=4)
    state.drain()
    now = state.progress()
    assert (now["state"], now["drained"], now["checkpointStep"]) == ("drained", True, 4)


def test_without_the_peak_of_its_ranks_a_run_has_no_utilisation(
    make_spec: Callable[..., RunSpec], clock: Clock
) -> None:
    state = RunState(
        replace(make_spec(), plan={"flops": {"step": 1e12, "peak": None}}), "s", clock
    )
    state.begin([], {})
    state.add(row(1))
    assert state.progress()["mfu"] is None
    assert "msa_run_mfu" not in state.metrics()


@pytest.mark.parametrize(
    ("reports", "rank"),
    [
        ([report(0, 7), report(1, 6), report(2, 7)], 1),
        ([report(0, 7, "training"), report(1, 7, "reading data")], 1),
        ([report(0, 7, waits=True), report(1, 7), report(2, 7, waits=True)], 1),
        ([report(0, 7, waits=True), report(1, 7, waits=True)], None),
        ([], None),
    ],
)
def test_the_lagging_rank(state: RunState, reports: list[RankReport], rank: int | None) -> None:
    for one in reports:
        state.heard(one)
    found = state.lagging()
    assert (found and found["rank"]) == rank


def test_a_silent_rank_lags_whatever_it_last_said(state: RunState, clock: Clock) -> None:
    state.heard(report(1, 9))
    clock.now += SILENT_SECONDS + 1
    state.heard(report(0, 8))
    assert state.lagging() == {"rank": 1, "step": 9, "node": "10.0.0.1"}
    assert state.progress()["ranks"][1]["doing"] == "silent for 16 s; before: training"


def test_metrics_are_prometheus_text(make_spec: Callable[..., RunSpec], clock: Clock) -> None:
    state = RunState(replace(make_spec(), name='a"b'), "s", clock)
    state.begin([], {})
    state.add(row(1))
    state.heard(report(0, 1))
    lines = state.metrics().splitlines()
    assert 'msa_run_step{job="a\\"b"} 1' in lines
    assert 'msa_run_loss{job="a\\"b"} 2.5' in lines
    assert 'msa_run_tokens_per_second{job="a\\"b"} 64.0' in lines
    assert 'msa_run_memory_bytes{job="a\\"b",rank="0"} 1000' in lines
    assert all(
        line.startswith(("# HELP msa_run_", "# TYPE msa_run_", "msa_run_")) for line in lines
    )


@pytest.fixture
def serve(state: RunState) -> Iterator[Callable[..., str]]:
    """Start an endpoint and return its address."""
    servers: list[ControlServer] = []

    def start(token: str | None = TOKEN, **parts: Any) -> str:
        server = ControlServer(
            state,
            parts.get("stacks", lambda: {"folder": "f", "lagging": None}),
            token=token,
            port=0,
        )
        servers.append(server.__enter__())
        return f"http://127.0.0.1:{server.address[1]}"

    yield start
    for server in servers:
        server.__exit__()


def call(
    url: str, method: str = "GET", token: str | None = TOKEN, header: str = "Authorization"
) -> tuple[int, str]:
    headers = {header: f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_only_the_token_opens_it(state: RunState, serve: Callable[..., str]) -> None:
    url = serve()
    for path, method in (("/progress", "GET"), ("/drain", "POST"), ("/stacks", "POST")):
        for token in (None, "another", TOKEN + " ", ""):
            code, text = call(url + path, method, token)
            assert code == 401, (path, token)
            assert TOKEN not in text
    assert state.progress()["state"] == "starting"
    assert call(f"{url}/progress")[0] == 200
    assert call(f"{url}/progress", header="X-Ray-Authorization")[0] == 200
    assert call(f"{url}/metrics", token=None)[0] == 200
    assert call(f"{url}/drain")[0] == 404
    assert call(f"{url}/other", "POST")[0] == 404


def test_requests_reach_the_run(state: RunState, serve: Callable[..., str]) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no rank runs yet")

    url = serve(stacks=broken)
    assert json.loads(call(f"{url}/progress")[1])["submission"] == "tiny-1"
    assert call(f"{url}/drain", "POST") == (202, '{"state": "draining"}')
    assert call(f"{url}/drain", "POST") == (202, '{"state": "draining"}')
    assert call(f"{url}/stacks", "POST") == (500, '{"error": "RuntimeError: no rank runs yet"}')
    assert not state.wait_for_last_word(0)
    state.ended("finished", checkpoint_step=6)
    assert not state.wait_for_last_word(0)
    assert json.loads(call(f"{url}/progress")[1])["state"] == "finished"
    assert state.wait_for_last_word(5)


def test_without_a_token_it_listens_on_loopback_only(state: RunState) -> None:
    for token, host in ((None, "127.0.0.1"), (TOKEN, "0.0.0.0")):
        with ControlServer(state, dict, token=token, port=0) as server:
            assert server.address[0] == host
            with pytest.raises(OSError):
                ControlServer(state, dict, token=token, port=server.address[1])


def test_where_the_token_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert cluster_token({}) is None
    assert cluster_token({"RAY_AUTH_TOKEN_PATH": str(file)}) == "from-file"
    both = {"RAY_AUTH_TOKEN_PATH": str(file), "RAY_AUTH_TOKEN": "given"}
    assert cluster_token(both) == "given"
    with pytest.raises(OSError):
        cluster_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})


class DirectChannel:
    """Reports straight into a state, as the board does by way of Ray."""

    def __init__(self, state: RunState) -> None:
        self.state, self.orders = state, Orders()

    def report(self, report: RankReport) -> Orders:
        self.state.heard(report)
        return self.orders

    def stacks(self, rank: int, number: int, text: str) -> None:
        self.state.stacks(rank, number, text)

    def ask(self) -> int:
        self.orders = Orders(dump=self.orders.dump + 1)
        return self.orders.dump


def test_a_rank_is_heard_asked_and_dumped(
    state: RunState, tmp_path: Path, poll: Callable[..., Any]
) -> None:
    channel = DirectChannel(state)
    control = RankControl(
        channel, rank=3, ranks=4, node="10.0.0.3", node_id="", folder=str(tmp_path),
        memory=lambda: 7,
    )  # fmt: skip
    store = tmp_path / "ckpt"
    with pytest.raises(RuntimeError, match="no rank runs yet"):
        dump_stacks(state, str(store), channel.ask)
    with control:
        control.enters(5, "reading data")
        control.saved(4)
        heard = poll(lambda: state.reports().get(3), "the rank is heard")
        assert heard.pid == os.getpid()
        done = dump_stacks(state, str(store), channel.ask)
        assert done["folder"] == f"{store}/stacks/tiny-1"
        text = (store / file_name("tiny-1", 3)).read_text()
        assert text.startswith(f"rank 3, pid {os.getpid()} on 10.0.0.3, step 5, reading data; at ")
        assert "test_a_rank_is_heard_asked_and_dumped" in text
        assert "MainThread" in text
        # The signal finds the same file, which has no name where there is /proc.
        by_signal = dump_by_signal(os.getpid(), heard.dump, 60)
        assert "test_a_rank_is_heard_asked_and_dumped" in by_signal
        assert not list(tmp_path.glob("msa-stacks-*")) or sys.platform != "linux"
        poll(lambda: state.checkpoint_step == 4, "the checkpoint is heard of")
        channel.orders = Orders(stop=True)
        poll(control.stop_requested, "the order to stop is heard")
    assert not list(tmp_path.glob("msa-stacks-*"))


def test_a_rank_outlives_its_driver(
    state: RunState, tmp_path: Path, poll: Callable[..., Any]
) -> None:
    class Dead(DirectChannel):
        def report(self, report: RankReport) -> Orders:
            raise ConnectionError("the driver is gone")

    control = RankControl(
        Dead(state), rank=0, ranks=1, node="", node_id="", folder=str(tmp_path), memory=lambda: 0
    )
    with control:
        poll(lambda: not control._thread.is_alive(), "its reports end")
        assert control.stop_requested() is False


HOLDS_THE_LOCK = """
import faulthandler, re, signal, sys
file = open(sys.argv[1], "r+b", buffering=0)
faulthandler.register(signal.Signals(int(sys.argv[2])), file=file, all_threads=True)
print("ready", flush=True)
def backtrack():
    re.match("(a*)*b", "a" * 200)
backtrack()
"""


def test_the_signal_reaches_a_rank_that_holds_its_interpreter_lock(
    tmp_path: Path, poll: Callable[..., Any]
) -> None:
    file = tmp_path / "dump"
    file.touch()
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(file), str(int(DUMP_SIGNAL))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            poll(
                lambda: "in backtrack" in dump_by_signal(child.pid, str(file), 60),
                "a dump from within the call that never gives the lock back",
            )
            os.kill(child.pid, 19)  # SIGSTOP: no signal is answered from now on
            said = dump_by_signal(child.pid, str(file), 1)
            assert said.startswith(f"pid {child.pid} answers no signal; its state is ")
        finally:
            child.kill()
    assert dump_by_signal(child.pid, str(file), 1).startswith(f"pid {child.pid} is gone")


def test_waiting_in_a_collective_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "peer.py"
    file.write_text("def collective(event):\n    event.wait()\n")
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    event = threading.Event()
    thread = threading.Thread(target=namespace["collective"], args=(event,), daemon=True)
    thread.start()
    try:
        assert not waits()
        monkeypatch.setattr(control_worker, "COLLECTIVE_PARTS", (str(file),))
        assert waits()
    finally:
        event.set()
        thread.join()


def test_the_cause_is_told_before_what_followed() -> None:
    class Ended(Exception):
        def __init__(self, **ranks: Exception) -> None:
            self.worker_failures = {int(name[1:]): error for name, error in ranks.items()}

    lost = "rank 0 failed: RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1\n..."
    own = "rank 1 failed: ValueError: bad\nTraceback"
    died = Ended(r0=RuntimeError("x"), r1=OSError("the actor died"))
    assert reason({0: lost, 1: own}, None) == own
    assert (
        reason({0: lost}, died) == "rank 1 ended without a Python error: OSError: the actor died"
    )
    assert reason({0: lost}, Ended(r0=RuntimeError("x"))) == lost
    assert reason({}, None) == "the workers returned no outcome"


LEAVES_A_FOLDER = """
import sys, time
from msa_workloads.cluster import temporary_folder
with temporary_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_sockets_of_ray_fit_below_any_temporary_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Below the one that macOS gives a user by itself, Ray's do not."""
    long = tmp_path / ("T" * 40)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with temporary_folder() as folder:
        named = f"{folder}/session_2026-11-30_19-11-40_967293_4194304/sockets/plasma_store"
        assert len(os.fsencode(named)) <= 103
    assert f"{long} is too long" in caplog.text and not Path(folder).exists()


def test_a_cluster_that_is_not_there_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        check_answers(there)
        check_answers(f"ray://{there}")
    with pytest.raises(ClusterError, match=f"no Ray cluster answers at {there} .* unset RAY_ADDR"):
        check_answers(there)
    with pytest.raises(ClusterError, match="takes jobs: ray job submit"):
        check_answers("http://127.0.0.1:8265")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary root that Ray's sockets fit below."""
    with tempfile.TemporaryDirectory(prefix="msa-", dir="/tmp") as folder:
        yield Path(folder)


def test_folders_of_killed_drivers_go_with_the_next(short_path: Path) -> None:
    import signal

    tmp_path = short_path
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", LEAVES_A_FOLDER], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    unmarked = tmp_path / "msa-ray-being-made"
    unmarked.mkdir()
    with start() as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
        assert (left / OWNER).exists()
        assert remove_abandoned(tmp_path) == [], "its owner lives"
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert left.exists()
    with start() as tidy:
        assert tidy.stdout is not None
        made = Path(tidy.stdout.readline().strip())
        assert not left.exists()
        assert made.exists()
        tidy.communicate("")
    assert not made.exists()
    assert unmarked.exists()


PRINTS = """
import os, subprocess, sys
from msa_workloads.container_log import container_log, copied
with copied(container_log(), "tiny-1"):
    print("one")
    print("two", file=sys.stderr)
    subprocess.run(["echo", "a child"])
    sys.stdout.write("no end of line")
print("after")
"""


def test_output_is_copied_to_the_containers_log(tmp_path: Path) -> None:
    log = tmp_path / "container.log"

    def run(path: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True, timeout=60,
            env={**os.environ, "MSA_CONTAINER_LOG": path, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        return done.stdout, done.stderr

    assert run(str(log)) == ("one\na child\nno end of lineafter\n", "two\n")
    lines = log.read_text().splitlines()
    assert sorted(lines) == [
        "tiny-1 | a child", "tiny-1 | no end of line", "tiny-1 | one", "tiny-1 | two",
    ]  # fmt: skip
    out, err = run(str(tmp_path / "no" / "such"))
    assert out == "one\na child\nno end of lineafter\n"
    assert err == f"no copy of this output in {tmp_path}/no/such: No such file or directory\ntwo\n"
    assert container_log({}) is None
    assert container_log({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "/proc/1/fd/1"
    assert container_log({"KUBERNETES_SERVICE_HOST": "x", "MSA_CONTAINER_LOG": ""}) is None

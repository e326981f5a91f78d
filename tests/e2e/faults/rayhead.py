"""Heads of Ray clusters as HTTP sees them: the Jobs API as Ray 2.60 has it, and a run's control.

A run moves on when its progress is asked for, not with time: so a test takes as long as the
operator takes to look. What could never happen to one job is written down in `violations`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from msa_workloads.runspec import RunSpec

from .rules import Call, Moment

OVER = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
DRAINED_EXIT = 75
DASHBOARD, CONTROL = 8265, 8267
SERVICE = "head-of-"
"""Begins the names of the heads' Services; not as KubeRay names them today: who recomputes a name
in place of reading it finds nothing."""


@dataclass(frozen=True)
class Work:
    """What the ConfigMap of a cluster tells its runs."""

    job_uid: str
    max_steps: int
    checkpoint_every: int


@dataclass
class Run:
    """One submission."""

    id: str
    entrypoint: str
    work: Work
    step: int
    checkpoint: int
    status: str = "RUNNING"
    drain: bool = False
    drained: bool = False
    held: bool = False
    """Makes no step, whoever looks."""
    looks: int = 0
    """How often it made steps."""
    message: str = ""
    exit_code: int | None = None

    @property
    def live(self) -> bool:
        return self.status not in OVER

    def end(self, status: str, code: int | None, message: str = "") -> None:
        self.status, self.exit_code, self.message = status, code, message


@dataclass
class Head:
    """A head's container; another one knows nothing of its runs."""

    identity: str
    token: str
    work: Work
    runs: dict[str, Run] = field(default_factory=dict)


HEAD = web.RequestKey("head", Head)


class Heads:
    """All heads, behind one port: /NAMESPACE/SERVICE/PORT/PATH."""

    def __init__(self, stride: int = 5) -> None:
        self.stride = stride
        """Steps of a run between two looks at it."""
        self.heads: dict[tuple[str, str], Head] = {}
        self.checkpoints: dict[str, int] = {}
        """Newest checkpoint by the job's uid: it outlives every cluster."""
        self.started: list[tuple[str, str, int]] = []
        """Every submission that was started: job uid, submission id, first step."""
        self.violations: list[str] = []
        self.writes: Counter[str] = Counter()
        self.deaf: set[tuple[str, str]] = set()
        """Clusters whose head does not answer."""
        self.turned_away: Counter[tuple[str, str]] = Counter()
        self.hold = False
        """Runs make their first steps and no more."""
        self.limits: dict[str, int] = {}
        """Steps that runs of a job, by its uid, may reach before a test lets them go on."""
        self.before: Moment | None = None
        self.after: Moment | None = None

    def application(self) -> web.Application:
        app = web.Application()
        head = "/{namespace}/{service}"
        jobs, control = f"{head}/{DASHBOARD}/api/jobs/", f"{head}/{CONTROL}"
        app.router.add_get(jobs, self._list)
        app.router.add_post(jobs, self._submit)
        app.router.add_get(jobs + "{id}", self._get)
        app.router.add_post(jobs + "{id}/stop", self._stop)
        app.router.add_get(f"{head}/{DASHBOARD}/api/version", self._version)
        app.router.add_get(f"{control}/progress", self._progress)
        app.router.add_post(f"{control}/drain", self._drain)
        app.router.add_post(f"{control}/stacks", self._stacks)
        app.middlewares.append(self._guard)
        return app

    def begin(self, namespace: str, cluster: str, head: Head) -> None:
        """A head came up; one that was there under this name is gone, with its runs."""
        known = self.heads.get((namespace, cluster))
        if known is None or known.identity != head.identity:
            self.end(namespace, cluster)
            self.heads[namespace, cluster] = head

    def end(self, namespace: str, cluster: str) -> None:
        """The head's container is no more."""
        if (head := self.heads.pop((namespace, cluster), None)) is not None:
            for run in head.runs.values():
                if run.live:
                    run.end("FAILED", None, "the head is gone")

    def finish(self, job_uid: str) -> None:
        """The job's runs do their last steps, whether or not anybody asks."""
        for head in self.heads.values():
            for run in head.runs.values():
                if run.live and run.work.job_uid == job_uid:
                    run.step = run.work.max_steps
                    self._save(run, run.step)
                    run.end("SUCCEEDED", 0)

    def worker_died(self, namespace: str, cluster: str) -> None:
        """The driver of a run whose worker died ends with an error."""
        if (head := self.heads.get((namespace, cluster))) is not None:
            for run in head.runs.values():
                if run.live:
                    run.end("FAILED", 1, "a worker died")

    def live(self, job_uid: str) -> list[Run]:
        runs = (run for head in self.heads.values() for run in head.runs.values())
        return [run for run in runs if run.live and run.work.job_uid == job_uid]

    def current(self, namespace: str, cluster: str) -> Run | None:
        """The newest submission of a cluster."""
        head = self.heads.get((namespace, cluster))
        return list(head.runs.values())[-1] if head and head.runs else None

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        where = request.match_info
        key = (where["namespace"], where["service"].removeprefix(SERVICE))
        head = self.heads.get(key)
        if head is None or key in self.deaf:
            self.turned_away[key] += 1
            return _dropped(request)
        if request.headers.get("Authorization") != f"Bearer {head.token}":
            return web.Response(status=401, text="Unauthorized")
        request[HEAD] = head
        if request.method != "POST":
            return await handler(request)
        what = request.path.rsplit("/", 1)[-1] or "submit"
        self.writes[what] += 1
        call = Call("create", f"head/{what}", key[0], key[1])
        body = await request.read()
        if self.before is not None and not await self.before(call, body):
            return _dropped(request)
        answer = await handler(request)
        if self.after is not None and not await self.after(call, body):
            return _dropped(request)
        return answer

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "4", "ray_version": "2.60.0"})

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response([_details(run) for run in request[HEAD].runs.values()])

    async def _get(self, request: web.Request) -> web.Response:
        run = request[HEAD].runs.get(request.match_info["id"])
        if run is None:
            text = f"Job {request.match_info['id']} does not exist"
            return web.Response(status=404, text=text)
        return web.json_response(_details(run))

    async def _submit(self, request: web.Request) -> web.Response:
        head: Head = request[HEAD]
        body = await request.json()
        name = body["submission_id"]
        if name in head.runs:
            # As Ray says it: no code of its own, a trace in plain text.
            text = f"Traceback ...\nValueError: Job with submission_id {name} already exists."
            return web.Response(status=500, text=text)
        uid = head.work.job_uid
        if others := [run.id for run in self.live(uid)]:
            self.violations.append(f"{name} was submitted while {others} of {uid} were live")
        saved = self.checkpoints.get(uid, 0)
        first = saved if "--resume" in body["entrypoint"].split() else 0
        if first < saved:
            self.violations.append(f"{name} began at step {first}, with a checkpoint of {saved}")
        self.started.append((uid, name, first))
        head.runs[name] = Run(name, body["entrypoint"], head.work, first, first)
        return web.json_response({"job_id": name, "submission_id": name})

    async def _stop(self, request: web.Request) -> web.Response:
        run = request[HEAD].runs.get(request.match_info["id"])
        if run is None:
            return web.Response(status=404, text="does not exist")
        if stopped := run.live:
            run.end("STOPPED", None, "stopped")
        return web.json_response({"stopped": stopped})

    async def _progress(self, request: web.Request) -> web.Response:
        run = self._driver(request[HEAD])
        if run is None:
            # The endpoint is the driver's: without one, nothing listens.
            return _dropped(request)
        said = self._advance(run)
        return web.json_response(said)

    async def _drain(self, request: web.Request) -> web.Response:
        if (run := self._driver(request[HEAD])) is None:
            return _dropped(request)
        run.drain = True
        return web.json_response({}, status=202)

    async def _stacks(self, request: web.Request) -> web.Response:
        if (run := self._driver(request[HEAD])) is None:
            return _dropped(request)
        lagging = {"rank": 0, "step": run.step, "node": "node-1"}
        folder = f"file:///checkpoints/stacks/{run.id}"
        return web.json_response({"folder": folder, "lagging": lagging}, status=202)

    @staticmethod
    def _driver(head: Head) -> Run | None:
        return next((run for run in head.runs.values() if run.live), None)

    def _advance(self, run: Run) -> dict[str, Any]:
        """What the run says of itself; it has gone on for a while since it was last asked."""
        work = run.work
        if run.drain:
            self._save(run, run.step)
            run.drained = True
            run.end("FAILED", DRAINED_EXIT, "Job entrypoint command failed with exit code 75")
        elif not run.held and not (self.hold and run.looks):
            run.looks += 1
            most = min(work.max_steps, self.limits.get(work.job_uid, work.max_steps))
            run.step = max(run.step, min(most, run.step + self.stride))
            self._save(run, run.step - run.step % work.checkpoint_every)
            if run.step == work.max_steps:
                self._save(run, run.step)
                run.end("SUCCEEDED", 0)
        state = "drained" if run.drained else "finished" if run.exit_code == 0 else "running"
        return {
            "submission": run.id, "state": state, "step": run.step, "maxSteps": work.max_steps,
            "loss": round(6.0 / (1 + run.step), 4), "tokensPerSecond": 1000.0, "mfu": None,
            "etaSeconds": float(work.max_steps - run.step), "checkpointStep": run.checkpoint,
            "checkpointUri": f"file:///checkpoints/step-{run.checkpoint}",
            "drained": run.drained, "ranks": [], "error": "",
        }  # fmt: skip

    def _save(self, run: Run, step: int) -> None:
        run.checkpoint = max(run.checkpoint, step)
        uid = run.work.job_uid
        self.checkpoints[uid] = max(self.checkpoints.get(uid, 0), run.checkpoint)


def _details(run: Run) -> dict[str, Any]:
    return {
        "type": "SUBMISSION", "job_id": "01000000", "submission_id": run.id, "driver_info": None,
        "status": run.status, "entrypoint": run.entrypoint, "message": run.message,
        "error_type": None, "start_time": 1, "end_time": None if run.live else 2,
        "metadata": {}, "runtime_env": {}, "driver_exit_code": run.exit_code,
    }  # fmt: skip


def _dropped(request: web.Request) -> web.Response:
    """Resets the connection; what is written to it afterwards goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def work(runspec: str, job_uid: str) -> Work:
    """What a RunSpec asks of a run; RunSpecError when the driver could not read it."""
    spec = RunSpec.from_json(runspec)
    return Work(job_uid, spec.training.max_steps, spec.checkpoint.every_steps)

"""The phases of a job and every way from one to another, as a table.

Rows of a phase are tried in order and the first whose condition holds is taken. A row changes the
intent only; what is done in a phase is in :mod:`msa_operator.reconcile.ensure`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from msa_operator.api import values
from msa_operator.api.job import JobSpec
from msa_operator.reconcile import attempts
from msa_operator.reconcile.attempts import Reason
from msa_operator.reconcile.intent import HOLDING, Intent, Phase
from msa_operator.reconcile.names import SAFE, content_hash, submission_id
from msa_operator.reconcile.observe import State, gang

SUBMIT_S = 300.0
"""A head that takes no submission for this long never will: its images are pulled, it is ready."""
UNREACHABLE_S = 300.0
"""The dashboard may be busy or the network away for minutes while training goes on."""
DRAIN_S = 300.0
"""For a checkpoint to be written after it was asked for."""
STOP_S = 120.0
"""For a submission to be over after it was told to stop; Ray itself gives the driver 3 s."""


@dataclass(frozen=True)
class Transition:
    source: Phase
    when: str
    """The condition in words, for the documentation."""
    holds: Callable[[State], bool]
    then: Callable[[State], Intent]
    targets: tuple[Phase, ...]
    observe_again: bool = False
    """What was observed no longer fits the new intent."""


def enter(s: State, phase: Phase, reason: str, message: str = "", **changes: object) -> Intent:
    """The intent in another phase, with the time that nodes were held counted."""
    before = replace(s.intent, **changes)  # type: ignore[arg-type]
    used, since = before.active_used, before.since_active
    holds = phase in HOLDING and phase != "Queued"
    if holds and since is None:
        since = s.now
    elif not holds and since is not None:
        used, since = used + s.age(since), None
    ended = s.now if phase in ("Complete", "Failed") else None
    return replace(
        before, phase=phase, since=s.now, reason=reason, message=message, active_used=used,
        since_active=since, ended=ended,
    )  # fmt: skip


def parts(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    """Hash of every part of a spec that a run is made from."""
    plain = spec.model_dump(mode="json", by_alias=True)
    return tuple((k, content_hash(v)[:8]) for k, v in sorted(plain.items()) if k not in SAFE)


def edited(s: State) -> tuple[str, ...]:
    """Parts of the spec that differ from what the run was made from."""
    now = dict(s.job.parts)
    then = dict(s.intent.accepted)
    return tuple(sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k)))


def active(s: State) -> float:
    """Seconds that the job has held nodes."""
    held = s.intent.since_active
    return s.intent.active_used + (0.0 if held is None else s.age(held))


def _suspend(s: State) -> bool:
    return s.job.spec.suspend


def _seconds(text: str) -> float:
    return float(values.seconds(text))


def _active_over(s: State) -> bool:
    return active(s) >= _seconds(s.job.spec.deadlines.active)


def _capacity_over(s: State) -> bool:
    return s.age(s.intent.since) >= _seconds(s.job.spec.deadlines.capacity)


def _status(s: State, *wanted: str) -> bool:
    return s.submission is not None and s.submission.status in wanted


def settled(s: State) -> bool:
    """No submission of ours can still be running: each is over, or its head does not know it, or
    there is no pod in which it could."""
    if not s.ours or not s.pods:
        return True
    return s.api.reachable and not s.live_submissions


def _held_back(s: State) -> bool:
    return s.cluster is not None and s.cluster.suspended


def _head_lost(s: State) -> bool:
    attempt = s.intent.attempt
    return attempt is not None and (s.head is None or s.head.identity != attempt.head)


def _node_lost(s: State) -> bool:
    return any(p.node_lost for p in s.members)


def _worker_lost(s: State) -> bool:
    attempt = s.intent.attempt
    return attempt is not None and gang(s.workers) != attempt.workers


def _vanished(s: State) -> bool:
    return s.api.reachable and s.submission is None


def _unreachable(s: State) -> bool:
    return not s.api.reachable and s.age(max(s.api.since, s.intent.since)) >= UNREACHABLE_S


def _hangs(s: State) -> bool:
    last = s.run.stepped if s.run else max(s.api.since, s.intent.since)
    return s.api.reachable and s.age(last) >= _seconds(s.job.spec.hang.step)


def _unsubmitted(s: State) -> bool:
    known = s.api.reachable and s.submission is not None
    return not known and s.age(s.intent.since) >= SUBMIT_S


def _first_step(s: State) -> bool:
    attempt = s.intent.attempt
    return attempt is not None and s.run is not None and s.run.step > attempt.from_step


def _may_retry(s: State) -> bool:
    # A time further off than any backoff was written by a clock that has been set back since.
    if 0 < s.intent.retry_at - s.now <= attempts.BACKOFF_MAX_S:
        return False
    if s.intent.replace or s.cluster is None:
        return not s.ours and bool(s.planning.content)
    return settled(s)


def _outdated(s: State) -> bool:
    """The operator died before anything was created; by now edits or an upgrade changed the plan.

    A plan of which anything was created is on record, and the record is used instead.
    """
    content = s.planning.content
    if s.ours or s.name_taken or not content:
        return False
    return s.name(content, s.intent.epoch) != s.intent.cluster


def _plan(s: State) -> Intent:
    return enter(s, "Planned", "Planned", s.planning.summary, accepted=s.job.parts)


def _provision(s: State) -> Intent:
    name = s.next_name()
    return enter(
        s, "Provisioning", "CreatingCluster", f"{name}: waiting for head and workers",
        epoch=s.intent.epoch + 1, cluster=name, replace=False,
    )  # fmt: skip


def _retry(s: State) -> Intent:
    if s.intent.replace or s.cluster is None:
        return _provision(s)
    return enter(s, "Provisioning", "SameCluster", "waiting for every worker to be ready")


def _start(s: State) -> Intent:
    head = s.head
    name = submission_id(s.intent.cluster, s.intent.number + 1)
    began = attempts.begin(s.intent, name, head.identity if head else "", gang(s.workers), s.now)
    message = f"attempt {began[-1].number} as {name}"
    return enter(s, "Starting", "Submitting", message, attempts=began)


def _ended(s: State, reason: Reason, message: str) -> Intent:
    run = s.run
    step, checkpoint = (run.step, run.checkpoint_step) if run else (0, 0)
    if reason == "Succeeded":
        # A driver that ends well has done all steps, and the last one always has a checkpoint;
        # it may have ended since it was last asked.
        step = checkpoint = s.job.spec.training.max_steps
    return attempts.end(s.intent, reason, message, s.now, step, checkpoint)


def _lost(reason: Reason, message: Callable[[State], str]) -> Callable[[State], Intent]:
    """The attempt ended; another follows where one is left."""

    def then(s: State) -> Intent:
        text = message(s)
        after = replace(s, intent=_ended(s, reason, text))
        limit = s.job.spec.failure.max_restarts
        if attempts.exhausted(after.intent, limit, s.now):
            told = (
                f"{text}; failure.maxRestarts {limit} is used up: mend the cause, make a new job"
            )
            return enter(after, "Failed", reason, told)
        if reason == "NodeLost":
            return _node_policy(after, text)
        return enter(after, "Recovering", reason, text)

    return then


def _node_policy(s: State, text: str) -> Intent:
    """What ``failure.onNodeLoss`` says, from the first choice that is not used up."""
    choices = s.job.spec.failure.on_node_loss
    for n in range(s.intent.losses_tried, len(choices)):
        if choices[n] == "WaitReplacement":
            return enter(s, "Recovering", "NodeLost", f"{text}; waiting for another",
                         losses_tried=n)  # fmt: skip
        if choices[n] == "Replan" and s.planning.fewer is not None:
            return enter(
                s, "Recovering", "Replan", f"{text}; going on with {s.planning.fewer} machines",
                losses_tried=n, machines=s.planning.fewer, replace=True,
                retry_at=max(s.intent.retry_at, s.now + attempts.BACKOFF_S),
            )  # fmt: skip
        if choices[n] == "Fail":
            break
    told = f"{text}; failure.onNodeLoss has nothing left to try"
    return enter(s, "Failed", "NodeLost", told)


def _no_capacity(s: State) -> Intent:
    waited = s.job.spec.deadlines.capacity
    text = f"no nodes after {waited} (deadlines.capacity)"
    if s.intent.attempts and s.intent.losses_tried < len(s.job.spec.failure.on_node_loss):
        used = replace(s.intent, losses_tried=s.intent.losses_tried + 1)
        return _node_policy(replace(s, intent=used), text)
    why = next((p.message for p in s.members if p.message), s.capacity.message)
    return enter(
        s, "Failed", "CapacityTimeout",
        f"{text}{': ' + why if why else ''}; allow more instance types or a longer deadline",
    )  # fmt: skip


def _drain(after: Phase, reason: str, message: str) -> Callable[[State], Intent]:
    return lambda s: enter(s, "Draining", reason, message, after=after)


def _drained(s: State) -> Intent:
    reason: Reason = "Suspended" if s.intent.after == "Suspended" else "DeadlineExceeded"
    after = replace(s, intent=_ended(s, reason, s.intent.message))
    if reason == "Suspended":
        step = after.intent.checkpoint_step
        return enter(after, "Suspended", "Suspended", f"checkpoint of step {step}; nodes are free")
    return enter(after, "Failed", reason, _ACTIVE)


def _succeeded(s: State) -> Intent:
    done = replace(s, intent=_ended(s, "Succeeded", ""))
    return enter(done, "Complete", "Succeeded", "all steps are trained")


def _go(phase: Phase, reason: str, message: str = "", **changes: object):
    return lambda s: enter(s, phase, reason, message, **changes)


_ACTIVE = "deadlines.active has passed; a longer one and a new job go on from the checkpoint"
_PREEMPTED = _lost("Preempted", lambda s: "a queue took the nodes back")
_NODE = _lost("NodeLost", lambda s: "node lost: " + ", ".join(
    sorted({p.node for p in s.members if p.node_lost})))  # fmt: skip
_HEAD = _lost("HeadLost", lambda s: "the head is another pod or was restarted")
_WORKER = _lost("WorkerLost", lambda s: "a worker is gone or was restarted")
_FAILED = _lost("TrainingFailed", lambda s: s.submission.message if s.submission else "")
_AGAIN: tuple[Phase, ...] = ("Recovering", "Failed")


def _losses(source: Phase) -> tuple[Transition, ...]:
    """What can happen to a submission wherever it is in its life."""
    return (
        Transition(source, "the submission succeeded", lambda s: _status(s, "Succeeded"),
                   _succeeded, ("Complete",)),
        Transition(source, "a queue takes the nodes back", _held_back, _PREEMPTED, _AGAIN),
        Transition(source, "a node is confirmed gone", _node_lost, _NODE, _AGAIN),
        Transition(source, "the head is another pod or container", _head_lost, _HEAD, _AGAIN),
        Transition(source, "a worker is another pod or container", _worker_lost, _WORKER, _AGAIN),
        Transition(source, "the submission failed or was stopped",
                   lambda s: _status(s, "Failed", "Stopped"), _FAILED, _AGAIN),
        Transition(source, "suspend is set", _suspend,
                   _drain("Suspended", "Suspending", "writing a checkpoint"), ("Draining",)),
        Transition(source, "deadlines.active has passed", _active_over,
                   _drain("Failed", "DeadlineExceeded", _ACTIVE), ("Draining",)),
    )  # fmt: skip


def _waiting(source: Phase) -> tuple[Transition, ...]:
    """What ends a wait in which no submission lives."""
    return (
        Transition(source, "suspend is set", _suspend,
                   _go("Suspended", "Suspended", "nothing was running; nodes are free"),
                   ("Suspended",)),
        Transition(source, "deadlines.active has passed", _active_over,
                   _go("Failed", "DeadlineExceeded", _ACTIVE), ("Failed",)),
    )  # fmt: skip


TABLE: tuple[Transition, ...] = (
    Transition("Pending", "there is a plan", lambda s: bool(s.planning.content), _plan,
               ("Planned",)),
    Transition("Planned", "suspend is set", _suspend,
               _go("Suspended", "Suspended", "planned; nothing is created"), ("Suspended",)),
    Transition("Planned", "there is no plan any more", lambda s: not s.planning.content,
               _go("Pending", "NoPlan"), ("Pending",)),
    Transition("Planned", "suspend is not set", lambda s: True, _provision, ("Provisioning",)),
    Transition("Suspended", "suspend is not set", lambda s: not _suspend(s),
               _go("Pending", "Resumed", machines=None, losses_tried=0), ("Pending",),
               observe_again=True),
    *_waiting("Queued"),
    Transition("Queued", "the queue lets the cluster go",
               lambda s: s.cluster is not None and not s.cluster.suspended,
               _go("Provisioning", "Admitted", "waiting for nodes"), ("Provisioning",)),
    *_waiting("Provisioning"),
    Transition("Provisioning", "nothing of it exists, and the plan is another one now", _outdated,
               _go("Pending", "PlanChanged", "planned anew before anything was created"),
               ("Pending",)),
    Transition("Provisioning", "the name belongs to another owner's cluster",
               lambda s: s.name_taken, _provision, ("Provisioning",), observe_again=True),
    Transition("Provisioning", "a queue holds the cluster back",
               _held_back, _go("Queued", "Queued", "waiting in the queue"), ("Queued",)),
    Transition("Provisioning", "head and every worker are ready",
               lambda s: s.complete and not _node_lost(s), _start, ("Starting",)),
    Transition("Provisioning", "deadlines.capacity has passed", _capacity_over, _no_capacity,
               ("Failed", "Recovering"), observe_again=True),
    *_losses("Starting"),
    Transition("Starting", "the first step is done", _first_step,
               lambda s: enter(s, "Running", "Stepping", "the first step is done", losses_tried=0),
               ("Running",)),
    Transition("Starting", "the head takes no submission in time", _unsubmitted,
               _lost("SubmissionFailed", lambda s: "the Jobs API took no submission"), _AGAIN),
    Transition("Starting", "deadlines.start has passed",
               lambda s: s.age(s.intent.since) >= _seconds(s.job.spec.deadlines.start),
               _lost("StartTimeout", lambda s: "no first step within deadlines.start"), _AGAIN),
    *_losses("Running"),
    Transition("Running", "the Jobs API no longer knows the submission", _vanished,
               _lost("HeadLost", lambda s: "the head has lost its store"), _AGAIN),
    Transition("Running", "the head cannot be reached for long", _unreachable,
               _lost("HeadLost", lambda s: "the Jobs API does not answer"), _AGAIN),
    Transition("Running", "no step for hang.step", _hangs,
               _lost("Hang", lambda s: "no step; stacks of all ranks are beside the checkpoints"),
               _AGAIN),
    *_waiting("Recovering"),
    Transition("Recovering", "backoff is over and the last attempt cannot be running", _may_retry,
               _retry, ("Provisioning",)),
    Transition("Recovering", "the last attempt does not stop",
               lambda s: not s.intent.replace and s.cluster is not None and not settled(s)
               and s.age(s.intent.since) >= STOP_S,
               lambda s: replace(s.intent, replace=True), ("Recovering",)),
    Transition("Draining", "the submission succeeded", lambda s: _status(s, "Succeeded"),
               _succeeded, ("Complete",)),
    Transition("Draining", "the submission is over", lambda s: settled(s), _drained,
               ("Suspended", "Failed")),
    Transition("Draining", "it is not over in time",
               lambda s: s.age(s.intent.since) >= DRAIN_S + STOP_S, _drained,
               ("Suspended", "Failed")),
)  # fmt: skip
"""Complete and Failed have no rows: nothing follows them."""

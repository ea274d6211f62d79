"""Jobs and queues that nobody works on, though it may look otherwise."""

from __future__ import annotations

import difflib
import shlex
from typing import TYPE_CHECKING

from graphile_worker._db import queries, symptoms, workers
from graphile_worker.doctor.finding import Finding, Level
from graphile_worker.durations import lasting
from graphile_worker.liveness import MOST_OF_TASKS
from graphile_worker.wording import counted, some

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker._db.symptoms import Locks
    from graphile_worker.doctor.subject import Subject
    from graphile_worker.liveness import WorkerInfo

_FOUR_HOURS = 4 * 3600.0
_LONGEST_IDENTIFIER = 128
_ADVICE = {
    "ready": "It runs jobs, and its log says more. A task that holds a connection while it waits for another "
    "one may wait for ever: end such jobs.",
    "blocked": "Its log says more. Nothing in an async task may block: use a plain def, or a process.",
    "exhausted": "Restart it, and let these tasks look at ctx.stopping.",
    "refused": "Its log names the jobs and the reasons: a constraint or a trigger, as a rule. Remove that.",
}
_SILENT_ON_TASKS = "Workers of Node and Rust do not tell which tasks they serve."


async def _known(subject: Subject) -> dict[str, WorkerInfo]:
    found = await subject.look(lambda on: workers.list_workers(on, subject.schema, and_locks=False))
    return {worker.id: worker for worker in found}


async def check_workers(subject: Subject) -> list[Finding]:
    """Whether live workers say that they cannot do all their work."""
    bad = [one for one in (await _known(subject)).values() if one.lives and one.is_ours and _complains(one)]
    if not bad:
        return [
            Finding(check="workers", level=Level.OK, says="All live Python workers say that they are well")
        ]
    return [
        Finding(
            check="workers",
            level=Level.WARNING if worker.state == "ready" else Level.TROUBLE,
            says=f"{worker.name} is {worker.state}: {worker.reason or 'it gives no reason'}",
            advice=_ADVICE.get(worker.state or "", "Its log says more."),
            details={"worker": worker.id, "state": worker.state},
        )
        for worker in bad
    ]


def _complains(worker: WorkerInfo) -> bool:
    if worker.state in {"starting", "stopping", "stopped"}:
        return False
    return worker.state != "ready" or worker.reason is not None


async def check_queues(subject: Subject) -> list[Finding]:
    """Whether a serial queue is locked, and none of its jobs runs."""
    stuck = await subject.look(lambda on: symptoms.read_stuck_queues(on, subject.schema))
    if not stuck:
        return [Finding(check="queues", level=Level.OK, says="No queue is locked without a job that runs")]
    known = await _known(subject)
    findings = []
    for queue in stuck:
        worker = known.get(queue.locked_by or "")
        advice = f"It is freed when it is four hours old. Now: {_unlock(queue.locked_by)}"
        if worker is not None and worker.lives:
            advice = (
                f"Its worker lives, so do not unlock it: restart {worker.name}, and others free the queue."
                if worker.is_ours
                else f"Its worker lives: stop {worker.name} first. Then: {_unlock(queue.locked_by)} --force"
            )
        waiting = counted(queue.waiting, "job waits", "jobs wait") if queue.waiting else "no job waits"
        findings.append(
            Finding(
                check="queues",
                level=Level.TROUBLE if queue.waiting else Level.WARNING,
                says=f"The queue {queue.name!r} has been locked by {queue.locked_by} for "
                f"{lasting(queue.seconds)}, and none of its jobs runs; {waiting} for it",
                advice=f"Whoever deletes rows of running jobs by hand causes this. {advice}",
                details=queue._asdict(),
            )
        )
    return findings


def _unlock(worker: str | None) -> str:
    """The command; it stands at the end of an advice, so that nothing else is taken for a part of it."""
    return f"graphile-worker unlock {shlex.quote(worker or '')}"


async def check_locks(subject: Subject) -> list[Finding]:
    """Whether somebody holds jobs who is gone, or may be."""
    held = await subject.look(lambda on: symptoms.read_locks(on, subject.schema))
    known = await _known(subject)
    anybody = any(worker.is_ours and worker.lives for worker in known.values())
    findings = [
        finding
        for locks in held
        if (finding := _judge(locks, known.get(locks.locked_by or ""), anybody, subject.limits.lock))
    ]
    if findings:
        return findings
    says = "Nothing is locked"
    if held:
        total = counted(sum(locks.jobs for locks in held), "job is", "jobs are")
        says = f"{total} locked, by workers that live, or have not had them for long"
    return [Finding(check="locks", level=Level.OK, says=says)]


def _judge(locks: Locks, worker: WorkerInfo | None, anybody: bool, patience: float) -> Finding | None:
    holds = f"{counted(locks.jobs, 'job')} and {counted(locks.queues, 'queue')}"
    who = worker.name if worker else str(locks.locked_by)
    unlock = _unlock(locks.locked_by)
    if worker is not None and worker.lives:
        return None
    if worker is not None and worker.is_ours:
        says = f"{who} is {worker.state}, and holds {holds}"
        level, advice = Level.NOTE, "Other workers free that within a minute. Now: graphile-worker sweep"
        if not anybody:
            level, advice = Level.WARNING, "Start a worker, which frees that; or: graphile-worker sweep"
    elif worker is not None and worker.silence is not None:  # Rust's, which beats too
        says = f"{who} has not been heard from for {lasting(worker.silence)}, and holds {holds}"
        level, advice = Level.WARNING, f"If it is gone for good: {unlock}"
    elif locks.seconds >= _FOUR_HOURS:
        says = f"{who} has held {holds} for {lasting(locks.seconds)}: longer than any lock counts"
        level, advice = Level.WARNING, f"Any worker that runs frees that within minutes. Now: {unlock}"
    elif locks.seconds >= patience:
        language = (
            "a worker of Node's" if who.startswith(("pool-", "worker-")) else "a worker without heartbeat"
        )
        says = (
            f"{who}, {language}, has held {holds} for {lasting(locks.seconds)}; it does not say if it lives"
        )
        level = Level.NOTE
        advice = f"They are freed after four hours. If you know that it is gone for good: {unlock}"
    else:
        return None
    return Finding(check="locks", level=level, says=says, advice=advice, details=locks._asdict())


async def check_tasks(subject: Subject) -> list[Finding]:
    """Whether jobs are due that no worker of ours can run."""
    rows = await subject.look(lambda on: queries.count_jobs(on, subject.schema))
    now = await subject.look(lambda on: queries.read_now(on, subject.schema))  # this machine's may be wrong
    waiting = {
        row["identifier"] or f"(unknown task {row['task_id']})": (
            row["ready"],
            (now - row["oldest_due"]).total_seconds(),
        )
        for row in rows
        if row["ready"]
    }
    lives = [worker for worker in (await _known(subject)).values() if worker.is_ours and worker.lives]
    served = {task for worker in lives for task in worker.tasks or ()}
    unserved = {name: due for name, due in waiting.items() if name not in served}
    late = {name: due for name, due in unserved.items() if due[1] >= subject.limits.due}
    if not (unserved if lives else late):
        says = f"{counted(sum(ready for ready, _ in waiting.values()), 'job is', 'jobs are')} due, and "
        says += "none of a task that nobody serves" if lives else "none for long"
        return [Finding(check="tasks", level=Level.OK, says=says, details=_as_details(waiting))]
    if not lives:
        total = counted(sum(ready for ready, _ in late.values()), "job has", "jobs have")
        oldest = max(seconds for _, seconds in late.values())
        says = (
            f"{total} been due for up to {lasting(oldest)}, and no worker of ours runs: {some(sorted(late))}"
        )
        advice = f"Start one: graphile-worker run. {_SILENT_ON_TASKS}"
        return [
            Finding(check="tasks", level=Level.WARNING, says=says, advice=advice, details=_as_details(late))
        ]
    return [
        _unserved(name, *due, lives, is_late=name in late)
        for name, due in sorted(unserved.items(), key=lambda item: (item[0] not in late, item[0]))
    ]


def _unserved(name: str, ready: int, seconds: float, lives: list[WorkerInfo], *, is_late: bool) -> Finding:
    says = f"No worker of ours serves the task {name!r}: {counted(ready, 'job is', 'jobs are')} due"
    says += f", the oldest for {lasting(seconds)}"
    level = Level.WARNING if is_late else Level.NOTE  # somebody may be about to start one
    near = difflib.get_close_matches(name, {task for worker in lives for task in worker.tasks or ()}, n=1)
    hint = f"Is {near[0]!r} meant? If not, give" if near else "Give"
    advice = f"{hint} a worker that task, or remove its jobs. {_SILENT_ON_TASKS}"
    if any(_tells_only_some(worker) for worker in lives):
        level = Level.NOTE
        advice += " One of ours has too many tasks to tell them all."
    details = {"task": name, "ready": ready, "seconds": seconds}
    return Finding(check="tasks", level=level, says=says, advice=advice, details=details)


def _tells_only_some(worker: WorkerInfo) -> bool:
    """Whether its list may have been cut off."""
    return sum(len(task.encode()) for task in worker.tasks or ()) > MOST_OF_TASKS - _LONGEST_IDENTIFIER


def _as_details(tasks: Mapping[str, tuple[int, float]]) -> dict[str, object]:
    return {name: {"ready": ready, "seconds": seconds} for name, (ready, seconds) in tasks.items()}

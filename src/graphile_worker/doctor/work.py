"""Checks of workers, queues, locks and tasks, for jobs that no worker runs."""

from __future__ import annotations

import difflib
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from graphile_worker._base.durations import format_duration
from graphile_worker._base.text import join_truncated, pluralize
from graphile_worker._db.connection.any_connection import run_own
from graphile_worker._db.queries import diagnostics, jobs, statistics, workers
from graphile_worker._db.queries.limits import listing_limits, read_outsiders
from graphile_worker._db.queries.pauses import listing_pauses
from graphile_worker.doctor.finding import Finding, Level
from graphile_worker.workers import MAX_TASK_NAMES_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker._db.queries.diagnostics import Locks
    from graphile_worker.doctor.subject import Subject
    from graphile_worker.limits import Pause
    from graphile_worker.workers import WorkerInfo

_MIN_BACKLOG = 100
"""The number of due jobs of a task from which they pile up, if they do not become fewer."""
_BACKLOG_MINUTES = 3
_FOUR_HOURS = 4 * 3600.0
_LONGEST_IDENTIFIER = 128
_ADVICE = {
    "ready": "The worker runs jobs; see its log. A task that holds a connection while it waits for another "
    "one may wait forever: end such jobs.",
    "blocked": "See the worker's log. Async tasks must not block: use a plain def, or a process.",
    "exhausted": "Restart the worker, and make these tasks check ctx.stop_requested.",
    "refused": "The worker's log has the jobs and the reasons, usually a constraint or a trigger. Remove it.",
}
_OTHER_WORKERS = "Node and Rust workers do not publish which tasks they serve."


async def _read_workers(subject: Subject) -> dict[str, WorkerInfo]:
    found = await subject.read(
        lambda connection: workers.list_workers(connection, subject.schema, include_locks=False)
    )
    return {worker.id: worker for worker in found}


async def check_workers(subject: Subject) -> list[Finding]:
    """Check that live workers report no problem."""
    unhealthy = [
        worker
        for worker in (await _read_workers(subject)).values()
        if worker.is_alive and worker.is_ours and _has_problem(worker)
    ]
    if not unhealthy:
        return [Finding(check="workers", level=Level.OK, message="No live Python worker reports a problem")]
    return [
        Finding(
            check="workers",
            level=Level.WARNING if worker.state == "ready" else Level.ERROR,
            message=f"{worker.name} is {worker.state}: {worker.reason or 'no reason given'}",
            advice=_ADVICE.get(worker.state or "", "See the worker's log."),
            details={"worker": worker.id, "state": worker.state},
        )
        for worker in unhealthy
    ]


def _has_problem(worker: WorkerInfo) -> bool:
    if worker.state in {"starting", "stopping", "stopped"}:
        return False
    return worker.state != "ready" or worker.reason is not None


async def check_pauses(subject: Subject) -> list[Finding]:
    """Report what is paused, because its jobs wait."""
    pauses = await subject.read(lambda connection: run_own(connection, listing_pauses(subject.schema)))
    if not pauses:
        return [Finding(check="pauses", level=Level.OK, message="Nothing is paused")]
    now = await subject.read(lambda connection: jobs.read_now(connection, subject.schema))
    return [_pause_finding(pause, (now - pause.paused_at).total_seconds()) for pause in pauses]


def _pause_finding(pause: Pause, age: float) -> Finding:
    message = f"Paused by {pause.paused_by} for {format_duration(age)}: {pause.subject}"
    message += f" ({pause.reason})" if pause.reason else ""
    advice = "" if pause.is_obeyed_by_all else "Node and Rust workers still run it. "
    if pause.until is not None:
        advice += f"The pause ends at {pause.until:%Y-%m-%d %H:%M} UTC, if a Python worker runs. "
    flag = "--all" if pause.kind == "all" else f"--{pause.kind} {shlex.quote(pause.name)}"
    advice += f"To end it now: graphile-worker resume {flag}"
    details = msgspec.to_builtins(pause)
    return Finding(check="pauses", level=Level.NOTE, message=message, advice=advice, details=details)


async def check_limits(subject: Subject) -> list[Finding]:
    """Check that all workers that run a limited task obey the limit, and report full limits."""
    limits = await subject.read(lambda connection: run_own(connection, listing_limits(subject.schema)))
    if not limits:
        return [Finding(check="limits", level=Level.OK, message="No task has a limit across workers")]
    outsiders = await subject.read(lambda connection: read_outsiders(connection, subject.schema))
    findings = [
        Finding(
            check="limits",
            level=Level.WARNING,
            message=f"Node or Rust workers run {pluralize(count, 'job')} of {task!r}, which has a limit",
            advice="They do not know limits: let only Python workers serve the task.",
            details={"task": task, "jobs": count},
        )
        for task, count in outsiders.items()
    ]
    findings += [
        Finding(
            check="limits",
            level=Level.NOTE,
            message=f"{pluralize(limit.waiting, 'job waits', 'jobs wait')} for the limit {limit.name!r}: "
            f"{limit.held} of {limit.concurrency} run",
            advice=f"To change it: graphile-worker limits set {shlex.quote(limit.name)} --concurrency N",
            details=msgspec.to_builtins(limit),
        )
        for limit in limits
        if limit.is_full and limit.waiting
    ]
    return findings or [
        Finding(
            check="limits", level=Level.OK, message=f"{pluralize(len(limits), 'limit')}, none of them full"
        )
    ]


async def check_queues(subject: Subject) -> list[Finding]:
    """Check that no serial queue is locked while none of its jobs is running."""
    stuck = await subject.read(lambda connection: diagnostics.read_stuck_queues(connection, subject.schema))
    if not stuck:
        return [Finding(check="queues", level=Level.OK, message="No queue is locked without a running job")]
    known = await _read_workers(subject)
    findings = []
    for queue in stuck:
        worker = known.get(queue.locked_by or "")
        advice = f"The lock expires after four hours. To release it now: {_unlock(queue.locked_by)}"
        if worker is not None and worker.is_alive:
            advice = (
                f"Its worker is alive, so do not unlock it: restart {worker.name}, and the queue is released."
                if worker.is_ours
                else f"Its worker is alive: stop {worker.name}, then run: {_unlock(queue.locked_by)} --force"
            )
        waiting = pluralize(queue.waiting, "job is", "jobs are") if queue.waiting else "no job is"
        findings.append(
            Finding(
                check="queues",
                level=Level.ERROR if queue.waiting else Level.WARNING,
                message=f"The queue {queue.name!r} has been locked by {queue.locked_by} for "
                f"{format_duration(queue.seconds)}, but none of its jobs is running; "
                f"{waiting} waiting for it",
                advice=f"Deleting rows of running jobs by hand causes this. {advice}",
                details=queue._asdict(),
            )
        )
    return findings


def _unlock(worker: str | None) -> str:
    """Return the command. It comes last in an advice, so that no other words are mistaken for part of it."""
    return f"graphile-worker unlock {shlex.quote(worker or '')}"


async def check_locks(subject: Subject) -> list[Finding]:
    """Check for locks of workers that are gone, or may be."""
    held = await subject.read(lambda connection: diagnostics.read_locks(connection, subject.schema))
    known = await _read_workers(subject)
    has_live_worker = any(worker.is_ours and worker.is_alive for worker in known.values())
    findings = [
        finding
        for locks in held
        if (
            finding := _lock_finding(
                locks, known.get(locks.locked_by or ""), has_live_worker, subject.limits.lock
            )
        )
    ]
    if findings:
        return findings
    message = "Nothing is locked"
    if held:
        total = pluralize(sum(locks.jobs for locks in held), "job is", "jobs are")
        message = f"{total} locked, by live workers or not for long"
    return [Finding(check="locks", level=Level.OK, message=message)]


def _lock_finding(
    locks: Locks, worker: WorkerInfo | None, has_live_worker: bool, max_age: float
) -> Finding | None:
    held = f"{pluralize(locks.jobs, 'job')} and {pluralize(locks.queues, 'queue')}"
    name = worker.name if worker else str(locks.locked_by)
    unlock = _unlock(locks.locked_by)
    if worker is not None and worker.is_alive:
        return None
    if worker is not None and worker.is_ours:
        message = f"{name} is {worker.state}, and holds {held}"
        level, advice = (
            Level.NOTE,
            "Other workers release that within a minute. To do it now: graphile-worker sweep",
        )
        if not has_live_worker:
            level, advice = Level.WARNING, "Start a worker, which releases that; or: graphile-worker sweep"
    elif worker is not None and worker.seconds_since_heartbeat is not None:
        # A Rust worker, which sends heartbeats too.
        silence = format_duration(worker.seconds_since_heartbeat)
        message = f"{name} has sent no heartbeat for {silence}, and holds {held}"
        level, advice = Level.WARNING, f"If it is gone for good: {unlock}"
    elif locks.seconds >= _FOUR_HOURS:
        message = f"{name} has held {held} for {format_duration(locks.seconds)}: the locks have expired"
        level, advice = (
            Level.WARNING,
            f"Any running worker releases that within minutes. To do it now: {unlock}",
        )
    elif locks.seconds >= max_age:
        language = "a Node worker" if name.startswith(("pool-", "worker-")) else "a worker without heartbeat"
        age = format_duration(locks.seconds)
        message = f"{name}, {language}, has held {held} for {age}; it sends no heartbeats"
        level = Level.NOTE
        advice = f"The locks expire after four hours. If you know that it is gone for good: {unlock}"
    else:
        return None
    return Finding(check="locks", level=level, message=message, advice=advice, details=locks._asdict())


async def check_tasks(subject: Subject) -> list[Finding]:
    """Check for due jobs that no Python worker can run."""
    rows = await subject.read(lambda connection: jobs.count_jobs(connection, subject.schema))
    now = await subject.read(
        lambda connection: jobs.read_now(connection, subject.schema)
    )  # this machine's clock may be wrong
    waiting = {
        row["identifier"] or f"(unknown task {row['task_id']})": (
            row["ready"],
            (now - row["oldest_due"]).total_seconds(),
        )
        for row in rows
        if row["ready"]
    }
    live = [
        worker for worker in (await _read_workers(subject)).values() if worker.is_ours and worker.is_alive
    ]
    served = {task for worker in live for task in worker.tasks or ()}
    unserved = {name: due for name, due in waiting.items() if name not in served}
    late = {name: due for name, due in unserved.items() if due[1] >= subject.limits.due}
    if not (unserved if live else late):
        message = f"{pluralize(sum(ready for ready, _ in waiting.values()), 'job is', 'jobs are')} due, "
        message += "none of them without a worker" if live else "none for long"
        return [Finding(check="tasks", level=Level.OK, message=message, details=_as_details(waiting))]
    if not live:
        total = pluralize(sum(ready for ready, _ in late.values()), "job has", "jobs have")
        oldest = max(seconds for _, seconds in late.values())
        message = (
            f"{total} been due for up to {format_duration(oldest)}, and no Python worker is running: "
            f"{join_truncated(sorted(late))}"
        )
        advice = f"Start one: graphile-worker run. {_OTHER_WORKERS}"
        return [
            Finding(
                check="tasks", level=Level.WARNING, message=message, advice=advice, details=_as_details(late)
            )
        ]
    return [
        _unserved(name, *due, live, is_late=name in late)
        for name, due in sorted(unserved.items(), key=lambda item: (item[0] not in late, item[0]))
    ]


async def check_backlog(subject: Subject) -> list[Finding]:
    """Check for tasks whose due jobs have not become fewer for minutes, as the workers' statistics say."""
    now = await subject.read(lambda connection: jobs.read_now(connection, subject.schema))
    since = now - timedelta(minutes=_BACKLOG_MINUTES + 2)
    rows = await subject.read(
        lambda connection: statistics.read_depths(connection, subject.schema, since, 60, None)
    )
    samples = {row["at"]: row["samples"] for row in rows if not row["task"]}
    depths: dict[str, list[int]] = {}
    for at in sorted(samples)[-_BACKLOG_MINUTES:]:
        ready = {row["task"]: row["ready"] // samples[at] for row in rows if row["at"] == at and row["task"]}
        for task in {*depths, *ready}:
            depths.setdefault(task, []).append(ready.get(task, 0))
    findings = [
        _backlog(task, counts)
        for task, counts in sorted(depths.items())
        if len(counts) == _BACKLOG_MINUTES
        and min(counts) == counts[0] >= _MIN_BACKLOG
        and max(counts) == counts[-1]  # not many that were added at once and are being run
    ]
    message = "No jobs pile up" if samples else "No worker has counted the jobs in the last minutes"
    return findings or [Finding(check="backlog", level=Level.OK, message=message)]


def _backlog(task: str, counts: list[int]) -> Finding:
    due = pluralize(counts[-1], "job is", "jobs are")
    return Finding(
        check="backlog",
        level=Level.WARNING,
        message=f"The jobs of the task {task!r} do not become fewer: {due} due, "
        f"{counts[-1] - counts[0]:,} more than {_BACKLOG_MINUTES - 1} minutes ago",
        advice="Add workers, raise their concurrency, or look for slow jobs: graphile-worker top",
        details={"task": task, "ready": counts},
    )


def _unserved(name: str, ready: int, seconds: float, live: list[WorkerInfo], *, is_late: bool) -> Finding:
    message = f"No Python worker serves the task {name!r}: {pluralize(ready, 'job is', 'jobs are')} due"
    message += f", the oldest for {format_duration(seconds)}"
    level = Level.WARNING if is_late else Level.NOTE  # a worker may be about to start
    near = difflib.get_close_matches(name, {task for worker in live for task in worker.tasks or ()}, n=1)
    hint = f"Did you mean {near[0]!r}? If not, add" if near else "Add"
    advice = f"{hint} the task to a worker, or remove its jobs. {_OTHER_WORKERS}"
    if any(_may_be_truncated(worker) for worker in live):
        level = Level.NOTE
        advice += " One Python worker has too many tasks to publish them all."
    details = {"task": name, "ready": ready, "seconds": seconds}
    return Finding(check="tasks", level=level, message=message, advice=advice, details=details)


def _may_be_truncated(worker: WorkerInfo) -> bool:
    """Return whether the published list of tasks may have been cut off."""
    return sum(len(task.encode()) for task in worker.tasks or ()) > MAX_TASK_NAMES_BYTES - _LONGEST_IDENTIFIER


def _as_details(tasks: Mapping[str, tuple[int, float]]) -> dict[str, object]:
    return {name: {"ready": ready, "seconds": seconds} for name, (ready, seconds) in tasks.items()}

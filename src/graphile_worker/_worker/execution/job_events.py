"""`JobRun`, the record of one run of a job, and the events about it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker import events as event
from graphile_worker.outcome import Cancelled, Completed, Failed, Interrupted, Snoozed

if TYPE_CHECKING:
    import asyncio

    from graphile_worker._base.stop_signals import StopSignal
    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker.events.emitter import Events
    from graphile_worker.outcome import Cancel, Outcome


class JobRun(msgspec.Struct, eq=False):
    """A job that runs in a slot, or has ended and is not recorded yet."""

    claimed: ClaimedJob
    slot: event.Worker
    since: float
    task: asyncio.Task[None] | None = None
    duration: float = 0.0
    value: Any = None
    """What the task returned, until the history has taken it."""
    error: BaseException | None = None
    """The error that it failed with."""
    outcome: type[Outcome] | None = None
    """The kind of its outcome."""
    runs_again: bool = False
    """Whether it was interrupted or snoozed, so that no `JobComplete` event follows."""
    stopped: bool = False
    """Whether the worker has stopped it, for any reason."""
    fenced: bool = False
    """Whether the worker has stopped it because other workers may claim it."""
    cancel: Cancel | None = None
    """Why it was cancelled, if it was."""
    stop_signal: StopSignal | None = None
    """The stop signal of a cancelled job, kept here so that it lives as long as the run."""


def emit_started(events: Events, run: JobRun) -> None:
    """Emit that the job is about to run."""
    if events.wants(event.JobStart):
        events.emit(event.JobStart(worker=run.slot, job=run.claimed.job))


def emit_ended(events: Events, run: JobRun, outcome: Outcome) -> None:
    """Emit the outcome, which is not recorded yet."""
    job = run.claimed.job
    match outcome:
        case Completed():
            if events.wants(event.JobSuccess):
                events.emit(event.JobSuccess(worker=run.slot, job=job, duration=run.duration))
        case Failed(error=error, batch_errors=errors):
            run.error = error
            fields: dict[str, Any] = {
                "worker": run.slot,
                "job": job,
                "error": error,
                "duration": run.duration,
            }
            retry_in = outcome.retry_in(job, datetime.now(UTC))
            events.emit(event.JobFailure(**fields, batch_job_errors=errors, retry_in=retry_in))
            if retry_in is None:
                events.emit(event.JobFailed(**fields, batch_job_errors=errors))
        case Cancelled(choice=choice):
            run.error = choice
            events.emit(
                event.JobCancelled(worker=run.slot, job=job, reason=choice.reason, duration=run.duration)
            )
        case Snoozed(choice=choice):
            run.runs_again = True
            events.emit(
                event.JobSnoozed(
                    worker=run.slot,
                    job=job,
                    delay=choice.delay,
                    reason=choice.reason,
                    duration=run.duration,
                )
            )
        case Interrupted():
            run.runs_again = True
            events.emit(event.JobInterrupted(worker=run.slot, job=job, duration=run.duration))


def emit_settled(events: Events, run: JobRun, kind: type[event.JobComplete | event.JobLost]) -> None:
    """Emit that the outcome is recorded, or lost."""
    if not (run.runs_again and kind is event.JobComplete):
        events.emit(
            kind(
                worker=run.slot,
                job=run.claimed.job,
                error=run.error,
                duration=run.duration,
                started=run.since,
            )
        )


def emit_unrecorded(events: Events, run: JobRun, error: BaseException) -> None:
    """Emit that the outcome will not be recorded."""
    events.emit(event.WorkerFatalError(worker=run.slot, error=error, job_error=run.error))

"""Jobs that run, and what is told about them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker import events as event
from graphile_worker.outcome import Cancelled, Completed, Failed, Interrupted, Snoozed

if TYPE_CHECKING:
    import asyncio

    from graphile_worker._db.exchange import Held
    from graphile_worker.context import Stopping
    from graphile_worker.emitter import Events
    from graphile_worker.outcome import Cancel, Outcome


class Run(msgspec.Struct, eq=False):
    """A job that runs in a slot, or did."""

    held: Held
    slot: event.Worker
    since: float
    task: asyncio.Task[None] | None = None
    duration: float = 0.0
    error: BaseException | None = None
    """What it failed with, if it did."""
    outcome: type[Outcome] | None = None
    """What it came to."""
    comes_back: bool = False
    """Whether it was interrupted, or snoozed: then nothing of it is complete."""
    stopped: bool = False
    """Whether the worker told it to stop, for whatever reason."""
    fenced: bool = False
    """Whether it was told to stop because it is not ours any more."""
    cancel: Cancel | None = None
    """Why it was told to stop, if somebody does not want it any more."""
    told: Stopping | None = None
    """By what."""


def tell_started(events: Events, run: Run) -> None:
    """It is about to run."""
    if events.wants(event.JobStart):
        events.emit(event.JobStart(worker=run.slot, job=run.held.job))


def tell_ended(events: Events, run: Run, outcome: Outcome) -> None:
    """It came to this; nothing of it is recorded yet."""
    job = run.held.job
    match outcome:
        case Completed():
            if events.wants(event.JobSuccess):
                events.emit(event.JobSuccess(worker=run.slot, job=job, duration=run.duration))
        case Failed(error=error, batch_errors=errors):
            run.error = error
            what: dict[str, Any] = {"worker": run.slot, "job": job, "error": error, "duration": run.duration}
            retry_in = outcome.retry_in(job, datetime.now(UTC))
            events.emit(event.JobFailure(**what, batch_job_errors=errors, retry_in=retry_in))
            if retry_in is None:
                events.emit(event.JobFailed(**what, batch_job_errors=errors))
        case Cancelled(choice=choice):
            run.error = choice
            events.emit(
                event.JobCancelled(worker=run.slot, job=job, reason=choice.reason, duration=run.duration)
            )
        case Snoozed(choice=choice):
            run.comes_back = True
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
            run.comes_back = True
            events.emit(event.JobInterrupted(worker=run.slot, job=job, duration=run.duration))


def tell_settled(events: Events, run: Run, kind: type[event.JobComplete | event.JobLost]) -> None:
    """The database has been told."""
    if events.wants(kind) and not (run.comes_back and kind is event.JobComplete):
        events.emit(kind(worker=run.slot, job=run.held.job, error=run.error, duration=run.duration))


def tell_unrecorded(events: Events, run: Run, error: BaseException) -> None:
    """The database will not be told."""
    events.emit(event.WorkerFatalError(worker=run.slot, error=error, job_error=run.error))

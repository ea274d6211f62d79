"""Jobs that run, and what is told about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from graphile_worker import events as event
from graphile_worker.outcome import Completed, Failed, Interrupted

if TYPE_CHECKING:
    import asyncio

    from graphile_worker._db.exchange import Held
    from graphile_worker.emitter import Events
    from graphile_worker.outcome import Outcome


class Run(msgspec.Struct, eq=False):
    """A job that runs in a slot, or did."""

    held: Held
    slot: event.Worker
    since: float
    task: asyncio.Task[None] | None = None
    duration: float = 0.0
    error: BaseException | None = None
    """What it failed with, if it did."""
    interrupted: bool = False
    fenced: bool = False
    """Whether it was told to stop because it is not ours any more."""


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
        case Failed(error=error):
            run.error = error
            events.emit(event.JobFailure(worker=run.slot, job=job, error=error, duration=run.duration))
            if job.attempts >= job.max_attempts:
                events.emit(event.JobFailed(worker=run.slot, job=job, error=error, duration=run.duration))
        case Interrupted():
            run.interrupted = True
            events.emit(event.JobInterrupted(worker=run.slot, job=job, duration=run.duration))


def tell_settled(events: Events, run: Run, kind: type[event.JobComplete | event.JobLost]) -> None:
    """The database has been told. Of a job that was interrupted nothing is complete."""
    if events.wants(kind) and not (run.interrupted and kind is event.JobComplete):
        events.emit(kind(worker=run.slot, job=run.held.job, error=run.error, duration=run.duration))


def tell_unrecorded(events: Events, run: Run, error: BaseException) -> None:
    """The database will not be told."""
    events.emit(event.WorkerFatalError(worker=run.slot, error=error, job_error=run.error))

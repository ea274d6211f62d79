"""Events about jobs: from the start of a run to its recorded outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphile_worker.events.base import SlotEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker.job import Job


class JobEvent(SlotEvent, frozen=True, kw_only=True):
    """Base class of the events about a job."""

    job: Job


class JobStart(JobEvent, frozen=True, kw_only=True):
    """A job is about to run."""

    name: ClassVar[str] = "job:start"


class JobSuccess(JobEvent, frozen=True, kw_only=True):
    """The task returned. The outcome is not recorded yet: see `JobComplete`."""

    name: ClassVar[str] = "job:success"
    duration: float


class JobFailure(JobEvent, frozen=True, kw_only=True):
    """The task raised an exception."""

    name: ClassVar[str] = "job:error"
    error: BaseException
    duration: float
    batch_job_errors: Sequence[BaseException] | None = None
    """The errors of the items that failed, for a batch."""
    retry_in: float | None = None
    """Seconds until the next attempt, or None if there is none."""


class JobFailed(JobEvent, frozen=True, kw_only=True):
    """The task raised an exception, and the job does not run again.

    It was the last attempt, or the error is final.
    """

    name: ClassVar[str] = "job:failed"
    error: BaseException
    duration: float
    batch_job_errors: Sequence[BaseException] | None = None


class JobSnoozed(JobEvent, frozen=True, kw_only=True):
    """The task asked to run again after `delay` seconds. The attempt does not count."""

    name: ClassVar[str] = "job:snoozed"
    delay: float
    reason: str
    duration: float


class JobCancelled(JobEvent, frozen=True, kw_only=True):
    """The job was cancelled, and does not run again."""

    name: ClassVar[str] = "job:cancelled"
    reason: str
    duration: float


class JobInterrupted(JobEvent, frozen=True, kw_only=True):
    """The worker stopped the job. The attempt does not count."""

    name: ClassVar[str] = "job:interrupted"
    duration: float


class JobComplete(JobEvent, frozen=True, kw_only=True):
    """The outcome is recorded in the database. `error` is set if the job failed."""

    name: ClassVar[str] = "job:complete"
    error: BaseException | None
    duration: float
    started: float = 0.0
    """When the run started, in seconds of `time.monotonic`."""


class JobLost(JobEvent, frozen=True, kw_only=True):
    """The outcome was not recorded, because another process released the job's lock.

    The job runs again, or already has.
    """

    name: ClassVar[str] = "job:lost"
    error: BaseException | None
    duration: float
    started: float = 0.0
    """When the run started, in seconds of `time.monotonic`."""

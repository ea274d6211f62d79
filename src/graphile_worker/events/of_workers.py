"""What a worker tells of itself and of its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker.job import Job
    from graphile_worker.liveness import Recovered


class WorkerPool(msgspec.Struct, frozen=True):
    """One worker process, or rather one call of `run`: what holds the locks of jobs."""

    id: str
    """As in the column locked_by."""
    schema: str
    concurrency: int
    tasks: tuple[str, ...]


class Worker(msgspec.Struct, frozen=True):
    """One slot of a pool: it runs one job at a time."""

    id: str
    """That of the pool, and the number."""
    number: int
    """From 1 to the pool's concurrency."""
    worker_id: str
    """That of the pool: as in the column locked_by, in the log, and at `JobContext.worker_id`."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""

    name: ClassVar[str] = "*"


class PoolEvent(Event, frozen=True, kw_only=True):
    """Base of those that are about a worker as a whole."""

    worker_pool: WorkerPool


class PoolCreate(PoolEvent, frozen=True, kw_only=True):
    """A worker begins."""

    name: ClassVar[str] = "pool:create"


class PoolListenConnecting(PoolEvent, frozen=True, kw_only=True):
    """It is about to connect in order to listen, after so many attempts in vain."""

    name: ClassVar[str] = "pool:listen:connecting"
    attempts: int


class PoolListenSuccess(PoolEvent, frozen=True, kw_only=True):
    """It listens. `client` is the driver's connection; leave it alone."""

    name: ClassVar[str] = "pool:listen:success"
    client: Any


class PoolListenError(PoolEvent, frozen=True, kw_only=True):
    """It cannot listen, or not any more. `client` is None if it could not connect."""

    name: ClassVar[str] = "pool:listen:error"
    error: BaseException
    client: Any = None


class PoolListenNotification(PoolEvent, frozen=True, kw_only=True):
    """It heard something."""

    name: ClassVar[str] = "pool:listen:notification"
    channel: str
    message: str
    client: Any


class PoolListenRelease(PoolEvent, frozen=True, kw_only=True):
    """It let the listening connection go."""

    name: ClassVar[str] = "pool:listen:release"
    client: Any


class PoolFatalError(PoolEvent, frozen=True, kw_only=True):
    """An error that it cannot go on after; `action` is what it was doing."""

    name: ClassVar[str] = "pool:fatalError"
    error: BaseException
    action: str


class PoolFenced(PoolEvent, frozen=True, kw_only=True):
    """It could not say for `silence` seconds that it lives, and gives up its jobs before others take them."""

    name: ClassVar[str] = "pool:fenced"
    silence: float


class PoolUnfenced(PoolEvent, frozen=True, kw_only=True):
    """It lives, and claims jobs again."""

    name: ClassVar[str] = "pool:unfenced"


class WorkerRecovered(PoolEvent, frozen=True, kw_only=True):
    """Another worker died, and this one freed what it held."""

    name: ClassVar[str] = "worker:recovered"
    recovered: Recovered


class PoolRelease(PoolEvent, frozen=True, kw_only=True):
    """It ended."""

    name: ClassVar[str] = "pool:release"


class PoolGracefulShutdown(PoolEvent, frozen=True, kw_only=True):
    """It claims nothing more, and waits for what runs."""

    name: ClassVar[str] = "pool:gracefulShutdown"
    message: str


class PoolGracefulShutdownComplete(PoolEvent, frozen=True, kw_only=True):
    """All is recorded."""

    name: ClassVar[str] = "pool:gracefulShutdown:complete"


class PoolGracefulShutdownError(PoolEvent, frozen=True, kw_only=True):
    """Not all could be recorded."""

    name: ClassVar[str] = "pool:gracefulShutdown:error"
    error: BaseException


class PoolGracefulShutdownWorkerError(PoolEvent, frozen=True, kw_only=True):
    """The result of this job could not be recorded."""

    name: ClassVar[str] = "pool:gracefulShutdown:workerError"
    error: BaseException
    job: Job


class PoolForcefulShutdown(PoolEvent, frozen=True, kw_only=True):
    """It interrupts the jobs that run."""

    name: ClassVar[str] = "pool:forcefulShutdown"
    message: str


class PoolForcefulShutdownComplete(PoolEvent, frozen=True, kw_only=True):
    """All that was interrupted is recorded."""

    name: ClassVar[str] = "pool:forcefulShutdown:complete"


class PoolForcefulShutdownError(PoolEvent, frozen=True, kw_only=True):
    """Not all that was interrupted could be recorded."""

    name: ClassVar[str] = "pool:forcefulShutdown:error"
    error: BaseException


class LocalQueueInit(PoolEvent, frozen=True, kw_only=True):
    """Prefetch is on."""

    name: ClassVar[str] = "localQueue:init"
    size: int


class LocalQueueSetMode(PoolEvent, frozen=True, kw_only=True):
    """What becomes of prefetched jobs: ``WAITING`` for a slot, ``TTL_EXPIRED``, ``RELEASED``."""

    name: ClassVar[str] = "localQueue:setMode"
    old_mode: str
    new_mode: str


class LocalQueueGetJobsComplete(PoolEvent, frozen=True, kw_only=True):
    """Jobs were claimed ahead."""

    name: ClassVar[str] = "localQueue:getJobs:complete"
    jobs: Sequence[Job]


class LocalQueueReturnJobs(PoolEvent, frozen=True, kw_only=True):
    """Jobs that were claimed ahead are given back."""

    name: ClassVar[str] = "localQueue:returnJobs"
    jobs: Sequence[Job]


class _WorkerEvent(Event, frozen=True, kw_only=True):
    worker: Worker


class WorkerCreate(_WorkerEvent, frozen=True, kw_only=True):
    """A slot is there."""

    name: ClassVar[str] = "worker:create"
    tasks: Sequence[str]


class WorkerRelease(_WorkerEvent, frozen=True, kw_only=True):
    """A slot gets no more jobs."""

    name: ClassVar[str] = "worker:release"


class WorkerStop(_WorkerEvent, frozen=True, kw_only=True):
    """A slot is gone."""

    name: ClassVar[str] = "worker:stop"
    error: BaseException | None = None


class WorkerGetJobStart(_WorkerEvent, frozen=True, kw_only=True):
    """The database is asked for jobs: once an exchange, for all free slots; `worker` is the first of them."""

    name: ClassVar[str] = "worker:getJob:start"


class WorkerGetJobError(_WorkerEvent, frozen=True, kw_only=True):
    """It could not be asked; it will be, later. Once for each try, while the database is away too."""

    name: ClassVar[str] = "worker:getJob:error"
    error: BaseException


class WorkerGetJobEmpty(_WorkerEvent, frozen=True, kw_only=True):
    """There was none."""

    name: ClassVar[str] = "worker:getJob:empty"


class WorkerFatalError(_WorkerEvent, frozen=True, kw_only=True):
    """The result of a job cannot be recorded; `job_error` is what the job itself failed with, if it did."""

    name: ClassVar[str] = "worker:fatalError"
    error: BaseException
    job_error: BaseException | None


class _JobEvent(_WorkerEvent, frozen=True, kw_only=True):
    job: Job


class JobStart(_JobEvent, frozen=True, kw_only=True):
    """A job is about to run."""

    name: ClassVar[str] = "job:start"


class JobSuccess(_JobEvent, frozen=True, kw_only=True):
    """It returned. Not recorded yet: see `JobComplete`."""

    name: ClassVar[str] = "job:success"
    duration: float


class JobFailure(_JobEvent, frozen=True, kw_only=True):
    """It raised."""

    name: ClassVar[str] = "job:error"
    error: BaseException
    duration: float
    batch_job_errors: Sequence[BaseException] | None = None
    """What the items of a batch failed with."""
    retry_in: float | None = None
    """Seconds until the next attempt; None: there is none."""


class JobFailed(_JobEvent, frozen=True, kw_only=True):
    """It raised, and does not run again: it was its last attempt, or is not to have another."""

    name: ClassVar[str] = "job:failed"
    error: BaseException
    duration: float
    batch_job_errors: Sequence[BaseException] | None = None


class JobSnoozed(_JobEvent, frozen=True, kw_only=True):
    """It asked to run again after `delay` seconds; its attempt is given back."""

    name: ClassVar[str] = "job:snoozed"
    delay: float
    reason: str
    duration: float


class JobCancelled(_JobEvent, frozen=True, kw_only=True):
    """It is not wanted any more, and does not run again."""

    name: ClassVar[str] = "job:cancelled"
    reason: str
    duration: float


class JobInterrupted(_JobEvent, frozen=True, kw_only=True):
    """The worker stopped it; its attempt is given back."""

    name: ClassVar[str] = "job:interrupted"
    duration: float


class JobComplete(_JobEvent, frozen=True, kw_only=True):
    """What became of it is recorded in the database; `error` if it failed."""

    name: ClassVar[str] = "job:complete"
    error: BaseException | None
    duration: float


class JobLost(_JobEvent, frozen=True, kw_only=True):
    """What became of it was not recorded: somebody else had freed it, and it will run again, or has."""

    name: ClassVar[str] = "job:lost"
    error: BaseException | None
    duration: float


class ResetLockedStarted(PoolEvent, frozen=True, kw_only=True):
    """Locks older than four hours are looked for."""

    name: ClassVar[str] = "resetLocked:started"


class ResetLockedSuccess(PoolEvent, frozen=True, kw_only=True):
    """They are freed; again in `delay` seconds, if not None."""

    name: ClassVar[str] = "resetLocked:success"
    delay: float | None


class ResetLockedFailure(PoolEvent, frozen=True, kw_only=True):
    """They could not be; again in `delay` seconds, if not None."""

    name: ClassVar[str] = "resetLocked:failure"
    delay: float | None
    error: BaseException


class GracefulShutdown(Event, frozen=True, kw_only=True):
    """A first signal arrived."""

    name: ClassVar[str] = "gracefulShutdown"
    signal: str


class ForcefulShutdown(Event, frozen=True, kw_only=True):
    """A second signal arrived."""

    name: ClassVar[str] = "forcefulShutdown"
    signal: str


class Stop(Event, frozen=True, kw_only=True):
    """The runner is stopping."""

    name: ClassVar[str] = "stop"

"""Events about a worker process: starting, listening, fencing, prefetching, recovery and shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from graphile_worker.events.base import Event, PoolEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker.job import Job
    from graphile_worker.workers import RecoveredWorker


class PoolCreate(PoolEvent, frozen=True, kw_only=True):
    """A worker is starting."""

    name: ClassVar[str] = "pool:create"


class PoolListenConnecting(PoolEvent, frozen=True, kw_only=True):
    """The worker is opening its listening connection. `attempts` counts the failures before this one."""

    name: ClassVar[str] = "pool:listen:connecting"
    attempts: int


class PoolListenSuccess(PoolEvent, frozen=True, kw_only=True):
    """The worker is listening. `client` is the driver's connection; don't use it."""

    name: ClassVar[str] = "pool:listen:success"
    client: Any


class PoolListenError(PoolEvent, frozen=True, kw_only=True):
    """Listening failed or ended. `client` is None if the worker could not connect."""

    name: ClassVar[str] = "pool:listen:error"
    error: BaseException
    client: Any = None


class PoolListenNotification(PoolEvent, frozen=True, kw_only=True):
    """A notification arrived."""

    name: ClassVar[str] = "pool:listen:notification"
    channel: str
    message: str
    client: Any


class PoolListenRelease(PoolEvent, frozen=True, kw_only=True):
    """The worker released its listening connection."""

    name: ClassVar[str] = "pool:listen:release"
    client: Any


class PoolExchange(PoolEvent, frozen=True, kw_only=True):
    """The database answered an exchange: the request that records outcomes and claims jobs."""

    name: ClassVar[str] = "pool:exchange"
    duration: float
    wanted: int
    """How many jobs the worker asked for."""
    claimed: int
    recorded: int
    """How many outcomes were sent."""


class PoolDatabaseError(PoolEvent, frozen=True, kw_only=True):
    """The database could not be used. Emitted for each attempt; an outage may have many."""

    name: ClassVar[str] = "pool:database:error"
    error: BaseException


class PoolDatabaseRecovered(PoolEvent, frozen=True, kw_only=True):
    """The database can be used again, after an outage of `outage` seconds."""

    name: ClassVar[str] = "pool:database:recovered"
    outage: float


class PoolFatalError(PoolEvent, frozen=True, kw_only=True):
    """The worker cannot continue after this error. `action` names what it was doing."""

    name: ClassVar[str] = "pool:fatalError"
    error: BaseException
    action: str


class PoolFenced(PoolEvent, frozen=True, kw_only=True):
    """The worker gives up its jobs, because no heartbeat was recorded for `silence` seconds.

    It does so before other workers may claim the jobs.
    """

    name: ClassVar[str] = "pool:fenced"
    silence: float


class PoolUnfenced(PoolEvent, frozen=True, kw_only=True):
    """A heartbeat is recorded again, and the worker claims jobs again."""

    name: ClassVar[str] = "pool:unfenced"


class WorkerRecovered(PoolEvent, frozen=True, kw_only=True):
    """Another worker died, and this one released its jobs and queues."""

    name: ClassVar[str] = "worker:recovered"
    recovered: RecoveredWorker


class PoolRelease(PoolEvent, frozen=True, kw_only=True):
    """The worker has ended."""

    name: ClassVar[str] = "pool:release"


class PoolGracefulShutdown(PoolEvent, frozen=True, kw_only=True):
    """The worker claims no more jobs, and waits for those that are running."""

    name: ClassVar[str] = "pool:gracefulShutdown"
    message: str


class PoolGracefulShutdownComplete(PoolEvent, frozen=True, kw_only=True):
    """All outcomes are recorded."""

    name: ClassVar[str] = "pool:gracefulShutdown:complete"


class PoolGracefulShutdownError(PoolEvent, frozen=True, kw_only=True):
    """Some outcomes could not be recorded."""

    name: ClassVar[str] = "pool:gracefulShutdown:error"
    error: BaseException


class PoolGracefulShutdownWorkerError(PoolEvent, frozen=True, kw_only=True):
    """The outcome of this job could not be recorded."""

    name: ClassVar[str] = "pool:gracefulShutdown:workerError"
    error: BaseException
    job: Job


class PoolForcefulShutdown(PoolEvent, frozen=True, kw_only=True):
    """The worker interrupts the jobs that are running."""

    name: ClassVar[str] = "pool:forcefulShutdown"
    message: str


class PoolForcefulShutdownComplete(PoolEvent, frozen=True, kw_only=True):
    """All interrupted jobs are recorded."""

    name: ClassVar[str] = "pool:forcefulShutdown:complete"


class PoolForcefulShutdownError(PoolEvent, frozen=True, kw_only=True):
    """Some interrupted jobs could not be recorded."""

    name: ClassVar[str] = "pool:forcefulShutdown:error"
    error: BaseException


class LocalQueueInit(PoolEvent, frozen=True, kw_only=True):
    """Prefetch is enabled."""

    name: ClassVar[str] = "localQueue:init"
    size: int


class LocalQueueSetMode(PoolEvent, frozen=True, kw_only=True):
    """The mode of the prefetched jobs changed: ``WAITING`` for a slot, ``TTL_EXPIRED`` or ``RELEASED``."""

    name: ClassVar[str] = "localQueue:setMode"
    old_mode: str
    new_mode: str


class LocalQueueGetJobsComplete(PoolEvent, frozen=True, kw_only=True):
    """Jobs were prefetched."""

    name: ClassVar[str] = "localQueue:getJobs:complete"
    jobs: Sequence[Job]


class LocalQueueReturnJobs(PoolEvent, frozen=True, kw_only=True):
    """Prefetched jobs are returned to the queue."""

    name: ClassVar[str] = "localQueue:returnJobs"
    jobs: Sequence[Job]


class ResetLockedStarted(PoolEvent, frozen=True, kw_only=True):
    """The worker searches for locks older than four hours."""

    name: ClassVar[str] = "resetLocked:started"


class ResetLockedSuccess(PoolEvent, frozen=True, kw_only=True):
    """The old locks are released. The next search is in `delay` seconds, unless it is None."""

    name: ClassVar[str] = "resetLocked:success"
    delay: float | None


class ResetLockedFailure(PoolEvent, frozen=True, kw_only=True):
    """The old locks could not be released. The next search is in `delay` seconds, unless it is None."""

    name: ClassVar[str] = "resetLocked:failure"
    delay: float | None
    error: BaseException


class GracefulShutdown(Event, frozen=True, kw_only=True):
    """The process received a first signal to stop."""

    name: ClassVar[str] = "gracefulShutdown"
    signal: str


class ForcefulShutdown(Event, frozen=True, kw_only=True):
    """The process received a second signal to stop."""

    name: ClassVar[str] = "forcefulShutdown"
    signal: str


class Stop(Event, frozen=True, kw_only=True):
    """The runner is stopping."""

    name: ClassVar[str] = "stop"

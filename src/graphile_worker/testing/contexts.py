"""Make jobs and contexts without a worker, for unit tests."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from graphile_worker._base.checked_connection import in_transaction_if_required
from graphile_worker._base.durations import seconds
from graphile_worker._base.logs import ScopedLogger
from graphile_worker._base.stop_signals import StopSignal, StopSignals
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.session import Session
from graphile_worker._tasks.specs import Specs
from graphile_worker._worker.execution.completion import already_complete
from graphile_worker._worker.execution.handlers import timeout_of
from graphile_worker.client import find_schema
from graphile_worker.context import JobContext, WorkerEnvironment
from graphile_worker.errors import ConfigurationError
from graphile_worker.job import Job, JobSpec, JobState
from graphile_worker.testing.overrides import ClockedUtils

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from graphile_worker._base.durations import Duration
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker.job import Progress
    from graphile_worker.testing.clocks import Clock

S = TypeVar("S")
T = TypeVar("T")
_WORKER = "python-test"


def job(task_identifier: str = "test", payload: Any = None, **fields: Any) -> Job:
    """Return a running job in its first attempt, without storing it in a database.

    Args:
        task_identifier: The job's task.
        payload: The job's payload; None means ``{}``.
        fields: Other fields to set: attempts, max_attempts, key, queue_name, flags, …

    Example:
        >>> from graphile_worker.retry import Exponential, Failure
        >>> from graphile_worker.testing import job
        >>> Exponential(first=1, factor=2)(Failure(job(attempts=3), ValueError("no")))
        4.0
    """
    now = datetime.now(UTC)
    default = Job(
        id=1,
        task_identifier=task_identifier,
        queue_name=None,
        payload={} if payload is None else payload,
        priority=0,
        run_at=now,
        attempts=1,
        max_attempts=25,
        last_error=None,
        created_at=now,
        updated_at=now,
        key=None,
        locked_at=now,
        locked_by=_WORKER,
        revision=0,
        flags=frozenset(),
        is_available=False,
        task_id=1,
        job_queue_id=None,
        state=JobState.RUNNING,
    )
    if unknown := fields.keys() - set(Job.__struct_fields__):
        raise ConfigurationError(f"Job has no field {', '.join(map(repr, sorted(unknown)))}.")
    return msgspec.structs.replace(default, **fields)


_make_job = job  # for functions that have a parameter named job


class FakeContext(JobContext[S]):
    """A `JobContext` without a worker, made by `context`.

    Attributes:
        added: The jobs that the task has added, if the context has no connection.
        reported: What the task has reported with `JobContext.progress`, in order.
    """

    __slots__ = ("_completions", "added", "reported")

    def __init__(
        self,
        job: Job,
        environment: _FakeEnvironment,
        added: list[JobSpec],
        deadline: _FakeDeadline | None = None,
    ) -> None:
        super().__init__(job, environment, deadline)
        self._completions = environment.completions
        self.added = added
        self.reported = environment.progress.reports

    @property
    def completed(self) -> bool:
        """Whether the task has completed the job, with `transaction`, `complete` or `complete_sync`."""
        return self._completions.completed


@overload
def context(
    job: Job | None = None,
    *,
    timeout: Duration | None = None,
    connection: Connection | None = None,
    clock: Clock | None = None,
) -> FakeContext[Any]: ...


@overload
def context(
    job: Job | None = None,
    *,
    state: S,
    timeout: Duration | None = None,
    connection: Connection | None = None,
    clock: Clock | None = None,
) -> FakeContext[S]: ...


def context(
    job: Job | None = None,
    *,
    state: Any = None,
    timeout: Duration | None = None,
    connection: Connection | None = None,
    clock: Clock | None = None,
) -> FakeContext[Any]:
    """Return a `JobContext` with which a unit test calls a task.

    Args:
        job: The running job [a job in its first attempt].
        state: The value that the application's lifespan would yield.
        timeout: The job's time limit, for `JobContext.deadline` [the timeout stored in the job]. Nothing
            happens when it is exceeded.
        connection: An asyncpg connection, for what the task does with the database. Without one, the jobs
            that the task adds are only recorded in `FakeContext.added`, and any other query is an error.
            `JobContext.transaction` yields this connection. The job is not stored, so none is deleted:
            `FakeContext.completed` tells whether the task has completed it.
        clock: The clock to use [the real time].

    Example:
        >>> import asyncio
        >>> from graphile_worker import JobContext, JobSpec
        >>> from graphile_worker.testing import context
        >>> async def greet(payload: dict, ctx: JobContext) -> None:
        ...     await ctx.add_job("farewell", payload)
        >>> ctx = context()
        >>> asyncio.run(greet({"name": "Ann"}, ctx))
        >>> ctx.added == [JobSpec("farewell", {"name": "Ann"})]
        True
    """
    added: list[JobSpec] = []
    utils = (
        _RecordingUtils.recording(added)
        if connection is None
        else ClockedUtils.on_connection(connection, None)
    )
    utils.clock = clock
    job = job or _make_job()
    environment = _FakeEnvironment(utils, state)
    length = timeout_of(job) if timeout is None else seconds("timeout", timeout, "more than 0")
    deadline = None
    if length is not None:
        deadline = _FakeDeadline(environment.now, length, environment.stop_signals.of_job(job))
    return FakeContext(job, environment, added, deadline)


class _FakeEnvironment(WorkerEnvironment):
    """A worker's environment without a worker, and possibly without an event loop."""

    loop: asyncio.AbstractEventLoop | None  # type: ignore[assignment]
    completions: _FakeCompletions  # type: ignore[assignment]
    progress: _FakeProgress

    def __init__(self, utils: ClockedUtils, state: Any) -> None:
        self._specs = Specs({}, allow_unregistered=True)
        self.completions = _FakeCompletions(utils)
        self.progress = _FakeProgress()
        self.stop_signals = StopSignals()
        self.state, self.worker_id, self.utils = state, _WORKER, utils
        self.logger = ScopedLogger(
            logging.getLogger("graphile_worker"), {"label": "worker", "worker_id": _WORKER}
        )
        self.now = utils.real_clock().now if utils.clock is None else utils.clock.now
        self.loop = asyncio._get_running_loop()  # noqa: SLF001 - get_running_loop raises
        self.loop_thread = threading.get_ident()

    def run_sync(self, awaitable: Awaitable[T]) -> T:
        """Return the result of the awaitable, on a new event loop if none is running."""
        if self.loop is not None:
            return super().run_sync(awaitable)

        async def result() -> T:
            return await awaitable

        return asyncio.run(result())


class _FakeCompletions:
    """Remembers that the task has completed the job. There is no row to delete."""

    def __init__(self, utils: ClockedUtils) -> None:
        self._utils = utils
        self.completed = False

    @asynccontextmanager
    async def transaction(self, job: Job) -> AsyncIterator[Connection]:
        """Open a transaction, or a savepoint, on the context's connection."""
        self._check(job)
        async with self._utils.connection() as connection:
            async with connection.transaction():
                yield connection
            self.completed = True

    async def complete(self, job: Job, connection: Any) -> None:  # noqa: ARG002
        """Remember that the job is complete."""
        self._check(job)
        self.completed = True

    def complete_sync(self, job: Job, connection: Any) -> None:  # noqa: ARG002
        """Remember that the job is complete."""
        self._check(job)
        self.completed = True

    def _check(self, job: Job) -> None:
        if self.completed:
            raise already_complete(job)


class _FakeProgress:
    """Keeps what the task reports."""

    def __init__(self) -> None:
        self.reports: list[Progress] = []

    def report(self, job: Job, progress: Progress) -> None:  # noqa: ARG002
        """Keep the report."""
        self.reports.append(progress)


class _FakeDeadline:
    """A deadline that a task can read and extend, but that is never enforced."""

    def __init__(self, now: Callable[[], datetime], timeout: float, stop_requested: StopSignal) -> None:
        self._now = now
        self.at = now() + timedelta(seconds=timeout)
        self.stop_requested = stop_requested

    def extend(self, duration: Duration) -> None:
        """Move the deadline to `duration` from now."""
        self.at = self._now() + timedelta(seconds=seconds("extend_deadline", duration, "more than 0"))


class _NoDatabasePool(Pool):
    """A pool that rejects every request for a connection."""

    def connection(self) -> Any:
        """Reject the request."""
        raise ConfigurationError(
            "This context has no database. Pass a connection: testing.context(connection=...)."
        )

    lend = dedicated = connection


class _RecordingUtils(ClockedUtils):
    """A client that adds jobs to a list instead of a database."""

    added: list[JobSpec]

    @classmethod
    def recording(cls, added: list[JobSpec]) -> _RecordingUtils:
        """Return a client that appends jobs to `added`."""
        session = Session(find_schema(None), _NoDatabasePool(), logging.getLogger("graphile_worker"))
        utils = cls._on_session(session, use_local_time=False)
        utils.added = added
        return utils

    async def add_spec(self, spec: JobSpec, *, connection: AnyConnection | None = None) -> Job:  # noqa: ARG002
        """Record the job."""
        self.added.append(spec)
        return job(
            spec.identifier,
            spec.payload,
            id=len(self.added),
            attempts=0,
            queue_name=spec.queue_name,
            key=spec.job_key,
            priority=spec.priority or 0,
            locked_at=None,
            locked_by=None,
            is_available=True,
            state=JobState.READY,
        )

    async def add_jobs(
        self,
        specs: Iterable[JobSpec],
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
    ) -> list[Job]:
        """Record the jobs."""
        on = in_transaction_if_required(connection, require_transaction=require_transaction)
        return [await self.add_spec(spec, connection=on) for spec in specs]

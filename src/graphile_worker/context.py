"""`JobContext`: what a task can read and do besides using its payload."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Unpack

from graphile_worker._base.checked_connection import in_transaction_if_required
from graphile_worker._base.durations import seconds
from graphile_worker._base.stop_signals import StopSignal, StopSignals
from graphile_worker.errors import TaskError
from graphile_worker.job import check_progress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    import asyncpg

    from graphile_worker._base.durations import Duration
    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker._tasks.options import JobOptions
    from graphile_worker._tasks.specs import JobLike, Specs
    from graphile_worker._worker.execution.completion import Completions
    from graphile_worker.client import WorkerUtils
    from graphile_worker.job import Job, JobSpec, Progress
    from graphile_worker.tasks import HandlerClass

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # included in type checkers

    # Not Any: mypy could not distinguish the decorator's overloads with it.
    S = TypeVar("S", default=object)
else:
    from typing import TypeVar

    S = TypeVar("S")
T = TypeVar("T")


class JobDeadline(Protocol):
    """The deadline of a job that has a timeout."""

    @property
    def stop_requested(self) -> StopSignal:
        """The signal that asks the job to stop."""

    @property
    def at(self) -> datetime:
        """The time of the deadline."""

    def extend(self, duration: Duration) -> None:
        """Set the deadline to this long from now."""


class JobCompletions(Protocol):
    """Completes jobs in transactions of their tasks."""

    def transaction(self, job: Job) -> AbstractAsyncContextManager[Connection]:
        """Open a transaction that completes the job at its end."""

    async def complete(self, job: Job, connection: Any) -> None:
        """Complete the job in the caller's transaction."""

    def complete_sync(self, job: Job, connection: Any) -> None:
        """Complete the job in the transaction of a connection that blocks."""


class ProgressReports(Protocol):
    """Stores the progress that jobs report."""

    def report(self, job: Job, progress: Progress) -> None:
        """Store the progress soon. May be called from any thread."""


class NoProgress:
    """Drops reports, where nothing stores them."""

    def report(self, job: Job, progress: Progress) -> None:
        """Drop the report."""


class JobEnvironment(Protocol):
    """What the contexts of all jobs share: in the worker, or in a task process."""

    worker_id: str
    logger: ScopedLogger

    @property
    def completions(self) -> JobCompletions:
        """Completes jobs in transactions."""

    @property
    def progress(self) -> ProgressReports:
        """Stores the progress that jobs report."""

    @property
    def state(self) -> Any:
        """The state that the application's lifespan has opened."""

    @property
    def utils(self) -> WorkerUtils:
        """The `WorkerUtils` of the worker."""

    @property
    def stop_signals(self) -> StopSignals:
        """The stop signals of the jobs."""

    def now(self) -> datetime:
        """Return the time of the queue's clock."""

    async def add_job(
        self,
        job: JobLike,
        payload: Any = None,
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add a job."""

    def add_job_sync(
        self,
        job: JobLike,
        payload: Any = None,
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add a job on a thread without an event loop."""

    async def add_jobs(
        self,
        jobs: Iterable[JobSpec | HandlerClass],
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
    ) -> list[Job]:
        """Add many jobs."""

    def run_sync(self, awaitable: Awaitable[T]) -> T:
        """Wait for the awaitable on a thread without an event loop."""


class WorkerEnvironment:
    """What the contexts of all jobs of a worker share.

    Args:
        worker_id: The name under which the worker locks jobs.
        utils: The `WorkerUtils` of the worker.
        logger: The worker's logger.
        now: Returns the time of the queue's clock.
        separate_tasks: Tasks with their own lease; see `StopSignals`.
        specs: Makes the specs of jobs that tasks add.
        completions: Completes jobs in transactions of their tasks.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        utils: WorkerUtils,
        logger: ScopedLogger,
        now: Callable[[], datetime],
        separate_tasks: Iterable[str] = (),
        specs: Specs,
        completions: Completions,
    ) -> None:
        self._specs = specs
        self.completions = completions
        self.progress: ProgressReports = NoProgress()
        self.state: Any = None
        self.worker_id = worker_id
        self.utils = utils
        self.logger = logger
        self.now = now
        self.stop_signals = StopSignals(separate_tasks)
        self.loop = asyncio.get_running_loop()
        self.loop_thread = threading.get_ident()

    async def add_job(
        self,
        job: JobLike,
        payload: Any = None,
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add a job. For a task of this worker, check the payload and apply the task's job options."""
        spec = self._specs.build(job, payload, options)
        on = in_transaction_if_required(connection, require_transaction=require_transaction)
        return await self.utils.add_spec(spec, connection=on)

    async def add_jobs(
        self,
        jobs: Iterable[JobSpec | HandlerClass],
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
    ) -> list[Job]:
        """Add many jobs: specs, or instances of classes that are tasks of this worker."""
        on = in_transaction_if_required(connection, require_transaction=require_transaction)
        return await self.utils.add_jobs(self._specs.build_many(jobs), connection=on)

    def add_job_sync(
        self,
        job: JobLike,
        payload: Any = None,
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add a job like `add_job`, on a thread. A sync connection is used on this thread."""
        on = in_transaction_if_required(connection, require_transaction=require_transaction)
        if on is None:
            return self.run_sync(self.add_job(job, payload, **options))
        return self.utils.add_spec_sync(self._specs.build(job, payload, options), connection=on)

    def run_sync(self, awaitable: Awaitable[T]) -> T:
        """Run an awaitable on the worker's event loop, and wait for it on this other thread."""
        if threading.get_ident() == self.loop_thread:
            refuse_to_block(awaitable)
        return asyncio.run_coroutine_threadsafe(_await(awaitable), self.loop).result()


class JobContext(Generic[S]):
    """What a task can read and do besides using its payload. ``JobContext[State]`` is the type of `state`.

    Attributes:
        job: The running job.
        add_job: Add a job, as `App.add_job` does. If this worker has the task, and it was made with
            ``@task``, the payload is checked and the task's job options apply.
        add_job_sync: Add a job in a task that is a plain function, as `App.add_job_sync` does.
        add_jobs: Add many jobs, as `App.add_jobs` does.

    Example:
        >>> from graphile_worker import JobContext
        >>> async def greet(payload: dict, ctx: JobContext) -> None:
        ...     ctx.logger.info("attempt %s", ctx.job.attempts)
        ...     await ctx.add_job("farewell", payload)
    """

    __slots__ = (
        "__weakref__",
        "_deadline",
        "_environment",
        "_initial_signal",
        "_stop_signal",
        "add_job",
        "add_job_sync",
        "add_jobs",
        "job",
    )

    def __init__(self, job: Job, environment: JobEnvironment, deadline: JobDeadline | None = None) -> None:
        self.job = job
        self._environment = environment
        self._deadline = deadline
        self._initial_signal = (
            environment.stop_signals.shared(job.task_identifier)
            if deadline is None
            else deadline.stop_requested
        )
        self._stop_signal: StopSignal | None = None
        self.add_job = environment.add_job
        self.add_job_sync = environment.add_job_sync
        self.add_jobs = environment.add_jobs

    def __repr__(self) -> str:
        return f"JobContext(job={self.job.id}, task={self.job.task_identifier!r})"

    @property
    def stop_requested(self) -> StopSignal:
        """A signal that is true once the job is asked to stop. It can also be awaited.

        The job is asked to stop when the worker is stopping or has to give up the job, when the job's timeout
        has passed, and when the job is cancelled.
        """
        if self._stop_signal is None:
            self._stop_signal = self._environment.stop_signals.of_job(self.job, self._initial_signal)
        return self._stop_signal

    def _renew_stop_signal(self, signal: StopSignal) -> None:
        """Use the signal of another run of the job, which middleware started after a timeout."""
        self._initial_signal = signal
        self._stop_signal = None

    @property
    def state(self) -> S:
        """The state that the application's lifespan has opened; None without a lifespan."""
        return self._environment.state  # type: ignore[no-any-return]

    @property
    def deadline(self) -> datetime | None:
        """The time when the job's timeout passes, by this machine's clock; None without a timeout."""
        return None if self._deadline is None else self._deadline.at

    def extend_deadline(self, duration: Duration) -> None:
        """Set the deadline to this long from now, whatever it was. Do nothing if the job has no timeout."""
        length = seconds("extend_deadline", duration, "more than 0")
        if self._deadline is not None:
            self._deadline.extend(length)

    def progress(self, value: float | None = None, message: str | None = None) -> None:
        """Report how far the job is. The call returns at once, on the event loop, a thread or in a process.

        The worker stores the latest report of each job at most once a second. `WorkerUtils.progress` and
        ``graphile-worker show`` read it. It stays while the job is retried, and goes with the job. See
        docs/guides/statistics.md.

        Args:
            value: The part that is done, from 0 to 1; None if that is unknown.
            message: What the task is doing. More than 500 characters are cut.

        Raises:
            InvalidJobError: The value is not a number from 0 to 1, or the message is not a string.

        Example:
            >>> from graphile_worker import JobContext
            >>> async def load(ctx: JobContext, pages: int) -> None:
            ...     for page in range(pages):
            ...         ctx.progress(page / pages, f"page {page} of {pages}")
        """
        environment = self._environment
        environment.progress.report(self.job, check_progress(value, message, environment.now()))

    @property
    def logger(self) -> ScopedLogger:
        """A logger whose records name this job; `logger.scope(order=7)` adds fields."""
        return self._environment.logger.scope(label="job", **job_scope(self.job))

    @property
    def utils(self) -> WorkerUtils:
        """A `WorkerUtils` on the worker's connections."""
        return self._environment.utils

    @property
    def cron(self) -> Any:
        """The crontab's data about this run, ``{"ts": …, "backfilled": …}``; None for any other job."""
        return _reserved_key(self.job.payload, "_cron")

    @property
    def trace(self) -> Any:
        """The tracing data that was added with the job; None if there is none."""
        return _reserved_key(self.job.payload, "_trace")

    @property
    def queue_name(self) -> str | None:
        """The job's serial queue."""
        return self.job.queue_name

    @property
    def worker_id(self) -> str:
        """The name under which this worker holds the job: its `locked_by`."""
        return self._environment.worker_id

    @property
    def schema(self) -> str:
        """The name of the schema."""
        return self._environment.utils.schema

    def now(self) -> datetime:
        """Return the time of the queue's clock: the database's, or with `use_local_time` this machine's."""
        return self._environment.now()

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """Borrow a connection from the worker's pool: ``async with ctx.connection() as connection``."""
        return self.utils.connection()

    async def query(self, statement: str, *arguments: object) -> list[asyncpg.Record]:
        """Run one statement in a transaction of its own, and return its rows."""
        async with self.connection() as connection, connection.transaction():
            return await connection.fetch(statement, *arguments)

    def transaction(self) -> AbstractAsyncContextManager[Connection]:
        """Open a transaction that also completes the job: ``async with ctx.transaction() as connection``.

        At the end of the block the job is deleted in the same transaction. So what the task writes with the
        connection, and the jobs that it adds with it, are stored exactly once, even if the worker is killed.
        What follows the block runs after the job is complete, and is not retried. An exception in the block
        rolls everything back, and the job gets the usual outcome. See docs/guides/exactly-once.md.

        Raises:
            JobLostError: The worker does not hold the job any more. Everything is rolled back.
            DatabaseError: The connection was lost during the commit, and the transaction is rolled back.
            TaskError: The job is already complete, or the task runs in a process.

        Example:
            >>> from graphile_worker import JobContext
            >>> async def pay(ctx: JobContext, order: int) -> None:
            ...     async with ctx.transaction() as connection:
            ...         await connection.execute("update orders set paid = true where id = $1", order)
            ...         await ctx.add_job("ship", {"order": order}, connection=connection)
        """
        return self._environment.completions.transaction(self.job)

    async def complete(self, *, connection: AnyConnection) -> None:
        """Complete the job in the transaction of this connection. The caller commits it.

        Call it last in the transaction, because it locks the job's row until the commit. If the caller rolls
        back, the job is not complete, and fails if the task returns. See docs/guides/exactly-once.md.

        Args:
            connection: The caller's connection or session, in a transaction: asyncpg, psycopg, SQLAlchemy,
                Django or Tortoise.

        Raises:
            JobLostError: The worker does not hold the job any more. Roll back the transaction.
            ConfigurationError: The connection is not in a transaction, or it blocks: use `complete_sync`.
            TaskError: The job is already complete, or the task runs in a process.

        Example:
            >>> import asyncpg
            >>> from graphile_worker import JobContext
            >>> async def pay(ctx: JobContext[asyncpg.Pool], order: int) -> None:
            ...     async with ctx.state.acquire() as connection, connection.transaction():
            ...         await connection.execute("update orders set paid = true where id = $1", order)
            ...         await ctx.complete(connection=connection)
        """
        await self._environment.completions.complete(self.job, connection)

    def complete_sync(self, *, connection: AnyConnection) -> None:
        """Complete the job in the transaction of a connection that blocks: see `complete`.

        It is for tasks that are plain functions, and runs in their thread.

        Args:
            connection: The caller's connection or session, in a transaction: psycopg, psycopg2, pg8000,
                SQLAlchemy or Django.

        Example:
            >>> import psycopg
            >>> from graphile_worker import JobContext
            >>> def pay(ctx: JobContext, order: int) -> None:
            ...     with psycopg.connect(dsn) as connection:
            ...         connection.execute("update orders set paid = true where id = %s", [order])
            ...         ctx.complete_sync(connection=connection)
        """
        self._environment.completions.complete_sync(self.job, connection)

    def run_sync(self, awaitable: Awaitable[T]) -> T:
        """Wait for an awaitable, in a task that is a plain function.

        ``ctx.run_sync(ctx.add_job("next"))`` runs on the worker's event loop while this thread waits.
        """
        return self._environment.run_sync(awaitable)


def refuse_to_block(awaitable: Awaitable[Any]) -> NoReturn:
    """Raise an error, because an event loop cannot wait for itself."""
    if inspect.iscoroutine(awaitable):
        awaitable.close()  # otherwise Python warns that it was never awaited
    raise TaskError(
        "ctx.run_sync cannot be called on the event loop, but only in a task that is a plain function. Use "
        "await instead."
    )


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _reserved_key(payload: Any, key: str) -> Any:
    return payload.get(key) if isinstance(payload, dict) else None


def job_scope(job: Job) -> dict[str, object]:
    """Return the fields of log records about a job."""
    fields: dict[str, object] = {
        "task_identifier": job.task_identifier,
        "job_id": job.id,
        "attempt": job.attempts,
    }
    trace = _reserved_key(job.payload, "_trace")
    trace_id = trace.get("trace_id") if isinstance(trace, dict) else None
    if not isinstance(trace_id, str) and isinstance(trace, dict):
        # The second part of a W3C traceparent: version-trace-span-flags.
        trace_id = next(iter(str(trace.get("traceparent") or "").split("-")[1:2]), None)
    if trace_id:
        fields["trace_id"] = trace_id
    return fields

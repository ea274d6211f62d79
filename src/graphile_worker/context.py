"""What a task can know and do beside its payload."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Unpack
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from graphile_worker.durations import seconds
from graphile_worker.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    import asyncpg

    from graphile_worker._db.connect import Connection
    from graphile_worker.client import WorkerUtils
    from graphile_worker.durations import Duration
    from graphile_worker.job import Job, JobSpec
    from graphile_worker.logs import ScopedLogger
    from graphile_worker.specs import Named, Specs
    from graphile_worker.task_options import JobOptions
    from graphile_worker.tasks import HandlerClass

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # which type checkers bring along

    # Not Any: with that mypy could not tell the decorator's overloads apart.
    S = TypeVar("S", default=object)
else:
    from typing import TypeVar

    S = TypeVar("S")
T = TypeVar("T")


class Stopping:
    """Whether a job is to stop: true or false, and something to wait for.

    ``if ctx.stopping``, ``await ctx.stopping``, and on a thread ``ctx.stopping.wait(seconds)``.

    Attributes:
        cancelled: Whether that is because somebody has cancelled the job.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self._for_threads = threading.Event()
        self._for_tasks = asyncio.Event()

    def __bool__(self) -> bool:
        return self._for_threads.is_set()

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._for_tasks.wait().__await__()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until then, or for so many seconds; whether it came to that."""
        return self._for_threads.wait(timeout)

    def set(self) -> None:
        """It is. Called on the event loop, by the worker."""
        self._for_threads.set()
        self._for_tasks.set()


class Limit(Protocol):
    """How long a job may run, for those jobs that have a timeout."""

    @property
    def stopping(self) -> Stopping:
        """What the job is warned by."""

    @property
    def at(self) -> datetime:
        """Until when."""

    def extend(self, duration: Duration) -> None:
        """So long from now."""


class Around(Protocol):
    """What a context is about, beside its job: here of a worker's jobs, or in a process of one."""

    worker_id: str
    logger: ScopedLogger

    @property
    def state(self) -> Any:
        """What the application has opened."""

    @property
    def utils(self) -> WorkerUtils:
        """To add jobs, and whatever else there is to do."""

    def now(self) -> datetime:
        """The time as the queue sees it."""

    async def add_job(
        self,
        job: Named,
        payload: Any = None,
        *,
        connection: Connection | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add a job."""

    async def add_jobs(
        self, jobs: Iterable[JobSpec | HandlerClass], *, connection: Connection | None = None
    ) -> list[Job]:
        """Add many jobs."""

    def stopping(self, task: str) -> Stopping:
        """What a job of that task is warned by."""

    def stopping_of(self, job: Job, told: Stopping | None = None) -> Stopping:
        """What that job alone is warned by; `told` is what it began with."""

    def blocking(self, awaitable: Awaitable[T]) -> T:
        """Wait for it, where there is no event loop."""


class Surroundings:
    """What all jobs of a worker share."""

    def __init__(
        self,
        *,
        worker_id: str,
        utils: WorkerUtils,
        logger: ScopedLogger,
        now: Callable[[], datetime],
        warned_apart: Iterable[str] = (),
        specs: Specs,
    ) -> None:
        self._specs = specs
        self._own: WeakKeyDictionary[Stopping, str] = WeakKeyDictionary()
        self._of_jobs: WeakValueDictionary[tuple[int, datetime | None], Stopping] = WeakValueDictionary()
        self._outdated: WeakSet[Stopping] = WeakSet()
        self._lock = threading.Lock()
        self.state: Any = None
        self.worker_id = worker_id
        self.utils = utils
        self.logger = logger
        self.now = now
        self._stopping = Stopping()
        self._apart = {task: Stopping() for task in warned_apart}
        self.loop = asyncio.get_running_loop()
        self.loop_thread = threading.get_ident()

    async def add_job(
        self,
        job: Named,
        payload: Any = None,
        *,
        connection: Connection | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add a job; what a task of this worker says of its jobs holds, and its payload is checked."""
        spec = self._specs.of(job, payload, options)
        return await self.utils.add_spec(spec, connection=connection)

    async def add_jobs(
        self, jobs: Iterable[JobSpec | HandlerClass], *, connection: Connection | None = None
    ) -> list[Job]:
        """Add many jobs: specs, or instances of classes that are tasks of this worker."""
        return await self.utils.add_jobs(self._specs.each(jobs), connection=connection)

    def stopping(self, task: str) -> Stopping:
        """What a job of that task is warned by."""
        return self._apart.get(task, self._stopping)

    def blocking(self, awaitable: Awaitable[T]) -> T:
        """Have it awaited on the worker's event loop, and wait for that on another thread."""
        if threading.get_ident() == self.loop_thread:
            refuse_to_block(awaitable)
        return asyncio.run_coroutine_threadsafe(_waited(awaitable), self.loop).result()

    def warn(self, concerned: Callable[[str | None], bool]) -> None:
        """Let jobs know that they are to stop: of tasks for which it holds; None stands for most of them."""
        for task, stopping in [(None, self._stopping), *self._apart.items()]:
            if concerned(task):
                stopping.set()
        with self._lock:
            own = list(self._own.items())
        for stopping, name in own:
            if concerned(name if name in self._apart else None):
                stopping.set()

    def warn_alone(self, task: str, stopping: Stopping) -> None:
        """A job of that task has something of its own to be warned by."""
        with self._lock:
            self._own[stopping] = task
        if self.stopping(task):
            stopping.set()

    def stopping_of(self, job: Job, told: Stopping | None = None) -> Stopping:
        """What that job alone is warned by. May be called from any thread.

        It is made when somebody asks for it: most jobs never do. `told` is what the job began with.
        """
        with self._lock:
            if told is not None and told in self._outdated:
                return told  # a thread of a run that is over: the one after it has something of its own
            own = self._of_jobs.get((job.id, job.locked_at))
            if own is None:
                own = told if told is not None and told in self._own else Stopping()
                self._of_jobs[job.id, job.locked_at] = own
                self._own[own] = job.task_identifier
                if told:
                    own.set()
            return own

    def told_anew(self, job: Job, told: Stopping) -> Stopping:
        """For a job that runs again after its timeout. That the worker stops, or it is cancelled, stands.

        Whatever is left of its first run keeps what it was told by.
        """
        with self._lock:
            place = job.id, job.locked_at
            own = self._of_jobs.get(place, told)
            if not told or self.stopping(job.task_identifier) or told.cancelled or own.cancelled:
                return told
            self._of_jobs.pop(place, None)
            self._outdated.add(told)
            new = Stopping()
            self._own[new] = job.task_identifier
        return new

    def calm(self) -> None:
        """Jobs that begin from now on need not stop."""
        self._stopping = self._stopping if not self._stopping else Stopping()
        self._apart = {
            task: stopping if not stopping else Stopping() for task, stopping in self._apart.items()
        }


class JobContext(Generic[S]):
    """What a task knows and can do beside its payload. ``JobContext[State]`` says what `state` is.

    Attributes:
        job: The job that runs.
        add_job: Add a job, as `App.add_job` does. If this worker has the task, and it was made with
            ``@task``, its payload is checked, and what it says of its jobs holds.
        add_jobs: Add many jobs, as `App.add_jobs` does.

    Example:
        >>> from graphile_worker import JobContext
        >>> async def greet(payload: dict, ctx: JobContext) -> None:
        ...     ctx.logger.info("attempt %s", ctx.job.attempts)
        ...     await ctx.add_job("farewell", payload)
    """

    __slots__ = (
        "__weakref__", "_deadline", "_stopping", "_surroundings", "_told", "add_job", "add_jobs", "job",
    )  # fmt: skip

    def __init__(self, job: Job, surroundings: Around, deadline: Limit | None = None) -> None:
        self.job = job
        self._surroundings = surroundings
        self._deadline = deadline
        self._told = surroundings.stopping(job.task_identifier) if deadline is None else deadline.stopping
        self._stopping: Stopping | None = None
        self.add_job = surroundings.add_job
        self.add_jobs = surroundings.add_jobs

    def __repr__(self) -> str:
        return f"JobContext(job={self.job.id}, task={self.job.task_identifier!r})"

    @property
    def stopping(self) -> Stopping:
        """True once the job is to stop; also to be awaited.

        Because the worker is stopping, or has to give up the job, or the job's timeout is over, or somebody
        has cancelled it.
        """
        if self._stopping is None:
            self._stopping = self._surroundings.stopping_of(self.job, self._told)
        return self._stopping

    @property
    def state(self) -> S:
        """What the application's lifespan has opened for its tasks; None if it has none."""
        return self._surroundings.state  # type: ignore[no-any-return]

    @property
    def deadline(self) -> datetime | None:
        """When the job's timeout is over, by this machine's clock; None if it has none."""
        return None if self._deadline is None else self._deadline.at

    def extend_deadline(self, duration: Duration) -> None:
        """Give the job so much time from now on, whatever it had. Without a timeout it does nothing."""
        length = seconds("extend_deadline", duration, "more than 0")
        if self._deadline is not None:
            self._deadline.extend(length)

    @property
    def logger(self) -> ScopedLogger:
        """A logger whose records name this job; `logger.scope(order=7)` adds more."""
        return self._surroundings.logger.scope(
            label="job", task_identifier=self.job.task_identifier, job_id=self.job.id
        )

    @property
    def utils(self) -> WorkerUtils:
        """All that `WorkerUtils` can do, on the worker's connections."""
        return self._surroundings.utils

    @property
    def cron(self) -> Any:
        """What the crontab says of this run, ``{"ts": …, "backfilled": …}``; None if it is not from there."""
        return _reserved(self.job.payload, "_cron")

    @property
    def trace(self) -> Any:
        """What whoever added the job sent along for tracing; None if nothing was."""
        return _reserved(self.job.payload, "_trace")

    @property
    def queue_name(self) -> str | None:
        """The job's serial queue."""
        return self.job.queue_name

    @property
    def worker_id(self) -> str:
        """Who holds the job: its `locked_by`."""
        return self._surroundings.worker_id

    @property
    def schema(self) -> str:
        """The name of the schema."""
        return self._surroundings.utils.schema

    def now(self) -> datetime:
        """The time as the queue sees it: the database's, or with `use_local_time` this machine's."""
        return self._surroundings.now()

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """A connection of the worker's pool: ``async with ctx.connection() as connection``."""
        return self.utils.lend_connection()

    async def query(self, statement: str, *arguments: object) -> list[asyncpg.Record]:
        """The rows of one statement."""
        async with self.connection() as connection, connection.transaction():
            return await connection.fetch(statement, *arguments)

    def blocking(self, awaitable: Awaitable[T]) -> T:
        """For a task that is a plain function: wait for what is awaitable here.

        ``ctx.blocking(ctx.add_job("next"))`` runs on the worker's event loop while this thread waits.
        """
        return self._surroundings.blocking(awaitable)


def refuse_to_block(awaitable: Awaitable[Any]) -> NoReturn:
    """An event loop must not wait for itself."""
    if inspect.iscoroutine(awaitable):
        awaitable.close()  # or Python complains that nobody awaited it
    raise TaskError("ctx.blocking is for plain functions. This is the event loop: use await.")


async def _waited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _reserved(payload: Any, key: str) -> Any:
    return payload.get(key) if isinstance(payload, dict) else None

"""`App`: tasks, and the queue that their jobs go to."""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, Unpack

from graphile_worker.blocking import Blocking
from graphile_worker.clients import DEFAULTS, Clients
from graphile_worker.cron import parse_cron_items
from graphile_worker.decorator import CronDecorator, TaskDecorator
from graphile_worker.durations import takes_one
from graphile_worker.emitter import Events
from graphile_worker.errors import ConfigurationError
from graphile_worker.loader import check_one_crontab, load_cron_items
from graphile_worker.middleware.base import check_middleware
from graphile_worker.options import OnceOptions, RunOptions
from graphile_worker.payload import MAX_PAYLOAD_SIZE
from graphile_worker.registry import Registry
from graphile_worker.runner import run, run_once, wait_until_ended
from graphile_worker.task_options import (
    JobOptions,
    OnInvalidPayload,
    unknown_option,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager
    from os import PathLike

    import asyncpg

    from graphile_worker._db.cancellations import CancelAnswer
    from graphile_worker._db.connect import Connection
    from graphile_worker._runtime.handlers import Tasks
    from graphile_worker.client import WorkerUtils
    from graphile_worker.cron import CronItem
    from graphile_worker.durations import Duration
    from graphile_worker.job import Job, JobSpec
    from graphile_worker.logs import AnyLogger
    from graphile_worker.middleware import Middleware
    from graphile_worker.options import CronItems
    from graphile_worker.runner import Drained, Runner
    from graphile_worker.tasks import HandlerClass, Task

    AnyTask: TypeAlias = Task[Any, Any, Any]

T = TypeVar("T")
_GRACE = 5.0


class App:
    """Tasks, and the queue that their jobs go to.

    Connections are opened when they are first needed, for each event loop its own, and closed when that loop
    ends, as `asyncio.run` ends it: so there is no need to open or close an app, though ``async with app`` and
    `close` do. Nothing of it is global; there may be several.

    Args:
        dsn: The connection string; by default ``DATABASE_URL``, or the ``PG*`` variables.
        pool: A pool of asyncpg's in place of `dsn`; it stays the caller's, and is not closed.
        schema: The schema's name; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.
        max_pool_size: How many connections to open at most; see `WorkerUtils`.
        pool_timeout: How long to wait for a connection before a `PoolTimeoutError`; by default as long as it
            takes.
        prepared_statements: Off for a PgBouncer in transaction mode.
        use_local_time: Take "now" from this machine's clock and not from the database's.
        max_payload_size: How many bytes of JSON a payload may have when a job is added; by default 16 MB.
        on_invalid_payload: What becomes of a job whose payload does not fit: ``"retry"``, as after any
            failure, for a newer deploy may understand it, or ``"fail"``.
        lifespan: Called with the app, makes an async context manager that each worker enters before its first
            job and leaves after its last; what it gives is at ``ctx.state``. Often an
            ``@asynccontextmanager``.
        middleware: What stands around the running of its jobs, and around the adding of jobs: a list of
            `Middleware`, the first outside.
        crontab: Recurring tasks, as the text of a crontab, beside those of `cron`: see docs/cron.md. A worker
            that is given some itself, by ``app.run(crontab=…)``, has both.
        crontab_file: The same as a file, which is read when a worker starts.
        cron_items: The same as a list of `CronItem` or of dictionaries.
        events: An emitter to which listeners were added already.
        logger: Where to log; by default the logger ``graphile_worker``.

    Attributes:
        task: The decorator that makes a function a task of this app: see `TaskDecorator`.
        cron: The decorator that says when jobs of a task are to be added: see `CronDecorator`.
        events: Where listeners can be added, for all workers of this app in this process.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> async def main():
        ...     await app.migrate()
        ...     await hello.enqueue(name="Bobby Tables")
        ...     await app.run_once()
        >>> asyncio.run(main())
        Hello, Bobby Tables
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        pool: asyncpg.Pool | None = None,
        schema: str | None = None,
        max_pool_size: int = 10,
        pool_timeout: Duration | None = None,
        prepared_statements: bool = True,
        use_local_time: bool = False,
        max_payload_size: int = MAX_PAYLOAD_SIZE,
        on_invalid_payload: OnInvalidPayload = "retry",
        lifespan: Callable[[App], AbstractAsyncContextManager[Any]] | None = None,
        middleware: Iterable[Middleware] | None = None,
        crontab: str | None = None,
        crontab_file: str | PathLike[str] | None = None,
        cron_items: CronItems | None = None,
        events: Events | None = None,
        logger: AnyLogger | None = None,
    ) -> None:
        if lifespan is not None and not takes_one(lifespan):
            raise ConfigurationError("The lifespan is called with the app, and must take one argument.")
        given = {**locals(), "middleware": check_middleware(middleware)}
        self._clients = Clients({name: given[name] for name in DEFAULTS})
        self.events = Events() if events is None else events
        self._of_workers: dict[str, Any] = {
            "on_invalid_payload": on_invalid_payload,
            "lifespan": None if lifespan is None else partial(lifespan, self),
            "events": self.events,
        }
        self._registry = Registry(self)
        self._blocking = Blocking()
        self.task = TaskDecorator(self._registry.declare)
        self.cron = CronDecorator()
        check_one_crontab(crontab, crontab_file, cron_items)
        self._crontab_file = crontab_file
        self._cron_items = load_cron_items(crontab, None, cron_items)  # what is wrong is better said now
        self._has_crontab = any(one is not None for one in (crontab, crontab_file, cron_items))

    def __repr__(self) -> str:
        return f"App(tasks={list(self._registry.tasks)!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    @property
    def tasks(self) -> Mapping[str, AnyTask]:
        """The tasks by their identifiers. Their jobs go to this app, whoever else has included them."""
        return MappingProxyType(self._registry.tasks)

    @property
    def cron_items(self) -> list[CronItem]:
        """What its workers add jobs of, and when: by `cron` and by its crontab."""
        return parse_cron_items(
            [*self.cron.items, *self._cron_items, *load_cron_items(None, self._crontab_file, None)]
        )

    def include(self, *things: ModuleType | str | AnyTask | type[Any] | Iterable[Any]) -> None:
        """Add tasks that were declared without an app, by ``from graphile_worker import task``.

        A task may be included by several apps. Its own `enqueue` then goes to the one that did so last; that
        of ``app.tasks["…"]`` always goes to this one.

        Args:
            things: Modules or their names, tasks, classes, or lists of any of these.
        """
        self._registry.include(things)

    async def add_job(
        self,
        job: str | AnyTask | HandlerClass,
        payload: Any = None,
        *,
        connection: Connection | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add a job, by the name of its task.

        For a task of this app the payload is checked, and what the task says of its jobs holds. Of other
        tasks nothing is known: another program may have them.

        Args:
            job: The name of the task; or an instance of a class that is a task, and then it is the payload.
            payload: What the task gets; None means ``{}``.
            connection: A connection of the caller's: the job is added in its transaction.
            options: queue_name, run_at, max_attempts, job_key, job_key_mode, priority, flags: those of
                `WorkerUtils.add_job`; and `timeout`, in place of the task's.

        Raises:
            InvalidJobError: An argument is wrong; nothing was added.
        """
        return await self.add_spec(self._registry.specs.of(job, payload, options), connection=connection)

    def add_job_sync(
        self, job: str | AnyTask | HandlerClass, payload: Any = None, **options: Unpack[JobOptions]
    ) -> Job:
        """The same for code without an event loop, in any thread: waits until the job is added."""
        return self.blocking(self.add_spec(self._registry.specs.of(job, payload, options)))

    async def add_jobs(
        self, jobs: Iterable[JobSpec | HandlerClass], *, connection: Connection | None = None
    ) -> list[Job]:
        """Add many jobs in few round trips: all of them or, if one cannot be added, none.

        Args:
            jobs: What `Task.spec` returns, a `JobSpec`, which is taken as it is, or an instance of a class
                that is a task. May be an iterator of any length.
            connection: A connection of the caller's: the jobs are added in its transaction.
        """
        return await self.utils.add_jobs(self._registry.specs.each(jobs), connection=connection)

    def add_jobs_sync(self, jobs: Iterable[JobSpec | HandlerClass]) -> list[Job]:
        """The same for code without an event loop."""
        specs = list(self._registry.specs.each(jobs))
        return self.blocking(lambda: self.utils.add_jobs(specs))

    async def add_spec(self, spec: JobSpec, *, connection: Connection | None = None) -> Job:
        """Add the job that the spec describes, as it is."""
        return await self.utils.add_spec(spec, connection=connection)

    async def cancel_job(
        self, job_id: int, reason: str | None = None, *, connection: Connection | None = None
    ) -> CancelAnswer | None:
        """Let a job not run any more, also if it runs now: see `WorkerUtils.cancel_job`."""
        return await self.utils.cancel_job(job_id, reason, connection=connection)

    def cancel_job_sync(self, job_id: int, reason: str | None = None) -> CancelAnswer | None:
        """The same for code without an event loop."""
        return self.blocking(self.cancel_job(job_id, reason))

    def configure(self, **settings: Any) -> None:
        """Say where the queue is, in a program that learns it after it has imported the app.

        Args:
            settings: dsn, pool, schema, max_pool_size, pool_timeout, prepared_statements, use_local_time,
                max_payload_size, middleware, logger: those of `App`.

        Raises:
            ConfigurationError: There are connections already.
        """
        self._clients.configure(settings)

    def add_jobs_through(self, utils: WorkerUtils) -> None:
        """Whatever the event loop, add jobs by that: in a process that runs tasks for a worker."""
        self._clients.everywhere = utils

    def sets(self, setting: str) -> bool:
        """Whether the app itself says something about that setting, of its connections or ``"crontab"``."""
        return self._has_crontab if setting == "crontab" else self._clients.sets(setting)

    @property
    def settings(self) -> Mapping[str, Any]:
        """How its connections are made, and what all its workers are given."""
        return {**self._clients.settings, **self._of_workers}

    @contextmanager
    def lent(self, utils: WorkerUtils | None, **settings: Any) -> Iterator[None]:
        """For a while use that one on this event loop, and these settings: for `graphile_worker.testing`."""
        if settings:
            self.close_sync()  # its connections are those that were said before
        with self._clients.replaced(utils, settings):
            try:
                yield
            finally:
                if settings:
                    self.close_sync()

    @property
    def utils(self) -> WorkerUtils:
        """All that `WorkerUtils` can do, on connections of this event loop: `await app.utils.stats()`."""
        return self._clients.utils

    async def migrate(self) -> None:
        """Install the schema, or complete it: see `run_migrations`. A worker does so when it starts."""
        await self.utils.migrate()

    async def close(self) -> None:
        """Close the connections of this event loop. They are opened again if they are needed again."""
        await self._clients.close()

    def close_sync(self) -> None:
        """Close the connections of code without an event loop. At exit that happens by itself."""
        self._blocking.close()

    def blocking(self, work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]) -> T:
        """For code without an event loop: wait here for a coroutine, or for that which a function makes.

        ``app.blocking(app.migrate())``, ``app.blocking(lambda: app.utils.stats())``.
        """
        home = self._clients.home
        if home is not None and home.is_running():
            return self._blocking.run_on(home, work)
        return self._blocking.run(work)

    async def run(self, **options: Unpack[RunOptions]) -> None:
        """Run a worker until it is stopped, by a signal or by cancelling this.

        A signal is only delayed: when the worker has stopped it goes where it would have gone, so after
        SIGTERM the program ends here, and nothing behind this call runs. What is to be closed, `lifespan`
        closes. Or let the program handle its signals: with ``handle_signals=False``, cancel this.

        Args:
            options: Those of `graphile_worker.run`, without what the app has itself.
        """
        async with self._worker(options) as runner:
            await wait_until_ended(runner, options.get("shutdown_grace", _GRACE))

    @asynccontextmanager
    async def running(self, **options: Unpack[RunOptions]) -> AsyncIterator[Runner]:
        """A worker inside of a program that does other things too: ``async with app.running() as runner``.

        At the end it claims nothing more, running jobs have `shutdown_grace` seconds, and what is not done
        then is interrupted. Signals are left to the program, unless ``handle_signals=True``.
        If the worker ends by itself, because of an error, that is raised at the end; until then
        `Runner.health` and `Runner.wait` tell.
        """
        options.setdefault("handle_signals", False)
        async with self._worker(options) as runner:
            try:
                yield runner
            finally:
                await runner.stop(grace=options.get("shutdown_grace", _GRACE))
            await runner.wait()

    async def run_once(self, **options: Unpack[OnceOptions]) -> Drained:
        """Run all jobs that can run now, and those that they add: see `graphile_worker.run_once`."""
        _check_options(options, OnceOptions)
        return await run_once(self._served(), **self.settings, **options)

    @asynccontextmanager
    async def _worker(self, options: RunOptions) -> AsyncIterator[Runner]:
        _check_options(options, RunOptions)
        options["cron_items"] = [
            *self.cron_items,
            *load_cron_items(
                options.pop("crontab", None), options.pop("crontab_file", None), options.get("cron_items")
            ),
        ]
        runner = await run(self._served(), **self.settings, **options)
        with self._clients.lent(runner.utils):  # no need for more connections
            yield runner

    def _served(self) -> Tasks:
        if not self._registry.tasks:
            raise ConfigurationError(
                "The app has no tasks. Declare some by @app.task, or include a module that does."
            )
        return self._registry.tasks


def _check_options(given: Iterable[str], known: type[OnceOptions | RunOptions]) -> None:
    for name in given:
        if name in known.__annotations__:
            continue
        if name in inspect.signature(App).parameters:
            raise ConfigurationError(f"The app itself has {name}: App({name}=...), or app.configure.")
        raise ConfigurationError(
            f"A worker of an app takes no {name!r}. {unknown_option(name, known.__annotations__)}"
        )

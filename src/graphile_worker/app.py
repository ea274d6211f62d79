"""`App`: declares tasks, adds their jobs, and runs workers for them."""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, Unpack

from graphile_worker._base.checked_connection import in_transaction_if_required
from graphile_worker._base.durations import accepts_one_argument
from graphile_worker._base.payload import MAX_PAYLOAD_SIZE
from graphile_worker._client.bound import BoundApp
from graphile_worker._client.per_loop import DEFAULTS, PerLoopClients
from graphile_worker._client.sync_twins import sync_twin
from graphile_worker._tasks.decorator import CronDecorator, TaskDecorator
from graphile_worker._tasks.loader import check_one_crontab, load_cron_items
from graphile_worker._tasks.registry import Registry
from graphile_worker._worker.run_options import OPTIONS, AppRunOnceOptions, AppRunOptions
from graphile_worker.cron import parse_cron_items
from graphile_worker.errors import ConfigurationError
from graphile_worker.events.emitter import Events
from graphile_worker.history import DEFAULT_KEEP_FOR
from graphile_worker.middleware.base import check_middleware
from graphile_worker.runner import DEFAULT_GRACE, check_option_names, run, run_once, wait_until_ended
from graphile_worker.tasks import Task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta
    from os import PathLike

    import asyncpg

    from graphile_worker._base.durations import Duration
    from graphile_worker._base.logs import AnyLogger
    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker._db.queries.cancellations import CancelAnswer
    from graphile_worker._tasks.options import JobOptions, OnInvalidPayload
    from graphile_worker._worker.execution.handlers import Tasks
    from graphile_worker._worker.run_options import CronItems
    from graphile_worker.client import WorkerUtils
    from graphile_worker.cron import CronItem
    from graphile_worker.history import History, Keep
    from graphile_worker.job import AwaitedJob, Job, JobSpec, Progress
    from graphile_worker.limits import Pause
    from graphile_worker.middleware import Middleware
    from graphile_worker.outcome import RunSummary
    from graphile_worker.runner import Runner
    from graphile_worker.tasks import HandlerClass

    AnyTask: TypeAlias = Task[Any, Any, Any]

T = TypeVar("T")
HISTORY_OPTIONS = ("history", "history_keep")


class App:
    """A set of tasks, and the queue that their jobs go to.

    An app opens connections when it first needs them, separately for each event loop. It closes them when
    that loop ends, for example at the end of `asyncio.run`. So there is no need to close an app, but
    ``async with app`` and `close` do. An app has no global state, and a program may have several.

    Code without an event loop calls the method with ``_sync`` at the end of its name. The app adds and
    cancels jobs. `utils` has all other methods for jobs, with and without ``_sync``.

    Args:
        dsn: Connection string; by default ``DATABASE_URL``, or the ``PG*`` variables.
        pool: An asyncpg pool to use instead of `dsn`. The caller closes it.
        schema: Name of the schema; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.
        max_pool_size: Maximum number of connections to open; see `WorkerUtils`.
        pool_timeout: How long to wait for a free connection before a `PoolTimeoutError`; by default without
            limit.
        prepared_statements: Whether to use prepared statements. Pass False for PgBouncer in transaction mode.
        use_local_time: Whether to take the current time from this machine's clock, not from the database's.
        max_payload_size: Maximum size of a new job's payload, in bytes of JSON; by default 16 MB.
        require_transaction: Whether to refuse a ``connection=`` that is not in a transaction. By default, a
            job that is committed at once gets an `AutocommitWarning`.
        on_invalid_payload: What happens to a job whose payload does not match its task's parameters.
            ``"retry"`` retries it like any other failure, because a newer deployment may accept the payload.
            ``"fail"`` fails it permanently.
        history: Which attempts are kept in the history: ``"none"``, ``"failures"``, ``"all"``, or a `History`
            object. Tasks can choose with ``history=``. See docs/guides/history.md.
        history_keep: How long attempts are kept, for example ``"14d"``.
        lifespan: A function that takes the app and returns an async context manager, usually made with
            ``@asynccontextmanager``. Each worker enters it before its first job and exits it after its last.
            The value it yields is available as ``ctx.state``.
        middleware: A list of `Middleware` to call around running and adding jobs, the outermost first.
        crontab: Recurring tasks as the text of a crontab, in addition to those declared with `cron`: see
            docs/guides/cron.md. A worker started with ``app.run(crontab=…)`` runs both.
        crontab_file: A crontab file, read when a worker starts.
        cron_items: Recurring tasks as a list of `CronItem` or dictionaries.
        events: An event emitter that already has listeners.
        logger: Logger to use; by default the logger ``graphile_worker``.

    Attributes:
        task: The decorator that turns a function into a task of this app: see `TaskDecorator`.
        cron: The decorator that adds jobs of a task on a schedule: see `CronDecorator`.
        events: The event emitter of all workers of this app in this process.

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
        require_transaction: bool = False,
        on_invalid_payload: OnInvalidPayload = "retry",
        history: History | Keep = "none",
        history_keep: Duration | str = DEFAULT_KEEP_FOR,
        lifespan: Callable[[App], AbstractAsyncContextManager[Any]] | None = None,
        middleware: Iterable[Middleware] | None = None,
        crontab: str | None = None,
        crontab_file: str | PathLike[str] | None = None,
        cron_items: CronItems | None = None,
        events: Events | None = None,
        logger: AnyLogger | None = None,
    ) -> None:
        if lifespan is not None and not accepts_one_argument(lifespan):
            raise ConfigurationError(
                f"Invalid lifespan {lifespan!r}: it must be a function that takes one argument, the app, and "
                "returns an async context manager."
            )
        given = {**locals(), "middleware": check_middleware(middleware)}
        self._clients = PerLoopClients({name: given[name] for name in DEFAULTS})
        self.events = Events() if events is None else events
        self._worker_settings: dict[str, Any] = {
            "on_invalid_payload": on_invalid_payload,
            "lifespan": None if lifespan is None else partial(lifespan, self),
            "events": self.events,
            **_read_history({"history": history, "history_keep": history_keep}),
        }
        self._registry = Registry(self)
        self.task = TaskDecorator(self._registry.declare)
        self.cron = CronDecorator()
        check_one_crontab(crontab, crontab_file, cron_items)
        self._crontab_file = crontab_file
        self._cron_items = load_cron_items(crontab, None, cron_items)  # raises here, not when a worker starts
        self._has_crontab = any(one is not None for one in (crontab, crontab_file, cron_items))

    def __repr__(self) -> str:
        return f"App(tasks={list(self._registry.tasks)!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    @property
    def tasks(self) -> Mapping[str, AnyTask]:
        """The tasks by identifier. Their jobs go to this app, even if other apps include the tasks too."""
        return MappingProxyType(self._registry.tasks)

    @property
    def cron_items(self) -> list[CronItem]:
        """The recurring tasks of this app, from `cron` and from its crontab."""
        return parse_cron_items(
            [*self.cron.items, *self._cron_items, *load_cron_items(None, self._crontab_file, None)]
        )

    def include(self, *things: ModuleType | str | AnyTask | type[Any] | Iterable[Any]) -> None:
        """Add tasks that were declared without an app, with ``from graphile_worker import task``.

        Several apps may include the same task. Its own `enqueue` then adds jobs to the app that included it
        last. ``app.tasks["…"].enqueue`` always adds them to this app.

        Args:
            things: Modules, names of modules, tasks, classes, or lists of any of these.

        Raises:
            ConfigurationError: An argument holds no task, or two tasks have the same identifier.
        """
        self._registry.include(things)

    async def add_job(
        self,
        job: str | AnyTask | HandlerClass,
        payload: Any = None,
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add a job by the identifier of its task.

        If the task belongs to this app, the payload is checked and the task's job options apply. Otherwise
        the job is added as it is, because another program may run the task.

        Args:
            job: Identifier of the task. Or an instance of a class that is a task: it is the payload.
            payload: Payload for the task; None means ``{}``.
            connection: The caller's connection or session. The job is added in its transaction.
            require_transaction: Whether to refuse the call if the connection is not in a transaction, or if
                none is given.
            options: Job options of `WorkerUtils.add_job`: queue_name, run_at, delay, max_attempts, job_key,
                job_key_mode, priority, flags and timeout. They override those of the task.

        Returns:
            The added job.

        Raises:
            InvalidJobError: An argument is invalid. Nothing was added.
            JobSkippedError: A middleware did not add the job.

        Example:
            >>> import asyncio
            >>> from datetime import timedelta
            >>> app = App(dsn=dsn)
            >>> async def main():
            ...     await app.migrate()
            ...     return await app.add_job("send_email", {"to": "ann"}, delay=timedelta(hours=1))
            >>> asyncio.run(main()).task_identifier
            'send_email'
        """
        spec = self._registry.specs.build(job, payload, options)
        on = in_transaction_if_required(connection, require_transaction=require_transaction)
        return await self.add_spec(spec, connection=on)

    def add_job_sync(
        self,
        job: str | AnyTask | HandlerClass,
        payload: Any = None,
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add a job like `add_job`, from code without an event loop. Blocks until the job is added.

        A sync connection or session is used in this thread.
        """
        # In this thread, because functions of the task may compute job options.
        spec = self._registry.specs.build(job, payload, options)
        on = in_transaction_if_required(connection, require_transaction=require_transaction)
        return self.add_spec_sync(spec, connection=on)

    async def add_jobs(
        self,
        jobs: Iterable[JobSpec | HandlerClass],
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
    ) -> list[Job]:
        """Add many jobs in few round trips: all of them, or none if one is rejected.

        Args:
            jobs: An iterable of any length. Each item is a `JobSpec`, for example from `Task.spec`, or an
                instance of a class that is a task. A `JobSpec` is added as it is.
            connection: The caller's connection or session. The jobs are added in its transaction.
            require_transaction: Whether to refuse the call if the connection is not in a transaction, or if
                none is given.

        Returns:
            The added jobs, in the same order.

        Raises:
            InvalidJobError: One of the jobs is invalid. None was added.
        """
        on = in_transaction_if_required(connection, require_transaction=require_transaction)
        return await self.utils.add_jobs(self._registry.specs.build_many(jobs), connection=on)

    def add_jobs_sync(
        self,
        jobs: Iterable[JobSpec | HandlerClass],
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
    ) -> list[Job]:
        """Add many jobs like `add_jobs`, from code without an event loop."""
        on = in_transaction_if_required(connection, require_transaction=require_transaction)
        return self._add_specs_sync(self._registry.specs.build_many(jobs), connection=on)

    async def add_spec(self, spec: JobSpec, *, connection: AnyConnection | None = None) -> Job:
        """Add the job that the spec describes, without applying the options of its task."""
        return await self.utils.add_spec(spec, connection=connection)

    async def _add_specs(
        self, specs: Iterable[JobSpec], *, connection: AnyConnection | None = None
    ) -> list[Job]:
        return await self.utils.add_jobs(specs, connection=connection)

    async def _read_result(self, job: AwaitedJob, limit: float | None) -> Any:
        """Wait until the job has ended, and return its result as plain JSON: see `Task.result_of`."""
        return await self.utils._read_result(job, limit)  # noqa: SLF001 - the library's own

    def _read_result_sync(self, job: AwaitedJob, limit: float | None) -> Any:
        """Wait until the job has ended, from code without an event loop."""
        return self.run_sync(self._read_result(job, limit))

    async def _call_spec(
        self, spec: JobSpec, limit: float | None, *, connection: AnyConnection | None = None
    ) -> Any:
        """Add the job that the spec describes, and wait for its result: see `Task.call`."""
        utils = self.utils
        return await utils._read_result(await utils._add_called(spec, connection=connection), limit)  # noqa: SLF001 - the library's own

    def _call_spec_sync(
        self, spec: JobSpec, limit: float | None, *, connection: AnyConnection | None = None
    ) -> Any:
        """Add the job that the spec describes, and wait for its result, from code without an event loop."""
        if connection is None:
            return self.run_sync(self._call_spec(spec, limit))
        job = self.utils._add_called_sync(spec, connection=connection)  # noqa: SLF001 - the library's own
        return self._read_result_sync(job, limit)

    async def _read_progress(self, job_id: int) -> Progress | None:
        """Return what the job has reported last with `JobContext.progress`: see `JobHandle.progress`."""
        return await self.utils.progress(job_id)

    def bind(self, connection: AnyConnection, *, require_transaction: bool = False) -> BoundApp:
        """Return an object that adds and changes jobs on one connection: a shorthand for many calls.

        Args:
            connection: The caller's connection or session: see docs/guides/transactions.md.
            require_transaction: Whether to refuse the connection if it is not in a transaction.
        """
        return BoundApp(self, connection, require_transaction=require_transaction)

    async def cancel_job(
        self, job_id: int, reason: str | None = None, *, connection: AnyConnection | None = None
    ) -> CancelAnswer | None:
        """Cancel a job, even if it is running: see `WorkerUtils.cancel_job`."""
        return await self.utils.cancel_job(job_id, reason, connection=connection)

    async def pause(
        self,
        *,
        task: str | AnyTask | None = None,
        queue: str | None = None,
        until: datetime | timedelta | str | None = None,
        reason: str | None = None,
        paused_by: str | None = None,
        connection: AnyConnection | None = None,
    ) -> Pause:
        """Pause a task, a serial queue, or everything: see `WorkerUtils.pause`."""
        return await self.utils.pause(
            task=task.identifier if isinstance(task, Task) else task,
            queue=queue,
            until=until,
            reason=reason,
            paused_by=paused_by,
            connection=connection,
        )

    async def resume(
        self,
        *,
        task: str | AnyTask | None = None,
        queue: str | None = None,
        connection: AnyConnection | None = None,
    ) -> bool:
        """End a pause: see `WorkerUtils.resume`."""
        name = task.identifier if isinstance(task, Task) else task
        return await self.utils.resume(task=name, queue=queue, connection=connection)

    def configure(self, **settings: Any) -> None:
        """Change settings of the app before it opens a connection.

        Use it if the program reads its configuration after it has imported the app.

        Args:
            settings: Arguments of `App`: dsn, pool, schema, max_pool_size, pool_timeout, prepared_statements,
                use_local_time, max_payload_size, require_transaction, middleware, logger, history and
                history_keep.

        Raises:
            ConfigurationError: A setting is invalid, or the app has open connections.
        """
        history = _read_history({name: settings.pop(name) for name in HISTORY_OPTIONS if name in settings})
        self._clients.configure(settings)
        self._worker_settings |= history

    def _add_jobs_through(self, utils: WorkerUtils) -> None:
        """Add jobs through these utils on every event loop. A task process calls it."""
        self._clients.override = utils

    def _sets(self, setting: str) -> bool:
        """Return whether the app sets a connection setting, or ``"crontab"``, to other than the default."""
        if setting in HISTORY_OPTIONS:
            default = _read_history({setting: OPTIONS[setting].default})
            return bool(self._worker_settings[setting] != default[setting])
        return self._has_crontab if setting == "crontab" else self._clients.is_set(setting)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the app's connections and of all its workers."""
        return {**self._clients.settings, **self._worker_settings}

    @contextmanager
    def _using_client(self, utils: WorkerUtils | None, **settings: Any) -> Iterator[None]:
        """Use these utils on this event loop, and these settings, for a while.

        `graphile_worker.testing` calls it.
        """
        if settings:
            self.close_sync()  # its connections were opened with the old settings
        with self._clients.replaced(utils, settings):
            try:
                yield
            finally:
                if settings:
                    self.close_sync()

    @property
    def history(self) -> History:
        """Which attempts the app's workers keep in the history."""
        history: History = self._worker_settings["history"]
        return history

    @property
    def utils(self) -> WorkerUtils:
        """A `WorkerUtils` with the settings of the app, as in ``await app.utils.stats()``.

        It uses the connections of this event loop. Code without an event loop uses its methods with
        ``_sync``, as in ``app.utils.stats_sync()``.
        """
        return self._clients.utils

    async def migrate(self) -> None:
        """Install or update the schema: see `run_migrations`. A worker does the same when it starts."""
        await self.utils.migrate()

    async def close(self) -> None:
        """Close the connections of this event loop. The app opens new ones when it needs them."""
        await self._clients.close()

    def close_sync(self) -> None:
        """Close the connections of code without an event loop. This happens automatically at exit."""
        self._clients.close_sync()

    def run_sync(self, work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine from code without an event loop, and return its result.

        Args:
            work: A coroutine, as in ``app.run_sync(main())``. Or a function that returns one, as in
                ``app.run_sync(lambda: app.utils.stats())``, because `utils` belongs to an event loop too.

        Raises:
            ConfigurationError: This thread has a running event loop.
        """
        return self._clients.run_sync(work)

    def _run_on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._clients.run_sync(work)

    def _on_own_loop(self) -> Self:
        return self

    async def run(self, **options: Unpack[AppRunOptions]) -> None:
        """Run a worker until a signal stops it or this call is cancelled.

        The worker delays a signal and sends it again once it has stopped. So after SIGTERM the program ends
        here, and no code after this call runs. Close resources in the `lifespan` of the app instead. If the
        program handles signals itself, pass ``handle_signals=False`` and cancel this call.

        Args:
            options: Options of `graphile_worker.run`, except those that the app itself has.

        Raises:
            ConfigurationError: An option is invalid, or the app has no tasks.
            DatabaseError: The database cannot be reached, or the schema cannot be installed.
            ShutdownError: The worker stopped before all outcomes were recorded.
        """
        async with self._worker(options) as runner:
            await wait_until_ended(runner, options.get("shutdown_grace", DEFAULT_GRACE))

    @asynccontextmanager
    async def running(self, **options: Unpack[AppRunOptions]) -> AsyncIterator[Runner]:
        """Run a worker for the duration of an ``async with`` block, next to other code.

        At the end of the block the worker claims no more jobs. Running jobs have `shutdown_grace` seconds to
        finish, and are then interrupted. The program handles signals, unless ``handle_signals=True``.

        If an error ends the worker earlier, the error is raised at the end of the block. Until then
        `Runner.health` reports it and `Runner.wait` raises it.

        Args:
            options: Options of `graphile_worker.run`, except those that the app itself has.

        Example:
            >>> import asyncio
            >>> app = App(dsn=dsn)
            >>> @app.task
            ... async def hello(name: str) -> None:
            ...     print(f"Hello, {name}")
            ...     done.set()
            >>> async def main():
            ...     global done
            ...     done = asyncio.Event()
            ...     async with app.running(concurrency=5):
            ...         await hello.enqueue(name="Ann")
            ...         await done.wait()
            >>> asyncio.run(main())
            Hello, Ann
        """
        options.setdefault("handle_signals", False)
        async with self._worker(options) as runner:
            try:
                yield runner
            finally:
                await runner.stop(grace=options.get("shutdown_grace", DEFAULT_GRACE))
            await runner.wait()

    async def run_once(self, **options: Unpack[AppRunOnceOptions]) -> RunSummary:
        """Run all jobs that are due, and the jobs that they add: see `graphile_worker.run_once`.

        Args:
            options: Options of `graphile_worker.run_once`, except those that the app itself has.

        Returns:
            How many jobs succeeded, failed, were snoozed and were cancelled.
        """
        _check_options(options, AppRunOnceOptions)
        return await run_once(self._require_tasks(), **self.settings, **options)

    add_spec_sync = sync_twin(add_spec)
    _add_specs_sync = sync_twin(_add_specs, listed="specs")
    cancel_job_sync = sync_twin(cancel_job)
    pause_sync = sync_twin(pause)
    resume_sync = sync_twin(resume)
    _read_progress_sync = sync_twin(_read_progress)
    migrate_sync = sync_twin(migrate)
    run_once_sync = sync_twin(run_once)

    @asynccontextmanager
    async def _worker(self, options: AppRunOptions) -> AsyncIterator[Runner]:
        _check_options(options, AppRunOptions)
        options["cron_items"] = [
            *self.cron_items,
            *load_cron_items(
                options.pop("crontab", None), options.pop("crontab_file", None), options.get("cron_items")
            ),
        ]
        runner = await run(self._require_tasks(), **self.settings, **options)
        with self._clients.using_client(runner.utils):  # so that the app opens no further connections
            yield runner

    def _require_tasks(self) -> Tasks:
        if not self._registry.tasks:
            raise ConfigurationError(
                "The app has no tasks. Declare some with @app.task, or add a module with app.include."
            )
        return self._registry.tasks


def _read_history(given: dict[str, Any]) -> dict[str, Any]:
    return {name: OPTIONS[name].kind.check(name, value) for name, value in given.items()}


def _check_options(given: Iterable[str], known: type[AppRunOnceOptions]) -> None:
    for name in given:
        if name not in known.__annotations__ and name in inspect.signature(App).parameters:
            raise ConfigurationError(
                f"Option {name!r} belongs to the app: pass it to App({name}=...) or to app.configure."
            )
    check_option_names("The app's worker", given, known)

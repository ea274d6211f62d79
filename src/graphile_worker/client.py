"""`WorkerUtils`: adds and manages jobs without an app or a worker."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import msgspec

from graphile_worker._base.checked_connection import (
    AutocommitConnection,
    CheckedConnection,
    DefaultConnection,
    in_transaction_if_required,
)
from graphile_worker._base.durations import seconds
from graphile_worker._base.logs import never_raising
from graphile_worker._base.payload import MAX_PAYLOAD_SIZE
from graphile_worker._client.administration import Administration, by_local_clock
from graphile_worker._client.results import ResultPoller, reject_waiting_for_itself, reject_waiting_in_queue
from graphile_worker._client.sync_bridge import SyncBridge
from graphile_worker._client.sync_twins import sync_twin
from graphile_worker._db.connection.any_connection import is_blocking, run
from graphile_worker._db.connection.connect import Pool, connect
from graphile_worker._db.connection.error_mapping import translate_errors
from graphile_worker._db.connection.session import Session
from graphile_worker._db.connection.transactions import COMPUTING, STREAMING
from graphile_worker._db.queries import bulk_insert, caller_jobs, jobs
from graphile_worker._db.schema.migrate import migrate
from graphile_worker._db.sql_files import DEFAULT_SCHEMA, Schema
from graphile_worker._tasks.options import JobOptions, as_spec_options, check_job_options
from graphile_worker.errors import ConfigurationError, InvalidJobError, JobSkippedError, ResultUnknownError
from graphile_worker.history import CALLED_FLAG
from graphile_worker.job import AwaitedJob, Job, JobSpec, check_integer
from graphile_worker.middleware.adding import chain_enqueue
from graphile_worker.middleware.base import check_middleware, overriding

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable
    from contextlib import AbstractAsyncContextManager

    import asyncpg

    from graphile_worker._base.durations import Duration
    from graphile_worker._base.logs import AnyLogger
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker.middleware import Middleware


T = TypeVar("T")


def find_schema(name: str | None) -> Schema:
    """Return the schema with this name, by default ``GRAPHILE_WORKER_SCHEMA`` or ``graphile_worker``."""
    if name is not None:
        return Schema(name)
    return Schema(os.environ.get("GRAPHILE_WORKER_SCHEMA") or DEFAULT_SCHEMA)


async def run_migrations(
    dsn: str | None = None, *, pool: asyncpg.Pool | None = None, schema: str | None = None
) -> None:
    """Install the schema, or adopt and update an existing one, for example from Graphile Worker for Node.

    Any number of processes may call it at every start, also at the same time. All migrations run in one
    transaction: either all of them apply, or none.

    Args:
        dsn: Connection string; by default ``DATABASE_URL``, or the ``PG*`` variables.
        pool: An asyncpg pool to use instead of `dsn`. The caller closes it.
        schema: Name of the schema; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.

    Raises:
        ConfigurationError: No database is configured, or the schema name is invalid.
        DatabaseError: The database cannot be reached, or is older than PostgreSQL 12.
        SchemaError: The schema cannot be installed, or is too old or too new to adopt.

    Example:
        >>> import asyncio
        >>> from graphile_worker import run_migrations
        >>> asyncio.run(run_migrations(dsn=dsn))
    """
    if pool is not None:
        async with WorkerUtils(dsn, pool=pool, schema=schema) as utils:
            await utils.migrate()
        return
    target = find_schema(schema)
    async with connect(dsn) as connection:
        await migrate(connection, target)


async def quick_add_job(
    identifier: str,
    payload: Any = None,
    *,
    dsn: str | None = None,
    pool: asyncpg.Pool | None = None,
    schema: str | None = None,
    connection: AnyConnection | None = None,
    require_transaction: bool = False,
    **options: Unpack[JobOptions],
) -> Job:
    """Open a connection, add one job, and close the connection. For several jobs, use `WorkerUtils`.

    The arguments are those of `WorkerUtils` and of `WorkerUtils.add_job`. With `pool`, the job is added on a
    connection of that asyncpg pool, and the pool stays open.

    Returns:
        The added job.

    Example:
        >>> import asyncio
        >>> from graphile_worker import quick_add_job
        >>> asyncio.run(quick_add_job("hello", {"name": "Ann"}, dsn=dsn)).task_identifier
        'hello'
    """
    on = in_transaction_if_required(connection, require_transaction=require_transaction)
    async with WorkerUtils(dsn=dsn, pool=pool, schema=schema, max_pool_size=1) as utils:
        return await utils.add_job(identifier, payload, connection=on, **options)


def quick_add_job_sync(
    identifier: str,
    payload: Any = None,
    *,
    dsn: str | None = None,
    schema: str | None = None,
    connection: AnyConnection | None = None,
    require_transaction: bool = False,
    **options: Unpack[JobOptions],
) -> Job:
    """Add one job like `quick_add_job`, from code without an event loop.

    Example:
        >>> from graphile_worker import quick_add_job_sync
        >>> quick_add_job_sync("hello", {"name": "Ann"}, dsn=dsn).task_identifier
        'hello'
    """
    on = in_transaction_if_required(connection, require_transaction=require_transaction)
    utils = WorkerUtils(dsn=dsn, schema=schema, max_pool_size=1)
    if on is not None:
        return utils.add_job_sync(identifier, payload, connection=on, **options)
    with utils:
        return utils.add_job_sync(identifier, payload, **options)


class WorkerUtils(Administration):
    """A client that adds and manages jobs, on its own connections or on the caller's.

    It opens connections when it first needs them. Close it at the end, with ``async with`` or
    ``await utils.close()``. The schema must already be installed: see `migrate`.

    Methods that add, change or get jobs take ``connection=``, the caller's connection or session: see
    docs/guides/transactions.md. They then run in the caller's transaction: the change takes effect when the
    caller commits, and is never retried. `migrate`, `pending_migrations` and `cleanup` take only an asyncpg
    connection.

    Code without an event loop calls the method with ``_sync`` at the end of its name. A client is used either
    with or without an event loop.

    Args:
        dsn: Connection string; by default ``DATABASE_URL``, or the ``PG*`` variables.
        pool: An asyncpg pool to use instead of `dsn`. The caller closes it.
        schema: Name of the schema; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.
        max_pool_size: Maximum number of connections to open. While callers hold all of them through
            `connection`, up to two more are opened to add and change jobs.
        pool_timeout: How long to wait for a free connection before a `PoolTimeoutError`; by default without
            limit.
        prepared_statements: Whether to use prepared statements. Pass False for PgBouncer in transaction mode.
        use_local_time: Whether to take the current time from this machine's clock, not from the database's.
        max_payload_size: Maximum size of a new job's payload, in bytes of JSON; by default 16 MB.
        require_transaction: Whether to refuse a ``connection=`` that is not in a transaction. By default, a
            job that is committed at once gets an `AutocommitWarning`.
        middleware: A list of `Middleware` to call around adding jobs: see docs/guides/middleware.md.
        logger: Logger for retried statements; by default the logger ``graphile_worker``.

    Example:
        >>> import asyncio
        >>> from graphile_worker import WorkerUtils
        >>> async def main():
        ...     async with WorkerUtils(dsn=dsn) as utils:
        ...         await utils.migrate()
        ...         job = await utils.add_job("hello", {"name": "Ann"}, priority=-1)
        ...         return job.priority
        >>> asyncio.run(main())
        -1
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
        middleware: Iterable[Middleware] | None = None,
        logger: AnyLogger | None = None,
    ) -> None:
        if dsn is not None and pool is not None:
            raise ConfigurationError("Pass dsn or pool, not both.")
        target = find_schema(schema)
        self.logger: AnyLogger = never_raising(logger or logging.getLogger("graphile_worker"))
        connection_pool = Pool(
            dsn,
            pool=pool,
            max_size=max_pool_size,
            prepared_statements=prepared_statements,
            timeout=None if pool_timeout is None else seconds("pool_timeout", pool_timeout, "more than 0"),
            logger=self.logger,
        )
        self.middleware = overriding(check_middleware(middleware), "enqueue")
        session = Session(target, connection_pool, self.logger, max_payload_size)
        self._start_blocking()
        super().__init__(session, use_local_time=use_local_time, require_transaction=require_transaction)

    def _start_blocking(self) -> None:
        """Prepare for the methods with ``_sync``."""
        self._sync_bridge = SyncBridge()
        self._loop = asyncio._get_running_loop()  # noqa: SLF001 - asyncio.get_running_loop raises

    @classmethod
    def _on_session(
        cls,
        session: Session,
        *,
        use_local_time: bool,
        require_transaction: bool = False,
        middleware: Iterable[Middleware] = (),
    ) -> Self:
        """Create a client on an existing session. Its creator closes the session."""
        utils = cls.__new__(cls)
        Administration.__init__(
            utils, session, use_local_time=use_local_time, require_transaction=require_transaction
        )
        utils._start_blocking()  # noqa: SLF001 - its own
        utils.logger = session.logger
        utils.middleware = overriding(middleware, "enqueue")
        return utils

    def __repr__(self) -> str:
        return f"WorkerUtils(schema={self._session.schema.name!r})"

    @property
    def schema(self) -> str:
        """The name of the schema."""
        return self._session.schema.name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    @property
    def is_closing(self) -> bool:
        """Whether the connections are closed or being closed."""
        return self._session.pool.is_closing

    async def close(self) -> None:
        """Close the connections that this client opened. It may be called more than once.

        Connections in use have five seconds to be returned. Then they are terminated, and a warning names the
        code that holds them.
        """
        await self._stop_waiting()
        await self._session.pool.close()

    async def _stop_waiting(self) -> None:
        """Let everything fail that waits for the result of a job. The jobs are not affected."""
        await self._session.close_services()

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """Borrow a connection from the pool: ``async with utils.connection() as connection``."""
        return self._session.pool.lend()

    async def migrate(self, *, connection: Connection | None = None) -> None:
        """Install or update the schema: see `run_migrations`."""
        with translate_errors(self._session.schema):
            async with self._session.connection(connection) as on:
                await migrate(on, self._session.schema)

    async def add_job(
        self,
        identifier: str,
        payload: Any = None,
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add a job.

        Args:
            identifier: Identifier of the task that runs the job, up to 128 characters.
            payload: Payload for the task: any value that can be encoded as JSON. None means ``{}``.
            connection: The caller's connection or session, from any of the drivers and ORMs in
                docs/guides/transactions.md. The job is added in its transaction. Outside of a transaction
                the job is committed at once, with an `AutocommitWarning`.
            require_transaction: Whether to refuse the call if the connection is not in a transaction, or if
                none is given.
            options: Job options, all of them optional.

                - ``queue_name``: Name of a serial queue. Its jobs run one after another.
                - ``run_at``: Earliest start: an aware datetime, or ISO 8601 text with an offset from UTC,
                  such as ``"2030-01-31T12:00:00Z"``. A timedelta is a delay from now.
                - ``delay``: Time from now until the earliest start, in seconds or as a timedelta, instead of
                  ``run_at``.
                - ``max_attempts``: Maximum number of attempts; by default 25.
                - ``job_key``: Key of the job. At most one pending job has the same key. Adding another one
                  changes it.
                - ``job_key_mode``: What happens if the key is in use; by default `JobKeyMode.REPLACE`.
                - ``priority``: Jobs with a lower number run first; by default 0.
                - ``flags``: Labels of the job. A worker can be configured not to claim jobs with certain
                  flags.
                - ``timeout``: How long the job may run, instead of its task's timeout. It is stored as a
                  flag, which only Python workers evaluate.

        Returns:
            The added job.

        Raises:
            InvalidJobError: An argument is invalid. Nothing was added.
            JobSkippedError: A middleware did not add the job.
            SchemaMissingError: The schema is not installed.

        Example:
            >>> import asyncio
            >>> from graphile_worker import WorkerUtils
            >>> async def main():
            ...     async with WorkerUtils(dsn=dsn) as utils:
            ...         await utils.migrate()
            ...         return await utils.add_job("remind", {"user": 7}, delay=3600, job_key="u7")
            >>> asyncio.run(main()).key
            'u7'
        """
        check_job_options("add_job", options)
        spec = JobSpec(identifier, payload, **as_spec_options(options))
        on = in_transaction_if_required(connection, require_transaction=require_transaction)
        return await self.add_spec(spec, connection=on)

    async def add_spec(self, spec: JobSpec, *, connection: AnyConnection | None = None) -> Job:
        """Add the job that the spec describes."""
        checked = self._checked(connection)
        if not self.middleware:
            return await self._add_one(spec, checked)

        async def add(specs: Sequence[JobSpec]) -> list[Job]:
            if len(specs) == 1:
                return [await self._add_one(specs[0], checked)]
            return await self._add_many(specs, checked)

        for job in await self._through_middleware([spec], add):
            return job
        raise JobSkippedError(
            f"The job for task {spec.identifier!r} was not added, because a middleware skipped it."
        )

    def _checked(self, connection: AnyConnection | None) -> CheckedConnection | None:
        if connection is None or isinstance(connection, AutocommitConnection):
            return connection
        warn = not isinstance(connection, DefaultConnection)
        return CheckedConnection(connection, require=self._require_transaction, warn=warn)

    async def _through_middleware(
        self, specs: Sequence[JobSpec], add: Callable[[Sequence[JobSpec]], Awaitable[Sequence[Job]]]
    ) -> Sequence[Job]:
        """Call the middleware around this way of adding jobs."""
        return await chain_enqueue(self.middleware, add)(specs)

    async def _add_one(self, spec: JobSpec, connection: CheckedConnection | None) -> Job:
        if self._use_local_time:
            spec = _by_local_time(spec)
        schema, max_size = self._session.schema, self._session.max_payload_size
        return await self._session.run(
            lambda on: jobs.add_job(on, schema, spec, max_size),
            lambda: caller_jobs.adding_job(schema, spec, max_size),
            connection,
        )

    async def add_jobs(
        self,
        specs: Iterable[JobSpec],
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
    ) -> list[Job]:
        """Add many jobs in few round trips: all of them, or none if one is rejected.

        Args:
            specs: The jobs to add, as an iterable of any length. No two may have the same key, and none may
                use ``unsafe_dedupe``.
            connection: The caller's connection or session. The jobs are added in its transaction.
            require_transaction: Whether to refuse the call if the connection is not in a transaction, or if
                none is given.

        Returns:
            The added jobs, in the order of the specs.

        Raises:
            InvalidJobError: One of the jobs is invalid. None was added.
            SchemaMissingError: The schema is not installed.

        Example:
            >>> import asyncio
            >>> from graphile_worker import JobSpec, WorkerUtils
            >>> async def main():
            ...     async with WorkerUtils(dsn=dsn) as utils:
            ...         await utils.migrate()
            ...         jobs = await utils.add_jobs(JobSpec("count", {"n": n}) for n in range(3))
            ...         return [job.payload["n"] for job in jobs]
            >>> asyncio.run(main())
            [0, 1, 2]
        """
        checked = self._checked(
            in_transaction_if_required(connection, require_transaction=require_transaction)
        )
        if not self.middleware:
            return await self._add_many(specs, checked)
        return list(await self._through_middleware(list(specs), partial(self._add_many, connection=checked)))

    async def _add_many(self, specs: Iterable[JobSpec], connection: CheckedConnection | None) -> list[Job]:
        schema = self._session.schema

        def local(spec: JobSpec) -> JobSpec:
            return _by_local_time(spec) if self._use_local_time else spec

        async def add(on: Connection) -> list[Job]:
            max_size = self._session.max_payload_size
            idle = COMPUTING if isinstance(specs, Sequence) else STREAMING
            return await bulk_insert.add_jobs(
                on, schema, map(local, specs), max_payload_size=max_size, idle=idle
            )

        try:
            if connection is not None:
                max_size = self._session.max_payload_size
                return await run(
                    connection, schema, caller_jobs.adding_jobs(schema, map(local, specs), max_size)
                )
            if isinstance(specs, Sequence):
                return await self._session.call(add)
            # Not retried after errors, because an iterator cannot be read twice.
            with translate_errors(schema):
                async with self._session.connection() as on:
                    return await add(on)
        except bulk_insert.IterationError as error:
            raise (error.__cause__ or error) from None

    async def add_batch_job(
        self,
        identifier: str,
        items: Iterable[Any],
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Add one job whose payload is a list of items, for a batch task.

        If a pending job has the same key, the items are appended to its payload. The other arguments are
        those of `add_job`.

        Returns:
            The added or extended job.

        Raises:
            InvalidJobError: `items` is not a list or is empty, or another argument is invalid.
        """
        if isinstance(items, str | bytes | Mapping):
            raise InvalidJobError(
                f"items is a {type(items).__name__}; it must be a list of items.", argument="items"
            )
        payload = list(items)
        if not payload:
            raise InvalidJobError("A batch job needs at least one item.", argument="items")
        on = in_transaction_if_required(connection, require_transaction=require_transaction)
        return await self.add_job(identifier, payload, connection=on, **options)

    async def job_result(self, job_id: int, *, timeout: Duration | None = None) -> Any:  # noqa: ASYNC109 - the error names the job
        """Wait until a job has ended, and return what its task returned, as plain JSON.

        The job's task must keep its results: see docs/guides/results.md. A task's own method
        `Task.result_of` also converts the value to the type of the task's result.

        Args:
            job_id: The job's id.
            timeout: How long to wait, in seconds or as a timedelta; 0 only checks. By default without limit.

        Raises:
            JobFailedError: The job has failed permanently.
            JobCancelledError: The job was cancelled.
            ResultUnknownError: The result is not known.
            ResultTimeoutError: The job has not ended in time. It is also a `TimeoutError`.
        """
        check_integer("job_id", job_id, range(2**63))
        limit = None if timeout is None else seconds("timeout", timeout)
        return await self._read_result(AwaitedJob(job_id), limit)

    async def _read_result(self, job: AwaitedJob, limit: float | None) -> Any:
        """Wait until the job has ended, and return its result as plain JSON."""
        reject_waiting_for_itself(job)
        results = self._session.service(ResultPoller)
        if job.is_called:
            results.listen()
        return await results.wait(job, limit)

    async def _add_called(self, spec: JobSpec, *, connection: AnyConnection | None = None) -> AwaitedJob:
        """Add a job for a caller who waits for it. Its worker keeps the result, and announces its end."""
        reject_waiting_in_queue(spec)
        results = self._session.service(ResultPoller)
        flags = {*(spec.flags or ()), CALLED_FLAG}
        if not is_blocking():  # otherwise another event loop waits, with a channel of its own
            results.listen()
            flags.add(results.flag)
        job = await self.add_spec(
            spec.replace(flags=flags),
            connection=None if connection is None else AutocommitConnection(connection),
        )
        if CALLED_FLAG not in job.flags:
            raise ResultUnknownError(
                f"Job {job.id} ({job.task_identifier}) was already in the queue and is not changed "
                "(unsafe_dedupe), or a middleware has removed the flag of called jobs. So its result may not "
                "be kept.",
                job.id,
            )
        return AwaitedJob(job.id, job.task_identifier, job.created_at, is_called=True)

    def _run_on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of this client on the event loop of its connections, and wait for it."""
        if self._loop is not None and self._loop.is_running():
            return self._sync_bridge.run_on(self._loop, work)
        return self._sync_bridge.run(work)

    def _on_own_loop(self) -> Self:
        """Return the client to use on that event loop."""
        return self

    def close_sync(self) -> None:
        """Close the connections that this client opened for code without an event loop."""
        self._run_on_own_loop(self.close)
        self._sync_bridge.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close_sync()

    migrate_sync = sync_twin(migrate)
    add_job_sync = sync_twin(add_job)
    add_jobs_sync = sync_twin(add_jobs, listed="specs")
    add_spec_sync = sync_twin(add_spec)
    add_batch_job_sync = sync_twin(add_batch_job, listed="items")
    job_result_sync = sync_twin(job_result)
    _add_called_sync = sync_twin(_add_called)


def _by_local_time(spec: JobSpec) -> JobSpec:
    """Return the spec with an absolute `run_at`, computed with this machine's clock."""
    return msgspec.structs.replace(spec, run_at=by_local_clock(spec.run_at or timedelta(0)))

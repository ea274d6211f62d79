"""`WorkerUtils`: adding and administering jobs from outside a worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import msgspec

from graphile_worker._db import bulk, queries
from graphile_worker._db.callers import warn_of_autocommit
from graphile_worker._db.connect import Pool, connect
from graphile_worker._db.failures import translated
from graphile_worker._db.migrate import migrate
from graphile_worker._db.session import Session
from graphile_worker._db.sql import DEFAULT_SCHEMA, Schema
from graphile_worker._db.transactions import COMPUTING, STREAMING
from graphile_worker.administration import Administration, by_local_clock
from graphile_worker.durations import seconds
from graphile_worker.errors import ConfigurationError, InvalidJobError, JobSkippedError
from graphile_worker.job import Job, JobKeyMode, JobSpec
from graphile_worker.logs import never_raising
from graphile_worker.middleware.adding import around_adding
from graphile_worker.middleware.base import check_middleware, overriding
from graphile_worker.payload import MAX_PAYLOAD_SIZE
from graphile_worker.task_options import with_timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    import asyncpg

    from graphile_worker._db.connect import Connection
    from graphile_worker.durations import Duration
    from graphile_worker.logs import AnyLogger
    from graphile_worker.middleware import Middleware


def find_schema(name: str | None) -> Schema:
    """The schema given, or else ``GRAPHILE_WORKER_SCHEMA``, or else ``graphile_worker``."""
    if name is not None:
        return Schema(name)
    return Schema(os.environ.get("GRAPHILE_WORKER_SCHEMA") or DEFAULT_SCHEMA)


async def run_migrations(
    dsn: str | None = None, *, pool: asyncpg.Pool | None = None, schema: str | None = None
) -> None:
    """Install the schema, or adopt and complete one that Graphile Worker made.

    Safe to call at every start, by any number of processes at once. It happens in one transaction: whole or
    not at all.

    Args:
        dsn: The connection string; by default ``DATABASE_URL``, or the ``PG*`` variables.
        pool: An asyncpg pool to use instead of `dsn`. The caller closes it.
        schema: The schema's name; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.

    Raises:
        ConfigurationError: No database was named, or the schema's name cannot be one.
        DatabaseError: The database cannot be reached, or is older than PostgreSQL 12.
        SchemaError: The schema cannot be installed here, or is too old or too new to adopt.

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
    queue_name: str | None = None,
    run_at: datetime | timedelta | str | None = None,
    max_attempts: int | None = None,
    job_key: str | None = None,
    job_key_mode: JobKeyMode | str | None = None,
    priority: int | None = None,
    flags: Iterable[str] | None = None,
    timeout: Duration | None = None,  # noqa: ASYNC109 - the job's
    connection: Connection | None = None,
) -> Job:
    """Open a connection, add one job, close the connection. For more than one use `WorkerUtils`.

    The arguments are those of `WorkerUtils.add_job`, and those that say where the queue is. On an asyncpg
    `pool` of the caller's the job is added without opening a connection, and the pool stays open.

    Example:
        >>> import asyncio
        >>> from graphile_worker import quick_add_job
        >>> asyncio.run(quick_add_job("hello", {"name": "Ann"}, dsn=dsn)).task_identifier
        'hello'
    """
    async with WorkerUtils(dsn=dsn, pool=pool, schema=schema, max_pool_size=1) as utils:
        return await utils.add_job(
            identifier,
            payload,
            queue_name=queue_name,
            run_at=run_at,
            max_attempts=max_attempts,
            job_key=job_key,
            job_key_mode=job_key_mode,
            priority=priority,
            flags=flags,
            timeout=timeout,
            connection=connection,
        )


class WorkerUtils(Administration):
    """Adds and administers jobs, on connections of its own or on the caller's.

    Connections are opened when they are first needed. Close it at the end: ``async with``, or
    `await utils.close()`. The schema must be there already: see `migrate`.

    Args:
        dsn: The connection string; by default ``DATABASE_URL``, or the ``PG*`` variables.
        pool: A pool of asyncpg's in place of `dsn`; it stays the caller's, and is not closed.
        schema: The schema's name; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.
        max_pool_size: How many connections to open at most. Up to two more are opened to add and change jobs
            if these are all held through `lend_connection`.
        pool_timeout: How long to wait for a connection before a `PoolTimeoutError`; by default as long as it
            takes.
        prepared_statements: Off for a PgBouncer in transaction mode.
        use_local_time: Take "now" from this machine's clock and not from the database's.
        max_payload_size: How many bytes of JSON a payload may have when a job is added; by default 16 MB.
        middleware: What stands around the adding of jobs: see docs/middleware.md.
        logger: Where to say that a statement is tried again; by default the logger ``graphile_worker``.

    Every method takes ``connection=``, an asyncpg connection of the caller's, and then is a part of the
    caller's transaction: it is done when the caller commits, and never repeated.

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
        middleware: Iterable[Middleware] | None = None,
        logger: AnyLogger | None = None,
    ) -> None:
        if dsn is not None and pool is not None:
            raise ConfigurationError("Pass dsn or pool, not both.")
        target = find_schema(schema)
        self.logger: AnyLogger = never_raising(logger or logging.getLogger("graphile_worker"))
        own = Pool(
            dsn,
            pool=pool,
            max_size=max_pool_size,
            prepared_statements=prepared_statements,
            timeout=None if pool_timeout is None else seconds("pool_timeout", pool_timeout, "more than 0"),
            logger=self.logger,
        )
        self.middleware = overriding(check_middleware(middleware), "enqueue")
        session = Session(target, own, self.logger, max_payload_size)
        super().__init__(session, use_local_time=use_local_time)

    @classmethod
    def on_session(
        cls, session: Session, *, use_local_time: bool, middleware: Iterable[Middleware] = ()
    ) -> Self:
        """On connections that somebody else looks after."""
        utils = cls.__new__(cls)
        Administration.__init__(utils, session, use_local_time=use_local_time)
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
        """Whether its connections are closed, or about to be."""
        return self._session.pool.is_closing

    async def close(self) -> None:
        """Close the connections that were opened here. May be called again.

        Connections that are lent have five seconds to come back. Then they are ended, and a warning names the
        code that holds them.
        """
        await self._session.pool.close()

    def lend_connection(self) -> AbstractAsyncContextManager[Connection]:
        """A connection for anything else: ``async with utils.lend_connection() as connection``."""
        return self._session.pool.lend()

    async def migrate(self, *, connection: Connection | None = None) -> None:
        """Install the schema, or complete it: see `run_migrations`."""
        with translated(self._session.schema):
            async with self._session.connection(connection) as on:
                await migrate(on, self._session.schema)

    async def add_job(
        self,
        identifier: str,
        payload: Any = None,
        *,
        queue_name: str | None = None,
        run_at: datetime | timedelta | str | None = None,
        max_attempts: int | None = None,
        job_key: str | None = None,
        job_key_mode: JobKeyMode | str | None = None,
        priority: int | None = None,
        flags: Iterable[str] | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109 - the job's
        connection: Connection | None = None,
    ) -> Job:
        """Add a job.

        Args:
            identifier: The task that is to run, up to 128 characters.
            payload: What it gets: anything that can be written as JSON. None means ``{}``.
            queue_name: Jobs of one queue run one after another.
            run_at: Not before this moment (an aware datetime, or ISO 8601 with an offset from UTC, such as
                ``"2030-01-31T12:00:00Z"``), or after this time from now (a timedelta).
            max_attempts: How often to try; by default 25.
            job_key: There is one pending job with a key at most; adding again changes it.
            job_key_mode: What adding again does; by default `JobKeyMode.REPLACE`.
            priority: Lower runs first; by default 0.
            flags: Labels; a worker can be told to leave jobs with certain flags alone.
            timeout: How long the job may run, in place of what its task says: a flag that our workers know.
            connection: A connection of the caller's: the job is added in its transaction. Outside of a
                transaction it is committed at once, and an `AutocommitWarning` says so.

        Raises:
            InvalidJobError: An argument is wrong; nothing was added.
            SchemaMissingError: The schema is not installed.
        """
        spec = JobSpec(
            identifier,
            payload,
            queue_name=queue_name,
            max_attempts=max_attempts,
            job_key=job_key,
            job_key_mode=job_key_mode,
            priority=priority,
            **with_timeout({"run_at": run_at, "flags": flags, "timeout": timeout}),
        )
        return await self.add_spec(spec, connection=connection)

    async def add_spec(self, spec: JobSpec, *, connection: Connection | None = None) -> Job:
        """Add the job that the spec describes."""
        if connection is not None:
            warn_of_autocommit(connection)
        if not self.middleware:
            return await self._add_one(spec, connection)

        async def add(specs: Sequence[JobSpec]) -> list[Job]:
            if len(specs) == 1:
                return [await self._add_one(specs[0], connection)]
            return await self._add_many(specs, connection)

        for job in await self.through_middleware([spec], add):
            return job
        raise JobSkippedError(f"The job of {spec.identifier!r} was not added: a middleware left it out.")

    async def through_middleware(
        self, specs: Sequence[JobSpec], add: Callable[[Sequence[JobSpec]], Awaitable[Sequence[Job]]]
    ) -> Sequence[Job]:
        """Add jobs in a way of one's own, with the middleware around that."""
        return await around_adding(self.middleware, add)(specs)

    async def _add_one(self, spec: JobSpec, connection: Connection | None) -> Job:
        if self._use_local_time:
            spec = _by_local_time(spec)
        schema, most = self._session.schema, self._session.max_payload_size
        return await self._session.call(lambda on: queries.add_job(on, schema, spec, most), connection)

    async def add_jobs(self, specs: Iterable[JobSpec], *, connection: Connection | None = None) -> list[Job]:
        """Add many jobs in few round trips: all of them or, if one cannot be added, none.

        The jobs come back in the order of the specs, which may be an iterator of any length. Two specs must
        not have the same key, and ``unsafe_dedupe`` is not possible.

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
        if connection is not None:
            warn_of_autocommit(connection)
        if not self.middleware:
            return await self._add_many(specs, connection)
        return list(
            await self.through_middleware(list(specs), partial(self._add_many, connection=connection))
        )

    async def _add_many(self, specs: Iterable[JobSpec], connection: Connection | None) -> list[Job]:
        schema = self._session.schema

        def local(spec: JobSpec) -> JobSpec:
            return _by_local_time(spec) if self._use_local_time else spec

        async def add(on: Connection) -> list[Job]:
            most = self._session.max_payload_size
            idle = COMPUTING if isinstance(specs, Sequence) else STREAMING
            return await bulk.add_jobs(on, schema, map(local, specs), max_payload_size=most, idle=idle)

        try:
            if isinstance(specs, Sequence):
                return await self._session.call(add, connection)
            # Not repeated on errors: an iterator cannot be read twice.
            with translated(schema):
                async with self._session.connection(connection) as on:
                    return await add(on)
        except bulk.IterationError as error:
            raise (error.__cause__ or error) from None

    async def add_batch_job(
        self,
        identifier: str,
        items: Iterable[Any],
        *,
        queue_name: str | None = None,
        run_at: datetime | timedelta | str | None = None,
        max_attempts: int | None = None,
        job_key: str | None = None,
        job_key_mode: JobKeyMode | str | None = None,
        priority: int | None = None,
        flags: Iterable[str] | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109 - the job's
        connection: Connection | None = None,
    ) -> Job:
        """Add one job whose payload is the list of items.

        With a key, items added while the job is pending are appended to those it has. The other arguments are
        those of `add_job`.
        """
        if isinstance(items, str | bytes | Mapping):
            raise InvalidJobError(
                f"items is a {type(items).__name__}; it must be a list of items.", argument="items"
            )
        payload = list(items)
        if not payload:
            raise InvalidJobError("A batch job needs at least one item.", argument="items")
        return await self.add_job(
            identifier,
            payload,
            queue_name=queue_name,
            run_at=run_at,
            max_attempts=max_attempts,
            job_key=job_key,
            job_key_mode=job_key_mode,
            priority=priority,
            flags=flags,
            timeout=timeout,
            connection=connection,
        )


def _by_local_time(spec: JobSpec) -> JobSpec:
    """The spec with the moment that this machine's clock means."""
    return msgspec.structs.replace(spec, run_at=by_local_clock(spec.run_at or timedelta(0)))

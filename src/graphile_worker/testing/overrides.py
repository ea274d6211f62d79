"""Override an app's database and clock during a test."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import msgspec

from graphile_worker._base.payload import MAX_PAYLOAD_SIZE
from graphile_worker._db.connection.caller_connection import CallerConnectionPool
from graphile_worker._db.connection.session import Session
from graphile_worker._worker.claiming.clock import Clock as RealClock
from graphile_worker.client import WorkerUtils, find_schema
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from contextlib import AbstractContextManager
    from datetime import datetime

    from graphile_worker._base.checked_connection import CheckedConnection
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker.app import App
    from graphile_worker.job import Job, JobSpec
    from graphile_worker.middleware import Middleware
    from graphile_worker.testing.clocks import Clock

IN_TEST_JOB: ContextVar[bool | None] = ContextVar("graphile_worker_in_test_job", default=None)
"""Whether this code is part of a job that a test runs: jobs that it adds run after it, not inside it.

None means unknown: threads of a pool do not inherit the variable.
"""

_KEPT_SETTINGS = ("schema", "use_local_time", "max_payload_size", "require_transaction", "middleware")
"""An app's settings that also apply to another database."""
_CLOCKS: WeakKeyDictionary[App, Clock | None] = WeakKeyDictionary()
"""The current clock of each app: an inner override of the database keeps the outer clock."""


class ClockedUtils(WorkerUtils):
    """A `WorkerUtils` that can use a test's clock and call back when jobs are added."""

    clock: Clock | None = None
    on_added: Callable[[AnyConnection | None], Awaitable[None]] | None = None

    @classmethod
    def over(cls, utils: WorkerUtils, clock: Clock | None = None) -> Self:
        """Return a client on the same connections, with the given clock or the client's own."""
        clocked = cls._on_session(
            utils._session,  # noqa: SLF001 - the base class
            use_local_time=utils._use_local_time,  # noqa: SLF001
            require_transaction=utils._require_transaction,  # noqa: SLF001
            middleware=utils.middleware,
        )
        clocked.clock = clock or (utils.clock if isinstance(utils, ClockedUtils) else None)
        return clocked

    @classmethod
    def on_connection(
        cls,
        connection: Connection,
        schema: str | None,
        clock: Clock | None = None,
        *,
        use_local_time: bool = False,
        max_payload_size: int = MAX_PAYLOAD_SIZE,
        middleware: Iterable[Middleware] = (),
    ) -> Self:
        """Return a client on the caller's connection."""
        logger = logging.getLogger("graphile_worker")
        session = Session(find_schema(schema), CallerConnectionPool(connection), logger, max_payload_size)
        utils = cls._on_session(session, use_local_time=use_local_time, middleware=middleware)
        utils.clock = clock
        return utils

    @property
    def session(self) -> Session:
        """The database session."""
        return self._session

    def real_clock(self) -> RealClock:
        """Return the clock to use if the test has none."""
        return RealClock(local=self._use_local_time)

    async def add_spec(self, spec: JobSpec, *, connection: AnyConnection | None = None) -> Job:
        """Add the job that the spec describes."""
        job = await super().add_spec(spec, connection=connection)
        await self._notify_added(connection)
        return job

    async def add_jobs(
        self,
        specs: Iterable[JobSpec],
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
    ) -> list[Job]:
        """Add many jobs."""
        jobs = await super().add_jobs(specs, connection=connection, require_transaction=require_transaction)
        await self._notify_added(connection)
        return jobs

    async def _add_one(self, spec: JobSpec, connection: CheckedConnection | None) -> Job:
        return await super()._add_one(self._with_run_at(spec), connection)

    async def _add_many(self, specs: Iterable[JobSpec], connection: CheckedConnection | None) -> list[Job]:
        return await super()._add_many([self._with_run_at(spec) for spec in specs], connection)

    async def reschedule_jobs(
        self, job_ids: Iterable[int], *, run_at: datetime | timedelta | str | None = None, **changes: Any
    ) -> list[Job]:
        """Reschedule jobs."""
        if self.clock is not None and isinstance(run_at, timedelta):
            run_at = self.clock.now() + run_at
        return await super().reschedule_jobs(job_ids, run_at=run_at, **changes)

    def _with_run_at(self, spec: JobSpec) -> JobSpec:
        if self.clock is None or not (spec.run_at is None or isinstance(spec.run_at, timedelta)):
            return spec
        return msgspec.structs.replace(spec, run_at=self.clock.now() + (spec.run_at or timedelta(0)))

    async def _notify_added(self, connection: AnyConnection | None) -> None:
        if self.on_added is not None and not IN_TEST_JOB.get():
            await self.on_added(connection)


class override:  # noqa: N801 - used like a function
    """Make the app and its tasks use another database or clock: ``async with override(app, ...)``.

    Afterwards the app has its own configuration again, and connections that were opened meanwhile are closed.
    For code without an event loop, ``with override(app, dsn=...)`` does the same.

    Args:
        app: The app.
        dsn: Another database.
        connection: An asyncpg connection, often in a transaction that will be rolled back. Everything that
            the app does is part of that transaction. The app cannot run workers meanwhile; use `drain`.
        clock: The clock for the app's jobs [the real time].

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> from graphile_worker.testing import assert_enqueued, override
        >>> app = App()
        >>> @app.task
        ... async def hello(name: str) -> None: ...
        >>> async def test():
        ...     async with override(app, dsn=dsn):
        ...         await app.migrate()
        ...         await hello.enqueue(name="Ann")
        ...         await assert_enqueued(hello, name="Ann")
        >>> asyncio.run(test())
    """

    def __init__(
        self,
        app: App,
        *,
        dsn: str | None = None,
        connection: Connection | None = None,
        clock: Clock | None = None,
    ) -> None:
        if dsn is not None and connection is not None:
            raise ConfigurationError("Pass dsn or connection, not both.")
        self._app = app
        self._dsn = dsn
        self._connection = connection
        self._clock = clock
        self._clock_before: Clock | None = None
        self._opened: WorkerUtils | None = None
        self._installed: AbstractContextManager[None] | None = None

    async def __aenter__(self) -> App:
        self._clock_before = _CLOCKS.get(self._app)
        self._clock = self._clock or self._clock_before
        settings = self._app.settings
        if self._connection is not None:
            utils = ClockedUtils.on_connection(
                self._connection,
                settings["schema"],
                self._clock,
                use_local_time=settings["use_local_time"],
                max_payload_size=settings["max_payload_size"],
                middleware=settings["middleware"],
            )
            # A worker cannot run on this pool: it raises an error if one is started.
            self._installed = self._app._using_client(utils, dsn=None, pool=utils.session.pool)
        elif self._dsn is not None:
            self._opened = WorkerUtils(
                self._dsn,
                **{name: settings[name] for name in _KEPT_SETTINGS},
            )
            utils = ClockedUtils.over(self._opened, self._clock)
            self._installed = self._app._using_client(utils, dsn=self._dsn, pool=None)
        else:
            self._installed = self._app._using_client(ClockedUtils.over(self._app.utils, self._clock))
        self._installed.__enter__()
        _CLOCKS[self._app] = self._clock
        return self._app

    async def __aexit__(self, *_exception: object) -> None:
        _CLOCKS[self._app] = self._clock_before
        if self._installed is not None:
            self._installed.__exit__(None, None, None)
        if self._opened is not None:
            await self._opened.close()

    def __enter__(self) -> App:
        if self._dsn is None or self._clock is not None:
            raise ConfigurationError(
                "A connection or a clock belongs to an event loop: use async with. "
                "Without an event loop, pass dsn."
            )
        self._installed = self._app._using_client(None, dsn=self._dsn, pool=None)
        self._installed.__enter__()
        return self._app

    def __exit__(self, *_exception: object) -> None:
        if self._installed is not None:
            self._installed.__exit__(None, None, None)

"""Where the jobs of a test are: on which connections, and by which clock."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import msgspec

from graphile_worker._db.callers import OneConnection
from graphile_worker._db.session import Session
from graphile_worker._runtime.clock import Clock as RealClock
from graphile_worker.client import WorkerUtils, find_schema
from graphile_worker.errors import ConfigurationError
from graphile_worker.payload import MAX_PAYLOAD_SIZE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from contextlib import AbstractContextManager
    from datetime import datetime

    from graphile_worker._db.connect import Connection
    from graphile_worker.app import App
    from graphile_worker.job import Job, JobSpec
    from graphile_worker.middleware import Middleware
    from graphile_worker.testing.clocks import Clock

INSIDE: ContextVar[bool | None] = ContextVar("graphile_worker_inside_of_a_drain", default=None)
"""Whether this is a job that a test runs: what it adds runs after it, and not inside of it.

None if nobody knows: threads of a pool do not inherit it.
"""


_KEPT = ("schema", "use_local_time", "max_payload_size", "middleware")
"""Settings of an app that hold on another database too."""
_CLOCKS: WeakKeyDictionary[App, Clock | None] = WeakKeyDictionary()
"""Those by which apps go now: whoever sends one elsewhere does not change the time."""


class Place(WorkerUtils):
    """A `WorkerUtils` that may go by a clock of the test's, and tell when something was added."""

    clock: Clock | None = None
    on_added: Callable[[Connection | None], Awaitable[None]] | None = None

    @classmethod
    def over(cls, utils: WorkerUtils, clock: Clock | None = None) -> Self:
        """On the same connections; by the clock given, or by that which they had already."""
        session, local = utils._session, utils._use_local_time  # noqa: SLF001 - it is one of us
        place = cls.on_session(session, use_local_time=local, middleware=utils.middleware)
        place.clock = clock or (utils.clock if isinstance(utils, Place) else None)
        return place

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
        """On one connection of the caller's."""
        logger = logging.getLogger("graphile_worker")
        session = Session(find_schema(schema), OneConnection(connection), logger, max_payload_size)
        place = cls.on_session(session, use_local_time=use_local_time, middleware=middleware)
        place.clock = clock
        return place

    @property
    def session(self) -> Session:
        """The connections."""
        return self._session

    def real_clock(self) -> RealClock:
        """The time, if the test has no clock."""
        return RealClock(local=self._use_local_time)

    async def add_spec(self, spec: JobSpec, *, connection: Connection | None = None) -> Job:
        """Add the job that the spec describes."""
        job = await super().add_spec(spec, connection=connection)
        await self._added(connection)
        return job

    async def add_jobs(self, specs: Iterable[JobSpec], *, connection: Connection | None = None) -> list[Job]:
        """Add many jobs."""
        jobs = await super().add_jobs(specs, connection=connection)
        await self._added(connection)
        return jobs

    async def _add_one(self, spec: JobSpec, connection: Connection | None) -> Job:
        return await super()._add_one(self._timed(spec), connection)

    async def _add_many(self, specs: Iterable[JobSpec], connection: Connection | None) -> list[Job]:
        return await super()._add_many([self._timed(spec) for spec in specs], connection)

    async def reschedule_jobs(
        self, job_ids: Iterable[int], *, run_at: datetime | timedelta | str | None = None, **changes: Any
    ) -> list[Job]:
        """Change jobs."""
        if self.clock is not None and isinstance(run_at, timedelta):
            run_at = self.clock.now() + run_at
        return await super().reschedule_jobs(job_ids, run_at=run_at, **changes)

    def _timed(self, spec: JobSpec) -> JobSpec:
        if self.clock is None or not (spec.run_at is None or isinstance(spec.run_at, timedelta)):
            return spec
        return msgspec.structs.replace(spec, run_at=self.clock.now() + (spec.run_at or timedelta(0)))

    async def _added(self, connection: Connection | None) -> None:
        if self.on_added is not None and not INSIDE.get():
            await self.on_added(connection)


class using:  # noqa: N801 - used like a function
    """For a while the app, and all its tasks, add their jobs there: ``async with using(app, ...)``.

    Whatever the app was configured with is as before afterwards, and the connections that were opened
    meanwhile are closed. For code without an event loop, ``with using(app, dsn=...)`` does the same.

    Args:
        app: The app.
        dsn: Another database.
        connection: A connection of asyncpg's, often in a transaction that will be rolled back: all that the
            app does is a part of it. It runs no workers meanwhile; `drain` runs its jobs.
        clock: What time it is for its jobs.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> from graphile_worker.testing import assert_enqueued, using
        >>> app = App()
        >>> @app.task
        ... async def hello(name: str) -> None: ...
        >>> async def test():
        ...     async with using(app, dsn=dsn):
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
        self._lent: AbstractContextManager[None] | None = None

    async def __aenter__(self) -> App:
        self._clock_before = _CLOCKS.get(self._app)
        self._clock = self._clock or self._clock_before
        settings = self._app.settings
        if self._connection is not None:
            place = Place.on_connection(
                self._connection,
                settings["schema"],
                self._clock,
                use_local_time=settings["use_local_time"],
                max_payload_size=settings["max_payload_size"],
                middleware=settings["middleware"],
            )
            # No pool for a worker: it says so if somebody starts one.
            self._lent = self._app.lent(place, dsn=None, pool=place.session.pool)
        elif self._dsn is not None:
            self._opened = WorkerUtils(
                self._dsn,
                **{name: settings[name] for name in _KEPT},
            )
            place = Place.over(self._opened, self._clock)
            self._lent = self._app.lent(place, dsn=self._dsn, pool=None)
        else:
            self._lent = self._app.lent(Place.over(self._app.utils, self._clock))
        self._lent.__enter__()
        _CLOCKS[self._app] = self._clock
        return self._app

    async def __aexit__(self, *_exception: object) -> None:
        _CLOCKS[self._app] = self._clock_before
        if self._lent is not None:
            self._lent.__exit__(None, None, None)
        if self._opened is not None:
            await self._opened.close()

    def __enter__(self) -> App:
        if self._dsn is None or self._clock is not None:
            raise ConfigurationError(
                "A connection, or a clock, belongs to an event loop: use async with. Without one, pass dsn."
            )
        self._lent = self._app.lent(None, dsn=self._dsn, pool=None)
        self._lent.__enter__()
        return self._app

    def __exit__(self, *_exception: object) -> None:
        if self._lent is not None:
            self._lent.__exit__(None, None, None)

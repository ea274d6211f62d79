"""Adds the jobs of recurring tasks through middleware."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from graphile_worker._base.user_code import call_user_code
from graphile_worker._db.queries import crontabs as database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import TypeAlias

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.crontabs import DueJob, Wanted
    from graphile_worker.job import Job, JobSpec

    Add: TypeAlias = Callable[[Sequence[JobSpec]], Awaitable[Sequence[Job]]]
    EnqueueMiddleware: TypeAlias = Callable[[Sequence[JobSpec], Add], Awaitable[object]]


class SupersededError(Exception):
    """Other workers added some of the jobs while middleware ran."""

    def __init__(self) -> None:
        super().__init__("Other workers have added some of these jobs. Trying again to add the rest.")


async def add_through_middleware(
    middleware: EnqueueMiddleware, session: Session, due: Sequence[DueJob], logger: ScopedLogger
) -> list[DueJob]:
    """Add the jobs of minutes that no scheduler has recorded. Returns the jobs that middleware received.

    Middleware is the user's code and may take long, so it runs before anything is locked. If other workers
    add some of the jobs in the meantime, middleware runs again for the rest.
    """
    while True:  # each round has fewer jobs
        found = await session.call(lambda on: database.find_wanted(on, session.schema, due), attempts=1)
        if found is None:
            return []
        addition = _Addition(session, found)
        error = await addition.run(middleware)
        if addition.superseded:
            continue
        if error is not None and not addition.done:
            raise error
        if error is not None:
            logger.error(
                "Middleware failed after the jobs of recurring tasks were added: %s", error, exc_info=error
            )
        return found.wanted if addition.won else []


class _Addition:
    """One attempt to add jobs through middleware, which calls `add` when it proceeds.

    The first call of `add` adds jobs and records their minutes, in one transaction. Later calls add jobs.
    """

    def __init__(self, session: Session, found: Wanted) -> None:
        self._session = session
        self._found = found
        self._turn = asyncio.Lock()
        self._error: Exception | None = None
        self.done = False
        """Whether the minutes are recorded, by this worker or by others."""
        self.won = False
        """Whether this worker has recorded them."""
        self.superseded = False
        """Whether other workers have recorded some of the minutes, so that this attempt is void."""

    async def run(self, middleware: EnqueueMiddleware) -> Exception | None:
        """Call the middleware. Returns its error or the database's, if there was one."""
        try:
            if self._found.wanted:
                await call_user_code(middleware, [due.spec for due in self._found.wanted], self.add)
            if not (self.done or self._error or self.superseded):
                await self.add([])  # middleware skipped all jobs, and the minutes are recorded
        except Exception as error:  # noqa: BLE001 - the caller decides what it means
            return error
        return None if self.done else self._error

    async def add(self, specs: Sequence[JobSpec]) -> Sequence[Job]:
        """Add jobs, unless other workers were faster."""
        schema = self._session.schema
        async with self._turn:
            if self.superseded:
                raise SupersededError
            if not self.done:
                return await self._add_first(specs)
            if not self.won:
                return []
            return await self._session.call(lambda on: database.add(on, schema, specs), attempts=1)

    async def _add_first(self, specs: Sequence[JobSpec]) -> Sequence[Job]:
        schema, found = self._session.schema, self._found
        try:
            changed = await self._session.call(
                lambda on: database.schedule_changed(on, schema, found, specs), attempts=1
            )
        except Exception as error:
            self._error = error
            raise
        self.superseded = changed.superseded
        if changed.superseded:
            raise SupersededError
        self.done, self.won = True, changed.jobs is not None
        return changed.jobs or []

"""Adding the jobs of a crontab, with middleware around that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from graphile_worker._db import crontabs as database
from graphile_worker.user_code import call_user_code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import TypeAlias

    from graphile_worker._db.crontabs import Due, Wanted
    from graphile_worker._db.session import Session
    from graphile_worker.job import Job, JobSpec
    from graphile_worker.logs import ScopedLogger

    Add: TypeAlias = Callable[[Sequence[JobSpec]], Awaitable[Sequence[Job]]]
    Around: TypeAlias = Callable[[Sequence[JobSpec], Add], Awaitable[object]]


class SupersededError(Exception):
    """Other workers have added some of the jobs while middleware ran."""

    def __init__(self) -> None:
        super().__init__("Other workers have added some of these jobs. The rest is tried again.")


async def add_through(
    around: Around, session: Session, due: Sequence[Due], logger: ScopedLogger
) -> list[Due]:
    """Add the jobs of minutes that no scheduler has added; return those that passed the middleware.

    Middleware is the user's code and may take long, so it runs before anything is locked. If other workers
    add some of the jobs meanwhile, it is asked again about the rest.
    """
    while True:  # each time there is less to do
        found = await session.call(lambda on: database.find_wanted(on, session.schema, due), attempts=1)
        if found is None:
            return []
        adding = _Adding(session, found)
        error = await adding.run(around)
        if adding.superseded:
            continue
        if error is not None and not adding.done:
            raise error
        if error is not None:
            logger.error(
                "Middleware failed after it had added jobs of recurring tasks: %s", error, exc_info=error
            )
        return found.wanted if adding.won else []


class _Adding:
    """What the middleware around some jobs proceeds to.

    The first call adds jobs and records that these minutes are had, in one transaction. Later calls add more.
    """

    def __init__(self, session: Session, found: Wanted) -> None:
        self._session = session
        self._found = found
        self._turn = asyncio.Lock()
        self._error: Exception | None = None
        self.done = False
        """Whether it is recorded that these minutes are had, by us or by others."""
        self.won = False
        """Whether it was by us."""
        self.superseded = False

    async def run(self, around: Around) -> Exception | None:
        """Ask the middleware; return what it, or the database, failed with."""
        try:
            if self._found.wanted:
                await call_user_code(around, [due.spec for due in self._found.wanted], self.add)
            if not (self.done or self._error or self.superseded):
                await self.add([])  # it wants none of them
        except Exception as error:  # noqa: BLE001 - what it means depends on what was done before
            return error
        return None if self.done else self._error

    async def add(self, specs: Sequence[JobSpec]) -> Sequence[Job]:
        """Add these; none if other workers were faster."""
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

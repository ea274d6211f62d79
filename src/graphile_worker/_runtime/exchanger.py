"""The connection on which a worker exchanges, kept through outages.

An exchange is never timed out, and cancelled only when the worker is given up: whether it was done would not
be known, and jobs that it claimed would be locked by nobody who knows of them. If its connection is lost all
the same, nothing more is claimed until the old session is gone and what it left under our name has been read
back.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from graphile_worker._db import exchange as database
from graphile_worker._db.connect import is_open
from graphile_worker._db.failures import (
    Trouble,
    is_about_data,
    is_conflict,
    is_given_up,
    is_refusal,
    is_timeout,
    message_of,
    statement_failed,
    trouble_of,
)
from graphile_worker._db.session_settings import own_transaction
from graphile_worker._db.workers import hold_session
from graphile_worker.errors import GraphileWorkerError
from graphile_worker.wording import without_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from graphile_worker._db.connect import Connection
    from graphile_worker._db.exchange import Answer, Backend, Fetch, Held, Locked, Result, Wish
    from graphile_worker._db.session import Session

T = TypeVar("T")
_RENEW_AFTER = 3600.0
_GOODBYE = 2.0


class OutageError(Exception):
    """The database could not be asked, or did not do what it was asked; later it may."""

    def __init__(
        self, why: BaseException, *, unknown: bool, error: GraphileWorkerError | None = None
    ) -> None:
        super().__init__(without_end(message_of(why)))
        self.error = error
        """The same, for somebody who does not want to wait."""
        self.unknown = unknown
        """Whether it may have been done after all."""
        self.is_refusal = is_refusal(why)
        """Whether the server may accept a part of it."""
        self.is_conflict = is_conflict(why)
        """Whether other transactions were in the way, or a trigger says so."""
        self.is_about_data = is_about_data(why)
        """Whether a value cannot be what it is to be."""
        self.is_timeout = is_timeout(why)
        """Whether the server stopped the statement, because it took too long as a rule."""
        self.is_given_up = is_given_up(why)
        """Whether the session may not exchange any more; another one may."""


class UnderWay(NamedTuple):
    """An exchange that is under way, or about to be."""

    results: list[Result]
    wish: Wish
    sent: float
    alive: float
    """When it was sent, by the clock of our vitals."""
    answer: Awaitable[Answer]
    """A task, if it was sent before somebody waits for it."""
    careful: bool = False
    """Whether each job is recorded and claimed by itself."""


class Exchanger:
    """Asks the database, on a connection of its own."""

    def __init__(self, session: Session, worker_id: str, identifiers: Iterable[str]) -> None:
        self._session = session
        self._worker_id = worker_id
        self._identifiers = list(identifiers)
        self._tasks: dict[int, str] = {}
        self._connection: Connection | None = None
        self._backend: Backend | None = None
        self._fetch: Fetch | None = None
        self._generation = 0
        self._resources = AsyncExitStack()
        self.holds_session = False
        """Whether others can see that the connection is there."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection to ask on."""
        return self._connection is not None and is_open(self._connection)

    async def connect(self) -> Locked:
        """Connect (again), and read what the database has under our name."""
        await self.disconnect()
        schema = self._session.schema
        try:
            connection = await self._resources.enter_async_context(self._session.pool.dedicated())
            async with self._statement_on(connection):
                if self._backend is not None:
                    await database.end_backend(connection, schema, self._backend)
                self._backend = await database.identify_backend(connection, schema)
                self._tasks = await database.register_tasks(connection, schema, self._identifiers)
                self.holds_session = self._backend is not None and await hold_session(
                    connection, schema, self._worker_id
                )
            self._fetch = None
            if self._session.pool.prepared_statements:
                self._fetch = await database.prepare(connection, schema)
            async with self._statement_on(connection):
                locked = await database.read_locked(connection, schema, self._worker_id, self._tasks)
        except Exception as error:
            await self.disconnect()
            raise self._explained(error, unknown=False) from error
        self._connection, self._generation = connection, locked.generation
        return locked

    async def disconnect(self) -> None:
        """Let the connection go."""
        resources, self._resources, self._connection = self._resources, AsyncExitStack(), None
        await resources.aclose()

    def abandon(self) -> None:
        """Do not ask on this connection any more."""
        if self._connection is not None:
            self._connection.terminate()

    async def exchange(self, results: Sequence[Result], wish: Wish, *, careful: bool = False) -> Answer:
        """Record results, and claim jobs; if `careful`, then job by job."""
        return await self._ask(
            lambda on: database.exchange(
                *(on, self._session.schema, self._worker_id, results, wish, self._tasks, self._fetch),
                generation=self._generation,
                careful=careful,
            ),
            # What a trigger lacks looks like something that the schema lacks: a careful call tells.
            may_be_fatal=careful,
        )

    async def leave(self) -> None:
        """End the session: nothing is locked under our name, and nothing is to be."""
        # If it cannot be done now, it is forgotten later.
        with suppress(OutageError, GraphileWorkerError, TimeoutError):
            async with asyncio.timeout(_GOODBYE):
                await self._ask(
                    lambda on: database.end_session(
                        on, self._session.schema, self._worker_id, self._generation
                    )
                )

    async def renew(self, in_hand: Iterable[Held], now: datetime) -> None:
        """Lock anew what has been ours for an hour, before anybody takes it for forgotten."""
        longest_ago = now - timedelta(seconds=_RENEW_AFTER)
        held = list(in_hand)
        jobs = [one for one in held if one.locked_at < longest_ago]
        locks = {one.queue.id: one.queue for one in held if one.queue is not None}
        queues = [lock for lock in locks.values() if lock.locked_at < longest_ago]
        if jobs or queues:
            await self._ask(
                lambda on: database.renew(
                    *(on, self._session.schema, self._worker_id, jobs, queues), generation=self._generation
                )
            )

    async def refresh_tasks(self) -> None:
        """Read the ids of the tasks again: a cleanup may have removed a task, and somebody added it anew."""
        self._tasks = await self._ask(
            lambda on: database.register_tasks(on, self._session.schema, self._identifiers)
        )

    async def unlock_queues(self, queues: Mapping[int, datetime]) -> set[int]:
        """Release queues that no job in hand belongs to. Returns those that are still locked."""
        return await self._ask(
            lambda on: database.unlock_queues(on, self._session.schema, self._worker_id, queues)
        )

    async def _ask(self, question: Callable[[Connection], Awaitable[T]], *, may_be_fatal: bool = True) -> T:
        connection = self._connection
        if connection is None:
            raise OutageError(ConnectionError("there is no connection"), unknown=False)
        try:
            async with self._statement_on(connection):
                return await question(connection)
        except Exception as error:
            given_up = is_given_up(error)
            lost = trouble_of(error) is Trouble.LOST and not given_up
            if lost:
                if is_open(connection):
                    # What we asked may still be under way on it: nobody else may get it.
                    connection.terminate()
                await self.disconnect()
            elif given_up:
                await self.disconnect()
            raise self._explained(error, unknown=lost, may_be_fatal=may_be_fatal) from error

    def _statement_on(self, connection: Connection) -> AbstractAsyncContextManager[object]:
        if self._session.pool.prepared_statements:
            return nullcontext()
        return own_transaction(connection)  # see Pool.connection

    def _explained(self, error: Exception, *, unknown: bool, may_be_fatal: bool = True) -> Exception:
        explained = (
            error if isinstance(error, GraphileWorkerError) else statement_failed(error, self._session.schema)
        )
        if trouble_of(error) is Trouble.FATAL and (may_be_fatal or not is_refusal(error)):
            return explained
        return OutageError(error, unknown=unknown, error=explained)

"""The connection on which a worker exchanges, kept through outages.

An exchange is never cancelled or timed out: whether it was done would not be known, and jobs that it claimed
would be locked by nobody who knows of them. If its connection is lost all the same, nothing more is claimed
until the old session is gone and what it left under our name has been read back.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

from graphile_worker._db import exchange as database
from graphile_worker._db.failures import Trouble, statement_failed, trouble_of
from graphile_worker.errors import GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from graphile_worker._db.connect import Connection
    from graphile_worker._db.exchange import Backend, Held, Locked, QueueLock, Reply, Result, Wish
    from graphile_worker._db.session import Session

T = TypeVar("T")


class OutageError(Exception):
    """The database could not be asked, or did not do what it was asked; later it may."""

    def __init__(
        self, why: BaseException, *, unknown: bool, error: GraphileWorkerError | None = None
    ) -> None:
        super().__init__(str(why).rstrip(".") or type(why).__name__)
        self.error = error
        """The same, for somebody who does not want to wait."""
        self.unknown = unknown
        """Whether it may have been done after all."""


class Exchanger:
    """Asks the database, on a connection of its own."""

    def __init__(self, session: Session, worker_id: str, identifiers: Iterable[str]) -> None:
        self._session = session
        self._worker_id = worker_id
        self._identifiers = list(identifiers)
        self._tasks: dict[int, str] = {}
        self._connection: Connection | None = None
        self._backend: Backend | None = None
        self._resources = AsyncExitStack()

    @property
    def connected(self) -> bool:
        """Whether there is a connection to ask on."""
        return self._connection is not None and not self._connection.is_closed()

    async def connect(self) -> Locked:
        """Connect (again), and read what the database has under our name."""
        await self.disconnect()
        schema = self._session.schema
        try:
            connection = await self._resources.enter_async_context(self._session.pool.dedicated())
            if self._backend is not None:
                await database.end_backend(connection, schema, self._backend)
            self._backend = await database.identify_backend(connection, schema)
            self._tasks = await database.register_tasks(connection, schema, self._identifiers)
            locked = await database.read_locked(connection, schema, self._worker_id, self._tasks)
        except Exception as error:
            await self.disconnect()
            raise self._explained(error, unknown=False) from error
        self._connection = connection
        return locked

    async def disconnect(self) -> None:
        """Let the connection go."""
        resources, self._resources, self._connection = self._resources, AsyncExitStack(), None
        await resources.aclose()

    async def exchange(self, results: Sequence[Result], wish: Wish) -> Reply:
        """Record results, and claim jobs."""
        return await self._ask(
            lambda on: database.exchange(
                on, self._session.schema, self._worker_id, results, wish, self._tasks
            )
        )

    async def renew(self, jobs: Sequence[Held], queues: Sequence[QueueLock]) -> None:
        """Lock anew what we have held for long."""
        await self._ask(lambda on: database.renew(on, self._session.schema, self._worker_id, jobs, queues))

    async def refresh_tasks(self) -> None:
        """Read the ids of the tasks again: a cleanup may have removed a task, and somebody added it anew."""
        self._tasks = await self._ask(
            lambda on: database.register_tasks(on, self._session.schema, self._identifiers)
        )

    async def unlock_queues(self, queue_ids: Sequence[int]) -> None:
        """Let go of queues that no job in hand belongs to."""
        await self._ask(
            lambda on: database.unlock_queues(on, self._session.schema, self._worker_id, queue_ids)
        )

    async def _ask(self, question: Callable[[Connection], Awaitable[T]]) -> T:
        connection = self._connection
        if connection is None:
            raise OutageError(ConnectionError("there is no connection"), unknown=False)
        try:
            if self._session.pool.prepared_statements:
                return await question(connection)
            async with connection.transaction(isolation="read_committed"):  # see Pool.connection
                return await question(connection)
        except Exception as error:
            lost = trouble_of(error) is Trouble.LOST
            if lost:
                await self.disconnect()
            raise self._explained(error, unknown=lost) from error

    def _explained(self, error: Exception, *, unknown: bool) -> Exception:
        explained = (
            error if isinstance(error, GraphileWorkerError) else statement_failed(error, self._session.schema)
        )
        if trouble_of(error) is Trouble.FATAL:
            return explained
        return OutageError(error, unknown=unknown, error=explained)

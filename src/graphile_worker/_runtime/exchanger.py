"""The connections on which a worker exchanges, kept through outages.

An exchange is never cancelled or timed out: whether it was done would not be known, and jobs that it claimed
would be locked by nobody who knows of them. If its connection is lost all the same, nothing more is claimed
until the old sessions are gone and what they left under our name has been read back.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from graphile_worker._db import exchange as database
from graphile_worker._db.connect import is_open
from graphile_worker._db.failures import Trouble, statement_failed, trouble_of
from graphile_worker.errors import GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from graphile_worker._db.connect import Connection
    from graphile_worker._db.exchange import Backend, Fetch, Held, Locked, Reply, Result, Wish
    from graphile_worker._db.session import Session

T = TypeVar("T")
_RENEW_AFTER = 3600.0


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


class _Line(NamedTuple):
    """A connection, and the exchange prepared on it."""

    connection: Connection
    fetch: Fetch | None


class Exchanger:
    """Asks the database, on connections of its own.

    Args:
        session: Where the schema is.
        worker_id: Under which name jobs are locked.
        identifiers: The tasks.
        lines: How many exchanges may be under way at once.
    """

    def __init__(
        self, session: Session, worker_id: str, identifiers: Iterable[str], *, lines: int = 1
    ) -> None:
        self._session = session
        self._worker_id = worker_id
        self._identifiers = list(identifiers)
        self.lines = lines
        self._tasks: dict[int, str] = {}
        self._open: list[_Line] = []
        self._free: list[_Line] = []
        self._backends: list[Backend] = []
        self._left_behind: list[Backend] = []
        self._resources = AsyncExitStack()

    @property
    def connected(self) -> bool:
        """Whether there is a connection to ask on, and none was lost."""
        return len(self._open) == self.lines and all(is_open(line.connection) for line in self._open)

    async def connect(self) -> Locked:
        """Connect (again), and read what the database has under our name. Nothing may be under way."""
        await self.disconnect()
        schema = self._session.schema
        self._left_behind += self._backends
        self._backends = []
        try:
            lines = [await self._connect_line() for _ in range(self.lines)]
            connection = lines[0].connection
            async with self._statement_on(connection):
                self._tasks = await database.register_tasks(connection, schema, self._identifiers)
            locked = await database.read_locked(connection, schema, self._worker_id, self._tasks)
        except Exception as error:
            await self.disconnect()
            raise self._explained(error, unknown=False) from error
        self._open, self._free = lines, list(lines)
        return locked

    async def _connect_line(self) -> _Line:
        pool, schema = self._session.pool, self._session.schema
        connection = await self._resources.enter_async_context(pool.dedicated())
        async with self._statement_on(connection):
            while self._left_behind:
                await database.end_backend(connection, schema, self._left_behind[-1])
                self._left_behind.pop()
            backend = await database.identify_backend(connection, schema)
        if backend is not None:
            self._backends.append(backend)
        return _Line(
            connection, await database.prepare(connection, schema) if pool.prepared_statements else None
        )

    async def disconnect(self) -> None:
        """Let the connections go."""
        resources, self._resources = self._resources, AsyncExitStack()
        self._open, self._free = [], []
        await resources.aclose()

    async def exchange(self, results: Sequence[Result], wish: Wish) -> Reply:
        """Record results, and claim jobs."""
        return await self._ask(
            lambda on: database.exchange(
                on.connection, self._session.schema, self._worker_id, results, wish, self._tasks, on.fetch
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
                lambda on: database.renew(on.connection, self._session.schema, self._worker_id, jobs, queues)
            )

    async def refresh_tasks(self) -> None:
        """Read the ids of the tasks again: a cleanup may have removed a task, and somebody added it anew."""
        self._tasks = await self._ask(
            lambda on: database.register_tasks(on.connection, self._session.schema, self._identifiers)
        )

    async def unlock_queues(self, queue_ids: Sequence[int]) -> None:
        """Let go of queues that no job in hand belongs to."""
        await self._ask(
            lambda on: database.unlock_queues(on.connection, self._session.schema, self._worker_id, queue_ids)
        )

    async def _ask(self, question: Callable[[_Line], Awaitable[T]]) -> T:
        if not self._free:
            raise OutageError(ConnectionError("there is no connection"), unknown=False)
        line = self._free.pop()
        try:
            if line.fetch is not None:
                answer = await question(line)
            else:
                async with self._statement_on(line.connection):
                    answer = await question(line)
        except Exception as error:
            lost = trouble_of(error) is Trouble.LOST
            if not lost:
                self._free.append(line)
            elif is_open(line.connection):
                # What we asked may still be under way on it: nobody else may get it.
                line.connection.terminate()
            raise self._explained(error, unknown=lost) from error
        self._free.append(line)
        return answer

    def _statement_on(self, connection: Connection) -> AbstractAsyncContextManager[object]:
        if self._session.pool.prepared_statements:
            return nullcontext()
        return connection.transaction(isolation="read_committed")  # see Pool.connection

    def _explained(self, error: Exception, *, unknown: bool) -> Exception:
        explained = (
            error if isinstance(error, GraphileWorkerError) else statement_failed(error, self._session.schema)
        )
        if trouble_of(error) is Trouble.FATAL:
            return explained
        return OutageError(error, unknown=unknown, error=explained)

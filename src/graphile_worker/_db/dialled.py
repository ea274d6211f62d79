"""A connection of its own for a service on another event loop."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.connect import Pool, end
from graphile_worker._db.keepalive import keep_alive
from graphile_worker._db.session_settings import own_transaction
from graphile_worker.errors import ConfigurationError, GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from graphile_worker._db.connect import Connection


class DialledConnection(Pool):
    """A pool of one connection, which is opened where it is used, as another pool opens its own.

    Args:
        like: The other pool. It may belong to another event loop.
    """

    def __init__(self, like: Pool) -> None:
        super().__init__(max_size=1)
        self._like = like
        self._dialler: Callable[[], Awaitable[asyncpg.Connection]] | None = None
        self._connection: asyncpg.Connection | None = None
        self._turn = asyncio.Lock()

    async def find_out(self) -> None:
        """Learn how to connect; on the event loop of the other pool."""
        self._dialler = await self._like.dialler()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """The connection, for one piece of work."""
        async with self._turn:
            connection, self._connection = self._connection, None
            if connection is None or connection.is_closed():
                connection = await self._open_connection()
            try:
                if self._like.prepared_statements:
                    yield connection
                else:
                    async with own_transaction(connection):  # see Pool.connection
                        yield connection
            except (asyncpg.PostgresError, GraphileWorkerError):
                self._connection = connection  # the statement failed, the connection is fine
                raise
            except BaseException:
                await end(connection)  # a statement may be under way
                raise
            self._connection = connection

    async def close(self) -> None:
        """Close the connection; the next use opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await end(connection)

    async def _open_connection(self) -> asyncpg.Connection:
        if self._dialler is None:
            raise ConfigurationError("It is not known yet how to connect.")
        connection = await self._dialler()
        keep_alive(connection)
        return connection

"""A separate connection for a service on another event loop."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.connection.connect import Pool, close_connection
from graphile_worker._db.connection.keepalive import keep_alive
from graphile_worker._db.connection.session_settings import own_transaction
from graphile_worker.errors import ConfigurationError, GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from graphile_worker._db.connection.connect import Connection


class SingleConnectionPool(Pool):
    """A pool with one connection, which is opened on the event loop that uses it.

    Args:
        like: The pool whose way to connect is used. It may belong to another event loop.
    """

    def __init__(self, like: Pool) -> None:
        super().__init__(max_size=1)
        self._like = like
        self._connect_new: Callable[[], Awaitable[asyncpg.Connection]] | None = None
        self._connection: asyncpg.Connection | None = None
        self._turn = asyncio.Lock()

    async def prepare(self) -> None:
        """Find out how to connect. Call this on the event loop of the other pool."""
        self._connect_new = await self._like.connector()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Acquire the connection for own statements."""
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
                self._connection = connection  # the statement failed, but the connection is usable
                raise
            except BaseException:
                await close_connection(connection)  # a statement may still be running
                raise
            self._connection = connection

    async def close(self) -> None:
        """Close the connection; the next use opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await close_connection(connection)

    async def _open_connection(self) -> asyncpg.Connection:
        if self._connect_new is None:
            raise ConfigurationError("Cannot connect before prepare() has run.")
        connection = await self._connect_new()
        keep_alive(connection)
        return connection

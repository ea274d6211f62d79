"""From a connection string to a connection, or to a pool of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

import asyncpg

from graphile_worker._db.dsn import EMBEDDED, Target, find_dsn, parse_dsn
from graphile_worker._db.failures import connecting
from graphile_worker._db.retryable import retrying
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg.pool import PoolConnectionProxy

    Connection: TypeAlias = asyncpg.Connection | PoolConnectionProxy

_APPLICATION = {"application_name": "graphile-worker"}
_CONNECT_ATTEMPTS = 4


@asynccontextmanager
async def connect(dsn: str | None) -> AsyncIterator[asyncpg.Connection]:
    """A connection that is closed at the end; an embedded server is kept up for as long."""
    async with _server_of(find_dsn(dsn)) as server_dsn:
        target = parse_dsn(server_dsn)
        with connecting(target):
            connection = await retrying(
                lambda: asyncpg.connect(**target.arguments, server_settings=_APPLICATION),
                attempts=_CONNECT_ATTEMPTS,
            )
        try:
            yield connection
        finally:
            await connection.close()


class Pool:
    """Connections to one database, opened when they are needed and kept until it is closed.

    Lighter than the driver's pool, which spends a task and a reset on each return: as much time as adding a
    job takes. What runs on these connections is ours alone, and leaves no trace in the session.

    Args:
        dsn: The connection string; by default what the environment says.
        pool: A pool of the caller's in place of `dsn`. It is not closed here.
        max_size: How many connections at most.
        prepared_statements: Off for a PgBouncer in transaction mode.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        pool: asyncpg.Pool | None = None,
        max_size: int = 10,
        prepared_statements: bool = True,
    ) -> None:
        self._dsn = dsn
        self._given = pool
        self._max_size = max_size
        self._prepared_statements = prepared_statements
        self._slots = asyncio.Semaphore(max_size)
        self._idle: list[asyncpg.Connection] = []
        self._target: Target | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._resources = AsyncExitStack()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for one piece of work."""
        async with self._given_connection() if self._given else self._own_connection() as connection:
            if self._prepared_statements:
                yield connection
            else:
                # The driver prepares in one round trip and executes in another; only in a transaction does
                # a pooler that hands out servers by transaction keep both on the same one.
                async with connection.transaction():
                    yield connection

    async def close(self) -> None:
        """Wait for what is under way, and close what was opened here."""
        if self._closed:
            return
        self._closed = True
        for _ in range(self._max_size):
            await self._slots.acquire()
        for connection in self._idle:
            await connection.close()
        await self._resources.aclose()

    @asynccontextmanager
    async def _given_connection(self) -> AsyncIterator[Connection]:
        assert self._given is not None  # noqa: S101 - for the type checker
        with connecting(Target("the pool given", {})):
            connection = await retrying(self._given.acquire, attempts=_CONNECT_ATTEMPTS)
        try:
            yield connection
        finally:
            await self._given.release(connection)

    @asynccontextmanager
    async def _own_connection(self) -> AsyncIterator[Connection]:
        if self._closed:
            raise ConfigurationError("The connections were closed already.")
        async with self._slots:
            connection = None
            while self._idle and (connection is None or connection.is_closed()):
                connection = self._idle.pop()
            if connection is None or connection.is_closed():
                connection = await self._connect()
            try:
                yield connection
            except (asyncio.CancelledError, asyncpg.InternalClientError):
                connection.terminate()  # a statement may still be under way
                raise
            finally:
                if not connection.is_closed():
                    self._idle.append(connection)

    async def _connect(self) -> asyncpg.Connection:
        async with self._opening:
            if self._target is None:
                server = _server_of(find_dsn(self._dsn))
                self._target = parse_dsn(await self._resources.enter_async_context(server))
        target, cache_size = self._target, 100 if self._prepared_statements else 0
        with connecting(target):
            # Safe to repeat: nothing was asked of the server yet.
            return await retrying(
                lambda: asyncpg.connect(
                    **target.arguments, statement_cache_size=cache_size, server_settings=_APPLICATION
                ),
                attempts=_CONNECT_ATTEMPTS,
            )


@asynccontextmanager
async def _server_of(dsn: str) -> AsyncIterator[str]:
    """The connection string itself, or that of the embedded server that it asks for."""
    if not dsn.startswith(EMBEDDED):
        yield dsn
        return
    # Here, because it is for development alone, and not for every platform.
    from graphile_worker.embedded import EmbeddedPostgres  # noqa: PLC0415

    server = EmbeddedPostgres(dsn.removeprefix(EMBEDDED) or None)
    await asyncio.to_thread(server.start)
    try:
        yield server.dsn()
    finally:
        await asyncio.to_thread(server.close)

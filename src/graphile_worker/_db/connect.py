"""From a connection string to a connection, or to a pool of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

import asyncpg

from graphile_worker._db.dsn import EMBEDDED, Target, find_dsn, parse_dsn
from graphile_worker._db.failures import connecting
from graphile_worker._db.retryable import retrying

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
    """Connections to one database, opened when they are needed.

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
        self._max_size = max_size
        self._prepared_statements = prepared_statements
        self._pool = pool
        self._target = Target("the pool given", {})
        self._opening = asyncio.Lock()
        self._resources = AsyncExitStack()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for one piece of work."""
        pool = self._pool or await self._open()
        with connecting(self._target):
            # Safe to repeat: nothing was asked of the server yet.
            connection = await retrying(pool.acquire, attempts=_CONNECT_ATTEMPTS)
        try:
            if self._prepared_statements:
                yield connection
            else:
                # The driver prepares in one round trip and executes in another; only in a transaction does
                # a pooler that hands out servers by transaction keep both on the same one.
                async with connection.transaction():
                    yield connection
        except asyncpg.InternalClientError:
            connection.terminate()
            raise
        finally:
            await pool.release(connection)

    async def close(self) -> None:
        """Close what was opened here."""
        await self._resources.aclose()

    async def _open(self) -> asyncpg.Pool:
        async with self._opening:
            if self._pool is not None:  # somebody else opened it while we waited
                return self._pool
            server_dsn = await self._resources.enter_async_context(_server_of(find_dsn(self._dsn)))
            self._target = target = parse_dsn(server_dsn)
            with connecting(self._target):
                pool = asyncpg.create_pool(
                    **target.arguments,
                    min_size=0,
                    max_size=self._max_size,
                    statement_cache_size=100 if self._prepared_statements else 0,
                    server_settings=_APPLICATION,
                    # What we run leaves no trace in the session, and the driver's own reset is a round trip.
                    reset=_leave_as_it_is,
                )
                self._pool = await self._resources.enter_async_context(pool)
            return pool


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


async def _leave_as_it_is(_connection: object) -> None:
    pass

"""Connections that callers bring, so that what we do is a part of their transaction.

This is the one place that knows of which drivers they may be. A connection of another driver would be
wrapped here in what our statements use of asyncpg's: `fetch`, `fetchrow`, `execute`, `transaction`,
`is_in_transaction` and `get_settings`.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from graphile_worker._db.connect import Pool
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from graphile_worker._db.connect import Connection


def as_ours(connection: Any) -> Connection:
    """The caller's connection, as our statements use it.

    Refuses what is no connection: on a pool each statement would be in a transaction of its own.
    """
    if not is_connection(connection):
        raise ConfigurationError(
            f"connection= takes a connection of asyncpg's, not a {type(connection).__name__}. "
            "To use a pool, pass it as WorkerUtils(pool=...)."
        )
    return connection  # type: ignore[no-any-return]


def is_connection(given: object) -> bool:
    """Whether it is one of a driver that we know."""
    return isinstance(given, asyncpg.Connection | PoolConnectionProxy)


class OneConnection(Pool):
    """A pool of one connection, the caller's: whatever asks this pool is a part of the caller's transaction.

    Those who ask at once have it one after the other. Who has it already may ask again, as with a pool that
    has more: then they, and the tasks that they start, take turns among themselves. What fails is rolled back
    to where it began, so that the transaction can go on.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(max_size=1)
        self._connection = as_ours(connection)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """The connection."""
        outer = _TURNS.get()
        async with outer.get(self, self._turn):
            _TURNS.set(MappingProxyType({**outer, self: asyncio.Lock()}))
            try:
                async with self._savepoint():
                    yield self._connection
            finally:
                _TURNS.set(outer)

    lend = dedicated = connection

    def _savepoint(self) -> Any:
        return self._connection.transaction() if self._connection.is_in_transaction() else nullcontext()

    async def close(self) -> None:
        """It stays the caller's."""


_TURNS: ContextVar[Mapping[OneConnection, asyncio.Lock]] = ContextVar("turns", default=MappingProxyType({}))

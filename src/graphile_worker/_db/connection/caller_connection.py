"""asyncpg connections that callers pass to methods that need one, and a pool that consists of one.

Jobs are added and changed on connections from any driver: see `any_connection`.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from graphile_worker._base.checked_connection import CheckedConnection
from graphile_worker._db.connection.adapted import AdaptedConnection
from graphile_worker._db.connection.connect import Pool
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from graphile_worker._db.connection.connect import Connection


def adapt_connection(connection: Any) -> Connection:
    """Return the caller's connection, which must be from asyncpg.

    On a pool, for example, each statement would run in a transaction of its own.
    """
    if isinstance(connection, CheckedConnection):
        connection = connection.connection
    if not is_connection(connection):
        raise ConfigurationError(
            f"connection= must be an asyncpg connection here, not {type(connection).__name__}. Migrations "
            "and cleanup need their own transactions. Leave out connection=, or, to use a pool, pass it as "
            "WorkerUtils(pool=...)."
        )
    return connection  # type: ignore[no-any-return]


def is_connection(given: object) -> bool:
    """Return whether the object is an asyncpg connection."""
    return isinstance(given, asyncpg.Connection | PoolConnectionProxy | AdaptedConnection)


class CallerConnectionPool(Pool):
    """A pool with one connection, the caller's. All statements run in the caller's transaction.

    Concurrent calls use the connection one after the other. Code that holds the connection may acquire it
    again, as with a larger pool: that code and the asyncio tasks it starts then take turns among themselves.
    A failed operation is rolled back to a savepoint, so that the transaction can continue.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(max_size=1)
        self.can_spare_one = False
        self._connection = adapt_connection(connection)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Acquire the connection."""
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
        """Do nothing, because the caller closes the connection."""


_TURNS: ContextVar[Mapping[CallerConnectionPool, asyncio.Lock]] = ContextVar(
    "turns", default=MappingProxyType({})
)

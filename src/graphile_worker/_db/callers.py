"""Connections that callers bring, so that what we do is a part of their transaction.

This is the one place that knows of which drivers they may be. A connection of another driver would be
wrapped here in what our statements use of asyncpg's: `fetch`, `fetchrow`, `execute`, `transaction`,
`is_in_transaction` and `get_settings`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from graphile_worker._db.connect import Pool
from graphile_worker.errors import AutocommitWarning, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from graphile_worker._db.connect import Connection

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


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


def warn_of_autocommit(connection: Any) -> None:
    """Warn if what is added on the caller's connection is committed at once, at the caller's line.

    Whatever else is wrong with the connection, the statement itself reports.
    """
    try:
        if not is_connection(connection) or connection.is_in_transaction():
            return
    except asyncpg.InterfaceError:  # released to its pool already
        return
    warnings.warn(
        "connection= is not in a transaction, so the job is committed at once, and stays if what follows "
        "fails. Add it inside of `async with connection.transaction():`. If the commit is intended, leave "
        "connection= out, or ignore graphile_worker.errors.AutocommitWarning.",
        AutocommitWarning,
        stacklevel=_level_of_caller(),
    )


def _level_of_caller() -> int:
    """Return the stack level, seen from the function that calls this, of the first frame outside of us."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001 - skip_file_prefixes needs Python 3.12
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


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

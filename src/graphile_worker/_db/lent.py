"""Connections that user code has held, made as they were before it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg

from graphile_worker._db.sql import read_statements

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    from graphile_worker._db.pool_usage import Loan
    from graphile_worker.logs import AnyLogger

_FILE = "lent.sql"


class LentConnection(asyncpg.Connection):
    """A connection whose `reset` also undoes what the driver's leaves: roles, temporary tables, sequences."""

    def get_reset_query(self) -> str:
        """Return what `reset` sends, in one round trip."""
        return read_statements(_FILE)["reset"]


async def reset(connection: asyncpg.Connection, loan: Loan, logger: AnyLogger, seconds: float) -> None:
    """Make a connection of our own as it was when it was opened. If this fails, it must be closed."""
    await _roll_back(connection, loan, logger, seconds)
    await connection.reset(timeout=seconds)


async def read_identity(pool: asyncpg.Pool, connection: PoolConnectionProxy) -> tuple[Any, ...] | None:
    """Read as whom a session of a caller's pool acts, before user code gets it.

    It is None, and not read, if the pool has no function of the caller's that may have set a role.
    """
    # The driver has no public way to ask for these functions.
    if getattr(pool, "_init", None) is None and getattr(pool, "_setup", None) is None:
        return None
    return tuple(await connection.fetchrow(read_statements(_FILE)["read_identity"]) or ())


async def reset_given(
    pool: asyncpg.Pool,
    connection: PoolConnectionProxy,
    before: tuple[Any, ...] | None,
    loan: Loan,
    logger: AnyLogger,
    seconds: float,
) -> None:
    """Undo what a caller's pool does not undo itself. If this fails, the connection must be closed."""
    await _roll_back(connection, loan, logger, seconds)
    if before is None:
        await connection.execute(read_statements(_FILE)["reset_identity"], timeout=seconds)
        return
    async with asyncio.timeout(seconds):
        if await read_identity(pool, connection) != before:
            raise _RoleChangedError


class _RoleChangedError(Exception):
    """User code has left another role than it found."""


async def _roll_back(connection: Any, loan: Loan, logger: AnyLogger, seconds: float) -> None:
    if connection.is_in_transaction():
        logger.warning(
            "A transaction was left open on a connection held by %s; it is rolled back. Use `async with "
            "connection.transaction()`",
            loan,
        )
        await connection.execute(read_statements(_FILE)["roll_back"], timeout=seconds)
        # Otherwise the driver reports the transaction object that user code has left, on the event loop.
        (getattr(connection, "_con", None) or connection)._top_xact = None  # noqa: SLF001

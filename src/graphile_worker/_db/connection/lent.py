"""Reset connections after user code has held them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg

from graphile_worker._db.sql_files import read_statements

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    from graphile_worker._base.logs import AnyLogger
    from graphile_worker._db.connection.pool_usage import Loan

_FILE = "lent.sql"


class LentConnection(asyncpg.Connection):
    """A connection whose `reset` also undoes roles, temporary tables and sequences, which asyncpg leaves."""

    def get_reset_query(self) -> str:
        """Return the statements that `reset` sends, in one round trip."""
        return read_statements(_FILE)["reset"]


async def reset(connection: asyncpg.Connection, loan: Loan, logger: AnyLogger, seconds: float) -> None:
    """Reset a connection that the pool opened. If this fails, the caller must close the connection."""
    await _roll_back(connection, loan, logger, seconds)
    await connection.reset(timeout=seconds)


async def read_identity(pool: asyncpg.Pool, connection: PoolConnectionProxy) -> tuple[Any, ...] | None:
    """Read the role of a session from the caller's pool, before user code gets it.

    Returns None without reading it if the pool has no `init` or `setup` function that may have set a role.
    """
    # The driver has no public way to get these functions.
    if getattr(pool, "_init", None) is None and getattr(pool, "_setup", None) is None:
        return None
    return tuple(await connection.fetchrow(read_statements(_FILE)["read_identity"]) or ())


async def reset_for_caller(
    pool: asyncpg.Pool,
    connection: PoolConnectionProxy,
    before: tuple[Any, ...] | None,
    loan: Loan,
    logger: AnyLogger,
    seconds: float,
) -> None:
    """Undo what the caller's pool does not undo. If this fails, the caller must close the connection."""
    await _roll_back(connection, loan, logger, seconds)
    if before is None:
        await connection.execute(read_statements(_FILE)["reset_identity"], timeout=seconds)
        return
    async with asyncio.timeout(seconds):
        if await read_identity(pool, connection) != before:
            raise _RoleChangedError


class _RoleChangedError(Exception):
    """User code left the session with another role, or with temporary tables."""


async def _roll_back(connection: Any, loan: Loan, logger: AnyLogger, seconds: float) -> None:
    if connection.is_in_transaction():
        logger.warning(
            "Rolling back a transaction that was left open on a connection held by %s. Use `async with "
            "connection.transaction()`",
            loan,
        )
        await connection.execute(read_statements(_FILE)["roll_back"], timeout=seconds)
        # Otherwise the driver would report the abandoned transaction object to the event loop.
        (getattr(connection, "_con", None) or connection)._top_xact = None  # noqa: SLF001

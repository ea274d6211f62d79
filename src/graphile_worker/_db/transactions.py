"""Transactions that cannot stand still for long.

A worker may freeze between two statements, or be cut off. Its transaction would keep its locks until the
server notices that the connection is dead, which takes hours; behind PgBouncer it may never notice. So each
transaction of ours begins with a limit, after which the server rolls it back. Callers' transactions stay as
they are.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from asyncpg.transaction import Transaction, TransactionState

from graphile_worker._db.sql import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker._db.connect import Connection

SHORT = 10.0
"""Seconds for which a transaction may stand still. Only our own code is between its statements."""
COMPUTING = 60.0
"""The same, where many jobs are encoded between statements."""
STREAMING = 900.0
"""The same, where an iterator of the caller says what comes next."""
_FILE = "transactions.sql"


class _LimitedTransaction(Transaction):
    """A transaction of asyncpg that sets its limit with BEGIN, in one round trip."""

    __slots__ = ("_begins_with", "_on", "idle")

    def __init__(self, connection: Any, *, idle: float, isolated: bool) -> None:
        super().__init__(connection, "read_committed" if isolated else None, readonly=False, deferrable=False)
        self.idle = idle
        self._begins_with = _limited("begin_read_committed" if isolated else "begin", idle)
        self._on = connection

    async def start(self) -> None:
        self._on._top_xact = self  # noqa: SLF001 - as the driver does it
        try:
            await self._on.execute(self._begins_with)
        except BaseException:
            self._state = TransactionState.FAILED
            raise
        self._state = TransactionState.STARTED


@asynccontextmanager
async def transaction(
    connection: Connection, *, idle: float | None = None, isolated: bool = False
) -> AsyncIterator[None]:
    """A transaction that the server ends if it stands still for so long; inside of another, a part of it.

    Args:
        connection: Where it is.
        idle: Seconds for which it may stand still, by default `SHORT`. The caller's is not limited; one of ours that it is a part
            of may stand still for longer, if this says so.
        isolated: Whether each statement sees what was committed before it, whatever the session's default is.
    """
    idle = SHORT if idle is None else idle
    if connection.is_in_transaction():
        outer: Any = getattr(connection, "_top_xact", None)  # the driver has no other way to ask
        if isinstance(outer, _LimitedTransaction) and outer.idle < idle:
            await connection.execute(_limited("limit_idleness", idle))
            outer.idle = idle
        own: Any = connection.transaction()
    else:
        real = getattr(connection, "_con", connection)  # what a pool of the driver's lends is a proxy
        own = _LimitedTransaction(real, idle=idle, isolated=isolated)
    async with own:
        yield


def _limited(statement: str, seconds: float) -> str:
    return read_statements(_FILE)[statement].replace("{milliseconds}", str(round(seconds * 1000)))

"""Transactions that cannot stand still for long.

A worker may freeze between two statements, or be cut off. Its transaction would keep its locks until the
server notices that the connection is dead, which takes hours; behind PgBouncer it may never notice. So each
of our transactions begins with a limit, after which the server rolls it back. Callers' transactions stay as
they are.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.transaction import Transaction, TransactionState

from graphile_worker._db.sql import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from graphile_worker._db.connect import Connection

SHORT = 10.0
"""Seconds for which a transaction may stand still. Only our own code is between its statements."""
COMPUTING = 60.0
"""The same, where many jobs are encoded between statements."""
STREAMING = 900.0
"""The same, where an iterator of the caller says what comes next."""
DURATION = 60.0
"""Seconds after which a transaction ends whose locks stop other workers; from PostgreSQL 17 on."""
_FILE = "transactions.sql"
_KNOWS_DURATION = 17


class _LimitedTransaction(Transaction):
    """A transaction of asyncpg that sets its limits with BEGIN, in one round trip."""

    __slots__ = ("_begins_with", "_on", "idle")

    def __init__(
        self, connection: Any, idle: float, duration: float | None, *, isolated: bool, settings: str
    ) -> None:
        super().__init__(connection, "read_committed" if isolated else None, readonly=False, deferrable=False)
        begin = read_statements(_FILE)["begin_read_committed" if isolated else "begin"]
        first = [begin, settings] if settings else [begin]
        self._begins_with = "; ".join([*first, *_limits(connection, idle, duration)])
        self._on = connection
        self.idle = idle

    async def start(self) -> None:
        self._on._top_xact = self  # noqa: SLF001 - as the driver does it
        try:
            await self._on.execute(self._begins_with)
        except BaseException as error:
            self._state = TransactionState.FAILED
            self._on._top_xact = None  # noqa: SLF001
            # It may have begun, and a setting was refused. Or the server ended the session.
            if isinstance(error, asyncpg.PostgresError) and not self._on.is_closed():
                await self._on.execute(read_statements(_FILE)["roll_back"])
            raise
        self._state = TransactionState.STARTED


@asynccontextmanager
async def transaction(
    connection: Connection,
    *,
    idle: float | None = None,
    duration: float | None = None,
    isolated: bool = False,
    settings: str = "",
) -> AsyncIterator[None]:
    """A transaction that the server ends if it stands still for so long; inside of another, a part of it.

    Inside of one of our transactions it changes the limits of that. A caller's transaction gets no limits.

    Args:
        connection: Where it is.
        idle: Seconds for which it may stand still, by default `SHORT`.
        duration: Seconds after which it ends in any case, if the server is new enough to do that.
        isolated: Whether each statement sees what was committed before it, whatever the session's default is.
        settings: Statements that set what is to hold in it, sent with BEGIN.
    """
    idle = SHORT if idle is None else idle
    if connection.is_in_transaction():
        outer: Any = getattr(connection, "_top_xact", None)  # the driver has no other way to ask
        if isinstance(outer, _LimitedTransaction) and (outer.idle < idle or duration is not None):
            outer.idle = max(outer.idle, idle)
            await connection.execute("; ".join(_limits(connection, outer.idle, duration)))
        own: Any = connection.transaction()
    else:
        real = getattr(connection, "_con", connection)  # what a pool of the driver's lends is a proxy
        own = _LimitedTransaction(real, idle, duration, isolated=isolated, settings=settings)
    async with own:
        yield


async def prepare(connection: Connection, statements: Iterable[str]) -> None:
    """Have the driver prepare statements before a transaction begins, and keep them for it.

    In the transaction each is one round trip then, and between two of them the server is idle. Otherwise the
    limit on idleness does not hold for a worker that freezes between preparing a statement and executing it.
    """
    real: Any = getattr(connection, "_con", connection)
    if not connection.is_in_transaction() and getattr(real, "_stmt_cache_enabled", False):
        for statement in statements:
            await real._get_statement(statement, None)  # noqa: SLF001 - in public it prepares for one use


def _limits(connection: Any, idle: float, duration: float | None) -> list[str]:
    limits = {"limit_idleness": idle}
    if duration is not None and connection.get_server_version().major >= _KNOWS_DURATION:
        limits["limit_duration"] = duration
    return [
        read_statements(_FILE)[name].replace("{milliseconds}", str(round(seconds * 1000)))
        for name, seconds in limits.items()
    ]

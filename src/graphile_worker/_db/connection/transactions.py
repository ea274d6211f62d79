"""Transactions that cannot stay idle for long.

A worker may freeze between two statements, or lose its network. Its transaction would keep its locks until
the server notices that the connection is dead. That takes hours, and behind PgBouncer it may never happen. So
each of the library's transactions starts with a limit, after which the server rolls it back. Callers'
transactions are not changed.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.transaction import Transaction, TransactionState

from graphile_worker._db.connection.error_mapping import ErrorKind, classify_error
from graphile_worker._db.sql_files import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from graphile_worker._db.connection.connect import Connection

SHORT = 10.0
"""Seconds that a transaction may be idle, if only the library's code runs between its statements."""
COMPUTING = 60.0
"""Seconds that it may be idle, if many jobs are encoded between statements."""
STREAMING = 900.0
"""Seconds that it may be idle, if the caller's iterator supplies the next jobs."""
DURATION = 60.0
"""Seconds after which a transaction ends if its locks block other workers; needs PostgreSQL 17."""
COMMIT_LIMIT = 5.0
"""Seconds that a COMMIT may still take after its caller was cancelled."""
_FILE = "transactions.sql"
_FIRST_WITH_TRANSACTION_TIMEOUT = 17


class _LimitedTransaction(Transaction):
    """An asyncpg transaction that sets its limits together with BEGIN, in one round trip."""

    __slots__ = ("_begin", "_on", "idle")

    def __init__(
        self, connection: Any, idle: float, duration: float | None, *, isolated: bool, settings: str
    ) -> None:
        super().__init__(connection, "read_committed" if isolated else None, readonly=False, deferrable=False)
        begin = read_statements(_FILE)["begin_read_committed" if isolated else "begin"]
        first = [begin, settings] if settings else [begin]
        self._begin = "; ".join([*first, *_limits(connection, idle, duration)])
        self._on = connection
        self.idle = idle

    async def start(self) -> None:
        self._on._top_xact = self  # noqa: SLF001 - the driver does the same
        try:
            await self._on.execute(self._begin)
        except BaseException as error:
            self._state = TransactionState.FAILED
            self._on._top_xact = None  # noqa: SLF001
            # The transaction may have begun before a setting was rejected. Or the server ended the session.
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
    prepare: Iterable[str] = (),
) -> AsyncIterator[None]:
    """Open a transaction that the server ends if it is idle for too long.

    Inside another transaction it is a savepoint. If the library opened that transaction, its limits are
    adjusted; a caller's transaction gets no limits, and nothing is prepared.

    Args:
        connection: The connection to use.
        idle: Seconds that the transaction may be idle, by default `SHORT`.
        duration: Seconds after which the transaction ends in any case, if the server supports that.
        isolated: Whether to use the isolation level read committed, whatever the session's default is.
        settings: Statements with settings for the transaction, sent together with BEGIN.
        prepare: The statements with parameters or results that the transaction executes. They are prepared
            before BEGIN. In the transaction, each of them then takes one round trip, and between two of them
            the session counts as idle. Otherwise the idle limit would not apply to a worker that freezes
            between preparing a statement and executing it. Behind a pooler in transaction mode, nothing can
            be prepared.
    """
    idle = SHORT if idle is None else idle
    if connection.is_in_transaction():
        outer: Any = getattr(connection, "_top_xact", None)  # the driver has no public way to get it
        if isinstance(outer, _LimitedTransaction) and (outer.idle < idle or duration is not None):
            outer.idle = max(outer.idle, idle)
            await connection.execute("; ".join(_limits(connection, outer.idle, duration)))
        own: Any = connection.transaction()
    else:
        real = getattr(connection, "_con", connection)  # a connection from an asyncpg pool is a proxy
        await _prepare(real, prepare)
        own = _LimitedTransaction(real, idle, duration, isolated=isolated, settings=settings)
    async with own:
        yield


class UnknownCommitError(Exception):
    """The connection was lost during COMMIT, so the transaction may be committed or rolled back."""


@asynccontextmanager
async def uncommitted(connection: Connection) -> AsyncIterator[Transaction]:
    """Open a transaction, or a savepoint, without limits. The caller commits it; an error rolls it back."""
    own: Any = connection.transaction()
    await own.start()
    try:
        yield own
    except BaseException:
        # A lost connection needs no rollback. If the rollback fails, the pool closes the connection.
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            if own._state is TransactionState.STARTED and not connection.is_closed():  # noqa: SLF001
                await own.rollback()
        raise


async def commit(connection: Connection, own: Transaction) -> asyncio.CancelledError | None:
    """Commit the transaction, even if this call is cancelled meanwhile.

    Otherwise a cancellation, for example by a timeout, would leave it unknown whether it is committed.

    Returns:
        The cancellation that arrived meanwhile. The caller raises it again.

    Raises:
        UnknownCommitError: The connection was lost.
    """
    committing = asyncio.create_task(own.commit())
    cancelled: asyncio.CancelledError | None = None
    while not committing.done():
        try:
            done, _ = await asyncio.wait([committing], timeout=None if cancelled is None else COMMIT_LIMIT)
        except asyncio.CancelledError as cancellation:
            cancelled = cancellation
            continue
        if not done:
            connection.terminate()
    failure = asyncio.CancelledError() if committing.cancelled() else committing.exception()
    if failure is None:
        return cancelled
    if cancelled is not None:
        raise cancelled
    if classify_error(failure) is ErrorKind.LOST:
        raise UnknownCommitError from failure
    raise failure


async def _prepare(connection: Any, statements: Iterable[str]) -> None:
    if getattr(connection, "_stmt_cache_enabled", False):
        for statement in statements:
            # The public method does not put the statement into the cache.
            await connection._get_statement(statement, None)  # noqa: SLF001


def _limits(connection: Any, idle: float, duration: float | None) -> list[str]:
    limits = {"limit_idleness": idle}
    if duration is not None and connection.get_server_version().major >= _FIRST_WITH_TRANSACTION_TIMEOUT:
        limits["limit_duration"] = duration
    return [
        read_statements(_FILE)[name].replace("{milliseconds}", str(round(seconds * 1000)))
        for name, seconds in limits.items()
    ]

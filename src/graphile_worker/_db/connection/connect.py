"""Open single connections, and pools of connections."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import asyncpg

from graphile_worker._base.text import pluralize
from graphile_worker._db.connection.array_types import register_array_types
from graphile_worker._db.connection.dsn import EMBEDDED, Target, find_dsn, parse_dsn
from graphile_worker._db.connection.error_mapping import translate_connect_errors
from graphile_worker._db.connection.keepalive import keep_alive
from graphile_worker._db.connection.lanes import RESERVE, Lanes, divide_pool
from graphile_worker._db.connection.lent import LentConnection, read_identity, reset, reset_for_caller
from graphile_worker._db.connection.pool_usage import Congestion, PoolUsage
from graphile_worker._db.connection.retryable import retrying
from graphile_worker._db.connection.servers import Server
from graphile_worker._db.connection.session_settings import (
    is_refusal,
    own_transaction,
    set_for_session,
    startup_settings,
)
from graphile_worker._db.connection.transactions import transaction
from graphile_worker.errors import ConfigurationError, GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from asyncpg.pool import PoolConnectionProxy

    from graphile_worker._base.logs import AnyLogger
    from graphile_worker._db.connection.lanes import Lane
    from graphile_worker._db.connection.pool_usage import Loan

    Connection: TypeAlias = asyncpg.Connection | PoolConnectionProxy

_CONNECT_ATTEMPTS = 4
_CLOSE_TIMEOUT = 5.0
_ACQUIRE_TIMEOUT = 30.0
_MAX_IDLE = 300.0
"""How many connections are reserved for own statements, so that user code cannot take them all."""
_LOAN_LIMIT = 5.0
"""Seconds that `close` waits for user code to return its connections."""
_STATEMENT_LIMIT = 60.0
"""Seconds that `close` waits for own statements. Adding a million jobs is one statement."""


def read_committed(
    connection: Connection, *, duration: float | None = None, prepare: Iterable[str] = ()
) -> AbstractAsyncContextManager[object]:
    """Open a transaction in which each statement sees what was committed before it.

    Inside another transaction it is a savepoint. See `transaction` for the arguments.
    """
    return transaction(connection, duration=duration, isolated=True, prepare=prepare)


def is_utf8(connection: Connection) -> bool:
    """Return whether the database can store every character."""
    return bool(connection.get_settings().server_encoding.upper() == "UTF8")


def is_open(connection: Connection) -> bool:
    """Return whether the connection can still be used."""
    try:
        return not connection.is_closed()
    except asyncpg.InterfaceError:  # the caller's pool has taken back a dead connection
        return False


@asynccontextmanager
async def connect(dsn: str | None) -> AsyncIterator[asyncpg.Connection]:
    """Open a connection, and close it at the end. An embedded server runs at least as long.

    A pooler may reject the session settings, so statements on this connection must qualify all names.
    """
    async with Server(find_dsn(dsn)) as server_dsn:
        target = parse_dsn(server_dsn)

        async def open_connection() -> asyncpg.Connection:
            try:
                return await asyncpg.connect(**target.arguments, server_settings=startup_settings(own=True))
            except asyncpg.ProtocolViolationError as error:
                if not is_refusal(error):
                    raise
            return await asyncpg.connect(**target.arguments, server_settings=startup_settings(own=False))

        with translate_connect_errors(target):
            connection = await retrying(open_connection, attempts=_CONNECT_ATTEMPTS)
        register_array_types(connection)
        try:
            yield connection
        finally:
            await connection.close()


class _Idle(NamedTuple):
    connection: asyncpg.Connection
    since: float


class Pool:
    """Connections to one database, opened when they are needed and kept until the pool is closed.

    It is lighter than asyncpg's pool, which spends an asyncio task and a reset on each release: as much time
    as adding a job takes. `connection` is for own statements, which leave no trace in the session; `lend` is
    for user code. They never share sessions, and user code cannot take all connections: see `lanes`.

    Args:
        dsn: The connection string; by default the one from the environment.
        pool: The caller's pool, to use instead of `dsn`. It is never closed here.
        max_size: The maximum number of connections, not counting dedicated ones and the reserve for own
            statements.
        prepared_statements: Off for a PgBouncer in transaction mode.
        dedicated: How many connections of `pool` to keep for `dedicated`.
        timeout: How long to wait for a connection, in seconds; None for no limit.
        logger: Where to warn about connections that are held for long.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        pool: asyncpg.Pool | None = None,
        max_size: int = 10,
        prepared_statements: bool = True,
        dedicated: int = 0,
        timeout: float | None = None,
        logger: AnyLogger | None = None,
    ) -> None:
        # The type is checked first, because `in` compares a value that is not an int with every number in the
        # range.
        if type(max_size) is not int or max_size not in range(1, 2**31):
            raise ConfigurationError(f"Invalid max_pool_size {max_size!r}: must be an integer, at least 1.")
        if pool is not None and not isinstance(pool, asyncpg.Pool):
            if isinstance(pool, Pool):  # a test has replaced the app's pool with one connection
                raise ConfigurationError(
                    "graphile_worker.testing.override has put the app on one connection, and a worker needs "
                    "more. Run the jobs with drain or inline."
                )
            raise ConfigurationError(f"pool= must be an asyncpg pool, not {type(pool).__name__}.")
        reserve = min(RESERVE, max_size)
        if pool is not None:
            max_size, reserve = divide_pool(pool.get_max_size(), dedicated)
        if dsn is not None and not find_dsn(dsn).startswith(EMBEDDED):
            parse_dsn(dsn)  # reports an invalid connection string early
        self._dsn = dsn
        self._caller_pool = pool
        # With its own reset function, the caller's pool may not undo the session settings, and user code
        # would get them.
        self.prepared_statements = prepared_statements and getattr(pool, "_reset", None) is None
        self.is_own = pool is None
        """Whether this pool opens its connections itself, so that no other code uses them."""
        self.can_spare_one = pool is None or max_size > RESERVE
        """Whether a connection can be kept for notifications that only save time."""
        """Whether statements are prepared and sessions are not shared; False once a pooler is detected."""
        self.has_one_host = False
        """Whether there is only one server to try; set by `connector`."""
        self._timeout = timeout
        self._logger: AnyLogger = logger or logging.getLogger("graphile_worker")
        self._lanes: Lanes[_Idle] = Lanes(max_size, reserve)
        self._usage = PoolUsage(max_size, self._logger)
        self._busy: set[asyncpg.Connection] = set()
        """The connections that run an own statement now."""
        self._ending: set[asyncio.Task[None]] = set()
        self._released = asyncio.Event()
        self._target: Target | None = None
        self._opening = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Task[None] | None = None
        self._resources = AsyncExitStack()

    @property
    def server(self) -> tuple[str | None, int | None]:
        """The host and the port of the server; each None if it is not known, or not yet."""
        return (None, None) if self._target is None else self._target.server

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Acquire a connection for own statements."""
        self._check_usable()
        # The driver prepares in one round trip and executes in another. A pooler in transaction mode keeps
        # both, and the session settings, on the same server only inside a transaction.
        async with (
            self._caller_connection() if self._caller_pool else self._own_connection() as connection,
            nullcontext() if await self._ensure_settings(connection) else own_transaction(connection),
        ):
            yield connection

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Connection]:
        """Lend a connection to user code, which may change its session and hold it for long."""
        self._check_usable()
        lane = self._lanes.lent
        await self._acquire_place(lane)
        loan, before = self._usage.lend(), None
        try:
            if self._caller_pool is None:
                loan.connection = self._pick_idle(lane) or await self._connect(lane)
            else:
                loan.connection = borrowed = await self._acquire(self._caller_pool)
                before = await read_identity(self._caller_pool, borrowed)
            _check_open(lane)
            yield loan.connection
        finally:
            # In a separate task, so that the connection is reset even if this call is cancelled here.
            returning = asyncio.create_task(self._reclaim(loan, before))
            self._ending.add(returning)
            returning.add_done_callback(partial(self._ended, lane, loan))
            if self._caller_pool is not None:  # the caller may close the pool next
                await asyncio.shield(returning)

    @asynccontextmanager
    async def dedicated(self) -> AsyncIterator[Connection]:
        """Acquire a connection that does not count towards the limits of `connection` and `lend`."""
        self._check_usable()
        if self._caller_pool is None:
            own = await self._connect()
            try:
                yield own
            finally:
                await close_connection(own)
            return
        with translate_connect_errors(Target("the caller's pool", {})):
            if self._caller_pool.is_closing():
                raise ConfigurationError(
                    "The pool passed as pool= was closed while the worker was using it. Stop the worker "
                    "before you close its pool."
                )
            borrowed = await self._caller_pool.acquire(timeout=_ACQUIRE_TIMEOUT)
        try:
            await self._ensure_settings(borrowed)
            yield borrowed
        finally:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await self._caller_pool.release(borrowed)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                if is_open(borrowed):
                    borrowed.terminate()

    async def connector(self) -> Callable[[], Awaitable[asyncpg.Connection]]:
        """Return a function that opens connections like the pool does, on any event loop.

        The caller must close these connections. They are not counted here.
        """
        self._check_usable()
        if self._caller_pool is None:
            target = await self._open()
            self.has_one_host = not target.has_several_hosts
            return partial(self._connect_to, target)
        pool = self._caller_pool
        # The driver has no public way to find out how its pool connects.
        known: dict[str, Any] = {
            name: getattr(pool, f"_{name}")
            for name in (
                *("connect", "connect_args", "connect_kwargs", "connection_class", "record_class"),
                *("init", "setup"),
            )
        }

        async def open_connection() -> asyncpg.Connection:
            connection: asyncpg.Connection = await known["connect"](
                *known["connect_args"],
                loop=asyncio.get_running_loop(),
                connection_class=known["connection_class"],
                record_class=known["record_class"],
                **known["connect_kwargs"],
            )
            try:
                for prepare in (known["init"], known["setup"]):
                    if prepare is not None:
                        await prepare(connection)
                await self._ensure_settings(connection)
            except BaseException:
                connection.terminate()
                raise
            return connection

        return open_connection

    async def close(self) -> None:
        """Wait for running calls, then close the connections that the pool opened. May be called again."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        # A caller that is cancelled here does not stop the closing.
        await asyncio.shield(self._closing)

    @property
    def congestion(self) -> Congestion | None:
        """The calls that have waited too long for a connection. May be read from any thread."""
        return self._usage.congestion()

    @property
    def is_closing(self) -> bool:
        """Whether the pool is closed or closing, and accepts no more calls."""
        return self._closing is not None

    def _check_usable(self) -> None:
        if self._closing is not None:
            raise _closed_error()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        # asyncpg does not check this. Its pool would then no longer work on its own loop either.
        if self._caller_pool is not None and getattr(self._caller_pool, "_loop", loop) is not loop:
            raise ConfigurationError(
                "The pool passed as pool= belongs to another event loop. For code on several event loops, or "
                "without one, pass a dsn instead of a pool."
            )
        if self._loop is not loop:
            raise ConfigurationError(
                "These connections belong to another event loop. Create a WorkerUtils for each loop; in a "
                "task that is a plain function, use ctx.run_sync(...)."
            )

    async def _close(self) -> None:
        try:
            await asyncio.gather(self._end_loans(), self._end_statements())
            await asyncio.gather(*(close_connection(idle.connection) for idle in self._lanes.clear()))
        finally:
            await self._resources.aclose()

    async def _end_loans(self) -> None:
        if await self._close_lane(self._lanes.lent, _LOAN_LIMIT):
            return
        loans = list(self._usage.loans)
        for loan in loans:
            what = "Closing it" if self._caller_pool is None else "It stays open in the caller's pool"
            self._logger.warning("The pool is closing, but a connection is still held by %s. %s", loan, what)
        if self._caller_pool is None:
            await asyncio.gather(
                *(close_connection(loan.connection) for loan in loans if loan.connection is not None)
            )

    async def _end_statements(self) -> None:
        if await self._close_lane(self._lanes.own, _STATEMENT_LIMIT):
            return
        self._logger.warning(
            "The pool is closing, but %s not finished within %.0f s",
            pluralize(self._lanes.own.used, "statement has", "statements have"),
            _STATEMENT_LIMIT,
        )
        await asyncio.gather(*(close_connection(connection) for connection in list(self._busy)))

    async def _close_lane(self, lane: Lane[_Idle], limit: float) -> bool:
        """Wait until the lane is idle, and close it; return whether it was idle within the limit.

        Calls that still wait for a connection are woken and fail.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while not lane.is_quiet:
                    self._released.clear()
                    await self._released.wait()
                lane.is_closed = True
                return True
        lane.is_closed = True
        while lane.waiting:
            lane.waiting.popleft().wake()  # without a place
        return False

    async def _acquire_place(self, lane: Lane[_Idle]) -> None:
        """Wait until the lane has a place for another call."""
        if self._lanes.take(lane):
            return
        woken = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not woken.done():  # it may have been cancelled
                woken.set_result(None)

        ticket = self._lanes.queue(lane, wake)
        try:
            with self._usage.waiting():
                # Not wait_for, because before Python 3.12 it may swallow the cancellation of this call.
                async with asyncio.timeout(self._timeout):
                    await woken
        except BaseException as error:
            self._lanes.leave(ticket)
            self._released.set()
            if isinstance(error, TimeoutError) and self._timeout is not None:
                raise self._usage.timeout_error(self._timeout) from None
            raise
        if not ticket.granted:
            raise _closed_error()

    def _release_place(self, lane: Lane[_Idle]) -> None:
        self._lanes.release(lane)
        self._released.set()

    async def _acquire(self, pool: asyncpg.Pool) -> PoolConnectionProxy:
        """Acquire a connection from the caller's pool. Other code may hold all of them."""
        with translate_connect_errors(Target("the caller's pool", {})):
            if pool.get_idle_size() or pool.get_size() < pool.get_max_size():
                return await retrying(pool.acquire, attempts=_CONNECT_ATTEMPTS)
        try:
            with self._usage.waiting():
                async with asyncio.timeout(self._timeout):
                    with translate_connect_errors(Target("the caller's pool", {})):
                        return await retrying(pool.acquire, attempts=_CONNECT_ATTEMPTS)
        except TimeoutError:
            if self._timeout is None:
                raise
            raise self._usage.timeout_error(self._timeout) from None

    @asynccontextmanager
    async def _caller_connection(self) -> AsyncIterator[Connection]:
        assert self._caller_pool is not None  # noqa: S101 - for the type checker
        lane = self._lanes.own
        await self._acquire_place(lane)
        try:
            connection = await self._acquire(self._caller_pool)
            try:
                yield connection
            finally:
                await self._caller_pool.release(connection)
        finally:
            self._release_place(lane)

    @asynccontextmanager
    async def _own_connection(self) -> AsyncIterator[Connection]:
        lane = self._lanes.own
        await self._acquire_place(lane)
        connection = None
        try:
            connection = self._pick_idle(lane) or await self._connect(lane)
            _check_open(lane)
            self._busy.add(connection)
            yield connection
        except (asyncpg.PostgresError, GraphileWorkerError):
            self._return(connection)  # the statement failed, but the connection is usable
            raise
        except BaseException:
            # A statement may still be running. The place stays taken until the server has been told to cancel
            # it.
            if connection is None:
                self._release_place(lane)
            else:
                ending = asyncio.create_task(close_connection(connection))
                self._ending.add(ending)
                ending.add_done_callback(partial(self._ended, lane, None))
            raise
        else:
            self._return(connection)
        finally:
            self._busy.discard(connection)

    def _pick_idle(self, lane: Lane[_Idle]) -> asyncpg.Connection | None:
        while (idle := lane.pick()) is not None:
            connection, since = idle
            if not connection.is_closed() and monotonic() - since < _MAX_IDLE:
                return connection
            connection.terminate()  # a firewall or pooler in between may have dropped it
        return None

    def _return(self, connection: asyncpg.Connection | None) -> None:
        lane = self._lanes.own
        if connection is not None and lane.is_closed:
            connection.terminate()
        elif connection is not None and not connection.is_closed():
            lane.idle.append(_Idle(connection, monotonic()))
        self._release_place(lane)

    async def _reclaim(self, loan: Loan, before: tuple[Any, ...] | None) -> None:
        """Reset a connection that user code has held; close it if that fails."""
        connection = loan.connection
        if connection is None:
            return
        if self._caller_pool is not None:
            await self._reclaim_for_caller(self._caller_pool, loan, before)
        elif not connection.is_closed():
            try:
                await reset(connection, loan, self._logger, _CLOSE_TIMEOUT)
                _check_open(self._lanes.lent)
            except (Exception, asyncio.CancelledError):  # noqa: BLE001 - however it fails, the connection must be closed
                await close_connection(connection)
            else:
                self._lanes.lent.idle.append(_Idle(connection, monotonic()))

    async def _reclaim_for_caller(
        self, pool: asyncpg.Pool, loan: Loan, before: tuple[Any, ...] | None
    ) -> None:
        connection = loan.connection
        try:
            if is_open(connection):
                await reset_for_caller(pool, connection, before, loan, self._logger, _CLOSE_TIMEOUT)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - however it fails, the connection must be closed
            if is_open(connection):
                connection.terminate()
        finally:
            # If this fails, the pool has closed the connection.
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await pool.release(connection, timeout=_CLOSE_TIMEOUT)

    def _ended(self, lane: Lane[_Idle], loan: Loan | None, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if loan is not None:
            self._usage.end(loan)
        self._release_place(lane)
        if not task.cancelled():
            task.exception()  # retrieved here, because a cancelled call does not retrieve it

    async def _open(self) -> Target:
        async with self._opening:
            if self._target is None:
                server = Server(find_dsn(self._dsn))
                self._target = parse_dsn(await self._resources.enter_async_context(server))
        return self._target

    async def _ensure_settings(self, connection: Connection) -> bool:
        """Return whether the session has the library's settings; set them if it is from the caller's pool.

        If not, a pooler shares its sessions, or the caller's pool would not undo the settings. Then each
        transaction sets them.
        """
        if (
            self.prepared_statements
            and self._caller_pool is not None
            and not (_is_reset(connection) and await set_for_session(connection))
        ):
            self.prepared_statements = False
        return self.prepared_statements

    def _arguments(self, target: Target, *, own: bool) -> dict[str, Any]:
        """Return the arguments to connect with. Connections for user code get no session settings."""
        return {
            **target.arguments,
            "connection_class": asyncpg.Connection if own else LentConnection,
            "statement_cache_size": 100 if self.prepared_statements else 0,
            "server_settings": startup_settings(own=own and self.prepared_statements),
        }

    async def _connect_to(self, target: Target, *, own: bool = True) -> asyncpg.Connection:
        try:
            connection: asyncpg.Connection = await asyncpg.connect(**self._arguments(target, own=own))
        except asyncpg.ProtocolViolationError as error:
            if not is_refusal(error):
                raise
            self.prepared_statements = False
            connection = await asyncpg.connect(**self._arguments(target, own=own))
        if own:
            register_array_types(connection)
        return connection

    async def _connect(self, lane: Lane[_Idle] | None = None) -> asyncpg.Connection:
        target = await self._open()
        if lane is not None and (surplus := self._lanes.surplus(lane)) is not None:
            await close_connection(surplus.connection)
        with translate_connect_errors(target):
            # Safe to repeat, because no statement has been sent yet.
            connection = await retrying(
                partial(self._connect_to, target, own=lane is not self._lanes.lent),
                attempts=_CONNECT_ATTEMPTS,
            )
        keep_alive(connection)
        return connection


def _is_reset(connection: Connection) -> bool:
    """Return whether the caller's pool undoes settings. A custom connection class may not."""
    return "RESET ALL" in connection.get_reset_query().upper()


def _check_open(lane: Lane[_Idle]) -> None:
    """Raise if `close` stopped waiting while this connection was being opened."""
    if lane.is_closed:
        raise _closed_error()


def _closed_error() -> ConfigurationError:
    return ConfigurationError(
        "The connections are closed, because the worker has stopped or the WorkerUtils was closed."
    )


async def close_connection(connection: asyncpg.Connection) -> None:
    """Close a connection, after cancelling a running statement on the server."""
    try:
        # The driver's own timeout does not cover everything that it does.
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await connection.close()
    except asyncio.CancelledError:
        connection.terminate()
        raise  # otherwise a service that is stopped while it waits here would run on
    except Exception:  # noqa: BLE001 - however it fails, the connection must be closed
        connection.terminate()

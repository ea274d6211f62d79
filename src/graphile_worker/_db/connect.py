"""From a connection string to a connection, or to a pool of them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import asyncpg

from graphile_worker._db.dsn import EMBEDDED, Target, find_dsn, parse_dsn
from graphile_worker._db.failures import connecting
from graphile_worker._db.keepalive import keep_alive
from graphile_worker._db.lanes import Lanes
from graphile_worker._db.lent import LentConnection, read_identity, reset, reset_given
from graphile_worker._db.pool_usage import Congestion, PoolUsage
from graphile_worker._db.retryable import retrying
from graphile_worker._db.servers import Server
from graphile_worker._db.session_settings import (
    is_refusal,
    own_transaction,
    set_for_session,
    startup_settings,
)
from graphile_worker._db.transactions import transaction
from graphile_worker.errors import ConfigurationError, GraphileWorkerError
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from asyncpg.pool import PoolConnectionProxy

    from graphile_worker._db.lanes import Lane
    from graphile_worker._db.pool_usage import Loan
    from graphile_worker.logs import AnyLogger

    Connection: TypeAlias = asyncpg.Connection | PoolConnectionProxy

_CONNECT_ATTEMPTS = 4
_CLOSE_TIMEOUT = 5.0
_ACQUIRE_TIMEOUT = 30.0
_LONGEST_IDLE = 300.0
_RESERVE = 2
"""How many connections user code cannot take from own statements."""
_LOAN_LIMIT = 5.0
"""How long `close` waits for user code to give its connections back."""
_STATEMENT_LIMIT = 60.0
"""How long `close` waits for statements of our own; adding a million jobs is one."""


def read_committed(
    connection: Connection, *, duration: float | None = None
) -> AbstractAsyncContextManager[object]:
    """A transaction in which each statement sees what was committed before it; a part of the caller's."""
    return transaction(connection, duration=duration, isolated=True)


def knows_all_characters(connection: Connection) -> bool:
    """Whether the database can store every text."""
    return bool(connection.get_settings().server_encoding.upper() == "UTF8")


def is_open(connection: Connection) -> bool:
    """Whether something can still be asked on it."""
    try:
        return not connection.is_closed()
    except asyncpg.InterfaceError:  # a pool has taken it back, because it died
        return False


@asynccontextmanager
async def connect(dsn: str | None) -> AsyncIterator[asyncpg.Connection]:
    """A connection that is closed at the end; an embedded server is kept up for as long.

    A pooler may refuse our settings: what runs on it qualifies its names.
    """
    async with Server(find_dsn(dsn)) as server_dsn:
        target = parse_dsn(server_dsn)

        async def dial() -> asyncpg.Connection:
            try:
                return await asyncpg.connect(**target.arguments, server_settings=startup_settings(own=True))
            except asyncpg.ProtocolViolationError as error:
                if not is_refusal(error):
                    raise
            return await asyncpg.connect(**target.arguments, server_settings=startup_settings(own=False))

        with connecting(target):
            connection = await retrying(dial, attempts=_CONNECT_ATTEMPTS)
        try:
            yield connection
        finally:
            await connection.close()


class _Idle(NamedTuple):
    connection: asyncpg.Connection
    since: float


class Pool:
    """Connections to one database, opened when they are needed and kept until it is closed.

    Lighter than the driver's pool, which spends a task and a reset on each return: as much time as adding a
    job takes. `connection` is for statements of our own, which leave no trace in the session, `lend` for user
    code. They never get each other's sessions, and user code cannot take all of them: see `lanes`.

    Args:
        dsn: The connection string; by default what the environment says.
        pool: A pool of the caller's in place of `dsn`. It is not closed here.
        max_size: How many connections at most, beside dedicated ones and the reserve for own statements.
        prepared_statements: Off for a PgBouncer in transaction mode.
        dedicated: How many connections of `pool` are kept for `dedicated`.
        timeout: How long to wait for a connection, in seconds; None to wait as long as it takes.
        logger: Where to warn about connections that are held.
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
        # By its type first: a range looks for what is not an int at each of its numbers.
        if type(max_size) is not int or max_size not in range(1, 2**31):
            raise ConfigurationError(f"max_pool_size is {max_size!r}; it must be an integer, at least 1.")
        if pool is not None and not isinstance(pool, asyncpg.Pool):
            if isinstance(pool, Pool):  # one that stands for a connection of a test's
                raise ConfigurationError(
                    "The app is on one connection, by graphile_worker.testing.using, and a worker needs "
                    "more: run its jobs by drain or inline."
                )
            raise ConfigurationError(f"pool= takes a pool of asyncpg's, not a {type(pool).__name__}.")
        reserve = min(_RESERVE, max_size)
        if pool is not None:
            max_size, reserve = _share_of(pool, dedicated)
        if dsn is not None and not find_dsn(dsn).startswith(EMBEDDED):
            parse_dsn(dsn)  # what is wrong with it is better said now
        self._dsn = dsn
        self._given = pool
        # A pool that doesn't reset its connections as the driver does would give our settings to user code.
        self.prepared_statements = prepared_statements and getattr(pool, "_reset", None) is None
        """Whether statements are prepared, and sessions are ours alone; False once a pooler shows."""
        self.has_one_host = False
        """Whether a refusal can only come from one server; known once there is a `dialler`."""
        self._timeout = timeout
        self._logger: AnyLogger = logger or logging.getLogger("graphile_worker")
        self._lanes: Lanes[_Idle] = Lanes(max_size, reserve)
        self._usage = PoolUsage(max_size, self._logger)
        self._busy: set[asyncpg.Connection] = set()
        """Our connections that run one of our statements."""
        self._ending: set[asyncio.Task[None]] = set()
        self._released = asyncio.Event()
        self._target: Target | None = None
        self._opening = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Task[None] | None = None
        self._resources = AsyncExitStack()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for one piece of work."""
        self._check_usable()
        # The driver prepares in one round trip and executes in another; only in a transaction does a
        # pooler that hands out servers by transaction keep both on the same one, and our settings.
        async with (
            self._given_connection() if self._given else self._own_connection() as connection,
            nullcontext() if await self._has_settings(connection) else own_transaction(connection),
        ):
            yield connection

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Connection]:
        """Lend a connection to user code, which may leave anything on it, and hold it for long."""
        self._check_usable()
        lane = self._lanes.lent
        await self._take_place(lane)
        loan, before = self._usage.lend(), None
        try:
            if self._given is None:
                loan.connection = self._take_idle(lane) or await self._connect(lane)
            else:
                loan.connection = given = await self._acquire(self._given)
                before = await read_identity(self._given, given)
            _check_open(lane)
            yield loan.connection
        finally:
            # In a task of its own: the connection is cleaned even if this call is cancelled here.
            returning = asyncio.create_task(self._take_back(loan, before))
            self._ending.add(returning)
            returning.add_done_callback(partial(self._ended, lane, loan))
            if self._given is not None:  # the caller may close that pool next
                await asyncio.shield(returning)

    @asynccontextmanager
    async def dedicated(self) -> AsyncIterator[Connection]:
        """A connection beside those of `connection` and `lend`: whoever uses up those does not matter."""
        self._check_usable()
        if self._given is None:
            own = await self._connect()
            try:
                yield own
            finally:
                await end(own)
            return
        with connecting(Target("the pool given", {})):
            if self._given.is_closing():
                raise ConfigurationError(
                    "The pool given was closed under the worker. Stop the worker before closing its pool."
                )
            given = await self._given.acquire(timeout=_ACQUIRE_TIMEOUT)
        try:
            await self._has_settings(given)
            yield given
        finally:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await self._given.release(given)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                if is_open(given):
                    given.terminate()

    async def dialler(self) -> Callable[[], Awaitable[asyncpg.Connection]]:
        """A function that connects as the pool does, on whatever event loop it is called.

        What it opens is the caller's to close, and not counted here.
        """
        self._check_usable()
        if self._given is None:
            target = await self._open()
            self.has_one_host = not target.several_hosts
            return partial(self._dial, target)
        pool = self._given
        # The driver does not tell in public how its pool connects.
        known: dict[str, Any] = {
            name: getattr(pool, f"_{name}")
            for name in (
                *("connect", "connect_args", "connect_kwargs", "connection_class", "record_class"),
                *("init", "setup"),
            )
        }

        async def dial() -> asyncpg.Connection:
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
                await self._has_settings(connection)
            except BaseException:
                connection.terminate()
                raise
            return connection

        return dial

    async def close(self) -> None:
        """Wait for what is under way, and close what was opened here. May be called again."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        # Whoever stops waiting for it does not stop it.
        await asyncio.shield(self._closing)

    @property
    def congestion(self) -> Congestion | None:
        """Which calls have waited too long for a connection. May be read from any thread."""
        return self._usage.congestion()

    @property
    def is_closing(self) -> bool:
        """Whether nothing can be asked on it any more."""
        return self._closing is not None

    def _check_usable(self) -> None:
        if self._closing is not None:
            raise _closed()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        # The driver's pool does not look, and would not work again on its own loop either.
        if self._given is not None and getattr(self._given, "_loop", loop) is not loop:
            raise ConfigurationError(
                "The pool given belongs to another event loop. For code on several loops, or without one, "
                "pass a dsn in place of a pool."
            )
        if self._loop is not loop:
            raise ConfigurationError(
                "These connections belong to another event loop. Make a WorkerUtils for each loop; in a task "
                "that is a plain function, use ctx.blocking(...)."
            )

    async def _close(self) -> None:
        try:
            await asyncio.gather(self._end_loans(), self._end_statements())
            await asyncio.gather(*(end(idle.connection) for idle in self._lanes.clear()))
        finally:
            await self._resources.aclose()

    async def _end_loans(self) -> None:
        if await self._quiet(self._lanes.lent, _LOAN_LIMIT):
            return
        loans = list(self._usage.loans)
        for loan in loans:
            what = "It is ended" if self._given is None else "The caller's pool keeps it"
            self._logger.warning("Closing, though a connection is still held by %s. %s", loan, what)
        if self._given is None:
            await asyncio.gather(*(end(loan.connection) for loan in loans if loan.connection is not None))

    async def _end_statements(self) -> None:
        if await self._quiet(self._lanes.own, _STATEMENT_LIMIT):
            return
        self._logger.warning(
            "Closing, though %s not ended within %.0f s",
            counted(self._lanes.own.used, "statement has", "statements have"),
            _STATEMENT_LIMIT,
        )
        await asyncio.gather(*(end(connection) for connection in list(self._busy)))

    async def _quiet(self, lane: Lane[_Idle], limit: float) -> bool:
        """Wait until the lane is not used; whether that was so in time. Then it is closed: no call waits."""
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

    async def _take_place(self, lane: Lane[_Idle]) -> None:
        """Wait until the lane has a place for one more call."""
        if self._lanes.take(lane):
            return
        woken = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not woken.done():  # it may have been cancelled
                woken.set_result(None)

        ticket = self._lanes.queue(lane, wake)
        try:
            with self._usage.waiting():
                # Not wait_for: before Python 3.12 it may lose that this call is cancelled.
                async with asyncio.timeout(self._timeout):
                    await woken
        except BaseException as error:
            self._lanes.leave(ticket)
            self._released.set()
            if isinstance(error, TimeoutError) and self._timeout is not None:
                raise self._usage.timed_out(self._timeout) from None
            raise
        if not ticket.granted:
            raise _closed()

    def _leave_place(self, lane: Lane[_Idle]) -> None:
        self._lanes.release(lane)
        self._released.set()

    async def _acquire(self, pool: asyncpg.Pool) -> PoolConnectionProxy:
        """A connection of the caller's pool, in which other code may leave us none."""
        with connecting(Target("the pool given", {})):
            if pool.get_idle_size() or pool.get_size() < pool.get_max_size():
                return await retrying(pool.acquire, attempts=_CONNECT_ATTEMPTS)
        try:
            with self._usage.waiting():
                async with asyncio.timeout(self._timeout):
                    with connecting(Target("the pool given", {})):
                        return await retrying(pool.acquire, attempts=_CONNECT_ATTEMPTS)
        except TimeoutError:
            if self._timeout is None:
                raise
            raise self._usage.timed_out(self._timeout) from None

    @asynccontextmanager
    async def _given_connection(self) -> AsyncIterator[Connection]:
        assert self._given is not None  # noqa: S101 - for the type checker
        lane = self._lanes.own
        await self._take_place(lane)
        try:
            connection = await self._acquire(self._given)
            try:
                yield connection
            finally:
                await self._given.release(connection)
        finally:
            self._leave_place(lane)

    @asynccontextmanager
    async def _own_connection(self) -> AsyncIterator[Connection]:
        lane = self._lanes.own
        await self._take_place(lane)
        connection = None
        try:
            connection = self._take_idle(lane) or await self._connect(lane)
            _check_open(lane)
            self._busy.add(connection)
            yield connection
        except (asyncpg.PostgresError, GraphileWorkerError):
            self._give_back(connection)  # the statement failed, the connection is fine
            raise
        except BaseException:
            # A statement may be under way. Until the server has been told to stop it, the place is taken.
            if connection is None:
                self._leave_place(lane)
            else:
                ending = asyncio.create_task(end(connection))
                self._ending.add(ending)
                ending.add_done_callback(partial(self._ended, lane, None))
            raise
        else:
            self._give_back(connection)
        finally:
            self._busy.discard(connection)

    def _take_idle(self, lane: Lane[_Idle]) -> asyncpg.Connection | None:
        while (idle := lane.pick()) is not None:
            connection, since = idle
            if not connection.is_closed() and monotonic() - since < _LONGEST_IDLE:
                return connection
            connection.terminate()  # something between us and the server may have forgotten it
        return None

    def _give_back(self, connection: asyncpg.Connection | None) -> None:
        lane = self._lanes.own
        if connection is not None and lane.is_closed:
            connection.terminate()
        elif connection is not None and not connection.is_closed():
            lane.idle.append(_Idle(connection, monotonic()))
        self._leave_place(lane)

    async def _take_back(self, loan: Loan, before: tuple[Any, ...] | None) -> None:
        """Clean what user code has held, or close it."""
        connection = loan.connection
        if connection is None:
            return
        if self._given is not None:
            await self._take_back_given(self._given, loan, before)
        elif not connection.is_closed():
            try:
                await reset(connection, loan, self._logger, _CLOSE_TIMEOUT)
                _check_open(self._lanes.lent)
            except (Exception, asyncio.CancelledError):  # noqa: BLE001 - however it fails, it has to go
                await end(connection)
            else:
                self._lanes.lent.idle.append(_Idle(connection, monotonic()))

    async def _take_back_given(self, pool: asyncpg.Pool, loan: Loan, before: tuple[Any, ...] | None) -> None:
        connection = loan.connection
        try:
            if is_open(connection):
                await reset_given(pool, connection, before, loan, self._logger, _CLOSE_TIMEOUT)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - however it fails, it has to go
            if is_open(connection):
                connection.terminate()
        finally:
            # If it fails the pool has closed the connection.
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await pool.release(connection, timeout=_CLOSE_TIMEOUT)

    def _ended(self, lane: Lane[_Idle], loan: Loan | None, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if loan is not None:
            self._usage.end(loan)
        self._leave_place(lane)
        if not task.cancelled():
            task.exception()  # a call that was cancelled does not ask for it

    async def _open(self) -> Target:
        async with self._opening:
            if self._target is None:
                server = Server(find_dsn(self._dsn))
                self._target = parse_dsn(await self._resources.enter_async_context(server))
        return self._target

    async def _has_settings(self, connection: Connection) -> bool:
        """Tell whether the session has our settings; a connection from the caller's pool gets them here.

        If not, a pooler shares its sessions with others, or the settings would stay when the connection goes
        back. Then each transaction sets them.
        """
        if (
            self.prepared_statements
            and self._given is not None
            and not (_is_reset(connection) and await set_for_session(connection))
        ):
            self.prepared_statements = False
        return self.prepared_statements

    def _arguments(self, target: Target, *, own: bool) -> dict[str, Any]:
        """What to connect with; user code has its own settings."""
        return {
            **target.arguments,
            "connection_class": asyncpg.Connection if own else LentConnection,
            "statement_cache_size": 100 if self.prepared_statements else 0,
            "server_settings": startup_settings(own=own and self.prepared_statements),
        }

    async def _dial(self, target: Target, *, own: bool = True) -> asyncpg.Connection:
        try:
            return await asyncpg.connect(**self._arguments(target, own=own))
        except asyncpg.ProtocolViolationError as error:
            if not is_refusal(error):
                raise
        self.prepared_statements = False
        return await asyncpg.connect(**self._arguments(target, own=own))

    async def _connect(self, lane: Lane[_Idle] | None = None) -> asyncpg.Connection:
        target = await self._open()
        if lane is not None and (surplus := self._lanes.surplus(lane)) is not None:
            await end(surplus.connection)
        with connecting(target):
            # Safe to repeat: nothing was asked of the server yet.
            connection = await retrying(
                partial(self._dial, target, own=lane is not self._lanes.lent), attempts=_CONNECT_ATTEMPTS
            )
        keep_alive(connection)
        return connection


def _is_reset(connection: Connection) -> bool:
    """Whether the caller's pool undoes settings; its class of connections may not."""
    return "RESET ALL" in connection.get_reset_query().upper()


def _check_open(lane: Lane[_Idle]) -> None:
    """Refuse to use a connection that was opened when `close` had given up waiting."""
    if lane.is_closed:
        raise _closed()


def _closed() -> ConfigurationError:
    return ConfigurationError(
        "The connections were closed already: the worker has stopped, or the WorkerUtils was closed."
    )


def _share_of(pool: asyncpg.Pool, dedicated: int) -> tuple[int, int]:
    """How many connections of a caller's pool both lanes share, and how many more own statements have."""
    share = pool.get_max_size() - dedicated
    if dedicated and share < 2:  # noqa: PLR2004 - one for each lane
        raise ConfigurationError(
            f"The pool given has at most {pool.get_max_size()} connections. A worker keeps {dedicated} of "
            "them for itself and needs one to add jobs and look after other workers, and its tasks need one: "
            f"give it at least {dedicated + 2}."
        )
    reserve = _RESERVE if share > _RESERVE + 1 else min(1, share - 1)
    return share - reserve, reserve


async def end(connection: asyncpg.Connection) -> None:
    """Close a connection; a statement that is under way on it is cancelled at the server first."""
    try:
        # The driver's own limit does not hold for everything that it does.
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await connection.close()
    except asyncio.CancelledError:
        connection.terminate()
        raise  # or a service that is told to end while it is here goes on for ever
    except Exception:  # noqa: BLE001 - however it fails, it has to go
        connection.terminate()

"""From a connection string to a connection, or to a pool of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import asyncpg

from graphile_worker._db.dsn import EMBEDDED, Target, find_dsn, parse_dsn
from graphile_worker._db.failures import connecting
from graphile_worker._db.keepalive import keep_alive
from graphile_worker._db.retryable import retrying
from graphile_worker._db.servers import Server
from graphile_worker._db.transactions import transaction
from graphile_worker.errors import ConfigurationError, GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from asyncpg.pool import PoolConnectionProxy

    Connection: TypeAlias = asyncpg.Connection | PoolConnectionProxy

_APPLICATION = {"application_name": "graphile-worker"}
_CONNECT_ATTEMPTS = 4
_CLOSE_TIMEOUT = 5.0
_ACQUIRE_TIMEOUT = 30.0
_LONGEST_IDLE = 300.0


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
    """A connection that is closed at the end; an embedded server is kept up for as long."""
    async with Server(find_dsn(dsn)) as server_dsn:
        target = parse_dsn(server_dsn)
        with connecting(target):
            connection = await retrying(
                lambda: asyncpg.connect(**target.arguments, server_settings=_APPLICATION),
                attempts=_CONNECT_ATTEMPTS,
            )
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
    job takes. What runs on these connections is ours alone, and leaves no trace in the session.

    Args:
        dsn: The connection string; by default what the environment says.
        pool: A pool of the caller's in place of `dsn`. It is not closed here.
        max_size: How many connections at most, beside dedicated ones.
        prepared_statements: Off for a PgBouncer in transaction mode.
        dedicated: How many connections of `pool` are kept for `dedicated`.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        pool: asyncpg.Pool | None = None,
        max_size: int = 10,
        prepared_statements: bool = True,
        dedicated: int = 0,
    ) -> None:
        if max_size not in range(1, 2**31):
            raise ConfigurationError(f"max_pool_size is {max_size!r}; it must be an integer, at least 1.")
        if pool is not None and not isinstance(pool, asyncpg.Pool):
            if isinstance(pool, Pool):  # one that stands for a connection of a test's
                raise ConfigurationError(
                    "The app is on one connection, by graphile_worker.testing.using, and a worker needs "
                    "more: run its jobs by drain or inline."
                )
            raise ConfigurationError(f"pool= takes a pool of asyncpg's, not a {type(pool).__name__}.")
        if pool is not None:
            max_size = _share_of(pool, dedicated)
        if dsn is not None and not find_dsn(dsn).startswith(EMBEDDED):
            parse_dsn(dsn)  # what is wrong with it is better said now
        self._dsn = dsn
        self._given = pool
        self._max_size = max_size
        self.prepared_statements = prepared_statements
        self.has_one_host = False
        """Whether a refusal can only come from one server; known once there is a `dialler`."""
        self._slots = asyncio.Semaphore(max_size)
        self._idle: list[_Idle] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._target: Target | None = None
        self._opening = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Task[None] | None = None
        self._resources = AsyncExitStack()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for one piece of work."""
        self._check_usable()
        async with self._given_connection() if self._given else self._own_connection() as connection:
            if self.prepared_statements:
                yield connection
            else:
                # The driver prepares in one round trip and executes in another; only in a transaction does
                # a pooler that hands out servers by transaction keep both on the same one.
                async with read_committed(connection):
                    yield connection

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Connection]:
        """A connection for somebody else's code, which may leave traces in the session."""
        self._check_usable()
        if self._given:
            async with self._given_connection() as given:
                yield given  # its pool cleans it
            return
        await self._slots.acquire()
        connection = None
        try:
            connection = self._take_idle() or await self._connect()
            yield connection
        finally:
            # Cleaned in a task of its own: whoever is cancelled here still gives it back.
            ending = asyncio.create_task(self._clean(connection))
            self._ending.add(ending)
            ending.add_done_callback(self._ended)

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
            self.has_one_host = not (await self._open()).several_hosts
            return partial(asyncpg.connect, **await self._arguments())
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
    def is_closing(self) -> bool:
        """Whether nothing can be asked on it any more."""
        return self._closing is not None

    def _check_usable(self) -> None:
        if self._closing is not None:
            raise ConfigurationError(
                "The connections were closed already: the worker has stopped, or the WorkerUtils was closed."
            )
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
            for _ in range(self._max_size):
                await self._slots.acquire()
            await asyncio.gather(*(end(idle.connection) for idle in self._idle))
        finally:
            await self._resources.aclose()

    @asynccontextmanager
    async def _given_connection(self) -> AsyncIterator[Connection]:
        assert self._given is not None  # noqa: S101 - for the type checker
        async with self._slots:
            with connecting(Target("the pool given", {})):
                connection = await retrying(self._given.acquire, attempts=_CONNECT_ATTEMPTS)
            try:
                yield connection
            finally:
                await self._given.release(connection)

    @asynccontextmanager
    async def _own_connection(self) -> AsyncIterator[Connection]:
        await self._slots.acquire()
        connection = None
        try:
            connection = self._take_idle() or await self._connect()
            yield connection
        except (asyncpg.PostgresError, GraphileWorkerError):
            self._give_back(connection)  # the statement failed, the connection is fine
            raise
        except BaseException:
            # A statement may be under way. Until the server has been told to stop it, the slot is taken.
            if connection is None:
                self._slots.release()
            else:
                ending = asyncio.create_task(end(connection))
                self._ending.add(ending)
                ending.add_done_callback(self._ended)
            raise
        else:
            self._give_back(connection)

    def _take_idle(self) -> asyncpg.Connection | None:
        while self._idle:
            connection, since = self._idle.pop()
            if not connection.is_closed() and monotonic() - since < _LONGEST_IDLE:
                return connection
            connection.terminate()  # something between us and the server may have forgotten it
        return None

    def _give_back(self, connection: asyncpg.Connection | None) -> None:
        if connection is not None and not connection.is_closed():
            self._idle.append(_Idle(connection, monotonic()))
        self._slots.release()

    async def _clean(self, connection: asyncpg.Connection | None) -> None:
        if connection is None or connection.is_closed():
            return
        try:
            await connection.reset(timeout=_CLOSE_TIMEOUT)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - however it fails, it has to go
            await end(connection)
        else:
            self._idle.append(_Idle(connection, monotonic()))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        self._slots.release()

    async def _open(self) -> Target:
        async with self._opening:
            if self._target is None:
                server = Server(find_dsn(self._dsn))
                self._target = parse_dsn(await self._resources.enter_async_context(server))
        return self._target

    async def _arguments(self) -> dict[str, Any]:
        """What to connect with."""
        return {
            **(await self._open()).arguments,
            "statement_cache_size": 100 if self.prepared_statements else 0,
            "server_settings": _APPLICATION,
        }

    async def _connect(self) -> asyncpg.Connection:
        target, arguments = await self._open(), await self._arguments()
        with connecting(target):
            # Safe to repeat: nothing was asked of the server yet.
            connection: asyncpg.Connection = await retrying(
                lambda: asyncpg.connect(**arguments), attempts=_CONNECT_ATTEMPTS
            )
        keep_alive(connection)
        return connection


def _share_of(pool: asyncpg.Pool, dedicated: int) -> int:
    share = pool.get_max_size() - dedicated
    if share < 1:
        raise ConfigurationError(
            f"The pool given has at most {pool.get_max_size()} connections. A worker keeps {dedicated} of "
            f"them for itself, and its tasks need one: give it at least {dedicated + 1}."
        )
    return share


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

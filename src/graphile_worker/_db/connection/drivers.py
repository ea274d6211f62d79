"""The drivers and ORMs whose connections callers may pass: how to recognize and use each.

Nothing is imported for that. A connection is recognized by the packages and names of its classes, and what
else is needed is taken from the modules that the caller has imported. A driver runs two things: a
`OneTextStatement` with its parameter, and a command without parameters, such as ``savepoint``.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from abc import abstractmethod
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import asyncpg

from graphile_worker._base.checked_connection import CheckedConnection
from graphile_worker._db.connection.any_bytes import INSIDE_JSON, fetch
from graphile_worker._db.sql_files import read_statements
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._db.sql_files import OneTextStatement

_ACTIVE, _IN_TRANSACTION = 1, (2, 3)
"""libpq's status of a connection that waits for results, or that is in a transaction."""
_PG8000_IN_TRANSACTION = (b"T", b"E")
_NO_CURSOR = {"stream_results": False}
"""A server-side cursor would run the statement only when its rows are fetched."""


class _Cursors(Protocol):
    """A connection from psycopg, psycopg2, pg8000 or Django."""

    def cursor(self, *args: Any, **kwargs: Any) -> Any: ...


class _Savepoints(Protocol):
    """A connection or session from SQLAlchemy, SQLModel or Flask-SQLAlchemy, sync or async."""

    def begin_nested(self) -> Any: ...


class _Asyncpg(Protocol):
    """A connection from asyncpg, or from one of its pools."""

    def is_in_transaction(self) -> bool: ...


class _Tortoise(Protocol):
    """A connection from Tortoise."""

    def execute_query_dict(self, query: str, values: Any = None) -> Any: ...


AnyConnection: TypeAlias = _Cursors | _Savepoints | _Asyncpg | _Tortoise | str | CheckedConnection
"""What callers may pass as ``connection=``; a str is the alias of a Django connection."""


class Driver:
    """A caller's connection, and how to use it.

    Args:
        connection: The connection or session.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed for good."""
        return bool(self.connection.closed)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that the connection belongs to; None if that is not known, or if it has none."""
        return None

    def check_usable(self) -> None:
        """Raise an error if the connection is closed, or belongs to another event loop."""
        if self.is_closed:
            raise ConfigurationError(
                f"connection= is closed: {_describe(self.connection)}. Pass an open connection, in the "
                "transaction that the change belongs to."
            )
        # Otherwise the statement would be sent, and the connection would wait for its end forever.
        if self.loop not in {None, asyncio._get_running_loop()}:  # noqa: SLF001 - get_running_loop raises
            raise ConfigurationError(
                f"connection= is {_describe(self.connection)} of another event loop. Open it in the event "
                "loop that uses it, for example in the same asyncio.run()."
            )

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether statements become part of a transaction that the caller commits.

        This is so for a connection that begins a transaction with its first statement.
        """

    @property
    def installed(self) -> set[OneTextStatement] | None:
        """The guarded statements whose functions exist in the connection's database, as far as is known.

        None if nothing can be remembered for the connection.
        """
        return _remembered(self.connection)


_INSTALLED: WeakKeyDictionary[Any, set[OneTextStatement]] = WeakKeyDictionary()


def _remembered(connection: Any) -> set[OneTextStatement] | None:
    try:
        return _INSTALLED.setdefault(connection, set())
    except TypeError:  # it has no weak references
        return None


def _describe(connection: Any) -> str:
    package = type(connection).__module__.partition(".")[0]
    return f"{'an' if package.startswith('a') else 'a'} {package} {type(connection).__name__}"


class SyncDriver(Driver):
    """A connection that blocks. It is used in the caller's thread."""

    @abstractmethod
    def fetch_text(self, statement: OneTextStatement, parameter: str) -> str:
        """Run a statement and return its one value."""

    @abstractmethod
    def execute(self, command: str) -> None:
        """Run a command without parameters and result."""


class AsyncDriver(Driver):
    """A connection that belongs to an event loop."""

    @abstractmethod
    async def fetch_text(self, statement: OneTextStatement, parameter: str) -> str:
        """Run a statement and return its one value."""

    @abstractmethod
    async def execute(self, command: str) -> None:
        """Run a command without parameters and result."""


class BridgedDriver:
    """An async API over a sync one: a function that uses the sync connection runs somewhere else.

    Args:
        connection: The connection or session.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    @abstractmethod
    async def run(self, work: Callable[[SyncDriver], Any]) -> Any:
        """Call the function with a driver for the sync connection, and return its result."""


class Asyncpg(AsyncDriver):
    """An asyncpg connection."""

    @property
    def is_closed(self) -> bool:
        try:
            return bool(self.connection.is_closed())
        except asyncpg.InterfaceError:  # it was given back to its pool
            return True

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        return _loop_of(self.connection)

    @property
    def in_transaction(self) -> bool:
        return bool(self.connection.is_in_transaction())

    @property
    def installed(self) -> set[OneTextStatement] | None:
        # What a pool's proxy stands for.
        return _remembered(getattr(self.connection, "_con", self.connection))

    async def fetch_text(self, statement: OneTextStatement, parameter: str) -> str:
        sql = statement.render("$1")
        [(text,)] = await fetch(self.connection, sql, parameter, errors=INSIDE_JSON)
        return str(text)

    async def execute(self, command: str) -> None:
        await self.connection.execute(command)


def _loop_of(connection: Any) -> asyncio.AbstractEventLoop | None:
    """Return the event loop of an asyncpg connection; None for anything else."""
    return getattr(connection, "_loop", None)


class _PsycopgStatus(Driver):
    @property
    def in_transaction(self) -> bool:
        if not self.connection.autocommit:
            return True
        status = self.connection.info.transaction_status
        if status == _ACTIVE:
            raise ConfigurationError(
                "connection= is in pipeline mode with autocommit, so whether it is in a transaction is not "
                "known yet. Call pipeline.sync() first."
            )
        return bool(status in _IN_TRANSACTION)


class Psycopg(_PsycopgStatus, SyncDriver):
    """A psycopg 3 ``Connection``. Its own cursor and row classes may be anything, so they are not used."""

    def fetch_text(self, statement: OneTextStatement, parameter: str) -> str:
        with self._cursor() as cursor, _synced(self.connection):
            cursor.execute(_with_percents(statement), (parameter,))
            return _as_text(cursor.fetchone()[0])

    def execute(self, command: str) -> None:
        with self._cursor() as cursor, _synced(self.connection):
            cursor.execute(command)

    def _cursor(self) -> Any:
        psycopg = sys.modules["psycopg"]
        return psycopg.Cursor(self.connection, row_factory=psycopg.rows.tuple_row)


class AsyncPsycopg(_PsycopgStatus, AsyncDriver):
    """A psycopg 3 ``AsyncConnection``."""

    async def fetch_text(self, statement: OneTextStatement, parameter: str) -> str:
        async with self._cursor() as cursor, _synced(self.connection):
            await cursor.execute(_with_percents(statement), (parameter,))
            return _as_text((await cursor.fetchone())[0])

    async def execute(self, command: str) -> None:
        async with self._cursor() as cursor, _synced(self.connection):
            await cursor.execute(command)

    def _cursor(self) -> Any:
        psycopg = sys.modules["psycopg"]
        return psycopg.AsyncCursor(self.connection, row_factory=psycopg.rows.tuple_row)


class _NoPipeline:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exception: object) -> None:
        pass

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_exception: object) -> None:
        pass


def _synced(connection: Any) -> Any:
    """In psycopg's pipeline mode, return a block that ends with a synchronization.

    Without it, an error would also fail the commands that follow, even a rollback to a savepoint.
    """
    return connection.pipeline() if connection.pgconn.pipeline_status else _NoPipeline()


class Psycopg2(_PsycopgStatus, SyncDriver):
    """A psycopg2 connection."""

    def check_usable(self) -> None:
        super().check_usable()
        if self.connection.async_:
            raise ConfigurationError(
                "connection= is a psycopg2 connection with async_=1, which has no transactions. Pass one "
                "without it."
            )

    def fetch_text(self, statement: OneTextStatement, parameter: str) -> str:
        with self._cursor() as cursor:
            cursor.execute(_with_percents(statement), (parameter,))
            return _as_text(cursor.fetchone()[0])

    def execute(self, command: str) -> None:
        with self._cursor() as cursor:
            cursor.execute(command)

    def _cursor(self) -> Any:
        return self.connection.cursor(cursor_factory=sys.modules["psycopg2"].extensions.cursor)


class Pg8000(SyncDriver):
    """A pg8000 connection, from ``pg8000.dbapi``, ``pg8000.legacy`` or ``pg8000.native``."""

    @property
    def is_closed(self) -> bool:
        return self.connection._usock is None  # noqa: SLF001 - there is no public way

    @property
    def in_transaction(self) -> bool:
        return self._is_begun or self._begins_transactions

    @property
    def _is_begun(self) -> bool:
        return self.connection._transaction_status in _PG8000_IN_TRANSACTION  # noqa: SLF001

    @property
    def _begins_transactions(self) -> bool:
        return not getattr(self.connection, "autocommit", True)

    def fetch_text(self, statement: OneTextStatement, parameter: str) -> str:
        # The cursor's placeholders depend on a global variable, paramstyle. The connection itself has $1.
        parameter.encode(self.connection._client_encoding)  # noqa: SLF001 - pg8000 fails in the middle of sending
        self._begin()
        result = self.connection.execute_unnamed(statement.render("$1"), vals=(parameter,))
        return _as_text(result.rows[0][0])

    def execute(self, command: str) -> None:
        self._begin()
        self.connection.execute_simple(command)

    def _begin(self) -> None:
        if self._begins_transactions and not self._is_begun:
            self.connection.execute_simple(read_statements("transactions.sql")["begin"])


class SqlAlchemy(SyncDriver):
    """A SQLAlchemy ``Connection`` or ``Session``, on any PostgreSQL driver.

    The driver's own connection is never used. SQLAlchemy begins its transaction with its first statement, so
    what ran on the driver's connection before that would not be rolled back.
    """

    @cached_property
    def _on(self) -> Any:
        on = self.connection
        if hasattr(on, "get_bind"):  # a session; its own execute would flush its objects first
            try:
                on = on.connection()
            except sys.modules["sqlalchemy"].exc.UnboundExecutionError as error:
                raise ConfigurationError(
                    "The session has several engines, and none is the default. Pass the connection to the "
                    "queue's database: session.connection(bind_arguments={'mapper': ...})."
                ) from error
        if on.dialect.name != "postgresql":
            raise ConfigurationError(
                f"connection= is connected to {on.dialect.name}. Pass a connection to the PostgreSQL "
                "database with the queue."
            )
        return on

    @property
    def is_closed(self) -> bool:
        return bool(getattr(self.connection, "closed", False))  # a Session can be used again

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        return _loop_of(getattr(self._on.connection.dbapi_connection, "driver_connection", None))

    @property
    def in_transaction(self) -> bool:
        return not self._on.connection.dbapi_connection.autocommit

    @property
    def installed(self) -> set[OneTextStatement] | None:
        found: set[OneTextStatement] = self._on.info.setdefault("graphile_worker", set())
        return found

    def fetch_text(self, statement: OneTextStatement, parameter: str) -> str:
        given = {"parameter": parameter}
        result = self._on.execute(_as_clause(statement), given, execution_options=_NO_CURSOR)
        return _as_text(result.scalar_one())

    def execute(self, command: str) -> None:
        self._on.exec_driver_sql(command, execution_options=_NO_CURSOR)


class AsyncSqlAlchemy(BridgedDriver):
    """A SQLAlchemy ``AsyncConnection`` or ``AsyncSession``."""

    async def run(self, work: Callable[[SyncDriver], Any]) -> Any:
        return await self.connection.run_sync(lambda sync: work(SqlAlchemy(sync)))


class Django(SyncDriver):
    """A Django connection. In a coroutine it is used on Django's own thread."""

    @property
    def is_closed(self) -> bool:
        return False  # Django connects again

    @property
    def in_transaction(self) -> bool:
        return bool(self.connection.in_atomic_block or not self.connection.get_autocommit())

    @property
    def installed(self) -> set[OneTextStatement] | None:
        return _remembered(self.connection.connection)  # Django may connect again, to another database

    def fetch_text(self, statement: OneTextStatement, parameter: str) -> str:
        with self.connection.cursor() as cursor:
            cursor.execute(_with_percents(statement), (parameter,))
            return _as_text(cursor.fetchone()[0])

    def execute(self, command: str) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(command)


class AsyncDjango(BridgedDriver):
    """Django's connection, used in a coroutine: Django has one for each thread, and none for event loops."""

    async def run(self, work: Callable[[SyncDriver], Any]) -> Any:
        asgiref: Any = sys.modules["asgiref.sync"]
        alias, connections = self.connection.alias, sys.modules["django.db"].connections
        return await asgiref.sync_to_async(lambda: work(Django(connections[alias])))()


class Tortoise(AsyncDriver):
    """A connection from Tortoise's ``in_transaction()``."""

    @property
    def is_closed(self) -> bool:
        return bool(getattr(self.connection, "_finalized", False))  # the block of in_transaction() has ended

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        return _loop_of(getattr(self.connection, "_connection", None))

    @property
    def in_transaction(self) -> bool:
        return True

    @property
    def installed(self) -> set[OneTextStatement] | None:
        return _remembered(getattr(self.connection, "_connection", None))

    async def fetch_text(self, statement: OneTextStatement, parameter: str) -> str:
        on_psycopg = any("psycopg" in kind.__module__ for kind in type(self.connection).__mro__)
        sql = _with_percents(statement) if on_psycopg else statement.render("$1")
        [row] = await self.connection.execute_query_dict(sql, [parameter])
        [text] = row.values()
        return _as_text(text)

    async def execute(self, command: str) -> None:
        await self.connection.execute_script(command)


@cache
def _with_percents(statement: OneTextStatement) -> str:
    return statement.render("%s", escaped="%", escape="%%")


@cache
def _as_clause(statement: OneTextStatement) -> Any:
    return sys.modules["sqlalchemy"].text(statement.render(":parameter", escaped=":", escape="\\:"))


def find_driver(connection: Any, *, is_async: bool) -> SyncDriver | AsyncDriver | BridgedDriver:
    """Return the driver for a caller's connection.

    Args:
        connection: The connection or session, or a Django alias.
        is_async: Whether the caller awaits the operation.

    Raises:
        ConfigurationError: The object is not a connection, or has to be used in the other way.
    """
    if isinstance(connection, CheckedConnection):
        connection = connection.connection
    if isinstance(connection, str):
        connection = _django_connection(connection)
    # A proxy, as tracers make them, has its own type and the class of the connection.
    classes = {*type(connection).__mro__, *getattr(connection.__class__, "__mro__", ())}
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in classes}
    if kinds & _SCOPED:
        return find_driver(connection.registry(), is_async=is_async)
    name = next((name for name in _DRIVERS if name in kinds), None)
    if name is None:
        raise ConfigurationError(_not_a_connection(connection, kinds))
    sync, asynchronous = _DRIVERS[name]
    found = asynchronous if is_async else sync
    if found is None:
        what = _describe(connection).replace("a", "A", 1)
        if is_async:
            raise ConfigurationError(
                f"{what} blocks, so it cannot be awaited. Use the method with _sync, for example "
                "task.using(connection=...).enqueue_sync(...)."
            )
        raise ConfigurationError(
            f"{what} belongs to an event loop. Use the method without _sync, for example "
            "await task.using(connection=...).enqueue(...)."
        )
    return found(connection)


_DRIVERS: dict[str, tuple[type[SyncDriver] | None, type[AsyncDriver | BridgedDriver] | None]] = {
    "asyncpg.Connection": (None, Asyncpg),
    "asyncpg.PoolConnectionProxy": (None, Asyncpg),
    "graphile_worker.AdaptedConnection": (None, Asyncpg),
    "psycopg.Connection": (Psycopg, None),
    "psycopg.AsyncConnection": (None, AsyncPsycopg),
    "psycopg2.connection": (Psycopg2, None),
    "pg8000.Connection": (Pg8000, None),
    "sqlalchemy.AsyncSession": (None, AsyncSqlAlchemy),
    "sqlalchemy.AsyncConnection": (None, AsyncSqlAlchemy),
    "sqlalchemy.Session": (SqlAlchemy, None),
    "sqlalchemy.Connection": (SqlAlchemy, None),
    "django.BaseDatabaseWrapper": (Django, AsyncDjango),
    "django.ConnectionProxy": (Django, AsyncDjango),
    "tortoise.TransactionalDBClient": (None, Tortoise),
}
"""For each class, by its package and name, the driver for sync use and the one for async use."""
_SCOPED = {"sqlalchemy.scoped_session", "sqlalchemy.async_scoped_session"}
_ACCEPTED = (
    "a connection from asyncpg, psycopg, psycopg2 or pg8000, a Session or Connection from SQLAlchemy (also "
    "async), a Django connection or its alias, or the connection of Tortoise's in_transaction()"
)
_HINTS = {
    "asyncpg.Pool": "A pool gives out several connections. Pass one: async with pool.acquire() as "
    "connection. To add jobs on the pool outside of your transaction, use WorkerUtils(pool=...).",
    "psycopg_pool.AsyncConnectionPool": "A pool gives out several connections. Pass one: async with "
    "pool.connection() as connection.",
    "psycopg_pool.BasePool": "A pool gives out several connections. Pass one: with pool.connection() as "
    "connection.",
    "psycopg2.AbstractConnectionPool": "A pool gives out several connections. Pass one: pool.getconn().",
    **dict.fromkeys(
        ("psycopg.BaseCursor", "psycopg2.cursor", "pg8000.Cursor"),
        "Pass the cursor's connection: cursor.connection.",
    ),
    **dict.fromkeys(
        (
            "asyncpg.Transaction",
            "django.Atomic",
            "psycopg.BaseTransaction",
            "sqlalchemy.AsyncSessionTransaction",
            "sqlalchemy.AsyncTransaction",
            "sqlalchemy.SessionTransaction",
            "sqlalchemy.Transaction",
        ),
        "Pass the connection or session that the transaction belongs to, not the transaction.",
    ),
    "sqlalchemy._ConnectionFairy": "Pass the SQLAlchemy Connection or Session, not engine.raw_connection(), "
    "because SQLAlchemy must know of the transaction.",
    "sqlalchemy.Engine": "An engine opens a connection for each transaction. Pass the one that your "
    "statements use: with engine.begin() as connection, or a Session.",
    "sqlalchemy.AsyncEngine": "An engine opens a connection for each transaction. Pass the one that your "
    "statements use: async with engine.begin() as connection, or an AsyncSession.",
    "sqlalchemy.sessionmaker": "Pass a session, not its factory: with Session() as session.",
    "sqlalchemy.async_sessionmaker": "Pass a session, not its factory: async with Session() as session.",
    "sqlalchemy.SQLAlchemy": "Pass the session: db.session.",
    "django.ConnectionHandler": "Pass one connection: connections['default'], or its alias.",
    "tortoise.BaseDBAsyncClient": "Outside of a transaction, Tortoise may use another connection for each "
    "statement. Pass the connection of in_transaction().",
}
"""What to pass instead of things that people take for a connection."""


def _not_a_connection(given: object, kinds: set[str]) -> str:
    hint = next((text for name, text in _HINTS.items() if name in kinds), None)
    if "flask_sqlalchemy.SQLAlchemy" in kinds:
        hint = _HINTS["sqlalchemy.SQLAlchemy"]
    if isinstance(given, type) or inspect.isroutine(given):
        hint = f"{getattr(given, '__qualname__', given)} is not a connection itself: pass what it returns."
    return f"connection= must be {_ACCEPTED}, not {type(given).__name__}." + (f" {hint}" if hint else "")


def _as_text(value: Any) -> str:
    """Return a text that the server sent. Some drivers return bytes if the database is SQL_ASCII."""
    return bytes(value).decode("utf-8", INSIDE_JSON) if isinstance(value, bytes | memoryview) else str(value)


def _django_connection(alias: str) -> Any:
    if "://" in alias or "=" in alias:  # it may have a password
        raise ConfigurationError(
            f"connection= is a connection string. Pass {_ACCEPTED}. A connection string goes to "
            "WorkerUtils(dsn=...) or App(dsn=...)."
        )
    django = sys.modules.get("django.db")
    if django is None:
        raise ConfigurationError(
            f"connection={alias!r} names a Django connection, but this program does not use Django. "
            f"Pass {_ACCEPTED}."
        )
    if alias not in django.connections:
        raise ConfigurationError(
            f"connection={alias!r}: Django has no such connection. "
            f"It has {', '.join(sorted(django.connections))}."
        )
    return django.connections[alias]

"""The drivers and ORMs that applications use, each with an open connection to the same database.

Each stack gives the object that an application would pass as ``connection=``, and the functions that end its
transaction. The connection strings of the tests are asyncpg's, so the engines get a function that connects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import asyncpg
import pg8000.dbapi
import pg8000.legacy
import pg8000.native
import psycopg
import psycopg2
import psycopg2.extras
import pytest
import sqlalchemy
import sqlmodel
import sqlmodel.ext.asyncio.session
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from tortoise import Tortoise
from tortoise.transactions import in_transaction


class SyncStack(NamedTuple):
    connection: Any
    execute: Callable[[str], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]


class AsyncStack(NamedTuple):
    connection: Any
    execute: Callable[[str], Awaitable[Any]]
    commit: Callable[[], Awaitable[Any]]
    rollback: Callable[[], Awaitable[Any]]


def _run_on_cursor(connection: Any, sql: str) -> None:
    connection.cursor().execute(sql)


@contextmanager
def psycopg_connection(dsn: str, **options: Any) -> Iterator[SyncStack]:
    with psycopg.connect(dsn, **options) as connection:
        cursor: Any = psycopg.Cursor(connection)
        yield SyncStack(connection, cursor.execute, connection.commit, connection.rollback)


@contextmanager
def psycopg2_connection(dsn: str, **options: Any) -> Iterator[SyncStack]:
    connection = psycopg2.connect(dsn, **options)
    yield SyncStack(connection, partial(_run_on_cursor, connection), connection.commit, connection.rollback)
    connection.close()


def pg8000_arguments(dsn: str) -> dict[str, Any]:
    given: dict[str, Any] = dict(conninfo_to_dict(dsn))
    arguments = {"user": given["user"], "database": given["dbname"], "password": given.get("password")}
    if str(given["host"]).startswith("/"):
        return {**arguments, "unix_sock": f"{given['host']}/.s.PGSQL.{given.get('port', 5432)}"}
    return {**arguments, "host": given["host"], "port": int(given.get("port", 5432))}


@contextmanager
def pg8000_connection(dsn: str) -> Iterator[SyncStack]:
    connection = pg8000.dbapi.connect(**pg8000_arguments(dsn))
    yield SyncStack(connection, partial(_run_on_cursor, connection), connection.commit, connection.rollback)
    connection.close()


@contextmanager
def pg8000_legacy_connection(dsn: str) -> Iterator[SyncStack]:
    connection = pg8000.legacy.Connection(**pg8000_arguments(dsn))
    yield SyncStack(connection, partial(_run_on_cursor, connection), connection.commit, connection.rollback)
    connection.close()


@contextmanager
def pg8000_native_connection(dsn: str) -> Iterator[SyncStack]:
    connection = pg8000.native.Connection(**pg8000_arguments(dsn))
    connection.run("begin")
    yield SyncStack(
        connection, connection.run, partial(connection.run, "commit"), partial(connection.run, "rollback")
    )
    connection.close()


def sync_engine(dsn: str, driver: str = "psycopg", **options: Any) -> sqlalchemy.Engine:
    connect: dict[str, Callable[[], Any]] = {
        "psycopg": lambda: psycopg.connect(dsn),
        "psycopg2": lambda: psycopg2.connect(dsn),
        "pg8000": lambda: pg8000.dbapi.connect(**pg8000_arguments(dsn)),
    }
    return sqlalchemy.create_engine(f"postgresql+{driver}://", creator=connect[driver], **options)


def _text(run: Callable[..., Any], sql: str) -> Any:
    return run(sqlalchemy.text(sql))


@contextmanager
def sqlalchemy_connection(dsn: str, driver: str = "psycopg", **options: Any) -> Iterator[SyncStack]:
    engine = sync_engine(dsn, driver, **options)
    with engine.connect() as connection:
        yield SyncStack(
            connection, partial(_text, connection.execute), connection.commit, connection.rollback
        )
    engine.dispose()


@contextmanager
def sqlalchemy_session(
    dsn: str, driver: str = "psycopg", make: Callable[..., Any] = Session, **options: Any
) -> Iterator[SyncStack]:
    engine = sync_engine(dsn, driver, **options)
    session = make(engine)
    yield SyncStack(
        session, lambda sql: session.connection().exec_driver_sql(sql), session.commit, session.rollback
    )
    session.close()
    engine.dispose()


def make_scoped_session(engine: Any) -> Any:
    return scoped_session(sessionmaker(engine))


@contextmanager
def flask_session(dsn: str) -> Iterator[SyncStack]:
    import flask  # noqa: PLC0415
    import flask_sqlalchemy  # noqa: PLC0415

    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://"
    app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"creator": lambda: psycopg.connect(dsn)}
    db = flask_sqlalchemy.SQLAlchemy(app)
    with app.app_context():
        yield SyncStack(
            db.session, partial(_text, db.session.execute), db.session.commit, db.session.rollback
        )
        db.session.remove()
        db.engine.dispose()


def skip_old_server_for_django(dsn: str) -> None:
    with suppress(psycopg.OperationalError), psycopg.connect(dsn) as connection:
        if connection.info.server_version < 140000:
            pytest.skip("Django needs PostgreSQL 14 or newer")


def configure_django(dsn: str) -> Any:
    """Connect Django to this database, and return ``django.db``. Django is configured once in a process."""
    import django.conf  # noqa: PLC0415
    from django import db  # noqa: PLC0415

    skip_old_server_for_django(dsn)
    given = conninfo_to_dict(dsn)
    settings = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": given["dbname"],
        "USER": given["user"],
        "PASSWORD": given.get("password", ""),
        "HOST": given["host"],
        "PORT": str(given.get("port", "")),
    }
    if not django.conf.settings.configured:
        django.conf.settings.configure(DATABASES={"default": settings}, USE_TZ=True)
        django.setup()
    db.connections.settings["default"].update(settings)
    return db


@contextmanager
def django_connection(dsn: str, *, alias: bool = False) -> Iterator[SyncStack]:
    db = configure_django(dsn)
    connection = db.connection
    connection.set_autocommit(False)
    yield SyncStack(
        "default" if alias else connection,
        partial(_run_on_cursor, connection),
        connection.commit,
        connection.rollback,
    )
    connection.close()


SYNC: dict[str, Callable[[str], Any]] = {
    "psycopg": psycopg_connection,
    "psycopg with RawCursor and dict rows": partial(
        psycopg_connection, cursor_factory=psycopg.RawCursor, row_factory=psycopg.rows.dict_row
    ),
    "psycopg2": psycopg2_connection,
    "psycopg2 with dict rows": partial(psycopg2_connection, cursor_factory=psycopg2.extras.RealDictCursor),
    "pg8000": pg8000_connection,
    "pg8000.legacy": pg8000_legacy_connection,
    "pg8000.native": pg8000_native_connection,
    "SQLAlchemy Connection": sqlalchemy_connection,
    "SQLAlchemy Connection on pg8000": partial(sqlalchemy_connection, driver="pg8000"),
    "SQLAlchemy Session": sqlalchemy_session,
    "SQLAlchemy Session on psycopg2": partial(sqlalchemy_session, driver="psycopg2"),
    "SQLAlchemy scoped_session": partial(sqlalchemy_session, make=make_scoped_session),
    "SQLModel Session": partial(sqlalchemy_session, make=sqlmodel.Session),
    "Flask-SQLAlchemy": flask_session,
    "Django": django_connection,
    "Django alias": partial(django_connection, alias=True),
}


@asynccontextmanager
async def asyncpg_connection(dsn: str) -> AsyncIterator[AsyncStack]:
    connection = await asyncpg.connect(dsn)
    await connection.execute("begin")
    yield AsyncStack(
        connection,
        connection.execute,
        partial(connection.execute, "commit"),
        partial(connection.execute, "rollback"),
    )
    await connection.close()


@asynccontextmanager
async def asyncpg_pool_connection(dsn: str) -> AsyncIterator[AsyncStack]:
    async with asyncpg.create_pool(dsn, min_size=1) as pool, pool.acquire() as connection:
        await connection.execute("begin")
        yield AsyncStack(
            connection,
            connection.execute,
            partial(connection.execute, "commit"),
            partial(connection.execute, "rollback"),
        )


@asynccontextmanager
async def async_psycopg_connection(dsn: str, **options: Any) -> AsyncIterator[AsyncStack]:
    async with await psycopg.AsyncConnection.connect(dsn, **options) as connection:
        cursor: Any = psycopg.AsyncCursor(connection)
        yield AsyncStack(connection, cursor.execute, connection.commit, connection.rollback)


def async_engine(dsn: str, driver: str = "asyncpg", **options: Any) -> Any:
    connect: dict[str, Callable[[], Any]] = {
        "asyncpg": lambda: asyncpg.connect(dsn),
        "psycopg": lambda: psycopg.AsyncConnection.connect(dsn),
    }
    return create_async_engine(f"postgresql+{driver}://", async_creator=connect[driver], **options)


@asynccontextmanager
async def async_sqlalchemy_connection(dsn: str, driver: str = "asyncpg") -> AsyncIterator[AsyncStack]:
    engine = async_engine(dsn, driver)
    async with engine.connect() as connection:
        yield AsyncStack(
            connection, partial(_text, connection.execute), connection.commit, connection.rollback
        )
    await engine.dispose()


@asynccontextmanager
async def async_sqlalchemy_session(
    dsn: str, driver: str = "asyncpg", make: Callable[..., Any] = AsyncSession
) -> AsyncIterator[AsyncStack]:
    engine = async_engine(dsn, driver)
    session = make(engine)

    async def execute(sql: str) -> None:
        await (await session.connection()).exec_driver_sql(sql)

    yield AsyncStack(session, execute, session.commit, session.rollback)
    await session.close()
    await engine.dispose()


def make_async_scoped_session(engine: Any) -> Any:
    return async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: None)


@asynccontextmanager
async def tortoise_connected(dsn: str, driver: str = "asyncpg") -> AsyncIterator[None]:
    given = conninfo_to_dict(dsn)
    credentials = {
        "host": given["host"],
        "port": int(str(given.get("port", 5432))),
        "user": given["user"],
        "password": given.get("password"),
        "database": given["dbname"],
        "minsize": 1,
        "maxsize": 2,
    }
    engine = {"engine": f"tortoise.backends.{driver}", "credentials": credentials}
    apps = {"shop": {"models": ["support.tortoise_models"]}}
    await Tortoise.init(config={"connections": {"default": engine}, "apps": apps})
    yield
    await Tortoise.close_connections()


@asynccontextmanager
async def tortoise_transaction(dsn: str, driver: str = "asyncpg") -> AsyncIterator[AsyncStack]:
    async with tortoise_connected(dsn, driver), in_transaction("default") as connection:
        yield AsyncStack(connection, connection.execute_script, connection.commit, connection.rollback)


ASYNC: dict[str, Callable[[str], Any]] = {
    "asyncpg": asyncpg_connection,
    "asyncpg pool connection": asyncpg_pool_connection,
    "psycopg": async_psycopg_connection,
    "psycopg with RawCursor and dict rows": partial(
        async_psycopg_connection,
        cursor_factory=psycopg.AsyncRawCursor,
        row_factory=psycopg.rows.dict_row,
    ),
    "SQLAlchemy AsyncConnection": async_sqlalchemy_connection,
    "SQLAlchemy AsyncConnection on psycopg": partial(async_sqlalchemy_connection, driver="psycopg"),
    "SQLAlchemy AsyncSession": async_sqlalchemy_session,
    "SQLAlchemy AsyncSession on psycopg": partial(async_sqlalchemy_session, driver="psycopg"),
    "SQLAlchemy async_scoped_session": partial(async_sqlalchemy_session, make=make_async_scoped_session),
    "SQLModel AsyncSession": partial(
        async_sqlalchemy_session, make=sqlmodel.ext.asyncio.session.AsyncSession
    ),
    "Tortoise": tortoise_transaction,
    "Tortoise on psycopg": partial(tortoise_transaction, driver="psycopg"),
}

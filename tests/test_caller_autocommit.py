"""Connections of every driver and ORM that commit each statement: noticed, and refused if required."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import asyncpg
import pg8000.dbapi
import pg8000.native
import psycopg
import psycopg2
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from graphile_worker import App, ConfigurationError, JobSpec
from graphile_worker.errors import AutocommitWarning
from support import stacks

AUTOCOMMIT: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}


@contextmanager
def psycopg_connection(dsn: str) -> Iterator[Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@contextmanager
def psycopg2_connection(dsn: str) -> Iterator[Any]:
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    yield connection
    connection.close()


@contextmanager
def pg8000_connection(dsn: str) -> Iterator[Any]:
    connection = pg8000.dbapi.connect(**stacks.pg8000_arguments(dsn))
    connection.autocommit = True
    yield connection
    connection.close()


@contextmanager
def pg8000_native_connection(dsn: str) -> Iterator[Any]:
    connection = pg8000.native.Connection(**stacks.pg8000_arguments(dsn))
    yield connection
    connection.close()


@contextmanager
def sqlalchemy_session(dsn: str, driver: str) -> Iterator[Any]:
    engine = stacks.sync_engine(dsn, driver, **AUTOCOMMIT)
    with Session(engine) as session:
        yield session
    engine.dispose()


@contextmanager
def sqlalchemy_connection(dsn: str) -> Iterator[Any]:
    engine = stacks.sync_engine(dsn)
    with engine.connect().execution_options(**AUTOCOMMIT) as connection:
        yield connection
    engine.dispose()


@contextmanager
def django_connection(dsn: str) -> Iterator[Any]:
    connection = stacks.configure_django(dsn).connection
    yield connection
    connection.close()


SYNC: dict[str, Callable[[str], Any]] = {
    "psycopg": psycopg_connection,
    "psycopg2": psycopg2_connection,
    "pg8000": pg8000_connection,
    "pg8000.native": pg8000_native_connection,
    **{
        f"Session on {name}": partial(sqlalchemy_session, driver=name)
        for name in ("psycopg", "psycopg2", "pg8000")
    },
    "SQLAlchemy Connection": sqlalchemy_connection,
    "Django": django_connection,
}


@asynccontextmanager
async def asyncpg_connection(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


@asynccontextmanager
async def async_psycopg_connection(dsn: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


@asynccontextmanager
async def async_session(dsn: str, driver: str) -> AsyncIterator[Any]:
    engine = stacks.async_engine(dsn, driver, **AUTOCOMMIT)
    async with AsyncSession(engine) as session:
        yield session
    await engine.dispose()


ASYNC: dict[str, Callable[[str], Any]] = {
    "asyncpg": asyncpg_connection,
    "psycopg": async_psycopg_connection,
    **{f"AsyncSession on {name}": partial(async_session, driver=name) for name in ("asyncpg", "psycopg")},
}


@pytest.fixture
def app() -> App:
    """An app that cannot reach a database by itself."""
    return App("postgresql://ann@127.0.0.1:1/none")


def count(database: str) -> int:
    with psycopg.connect(database, autocommit=True) as connection:
        [(found,)] = connection.execute("select count(*) from graphile_worker.jobs").fetchall()
        return int(found)


@pytest.mark.sample(3)
@pytest.mark.parametrize("connected", SYNC)
def test_job_on_a_sync_connection_that_autocommits_stays_with_a_warning_or_is_refused(
    app: App, database: str, connected: str
) -> None:
    with SYNC[connected](database) as connection:
        with pytest.raises(ConfigurationError, match="require_transaction"):
            app.add_job_sync("t", connection=connection, require_transaction=True)
        assert count(database) == 0
        with pytest.warns(AutocommitWarning, match="committed immediately") as caught:
            app.add_job_sync("t", connection=connection)
        assert caught[0].filename == __file__
        assert count(database) == 1
        with pytest.warns(AutocommitWarning):
            app.add_jobs_sync([JobSpec("t")] * 3, connection=connection)
        assert count(database) == 4


@pytest.mark.sample(2)
@pytest.mark.parametrize("connected", ASYNC)
async def test_job_on_an_async_connection_that_autocommits_stays_with_a_warning_or_is_refused(
    app: App, database: str, connected: str
) -> None:
    async with ASYNC[connected](database) as connection:
        with pytest.raises(ConfigurationError, match="require_transaction"):
            await app.add_job("t", connection=connection, require_transaction=True)
        assert count(database) == 0
        with pytest.warns(AutocommitWarning, match="committed immediately") as caught:
            await app.add_job("t", connection=connection)
        assert caught[0].filename == __file__
        assert count(database) == 1
        with pytest.warns(AutocommitWarning):
            await app.add_jobs([JobSpec("t")] * 3, connection=connection)
        assert count(database) == 4

"""Mistakes with connection=: each error says what happened and what to do, and nothing is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from secrets import token_hex
from typing import Any

import asyncpg
import pg8000.dbapi
import psycopg
import psycopg2
import psycopg_pool
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from graphile_worker import App, ConfigurationError, DatabaseError, run_migrations
from graphile_worker._db.schema.databases import drop_database, dsn_of
from support import stacks

NOWHERE = "postgresql://ann@127.0.0.1:1/none"


@pytest.fixture
def app() -> App:
    """An app that cannot reach a database by itself."""
    return App(NOWHERE)


@pytest.fixture
def engine(database: str) -> Iterator[sqlalchemy.Engine]:
    found = stacks.sync_engine(database)
    yield found
    found.dispose()


def fetch_one(given: Any, sql: str) -> Any:
    if hasattr(given, "exec_driver_sql"):
        return given.exec_driver_sql(sql).scalar_one()
    cursor = given.cursor()
    cursor.execute(sql)
    return cursor.fetchone()[0]


CONNECTS: dict[str, Callable[[str], Any]] = {
    "psycopg": psycopg.connect,
    "psycopg2": psycopg2.connect,
    "pg8000": lambda dsn: pg8000.dbapi.connect(**stacks.pg8000_arguments(dsn)),
    "SQLAlchemy": lambda dsn: stacks.sync_engine(dsn, poolclass=sqlalchemy.NullPool).connect(),
}


def terminate(database: str, pid: int) -> None:
    """End a session, and wait until it is gone."""
    with psycopg.connect(database, autocommit=True) as other:
        while other.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where pid = %s", [pid]
        ).fetchone():
            pass


@pytest.mark.parametrize("driver", CONNECTS)
def test_lost_connection_says_that_nothing_of_the_transaction_is_committed(
    app: App, database: str, driver: str
) -> None:
    given = CONNECTS[driver](database)
    pid = fetch_one(given, "select pg_backend_pid()")
    terminate(database, pid)
    with pytest.raises(
        DatabaseError, match=r"(?s)was lost: .*Nothing of your transaction is committed"
    ) as caught:
        app.add_job_sync("t", {"secret": "s3cret"}, connection=given)
    assert caught.value.__cause__ is not None
    assert "s3cret" not in str(caught.value)
    if driver == "pg8000":  # its own close fails
        given._usock.close()
        with suppress(OSError):
            given._sock.close()
    else:
        given.close()


def test_lost_autocommit_connection_says_that_the_job_may_be_committed(app: App, database: str) -> None:
    given = psycopg.connect(database, autocommit=True)
    terminate(database, given.info.backend_pid)
    with (
        pytest.warns(match="not in a transaction"),
        pytest.raises(DatabaseError, match="may have been committed"),
    ):
        app.add_job_sync("t", connection=given)
    given.close()


@pytest.mark.parametrize("driver", CONNECTS)
def test_failed_transaction_says_to_roll_back(app: App, database: str, driver: str) -> None:
    given = CONNECTS[driver](database)
    with pytest.raises(Exception, match="zero"):
        fetch_one(given, "select 1 / 0")
    with pytest.raises(DatabaseError, match=r"An earlier statement .* has failed.* Roll back"):
        app.add_job_sync("t", connection=given)
    given.rollback()
    assert app.add_job_sync("t", connection=given).task_identifier == "t"
    given.rollback()
    given.close()


def test_session_after_a_failed_flush_says_to_roll_back_without_its_statement(
    app: App, engine: sqlalchemy.Engine
) -> None:
    class Base(sqlalchemy.orm.DeclarativeBase): ...

    class Order(Base):
        __tablename__ = "orders"
        id: sqlalchemy.orm.Mapped[int] = sqlalchemy.orm.mapped_column(primary_key=True)
        card: sqlalchemy.orm.Mapped[str]

    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Order(id=1, card="4242"))
        session.commit()
        session.expunge_all()
        session.add(Order(id=1, card="s3cret"))
        with pytest.raises(sqlalchemy.exc.IntegrityError):
            session.flush()
        with pytest.raises(DatabaseError, match="Roll back") as caught:
            app.add_job_sync("t", connection=session)
        assert "s3cret" not in str(caught.value)
        session.rollback()
        assert app.add_job_sync("t", connection=session).task_identifier == "t"


async def test_asyncpg_connection_of_another_event_loop_is_refused_unharmed(app: App, database: str) -> None:
    connection = await asyncpg.connect(database)
    async with connection.transaction():
        with pytest.raises(ConfigurationError, match="an asyncpg Connection of another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(app.add_job("t", connection=connection)))
        await app.add_job("t", connection=connection)
    await connection.close()


async def test_async_session_of_another_event_loop_is_refused_unharmed(app: App, database: str) -> None:
    engine = stacks.async_engine(database)
    async with AsyncSession(engine) as session:
        await session.connection()
        with pytest.raises(ConfigurationError, match="of another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(app.add_job("t", connection=session)))
        await app.add_job("t", connection=session)
    await engine.dispose()


async def test_busy_asyncpg_connection_says_so(app: App, database: str) -> None:
    connection = await asyncpg.connect(database)
    async with connection.transaction():
        await app.add_job("known", connection=connection)
        other = asyncio.ensure_future(connection.execute("select pg_sleep(0.2)"))
        await asyncio.sleep(0)
        with pytest.raises(DatabaseError, match="another operation is in progress"):
            await app.add_job("t", connection=connection)
        await other
        await app.add_job("t", connection=connection)
    await connection.close()


def test_two_threads_may_add_jobs_on_one_session(app: App, engine: sqlalchemy.Engine) -> None:
    with Session(engine) as session:
        session.connection()
        errors: list[Exception] = []

        def add() -> None:
            try:
                for _ in range(10):
                    app.add_job_sync("t", connection=session)
            except DatabaseError as error:
                errors.append(error)

        threads = [threading.Thread(target=add) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        session.rollback()


async def test_connection_that_was_given_back_to_its_pool_is_closed(app: App, database: str) -> None:
    async with asyncpg.create_pool(database, min_size=1) as pool:
        async with pool.acquire() as connection:
            pass
        with pytest.raises(ConfigurationError, match="connection= is closed: an asyncpg PoolConnectionProxy"):
            await app.add_job("t", connection=connection)


def test_error_for_a_closed_connection_does_not_show_its_settings(app: App, database: str) -> None:
    for connect in (psycopg2.connect, psycopg.connect):
        given: Any = connect(f"{database}&application_name=s3cret")
        given.close()
        with pytest.raises(ConfigurationError, match="connection= is closed") as caught:
            app.add_job_sync("t", connection=given)
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda c: c.cursor(), "cursor.connection"),
        (psycopg.Transaction, "not the transaction"),
        (lambda _: Session, "Session is not a connection itself"),
        (lambda c: c.cursor, "pass what it returns"),
        (lambda _: psycopg_pool.AsyncConnectionPool(NOWHERE, open=False), "async with pool.connection"),
    ],
)
def test_error_for_something_near_a_connection_says_what_to_pass(
    app: App, database: str, make: Any, hint: str
) -> None:
    with psycopg.connect(database) as connection, pytest.raises(ConfigurationError, match=hint):
        app.add_job_sync("t", connection=make(connection))


def test_transaction_and_raw_connection_of_sqlalchemy_say_what_to_pass(
    app: App, engine: sqlalchemy.Engine
) -> None:
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="not the transaction"):
        app.add_job_sync("t", connection=connection.begin())  # type: ignore[arg-type]
    raw = engine.raw_connection()
    with pytest.raises(ConfigurationError, match=r"not engine\.raw_connection"):
        app.add_job_sync("t", connection=raw)
    raw.close()


def test_psycopg2_connection_in_async_mode_is_refused(app: App, database: str) -> None:
    connection = psycopg2.connect(database, async_=1)
    with pytest.raises(ConfigurationError, match="async_=1"):
        app.add_job_sync("t", connection=connection)
    connection.close()


@asynccontextmanager
async def in_encoding(server: str, encoding: str) -> AsyncIterator[str]:
    """Yield a database with the schema, in this encoding."""
    name = f"encoded_{token_hex(4)}"
    db = await asyncpg.connect(server)
    await db.execute(
        f"create database {name} template template0 encoding '{encoding}' lc_collate 'C' lc_ctype 'C'"
    )
    try:
        await run_migrations(dsn := dsn_of(server, name))
        yield dsn
    finally:
        await drop_database(db, name)
        await db.close()


@pytest.mark.parametrize("stack", ["psycopg2", "pg8000", "SQLAlchemy Session on psycopg2"])
async def test_character_that_a_connection_cannot_send_is_named(app: App, server: str, stack: str) -> None:
    async with in_encoding(server, "SQL_ASCII") as dsn:
        with stacks.SYNC[stack](dsn) as given:
            app.add_job_sync("kept", connection=given.connection)
            with pytest.raises(DatabaseError, match=r"'\\xe9'.* client encoding is ascii") as caught:
                app.add_job_sync("t", {"name": "Andr\xe9"}, connection=given.connection)
            assert isinstance(caught.value.__cause__, UnicodeEncodeError)
            assert app.add_job_sync("kept", connection=given.connection).task_identifier == "kept"
            given.rollback()


@pytest.mark.parametrize("stack", ["asyncpg", "SQLAlchemy AsyncSession"])
async def test_character_that_the_database_lacks_does_not_abort_the_transaction(
    app: App, server: str, stack: str
) -> None:
    async with in_encoding(server, "LATIN1") as dsn, stacks.ASYNC[stack](dsn) as given:
        for _ in range(2):
            await app.add_job("kept", {"name": "Andr\xe9"}, connection=given.connection)
            with pytest.raises(DatabaseError, match="has no equivalent"):
                await app.add_job("t", {"name": "\N{SNAKE}"}, connection=given.connection)
        await given.execute("select 1")
        await given.rollback()

"""Statements on the caller's connection, from every driver and ORM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy

from graphile_worker import App, DatabaseError, GraphileWorkerError
from graphile_worker._db.connection import any_connection
from graphile_worker._db.connection.any_connection import fetch_text, fetch_text_sync
from graphile_worker._db.sql_files import OneTextStatement, Schema
from support import stacks

HOSTILE = """%s %(x)s %% :x ::x \\:x $1 $$ ? {x} ' " \\ 12345678901234567890123 \\u0000 é 🐍"""
ECHO = OneTextStatement("""select cast(""", """ as pg_catalog.text) as "odd 100% :x \\:y ::z $1 ? name" """)
FAIL = OneTextStatement("select cast(cast(", " as pg_catalog.text)::pg_catalog.int4 / 0 as pg_catalog.text)")
SCHEMA = Schema()


@pytest.mark.sample(4)
@pytest.mark.parametrize("stack", stacks.SYNC)
def test_statement_runs_on_a_sync_connection(database: str, stack: str) -> None:
    with stacks.SYNC[stack](database) as given:
        assert fetch_text_sync(given.connection, SCHEMA, ECHO, HOSTILE) == HOSTILE


@pytest.mark.parametrize("stack", stacks.ASYNC)
async def test_statement_runs_on_an_async_connection(database: str, stack: str) -> None:
    async with stacks.ASYNC[stack](database) as given:
        assert await fetch_text(given.connection, SCHEMA, ECHO, HOSTILE) == HOSTILE


@pytest.mark.sample(4)
@pytest.mark.parametrize("stack", stacks.SYNC)
def test_refused_statement_does_not_abort_the_transaction_of_a_sync_connection(
    database: str, stack: str
) -> None:
    with stacks.SYNC[stack](database) as given:
        given.execute("create table kept ()")
        with pytest.raises(GraphileWorkerError, match="Division by zero"):
            fetch_text_sync(given.connection, SCHEMA, FAIL, "1")
        assert fetch_text_sync(given.connection, SCHEMA, ECHO, "1") == "1"
        given.commit()
        given.execute("drop table kept")
        given.rollback()


@pytest.mark.sample(4)
@pytest.mark.parametrize("stack", stacks.ASYNC)
async def test_refused_statement_does_not_abort_the_transaction_of_an_async_connection(
    database: str, stack: str
) -> None:
    async with stacks.ASYNC[stack](database) as given:
        await given.execute("create table kept ()")
        with pytest.raises(GraphileWorkerError, match="Division by zero"):
            await fetch_text(given.connection, SCHEMA, FAIL, "1")
        assert await fetch_text(given.connection, SCHEMA, ECHO, "1") == "1"
        await given.execute("drop table kept")
        await given.commit()


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> App:
    """An app that cannot reach a database by itself, in a process that has seen no schema yet."""
    monkeypatch.setattr(any_connection, "_MISSING_UNTIL", {})
    return App("postgresql://ann@127.0.0.1:1/none")


@pytest.fixture
def engine(database: str) -> Iterator[sqlalchemy.Engine]:
    found = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database))
    yield found
    found.dispose()


@pytest.fixture
def sent(engine: sqlalchemy.Engine) -> list[str]:
    """The statements that are sent to the server."""
    statements: list[str] = []

    @sqlalchemy.event.listens_for(engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_others: Any) -> None:
        statements.append(statement)

    return statements


def count_jobs(connection: sqlalchemy.Connection) -> int:
    return int(connection.exec_driver_sql("select count(*) from graphile_worker.jobs").scalar_one())


def test_adding_a_job_takes_one_round_trip_once_the_function_is_known(
    unreachable: App, engine: sqlalchemy.Engine, sent: list[str]
) -> None:
    with engine.begin() as connection:
        unreachable.add_job_sync("first", connection=connection)
    sent.clear()
    with engine.begin() as connection:  # the same connection of the pool
        unreachable.add_job_sync("second", connection=connection)
        assert len(sent) == 1
        assert count_jobs(connection) == 2


def test_refused_job_does_not_abort_the_transaction_without_a_savepoint_first(
    unreachable: App, engine: sqlalchemy.Engine
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "alter table graphile_worker._private_jobs add constraint small check (priority < 100)"
        )
        for _ in range(2):
            unreachable.add_job_sync("kept", connection=connection)
            with pytest.raises(DatabaseError, match="small") as caught:
                unreachable.add_job_sync("refused", priority=100, connection=connection)
            assert isinstance(caught.value.__cause__, sqlalchemy.exc.IntegrityError)
        assert count_jobs(connection) == 2


def test_statement_timeout_does_not_abort_the_transaction(
    unreachable: App, engine: sqlalchemy.Engine
) -> None:
    with engine.connect() as connection, engine.begin() as other:
        unreachable.add_job_sync("known", connection=connection)
        connection.commit()
        other.exec_driver_sql("lock table graphile_worker._private_jobs")
        connection.exec_driver_sql("set local statement_timeout = 50")
        with pytest.raises(DatabaseError, match="statement timeout"):
            unreachable.add_job_sync("late", connection=connection)
        assert connection.exec_driver_sql("select 1").scalar_one() == 1


@pytest.mark.parametrize("change", ["drop function {}", "revoke execute on function {} from public"])
def test_job_is_added_in_a_savepoint_where_the_function_cannot_be_called(
    unreachable: App, engine: sqlalchemy.Engine, sent: list[str], change: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(change.format("graphile_worker._private_python_add_v1(text)"))
        connection.exec_driver_sql("create role adds_jobs_only bypassrls")
        connection.exec_driver_sql("grant usage on schema graphile_worker to adds_jobs_only")
        connection.exec_driver_sql("grant all on all tables in schema graphile_worker to adds_jobs_only")
        connection.exec_driver_sql("set role adds_jobs_only")
        unreachable.add_job_sync("first", connection=connection)
        sent.clear()
        unreachable.add_job_sync("second", connection=connection)
        savepoint, add, release = sent
        assert savepoint.startswith("savepoint")
        assert "add_v1" not in add
        assert release.startswith("release")
        assert count_jobs(connection) == 2
        connection.rollback()  # the role too


def test_function_dropped_while_a_connection_is_open_fails_one_call(
    unreachable: App, engine: sqlalchemy.Engine
) -> None:
    with engine.begin() as connection:
        unreachable.add_job_sync("first", connection=connection)
        connection.exec_driver_sql("drop function graphile_worker._private_python_add_v1(text)")
    with engine.connect() as connection, pytest.raises(GraphileWorkerError):
        unreachable.add_job_sync("second", connection=connection)
    with engine.begin() as connection:
        unreachable.add_job_sync("third", connection=connection)
        assert count_jobs(connection) == 2

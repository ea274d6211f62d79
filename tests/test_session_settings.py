"""The worker's sessions have their own settings, whatever the role and the database set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from graphile_worker import JobSpec, WorkerUtils, doctor, parse_crontab, run_migrations
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.transactions import transaction
from graphile_worker._db.queries import workers as database_workers
from graphile_worker._db.sql_files import Schema
from support.workers import EventRecorder, nothing, running

WORKER_SETTINGS = {
    "search_path": "pg_catalog, pg_temp",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "transaction_read_only": "off",
    "transaction_isolation": "read committed",
}
WORKER_SETTINGS_IN_A_TRANSACTION = {**WORKER_SETTINGS, "idle_in_transaction_session_timeout": "10s"}
"""A transaction that sets the settings also sets the idle limit of the worker's transactions."""
HARMFUL = {
    "statement_timeout": "1",
    "lock_timeout": "1",
    "idle_in_transaction_session_timeout": "1",
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
}
HARMLESS = {
    **HARMFUL,
    "statement_timeout": "60000",
    "lock_timeout": "60000",
    "idle_in_transaction_session_timeout": "60000",
    "search_path": "public, pg_catalog",
}
"""Settings that differ from the worker's, but do not break the rest of a test."""


async def configure(dsn: str, settings: dict[str, str]) -> None:
    """Apply the settings to the database, and read-only transactions to the role too."""
    db = await asyncpg.connect(dsn)
    name = await db.fetchval("select current_database()")
    for setting, value in settings.items():
        await db.execute(f'alter database "{name}" set {setting} = {value}')
    await db.execute(f'alter role current_user in database "{name}" set default_transaction_read_only = on')
    await db.close()


@pytest.fixture
async def restrictive_database(empty_database: str) -> str:
    """A database whose sessions time out after a millisecond."""
    await configure(empty_database, HARMFUL)
    return empty_database


async def settings_of(connection: Any) -> dict[str, str]:
    return {name: await connection.fetchval(f"show {name}") for name in WORKER_SETTINGS}


async def test_worker_runs_despite_restrictive_settings_of_role_and_database(
    restrictive_database: str,
) -> None:
    await run_migrations(dsn=restrictive_database)
    recorder = EventRecorder()
    items = parse_crontab("* * * * * t ?fill=3m")
    async with WorkerUtils(restrictive_database) as utils:
        await utils.add_jobs(JobSpec("t", n, queue_name="q") for n in range(20))
        async with utils._session.pool.connection() as on:
            old = datetime.now(UTC) - timedelta(hours=1)
            await on.execute(
                "insert into graphile_worker._private_known_crontabs values ('t', $1, $1)",
                old.replace(second=0, microsecond=0),
            )
            lease = {"seconds": 38, "fast": 8, "tasks": {}, "epoch": ""}
            metadata = {"lease": lease, "died_at": old.isoformat(), "swept_at": old.isoformat()}
            await database_workers.register(on, Schema(), "dead", metadata)
        held = await utils.add_job("held")
        async with utils._session.pool.connection() as on:
            await on.execute(
                "update graphile_worker._private_jobs set locked_by = 'dead', locked_at = now() "
                "where id = $1",
                held.id,
            )
    async with running(
        {"t": nothing}, restrictive_database, recorder=recorder, cron_items=items, poll_interval=0.1
    ) as runner:
        await runner.add_job("t", 1)
        await recorder.until("job:complete", 21 + 3)
    async with WorkerUtils(restrictive_database) as utils:
        await utils.sweep()
        job = await utils.get_job(id=held.id)
        await utils.cleanup()

    assert job is not None
    assert job.locked_by is None
    assert recorder.counts["job:complete"] >= 24
    assert not [name for name in recorder.names if name.endswith("rror")]


@pytest.mark.parametrize("prepared_statements", [True, False], ids=["session", "transactions"])
async def test_every_connection_of_a_pool_has_the_worker_settings(
    database: str, *, prepared_statements: bool
) -> None:
    await configure(database, HARMLESS)
    pool = Pool(database, prepared_statements=prepared_statements)
    try:
        async with pool.connection() as connection:
            expected = WORKER_SETTINGS if prepared_statements else WORKER_SETTINGS_IN_A_TRANSACTION
            assert await settings_of(connection) == expected
        if prepared_statements:
            async with pool.dedicated() as connection:
                assert await settings_of(connection) == WORKER_SETTINGS
            connection = await (await pool.connector())()
            assert await settings_of(connection) == WORKER_SETTINGS
            await connection.close()
        async with pool.lend() as lent:
            assert await settings_of(lent) != WORKER_SETTINGS
            assert await lent.fetchval("show search_path") == "public, pg_catalog"
    finally:
        await pool.close()


async def test_connections_of_a_callers_pool_have_the_worker_settings_only_while_in_use(
    database: str,
) -> None:
    await configure(database, HARMLESS)
    async with asyncpg.create_pool(database, min_size=1, max_size=2) as given:
        original = await settings_of(given)
        pool = Pool(pool=given)
        for own in (pool.connection, pool.dedicated):
            async with own() as connection:
                assert await settings_of(connection) == WORKER_SETTINGS
            assert await settings_of(given) == original
        connection = await (await pool.connector())()
        assert await settings_of(connection) == WORKER_SETTINGS
        await connection.close()
        async with pool.lend() as lent:
            assert await settings_of(lent) == original
        async with WorkerUtils(pool=given) as utils:
            await utils.add_job("t")
        await pool.close()


async def test_pool_with_a_custom_reset_keeps_no_setting(database: str) -> None:
    async def reset(_connection: object) -> None:
        """Keep the session as it is."""

    await configure(database, HARMLESS)
    async with asyncpg.create_pool(database, min_size=1, max_size=1, reset=reset) as given:
        original = await settings_of(given)
        pool = Pool(pool=given)
        async with pool.connection() as connection:
            assert await settings_of(connection) == WORKER_SETTINGS_IN_A_TRANSACTION
        await pool.close()
        assert await settings_of(given) == original


async def test_pool_whose_connections_reset_nothing_keeps_no_setting(database: str) -> None:
    class Kept(asyncpg.Connection):
        def get_reset_query(self) -> str:
            return ""

    await configure(database, HARMLESS)
    async with asyncpg.create_pool(database, min_size=1, max_size=1, connection_class=Kept) as given:
        original = await settings_of(given)
        pool = Pool(pool=given)
        async with pool.connection() as connection:
            assert await settings_of(connection) == WORKER_SETTINGS_IN_A_TRANSACTION
        await pool.close()
        assert await settings_of(given) == original


async def test_transaction_with_invalid_settings_is_rolled_back(database: str) -> None:
    connection = await asyncpg.connect(database)
    refused = transaction(connection, settings="set local no_such_setting = 1")
    with pytest.raises(asyncpg.UndefinedObjectError):
        await refused.__aenter__()

    assert not connection.is_in_transaction()
    async with transaction(connection):
        assert await connection.fetchval("select 1") == 1
    await connection.close()


async def test_transaction_on_a_terminated_session_raises_the_cause(database: str) -> None:
    connection = await asyncpg.connect(database)
    ended = transaction(connection, settings="select pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(asyncpg.PostgresError, match="terminating connection"):
        await ended.__aenter__()


async def test_doctor_warns_about_a_read_only_default(database: str) -> None:
    await configure(database, HARMLESS)

    found = {one.check: one async for one in doctor.examine(database)}

    assert found["server"].level.name == "WARNING"
    assert "read-only" in found["server"].message

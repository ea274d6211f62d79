"""Our own sessions have the settings that we need, whatever those of the role and the database are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import JobSpec, WorkerUtils, doctor, parse_crontab, run_migrations
from graphile_worker._db import workers as database_workers
from graphile_worker._db.connect import Pool
from graphile_worker._db.sql import Schema
from graphile_worker._db.transactions import transaction
from support.workers import Heard, nothing, running

if TYPE_CHECKING:
    pass

OURS = {
    "search_path": "pg_catalog, pg_temp",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "transaction_read_only": "off",
    "transaction_isolation": "read committed",
}
OURS_IN_A_TRANSACTION = {**OURS, "idle_in_transaction_session_timeout": "10s"}
"""Where each transaction brings the settings, it also brings the limit of all our transactions."""
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
"""Settings that are not ours, but do no harm to the rest of a test."""


async def configure(dsn: str, settings: dict[str, str]) -> None:
    """Set them for the database, and the last one for the role too."""
    db = await asyncpg.connect(dsn)
    name = await db.fetchval("select current_database()")
    for setting, value in settings.items():
        await db.execute(f'alter database "{name}" set {setting} = {value}')
    await db.execute(f'alter role current_user in database "{name}" set default_transaction_read_only = on')
    await db.close()


@pytest.fixture
async def hurried(empty_database: str) -> str:
    """A database whose sessions may do nothing for longer than a millisecond."""
    await configure(empty_database, HARMFUL)
    return empty_database


async def settings_of(connection: Any) -> dict[str, str]:
    return {name: await connection.fetchval(f"show {name}") for name in OURS}


async def test_a_worker_is_not_hurt_by_settings_of_the_role_or_database(hurried: str) -> None:
    await run_migrations(dsn=hurried)
    heard = Heard()
    items = parse_crontab("* * * * * t ?fill=3m")
    async with WorkerUtils(hurried) as utils:
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
    async with running({"t": nothing}, hurried, heard=heard, cron_items=items, poll_interval=0.1) as runner:
        await runner.add_job("t", 1)
        await heard.until("job:complete", 21 + 3)
    async with WorkerUtils(hurried) as utils:
        await utils.sweep()
        job = await utils.get_job(id=held.id)
        await utils.cleanup()

    assert job is not None
    assert job.locked_by is None
    assert heard.counts["job:complete"] >= 24
    assert not [name for name in heard.names if name.endswith("rror")]


@pytest.mark.parametrize("prepared_statements", [True, False], ids=["session", "transactions"])
async def test_every_own_connection_has_our_settings(database: str, *, prepared_statements: bool) -> None:
    await configure(database, HARMLESS)
    pool = Pool(database, prepared_statements=prepared_statements)
    try:
        async with pool.connection() as connection:
            expected = OURS if prepared_statements else OURS_IN_A_TRANSACTION
            assert await settings_of(connection) == expected
        if prepared_statements:
            async with pool.dedicated() as connection:
                assert await settings_of(connection) == OURS
            connection = await (await pool.dialler())()
            assert await settings_of(connection) == OURS
            await connection.close()
        async with pool.lend() as lent:
            assert await settings_of(lent) != OURS
            assert await lent.fetchval("show search_path") == "public, pg_catalog"
    finally:
        await pool.close()


async def test_connections_of_a_callers_pool_have_our_settings_only_while_we_use_them(database: str) -> None:
    await configure(database, HARMLESS)
    async with asyncpg.create_pool(database, min_size=1, max_size=2) as given:
        theirs = await settings_of(given)
        pool = Pool(pool=given)
        for own in (pool.connection, pool.dedicated):
            async with own() as connection:
                assert await settings_of(connection) == OURS
            assert await settings_of(given) == theirs
        connection = await (await pool.dialler())()
        assert await settings_of(connection) == OURS
        await connection.close()
        async with pool.lend() as lent:
            assert await settings_of(lent) == theirs
        async with WorkerUtils(pool=given) as utils:
            await utils.add_job("t")
        await pool.close()


async def test_a_pool_with_a_reset_of_its_own_gets_no_setting_that_stays(database: str) -> None:
    async def reset(_connection: object) -> None:
        """Keep the session as it is."""

    await configure(database, HARMLESS)
    async with asyncpg.create_pool(database, min_size=1, max_size=1, reset=reset) as given:
        theirs = await settings_of(given)
        pool = Pool(pool=given)
        async with pool.connection() as connection:
            assert await settings_of(connection) == OURS_IN_A_TRANSACTION
        await pool.close()
        assert await settings_of(given) == theirs


async def test_a_pool_whose_connections_reset_nothing_gets_no_setting_that_stays(database: str) -> None:
    class Kept(asyncpg.Connection):
        def get_reset_query(self) -> str:
            return ""

    await configure(database, HARMLESS)
    async with asyncpg.create_pool(database, min_size=1, max_size=1, connection_class=Kept) as given:
        theirs = await settings_of(given)
        pool = Pool(pool=given)
        async with pool.connection() as connection:
            assert await settings_of(connection) == OURS_IN_A_TRANSACTION
        await pool.close()
        assert await settings_of(given) == theirs


async def test_a_transaction_whose_settings_are_refused_is_rolled_back(database: str) -> None:
    connection = await asyncpg.connect(database)
    refused = transaction(connection, settings="set local no_such_setting = 1")
    with pytest.raises(asyncpg.UndefinedObjectError):
        await refused.__aenter__()

    assert not connection.is_in_transaction()
    async with transaction(connection):
        assert await connection.fetchval("select 1") == 1
    await connection.close()


async def test_a_transaction_on_a_session_that_ends_fails_with_the_cause(database: str) -> None:
    connection = await asyncpg.connect(database)
    ended = transaction(connection, settings="select pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(asyncpg.PostgresError, match="terminating connection"):
        await ended.__aenter__()


async def test_the_doctor_tells_of_a_read_only_default(database: str) -> None:
    await configure(database, HARMLESS)

    found = {one.check: one async for one in doctor.examine(database)}

    assert found["server"].level.name == "WARNING"
    assert "read-only by default" in found["server"].says

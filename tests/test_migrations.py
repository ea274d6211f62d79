"""Migrations: install the schema, adopt an existing one, and reject incompatible ones."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from typing import TYPE_CHECKING
from uuid import uuid4

import asyncpg
import pytest

from graphile_worker import (
    ConfigurationError,
    DatabaseError,
    SchemaError,
    SchemaTooNewError,
    SchemaTooOldError,
    WorkerUtils,
    run_migrations,
)
from graphile_worker._db.schema.migrate import migrate
from graphile_worker._db.schema.steps import OWN_MIGRATIONS
from graphile_worker._db.sql_files import Schema
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.testing import running_server
from support import node
from support.jobs import add
from support.postgres import from_npm, installations
from support.waiting import until, until_blocked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BREAKING = [1, 3, 11, 13, 14, 16, 19]


@pytest.fixture
async def empty(empty_database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(empty_database)
    yield connection
    await connection.close()


@pytest.fixture
async def limited_role(empty: asyncpg.Connection) -> AsyncIterator[str]:
    """A role that may connect, but create nothing in the database."""
    role = f"gw_limited_{uuid4().hex}"
    await empty.execute(f"create role {role} login password 'p'")
    yield role
    await empty.execute(f"drop owned by {role} cascade; drop role {role}")


async def revisions(connection: asyncpg.Connection) -> list[tuple[int, bool]]:
    rows = await connection.fetch("select id, breaking from graphile_worker.migrations order by id")
    return [tuple(row) for row in rows]


async def objects(connection: asyncpg.Connection) -> set[str]:
    """Return all objects in the database that do not belong to PostgreSQL itself."""
    rows = await connection.fetch("""
        select 'schema ' || nspname as object from pg_namespace
          where nspname !~ '^pg_' and nspname not in ('public', 'information_schema')
        union select 'relation ' || oid::regclass from pg_class where oid >= 16384
          and relnamespace <> 'pg_toast'::regnamespace
        union select 'function ' || oid::regprocedure from pg_proc where oid >= 16384
        union select 'type ' || oid::regtype from pg_type where oid >= 16384
          and typnamespace <> 'pg_toast'::regnamespace""")
    return {row["object"] for row in rows}


async def test_empty_database_gets_all_revisions(empty: asyncpg.Connection, empty_database: str) -> None:
    await run_migrations(dsn=empty_database)

    assert await revisions(empty) == [(n, n in BREAKING) for n in range(1, 21)]
    assert (await add(empty, "hello"))["id"] == 1


async def test_repeated_migration_changes_nothing(empty: asyncpg.Connection, empty_database: str) -> None:
    await run_migrations(dsn=empty_database)
    before = await empty.fetch("select * from graphile_worker.migrations order by id")
    before_objects = await objects(empty)

    for _ in range(3):
        assert await migrate(empty, Schema()) == (20, False)

    assert await empty.fetch("select * from graphile_worker.migrations order by id") == before
    assert await objects(empty) == before_objects


async def test_dropping_the_schema_removes_all_created_objects(
    empty: asyncpg.Connection, empty_database: str
) -> None:
    before = await objects(empty)
    await run_migrations(dsn=empty_database)
    assert len(await objects(empty)) > len(before)

    await empty.execute("drop schema graphile_worker cascade")

    assert await objects(empty) == before


async def test_first_migration_writes_no_error_to_the_server_log(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder) as server:
        await run_migrations(dsn=server.dsn())
        await run_migrations(dsn=server.dsn())

        log = server.log.read_text()
    assert "database system is ready" in log
    assert "ERROR" not in log


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    [
        'a"; drop',
        "Case-Schema",
        "with space",
        "ünï",
        "a'b",
        "$body$",
        "{schema}",
        "--",
        "%s",
        "x" * 63,
    ],
)
async def test_schema_may_have_any_name(empty: asyncpg.Connection, empty_database: str, name: str) -> None:
    await run_migrations(dsn=empty_database, schema=name)

    quoted = '"' + name.replace('"', '""') + '"'
    await empty.execute(f"select {quoted}.add_job('t', job_key => 'k')")
    await empty.execute(f"select {quoted}.add_job('t', job_key => 'k', job_key_mode => 'unsafe_dedupe')")
    assert await empty.fetchval(f"select revision from {quoted}.jobs") == 1
    await empty.execute(f"select {quoted}.remove_job('k')")
    await empty.execute(f"select {quoted}.worker_heartbeat('w')")
    assert await empty.fetchval(f"select count(*) from {quoted}.jobs") == 0


@pytest.mark.parametrize("name", ["x" * 64, "é" * 32, "a\0b", "\ud800"])
async def test_schema_name_that_postgresql_cannot_store_is_rejected(name: str) -> None:
    with pytest.raises(ConfigurationError, match="schema"):
        await run_migrations(dsn="postgresql://nowhere", schema=name)


async def test_long_schema_name_is_warned_about_once(
    empty_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    await run_migrations(dsn=empty_database, schema="x" * 32)
    assert not caplog.records
    await run_migrations(dsn=empty_database, schema="x" * 33)
    await run_migrations(dsn=empty_database, schema="x" * 33)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "33 bytes" in caplog.text


async def test_database_and_schema_are_read_from_the_environment(
    empty: asyncpg.Connection, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database)
    monkeypatch.setenv("GRAPHILE_WORKER_SCHEMA", "from_env")

    await run_migrations()

    assert await empty.fetchval("select count(*) from from_env.migrations") == 20


async def test_failed_migration_changes_nothing(empty: asyncpg.Connection, empty_database: str) -> None:
    await empty.execute("create schema graphile_worker; create view graphile_worker.jobs as select 1")
    before = await objects(empty)

    with pytest.raises(SchemaError, match=r'conflicting objects: Relation "jobs" already exists'):
        await run_migrations(dsn=empty_database)

    assert await objects(empty) == before


@pytest.mark.parametrize(
    "columns",
    [
        "version text",
        "id serial, name text",
        "id uuid, ts timestamptz",
        "id int, ts timestamptz, breaking text",
    ],
)
async def test_migrations_table_of_another_application_is_rejected(
    empty: asyncpg.Connection, empty_database: str, columns: str
) -> None:
    await empty.execute(f"create table public.migrations ({columns})")

    with pytest.raises(SchemaError, match="does not belong to Graphile Worker"):
        await run_migrations(dsn=empty_database, schema="public")


async def test_schema_with_other_tables_is_warned_about(
    empty: asyncpg.Connection, empty_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    await empty.execute("create table public.mine ()")
    await run_migrations(empty_database, schema="public")
    assert "contains other tables" in caplog.text


async def test_migration_with_a_lost_connection_leaves_nothing(
    empty: asyncpg.Connection, empty_database: str
) -> None:
    others = """from pg_stat_activity
        where application_name = 'graphile-worker' and datname = current_database()"""
    other = await asyncpg.connect(empty_database)
    async with other.transaction():
        await other.execute("create schema graphile_worker")  # not committed, so the installer waits
        installing = asyncio.create_task(run_migrations(empty_database))
        await until(
            lambda: empty.fetchval(f"select bool_or(cardinality(pg_blocking_pids(pid)) > 0) {others}"),
            "the installer waits for the lock",
        )
        await empty.execute(f"select pg_terminate_backend(pid) {others}")
        with pytest.raises(DatabaseError, match=r"(Terminating connection|connection was lost)"):
            await installing
        await other.execute("drop schema graphile_worker")
    await other.close()
    assert await objects(empty) == set()


class Clock:
    """A clock that the test moves, and that counts how often it was read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now

    async def until_read_twice(self) -> None:
        """Wait until the clock is read twice. The reader has then seen the current state of the database."""
        before = self.reads

        async def read() -> bool:
            return self.reads >= before + 2

        await until(read, "the clock is read")


class TestExistingSchema:
    async def test_revision_20_installed_by_node_is_adopted(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        await node.install("0.18.0", empty_database)
        job = await add(empty, "from_node")
        rows = await empty.fetch("select * from graphile_worker.migrations order by id")

        assert await migrate(empty, Schema()) == (20, True)

        assert await empty.fetch("select * from graphile_worker.migrations order by id") == rows
        assert await empty.fetchval("select id from graphile_worker.jobs") == job["id"]
        assert await migrate(empty, Schema()) == (20, False)

    async def test_revision_19_is_upgraded_to_20_and_announced(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        await node.install("0.17.3", empty_database)
        job = await add(empty, "from_node")
        received: asyncio.Queue[object] = asyncio.Queue()
        await empty.add_listener("worker:migrate", lambda *message: received.put_nowait(message[3]))

        await run_migrations(dsn=empty_database)

        assert json.loads(str(await received.get())) == {"migrationNumber": 20, "breaking": False}
        assert await revisions(empty) == [(n, n in BREAKING) for n in range(1, 21)]
        assert await empty.fetchval("select id from graphile_worker.jobs") == job["id"]
        for _ in range(5):
            await add(empty, "from_node", queue_name="q")
        sequences = "select last_value from graphile_worker.job_queues_id_seq"
        assert await empty.fetchval(sequences) == 1, "the functions of revision 19 must not be replaced"
        await empty.reset()

    async def test_functions_from_an_earlier_release_are_replaced(self, db: asyncpg.Connection) -> None:
        bodies = "select array_agg(prosrc order by proname) from pg_proc where proname like 'add_job%'"
        current = await db.fetchval(bodies)
        await self.make_earlier_functions(db)
        assert await db.fetchval(bodies) != current

        assert await migrate(db, Schema()) == (20, True)

        assert await db.fetchval(bodies) == current
        assert await migrate(db, Schema()) == (20, False)

    async def test_functions_installed_by_node_are_not_replaced(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        await node.install("0.18.0", empty_database)
        await migrate(empty, Schema())
        await self.make_earlier_functions(empty)
        bodies = "select array_agg(prosrc order by proname) from pg_proc where proname like 'add_job%'"
        before = await empty.fetchval(bodies)

        assert await migrate(empty, Schema()) == (20, True)

        assert await empty.fetchval(bodies) == before

    @staticmethod
    async def make_earlier_functions(db: asyncpg.Connection) -> None:
        """Make the schema look as before Python migration 7: without its row, and with another add_job."""
        await db.execute("delete from graphile_worker._private_python_migrations where id >= 7")
        definition = await db.fetchval(
            "select pg_get_functiondef(oid) from pg_proc where proname = 'add_job'"
        )
        await db.execute(definition.replace("declare", "declare -- from an earlier release", 1))

    async def test_new_schema_is_not_announced(self, empty: asyncpg.Connection, empty_database: str) -> None:
        received: asyncio.Queue[object] = asyncio.Queue()
        for channel in ("worker:migrate", "marker"):
            await empty.add_listener(channel, lambda *message: received.put_nowait(message[2]))

        await run_migrations(dsn=empty_database)

        await empty.execute("notify marker")
        assert await received.get() == "marker"
        await empty.reset()

    async def test_revision_18_is_rejected_with_advice(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        await node.install("0.16.6", empty_database)
        before = await objects(empty)

        with pytest.raises(SchemaTooOldError, match=r"revision 18.*npx graphile-worker@0\.18"):
            await migrate(empty, Schema(), stall_timeout=0.2)

        assert await objects(empty) == before

    async def test_schema_older_than_the_breaking_flag_is_rejected(self, empty: asyncpg.Connection) -> None:
        await empty.execute("""
            create schema graphile_worker;
            create table graphile_worker.migrations (id int primary key, ts timestamptz);
            insert into graphile_worker.migrations values (1, now())""")

        with pytest.raises(SchemaTooOldError, match="revision 1 "):
            await migrate(empty, Schema(), stall_timeout=0.2)

    async def test_migrate_waits_for_an_installer_that_makes_progress(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another installer commits revision by revision, each within the stall timeout."""
        clock = Clock()
        monkeypatch.setattr("graphile_worker._db.schema.migrate.monotonic", clock)
        await db.execute("delete from graphile_worker.migrations where id > 12")
        connection = await asyncpg.connect(database)
        migrating = asyncio.create_task(migrate(connection, Schema(), stall_timeout=1.0))

        for revision in range(13, 20):
            await clock.until_read_twice()
            clock.now += 0.9
            assert not migrating.done()
            await db.execute(
                "insert into graphile_worker.migrations values ($1, now(), $2)",
                revision,
                revision in BREAKING,
            )

        assert await migrating == (20, True)
        await connection.close()

    async def test_migrate_waits_for_a_long_migration_of_another_installer(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """Migration 11 of Node copies all jobs, and other sessions see nothing of it until it commits."""
        await db.execute("delete from graphile_worker.migrations where id > 18")
        other = await asyncpg.connect(database)
        async with other.transaction():
            await other.execute("insert into graphile_worker.migrations values (19, now(), true)")
            migrating = asyncio.create_task(migrate(db, Schema(), stall_timeout=0.1))
            await until_blocked(other, db.get_server_pid())
        assert await migrating == (20, True)
        await other.close()

    async def test_breaking_migration_of_a_newer_python_release_is_rejected(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        insert = (
            "insert into graphile_worker._private_python_migrations (id, name, breaking) values ($1, 'x', $2)"
        )
        await db.execute(insert, 98, False)
        await run_migrations(database)
        await db.execute(insert, 99, True)
        with pytest.raises(SchemaTooNewError, match="newer release"):
            await run_migrations(database)

    async def test_newer_compatible_schema_is_adopted_with_a_warning(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        await db.execute("""
            insert into graphile_worker.migrations values (21, now(), false);
            drop table graphile_worker._private_python_migrations, graphile_worker._private_workers;
            drop function graphile_worker.worker_heartbeat, graphile_worker.worker_deregister,
              graphile_worker.list_stale_workers, graphile_worker.list_orphan_locked_workers,
              graphile_worker.recover_dead_worker_jobs, graphile_worker.delete_stale_workers""")

        await run_migrations(dsn=database)

        assert re.search(r"revision 21\b.*\b20\b", caplog.text)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]

    async def test_revision_19_of_the_rust_port_is_marked_breaking_with_a_log_message(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """In the Rust port, revision 19 is not breaking, and revision 20 adds the table of workers."""
        await db.execute("""
            delete from graphile_worker.migrations where id = 20;
            update graphile_worker.migrations set breaking = false where id = 19;
            drop table graphile_worker._private_python_migrations, graphile_worker._private_workers;
            drop function graphile_worker.worker_heartbeat, graphile_worker.worker_deregister,
              graphile_worker.list_stale_workers, graphile_worker.list_orphan_locked_workers,
              graphile_worker.recover_dead_worker_jobs, graphile_worker.delete_stale_workers""")
        async with WorkerUtils(database) as utils:
            pending = await utils.pending_migrations()
        assert "mark revision 19 as breaking, like Node's" in pending.what

        await run_migrations(dsn=database)
        await run_migrations(dsn=database)

        [record] = caplog.records
        assert "revision 19 was not marked as breaking, and is now" in record.getMessage()
        marked = await db.fetch("select id from graphile_worker.migrations where breaking order by id")
        assert [row["id"] for row in marked] == [1, 3, 11, 13, 14, 16, 19]

    async def test_newer_breaking_schema_is_rejected_with_its_revisions(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("""
            insert into graphile_worker.migrations
            values (999998, now(), true), (999999, now(), false)""")

        with pytest.raises(SchemaTooNewError, match=r"revision 999999 .* 999998 .* 20"):
            await run_migrations(dsn=database)

    @pytest.mark.parametrize("after_node_017", [False, True])
    async def test_schema_installed_by_the_rust_port_is_adopted_with_a_log_message(
        self,
        db: asyncpg.Connection,
        database: str,
        caplog: pytest.LogCaptureFixture,
        *,
        after_node_017: bool,
    ) -> None:
        # In the Rust port, revision 20 adds the table of workers, and revision 19 is not breaking.
        await db.execute("drop table graphile_worker._private_python_migrations")
        if not after_node_017:
            await db.execute("update graphile_worker.migrations set breaking = false where id = 19")
        before = await objects(db)

        await run_migrations(dsn=database)
        await run_migrations(dsn=database)

        assert len(caplog.records) == 1
        assert "Rust port" in caplog.text
        assert ("Node workers older than 0.17" in caplog.text) is not after_node_017
        added = await objects(db) - before
        assert all("_private_python_migrations" in name for name in added)


class TestRoles:
    async def connect(self, dsn: str, role: str) -> asyncpg.Connection:
        return await asyncpg.connect(dsn, user=role, password="p")

    async def test_role_that_owns_the_schema_can_migrate(
        self, empty: asyncpg.Connection, empty_database: str, limited_role: str
    ) -> None:
        await empty.execute(f"create schema graphile_worker authorization {limited_role}")
        connection = await self.connect(empty_database, limited_role)

        assert await migrate(connection, Schema()) == (20, True)

        assert (await add(connection))["id"] == 1
        await connection.close()

    async def test_existing_migrations_table_is_used(
        self, empty: asyncpg.Connection, empty_database: str, limited_role: str
    ) -> None:
        await empty.execute(f"""
            create schema graphile_worker authorization {limited_role};
            create table graphile_worker.migrations (
              id int primary key, ts timestamptz default now() not null);
            alter table graphile_worker.migrations owner to {limited_role}""")
        connection = await self.connect(empty_database, limited_role)

        assert await migrate(connection, Schema()) == (20, True)

        assert await revisions(connection) == [(n, n in BREAKING) for n in range(1, 21)]
        await connection.close()

    @pytest.mark.parametrize("is_installed", [True, False])
    async def test_member_of_the_owner_installs_for_the_owner(
        self, empty: asyncpg.Connection, empty_database: str, limited_role: str, *, is_installed: bool
    ) -> None:
        member = f"gw member {uuid4().hex}"
        await empty.execute(f"""
            create role "{member}" login password 'p' in role {limited_role};
            create schema graphile_worker authorization {limited_role}""")
        owner = await self.connect(empty_database, limited_role)
        if is_installed:
            await migrate(owner, Schema())
            await owner.execute("drop table graphile_worker._private_python_migrations")
        connection = await self.connect(empty_database, member)

        async with connection.transaction():
            assert await migrate(connection, Schema()) == (20, True)
            assert await connection.fetchval("select current_user") == member

        assert await migrate(owner, Schema()) == (20, False)
        assert (await add(owner))["id"] == 1
        assert (await add(connection))["id"] == 2
        await connection.close()
        await owner.close()
        await empty.execute(f'drop role "{member}"')

    async def test_role_without_rights_is_rejected_with_advice(
        self, empty_database: str, limited_role: str
    ) -> None:
        connection = await self.connect(empty_database, limited_role)

        with pytest.raises(SchemaError, match=r"Permission denied.*create schema .* authorization"):
            await migrate(connection, Schema())

        await connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("_round", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
async def test_ten_concurrent_python_and_node_installers_succeed(
    empty: asyncpg.Connection, empty_database: str, _round: int
) -> None:
    node.command("0.18.0")

    async with asyncio.TaskGroup() as installers:
        for _ in range(4):
            installers.create_task(node.install("0.18.0", empty_database))
        # Node is slow to start, so some Python installers begin before it and some after it.
        for _ in range(3):
            installers.create_task(run_migrations(dsn=empty_database))
        await until(
            lambda: empty.fetchval("select to_regnamespace('graphile_worker') is not null"),
            "an installer has created the schema",
        )
        for _ in range(3):
            installers.create_task(run_migrations(dsn=empty_database))

    assert await revisions(empty) == [(n, n in BREAKING) for n in range(1, 21)]
    assert (await add(empty))["id"] == 1
    applied = "select array_agg(id order by id) from graphile_worker._private_python_migrations"
    assert await empty.fetchval(applied) == [migration.id for migration in OWN_MIGRATIONS]


async def test_python_installers_succeed_while_node_installs(
    empty: asyncpg.Connection, empty_database: str
) -> None:
    node.command("0.18.0")

    async with asyncio.TaskGroup() as installers:
        installers.create_task(node.install("0.18.0", empty_database))
        await until(
            lambda: empty.fetchval("select to_regclass('graphile_worker.migrations') is not null"),
            "Node has created the migrations table",
        )
        for _ in range(5):
            installers.create_task(run_migrations(dsn=empty_database))

    assert await revisions(empty) == [(n, n in BREAKING) for n in range(1, 21)]


async def test_twenty_concurrent_python_installers_succeed(
    empty: asyncpg.Connection, empty_database: str
) -> None:
    async with asyncio.TaskGroup() as installers:
        for _ in range(20):
            installers.create_task(run_migrations(dsn=empty_database))

    assert await revisions(empty) == [(n, n in BREAKING) for n in range(1, 21)]


async def test_concurrent_python_installers_write_no_error_to_the_server_log(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder) as server:
        async with asyncio.TaskGroup() as installers:
            for _ in range(10):
                installers.create_task(run_migrations(server.dsn()))
        assert "ERROR" not in server.log.read_text()


async def test_postgresql_11_is_rejected_with_its_version() -> None:
    binaries = from_npm(11)
    if binaries is None:
        node.missing("npm did not bring PostgreSQL 11")
    with (
        running_server(binaries=binaries) as dsn,
        pytest.raises(DatabaseError, match=r"PostgreSQL 11\.22.* needs 12"),
    ):
        await run_migrations(dsn=dsn)


def test_oldest_supported_postgresql_12_is_tested() -> None:
    binaries = from_npm(12)
    if os.environ.get("TEST_DATABASE_URL"):
        pytest.skip("TEST_DATABASE_URL selects another server")
    if binaries is None:
        node.missing("npm did not bring PostgreSQL 12")
    assert binaries in {found.binaries for found in installations()}


class TestPythonIndexes:
    names = ("jobs_of_queue", "jobs_with_flags", "jobs_with_queue", "jobs_without_flags")
    valid = """select array_agg(replace(relname, '_private_python_', '') order by relname)
        from pg_index join pg_class on pg_class.oid = indexrelid
        where relname like '\\_private\\_python\\_jobs%' and indisvalid"""

    async def test_indexes_are_built_without_blocking_writers(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        await node.install("0.18.0", empty_database)
        await add(empty)
        writer = await asyncpg.connect(empty_database)
        writing = writer.transaction()
        await writing.start()
        await add(writer)

        migrating = asyncio.create_task(run_migrations(dsn=empty_database))
        waits = "select exists (select from pg_stat_progress_create_index where index_relid <> 0)"
        await until(lambda: empty.fetchval(waits), "the index waits for the writer")
        await add(empty)  # would block if the index were not built concurrently
        await writing.commit()
        await migrating

        assert await empty.fetchval(self.valid) == list(self.names)
        await writer.close()

    async def test_invalid_index_of_an_interrupted_installer_is_rebuilt(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        await node.install("0.18.0", empty_database)
        writer = await asyncpg.connect(empty_database)
        await writer.execute("begin")
        await add(writer)
        dying = await asyncpg.connect(empty_database)
        building = asyncio.create_task(migrate(dying, Schema()))
        waits = "select max(pid) from pg_stat_progress_create_index where index_relid <> 0"
        await until(lambda: empty.fetchval(waits), "the index waits for the writer")
        await empty.execute("select pg_terminate_backend($1)", await empty.fetchval(waits))
        with pytest.raises(DatabaseError):
            await building
        await writer.execute("commit")
        assert await empty.fetchval(self.valid) is None

        await run_migrations(dsn=empty_database)

        assert await empty.fetchval(self.valid) == list(self.names)
        dying.terminate()
        await writer.close()

    async def test_concurrent_installers_build_each_index_once(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        await node.install("0.18.0", empty_database)

        async with asyncio.TaskGroup() as installers:
            for _ in range(4):
                installers.create_task(run_migrations(dsn=empty_database))

        assert await empty.fetchval(self.valid) == list(self.names)

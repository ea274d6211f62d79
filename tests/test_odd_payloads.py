"""Payloads that PostgreSQL accepts and Python cannot decode, or hardly: each affects only its own job."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from graphile_worker import InvalidJobError, RunSummary, WorkerUtils, run_migrations, run_once
from graphile_worker._client.bulk import JobFilter
from graphile_worker._db.schema.databases import drop_database
from graphile_worker.testing import Databases
from support.jobs import fetch_one
from support.odd_payloads import RAW_JSON, UNDECODABLE, UNUSUAL, add_raw, in_one_line, nested
from support.waiting import until
from support.workers import EventRecorder, locked, nothing, running

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
async def connect(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def claim_for(db: asyncpg.Connection, runner: Runner) -> None:
    """Lock all jobs in the name of the worker, which does not know of it."""
    await db.execute(
        "update graphile_worker._private_jobs set locked_by = $1, locked_at = now(), attempts = 1", runner.id
    )


async def cut_connections(db: asyncpg.Connection) -> None:
    await db.execute(
        """select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()"""
    )


# Not a method: hypothesis refuses one example database for several instances of a class, one for each server.
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(payloads=st.lists(RAW_JSON, min_size=2, max_size=6))
async def test_unusual_json_payload_affects_only_its_own_job(
    databases: Databases, payloads: list[str]
) -> None:
    ran: list[int] = []

    async def good(payload: Any) -> None:
        ran.append(payload["n"])

    async with databases.fresh() as dsn, connect(dsn) as db:
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
            async with connect(other) as there:
                stored = "select id, payload::text from graphile_worker._private_jobs order by id"
                assert in_one_line(await there.fetch(stored)) == in_one_line(await db.fetch(stored))


class TestWorkers:
    async def test_undecodable_payload_fails_only_its_own_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add_raw(db, *UNDECODABLE.values())
        await add_good(db)
        recorder = EventRecorder()
        async with running({"odd": nothing, "good": nothing}, database, recorder=recorder, concurrency=3):
            await recorder.until("job:success", GOOD)
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

    async def test_undecodable_payload_read_back_after_a_lost_connection_fails_only_its_own_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """Imitate a connection that is lost after the claim, before the worker receives the reply."""
        recorder = EventRecorder()
        async with running({"odd": nothing, "good": nothing}, database, recorder=recorder) as runner:
            async with db.transaction():
                await add_raw(db, *UNDECODABLE.values())
                await claim_for(db, runner)
            await cut_connections(db)
            await until(lambda: _failed(db, len(UNDECODABLE)), "all odd jobs have failed")
            await add_good(db)
            await recorder.until("job:success", GOOD)
        assert await locked(db) == []

    async def test_job_with_a_date_outside_the_range_of_python_runs(
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
        assert await run_once({"good": nothing}, database, handle_signals=False) == RunSummary(4, 0)

    async def test_unusual_payloads_reach_their_tasks(self, db: asyncpg.Connection, database: str) -> None:
        received: list[object] = []

        async def odd(payload: object) -> None:
            received.append(payload)

        await add_raw(db, *UNUSUAL)
        await run_once({"odd": odd}, database, handle_signals=False)
        assert received == [json.loads(text) for text in UNUSUAL]

    async def test_too_deeply_nested_notification_is_handled(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = EventRecorder()
        async with running({"good": nothing}, database, recorder=recorder):
            await recorder.until("pool:listen:success")
            await db.execute("select pg_notify('jobs:insert', $1)", nested(1500))
            await recorder.until("pool:listen:notification")
            await add_good(db)
            await recorder.until("job:success", GOOD)
        assert "Traceback" not in caplog.text
        assert "RecursionError" not in caplog.text


class TestInvalidUtf8:
    """A SQL_ASCII database stores any bytes, for example Latin-1."""

    @pytest.fixture
    async def ascii_database(self, databases: Databases) -> AsyncIterator[str]:
        async with databases.fresh(empty=True) as any_database, connect(any_database) as admin:
            name = f"gw_ascii_{uuid4().hex[:8]}"
            await admin.execute(
                f"create database {name} template template0 encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C'"
            )
            dsn = any_database.replace(any_database.partition("?")[0].rpartition("/")[2], name)
            try:
                await run_migrations(dsn)
                async with connect(dsn) as db:
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

    async def test_payload_with_invalid_utf8_fails_only_its_own_job(self, ascii_database: str) -> None:
        async with connect(ascii_database) as db:
            recorder = EventRecorder()
            async with running({"odd": nothing, "good": nothing}, ascii_database, recorder=recorder):
                await recorder.until("job:success", GOOD)
                await until(lambda: _failed(db, 1), "the odd job has failed")
            error = await db.fetchval("select last_error from graphile_worker._private_jobs")
            assert error == "The payload cannot be decoded: it holds the byte 0xe9, which is not UTF-8."
            assert await locked(db) == []

    async def test_jobs_with_invalid_utf8_read_back_after_a_lost_connection_get_an_outcome(
        self, ascii_database: str
    ) -> None:
        async with connect(ascii_database) as db:
            recorder = EventRecorder()
            async with running({"other": nothing}, ascii_database, recorder=recorder) as runner:
                await claim_for(db, runner)
                await cut_connections(db)
                await until(lambda: _unlocked(db), "all jobs have an outcome")
            errors = await db.fetch("select last_error from graphile_worker._private_jobs order by id")
            assert [row["last_error"] for row in errors] == ["This worker has no task ''."] * (GOOD + 1)

    async def test_invalid_utf8_is_shown_as_escapes(self, ascii_database: str) -> None:
        async with WorkerUtils(ascii_database) as utils:
            job = (await utils.list_jobs())[0]
            assert job.payload == msgspec.Raw(rb'{"name": "Ren\xe9"}')
            assert (job.key, job.queue_name, job.last_error) == (r"key \xe9", r"queue \xe9", r"error \xe9")
            assert job.flags == {r"flag \xe9"}
            found = await utils.many.find(id=job.id)
            assert found is not None
            assert json.loads(bytes(found.payload)) == {"name": r"Ren\xe9"}

    async def test_export_keeps_invalid_utf8_and_import_rejects_it_with_the_byte(
        self, ascii_database: str, database: str
    ) -> None:
        async with WorkerUtils(ascii_database) as utils:
            lines = [line async for page in utils.many.export(JobFilter()) for line in page]
        assert rb'"payload":{"name": "Ren' + b"\xe9" + b'"}' in lines[0]
        async with WorkerUtils(database) as utils:
            with pytest.raises(InvalidJobError, match=r"(?i)line 1\b.*0xe9"):
                async for _ in utils.many.import_lines(lines, new_ids=False):
                    pass


async def _unlocked(db: asyncpg.Connection) -> bool:
    return not await locked(db)


async def _failed(db: asyncpg.Connection, count: int) -> bool:
    row = await fetch_one(
        db,
        """select count(*) as count from graphile_worker._private_jobs
        where locked_at is null and attempts = 1 and last_error like 'The payload cannot%'""",
    )
    return bool(row["count"] == count)

"""`Job.failed_at`: when the failure that `last_error` describes was recorded."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import Cancel, Fail, Retry, Snooze, WorkerUtils, run_once
from graphile_worker._db.queries.workers import unlock_stale
from graphile_worker._db.sql_files import Schema, read_script
from support.commands import Cli
from support.jobs import AUTOCOMMITS, add, lock
from test_recovery import TimedSweeper, register_worker, session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from graphile_worker import Job
    from graphile_worker._db.connection.session import Session

__all__ = ["session"]

SCHEMA = Schema()
FAIL_AS_NODE = """
    update graphile_worker._private_jobs set last_error = $2, locked_at = null, locked_by = null,
    run_at = greatest(now(), run_at) + interval '7 seconds' where id = $1
"""


@pytest.fixture
async def utils(database: str) -> AsyncIterator[WorkerUtils]:
    async with WorkerUtils(database) as utils:
        yield utils


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


async def run_task(database: str, outcome: BaseException | None = None) -> None:
    """Run the due jobs with a task that has this outcome."""

    def task(_payload: Any) -> None:
        if outcome is not None:
            raise outcome

    await run_once({"task": task}, database)


async def read_job(utils: WorkerUtils) -> Job:
    [job] = await utils.list_jobs()
    return job


async def now(db: asyncpg.Connection) -> datetime:
    moment: datetime = await db.fetchval("select clock_timestamp()")
    return moment


@pytest.mark.parametrize(
    "error",
    [ValueError("broken"), Fail("no use"), Retry(after=60), Cancel("unwanted")],
    ids=lambda e: type(e).__name__,
)
async def test_failed_job_has_the_time_of_its_failure(
    db: asyncpg.Connection, database: str, utils: WorkerUtils, error: BaseException
) -> None:
    await add(db, max_attempts=5)
    begin = await now(db)
    await run_task(database, error)
    job = await read_job(utils)
    assert job.failed_at is not None
    assert begin <= job.failed_at <= await now(db)
    assert await utils.get_job(id=job.id) == job


async def test_snoozed_job_has_no_failure_time(
    db: asyncpg.Connection, database: str, utils: WorkerUtils
) -> None:
    await add(db)
    await run_task(database, Snooze(60))
    assert (await read_job(utils)).failed_at is None


async def test_successful_jobs_store_no_failure_time(db: asyncpg.Connection, database: str) -> None:
    for _ in range(20):
        await add(db)
    await run_task(database)
    assert await db.fetchval("select count(*) from graphile_worker._private_python_failures") == 0


async def test_next_failure_replaces_the_failure_time(
    db: asyncpg.Connection, database: str, utils: WorkerUtils
) -> None:
    await add(db)
    await run_task(database, ValueError("first"))
    first = (await read_job(utils)).failed_at
    await db.execute(
        "select graphile_worker.reschedule_jobs(array(select id from graphile_worker.jobs), now())"
    )
    assert (await read_job(utils)).failed_at is None, "rescheduled by SQL"
    await run_task(database, ValueError("second"))
    job = await read_job(utils)
    assert first is not None
    assert job.failed_at is not None
    assert job.failed_at > first
    assert await db.fetchval("select count(*) from graphile_worker._private_python_failures") == 1


async def test_running_job_keeps_the_time_of_its_last_failure(
    db: asyncpg.Connection, database: str, utils: WorkerUtils
) -> None:
    added = await add(db)
    await run_task(database, ValueError("broken"))
    failed_at = (await read_job(utils)).failed_at
    await lock(db, added["id"])
    assert (await read_job(utils)).failed_at == failed_at


async def test_failure_recorded_by_another_program_has_no_time(
    db: asyncpg.Connection, database: str, utils: WorkerUtils
) -> None:
    added = await add(db)
    await run_task(database, ValueError("broken"))
    await lock(db, added["id"])
    await db.execute(FAIL_AS_NODE, added["id"], "failed in a Node worker")
    job = await read_job(utils)
    assert job.last_error == "failed in a Node worker"
    assert job.failed_at is None


async def test_job_of_a_dead_worker_has_the_time_of_its_recovery(
    db: asyncpg.Connection, session: Session, utils: WorkerUtils
) -> None:
    added = await add(db)
    await register_worker(db)
    await lock(db, added["id"])
    begin = await now(db)
    await TimedSweeper(session).run_for(10)
    job = await read_job(utils)
    assert job.failed_at is not None
    assert begin <= job.failed_at <= await now(db)


@AUTOCOMMITS
async def test_job_failed_or_cancelled_by_an_operator_has_a_failure_time(
    db: asyncpg.Connection, utils: WorkerUtils
) -> None:
    ids = [(await add(db))["id"] for _ in range(4)]
    begin = await now(db)
    await utils.permanently_fail_jobs([ids[0]], "wrong")
    await utils.cancel_job(ids[1], "wrong")
    await utils.permanently_fail_jobs([ids[2]], "wrong", connection=db)
    jobs = await utils.list_jobs()
    assert [job.failed_at is not None and job.failed_at >= begin for job in jobs] == [True, True, True, False]


async def test_rolled_back_failure_leaves_no_failure_time(db: asyncpg.Connection, utils: WorkerUtils) -> None:
    added = await add(db)
    transaction = db.transaction()
    await transaction.start()
    await utils.permanently_fail_jobs([added["id"]], connection=db)
    await transaction.rollback()
    assert (await read_job(utils)).failed_at is None
    assert await db.fetchval("select count(*) from graphile_worker._private_python_failures") == 0


async def test_failure_times_of_deleted_jobs_are_removed(
    db: asyncpg.Connection, database: str, utils: WorkerUtils
) -> None:
    for _ in range(2):
        await add(db, max_attempts=1)
    await run_task(database, ValueError("broken"))
    [first, _] = await utils.list_jobs()
    await utils.complete_jobs([first.id])
    await unlock_stale(db, SCHEMA)
    rows = await db.fetch("select job_id from graphile_worker._private_python_failures")
    assert [row["job_id"] for row in rows] == [first.id + 1]
    await utils.cleanup(["DELETE_PERMAFAILED_JOBS"])
    assert await db.fetchval("select count(*) from graphile_worker._private_python_failures") == 0


@pytest.mark.parametrize("obstacle", ["no table", "no privilege"])
async def test_jobs_are_listed_and_failed_without_the_failures_table(
    db: asyncpg.Connection, utils: WorkerUtils, obstacle: str
) -> None:
    """A schema installed by Node alone has no such table."""
    added = await add(db, max_attempts=1)
    if obstacle == "no table":
        await db.execute("alter table graphile_worker._private_python_failures rename to elsewhere")
        await utils.permanently_fail_jobs([added["id"]])
        job = await read_job(utils)
    else:
        role = "reader_of_" + await db.fetchval("select current_database()")
        await db.execute(f"create role {role} bypassrls")
        try:
            await db.execute(
                f"grant usage on schema graphile_worker to {role};"
                f"grant select on all tables in schema graphile_worker to {role};"
                f"revoke all on graphile_worker._private_python_failures from {role}"
            )
            async with db.transaction():
                await db.execute(f"set local role {role}")
                [job] = await utils.list_jobs(connection=db)
        finally:
            await db.execute(f"drop owned by {role}; drop role {role}")
    assert job.failed_at is None


async def test_exchange_stores_times_of_failures_only(db: asyncpg.Connection, database: str) -> None:
    """Without the condition in the exchange, a snoozed job would seem to have failed."""
    text = read_script("own/012_exchange.sql")
    condition = "from changed where changed.action = 'fail'"
    assert text.count(condition) == 1
    await db.execute(SCHEMA.render(text.replace(condition, "from changed")))
    await add(db)
    await db.execute("update graphile_worker._private_jobs set last_error = 'earlier'")
    await run_task(database, Snooze(60))
    assert await db.fetchval("select count(*) from graphile_worker._private_python_failures") == 1
    await db.execute(SCHEMA.render(text))
    await db.execute("delete from graphile_worker._private_python_failures")
    await db.execute("update graphile_worker._private_jobs set run_at = now()")
    await run_task(database, Snooze(60))
    assert await db.fetchval("select count(*) from graphile_worker._private_python_failures") == 0


async def test_command_shows_failure_times(
    db: asyncpg.Connection, database: str, cli: Cli, utils: WorkerUtils
) -> None:
    await add(db)
    await run_task(database, ValueError("broken"))
    failed_at = (await read_job(utils)).failed_at
    assert failed_at is not None
    [listed] = await cli.json("list")
    shown = await cli.json("show", "1")
    for row in (listed, shown[0] if isinstance(shown, list) else shown):
        assert datetime.fromisoformat(row["failed_at"]).astimezone(UTC) == failed_at

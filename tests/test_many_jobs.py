"""Bulk operations on jobs from Python. The tests of the command are in test_cli_*.py."""

from __future__ import annotations

from contextlib import aclosing
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker import InvalidJobError, WorkerUtils
from graphile_worker._client.bulk import BatchResult, Change, JobFilter
from support.jobs import add, count, existing, lock, put_in_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def utils(database: str) -> AsyncIterator[WorkerUtils]:
    async with WorkerUtils(database) as utils:
        yield utils


async def apply_change(
    utils: WorkerUtils, change: Change, chosen: JobFilter | list[int]
) -> list[BatchResult]:
    return [batch async for batch in utils.many.change(change, chosen)]


async def add_job_in_each_state(db: asyncpg.Connection) -> dict[str, int]:
    """Add one job in each state, and return the ids by state."""
    found = {}
    for state in ("new", "retrying", "failed", "locked", "stale"):
        found[state] = int((await add(db, queue_name="q" if state == "new" else None))["id"])
        await put_in_state(db, state, found[state])
    return found


async def test_bulk_changes_skip_running_jobs(db: asyncpg.Connection, utils: WorkerUtils) -> None:
    ids = await add_job_in_each_state(db)
    everything = list(ids.values())
    assert await apply_change(utils, Change.retry(), everything) == [
        BatchResult(5, [ids["retrying"], ids["failed"]])
    ]
    later = Change.reschedule(run_at=timedelta(minutes=1), priority=3)
    [batch] = await apply_change(utils, later, everything)
    assert batch.changed == [ids[state] for state in ("new", "retrying", "failed", "stale")]
    assert (await existing(db, ids["new"]))["priority"] == 3
    [batch] = await apply_change(utils, Change.fail("why"), JobFilter(queue_name="q"))
    assert batch == BatchResult(1, [ids["new"]])
    assert await utils.many.count(JobFilter(), Change.complete()) == 4
    [batch] = await apply_change(utils, Change.complete(), JobFilter())
    assert batch.seen == 4
    left = await utils.many.read_unchanged(everything)
    assert [(one.id, one.locked_by, one.state) for one in left] == [(ids["locked"], "w", "running")]


async def test_bulk_cancel_requests_cancellation_of_running_jobs(
    db: asyncpg.Connection, utils: WorkerUtils
) -> None:
    ids = await add_job_in_each_state(db)
    [batch] = await apply_change(utils, Change.cancel("enough"), JobFilter())
    assert batch.changed == [ids[state] for state in ("new", "retrying", "locked", "stale")]
    assert batch.requested == 1
    assert (await existing(db, ids["new"]))["last_error"] == "Cancelled: enough"
    assert await utils.cancel_job(ids["failed"]) is None


async def test_jobs_are_read_page_by_page(db: asyncpg.Connection, utils: WorkerUtils) -> None:
    for _ in range(5):
        await add(db)
    pages = [[job.id for job in page] async for page in utils.many.pages(JobFilter(), after=1, size=2)]
    assert pages == [[2, 3], [4, 5]]
    async with aclosing(utils.many.pages(JobFilter(state="failed"))) as none:
        assert [page async for page in none] == []


async def test_exported_jobs_can_be_imported(db: asyncpg.Connection, utils: WorkerUtils) -> None:
    await add_job_in_each_state(db)
    before = await db.fetch("select * from graphile_worker.jobs order by id")
    [lines] = [lines async for lines in utils.many.export(JobFilter())]
    with pytest.raises(InvalidJobError, match=r"(?i)line 1\b.*\b1 already exists"):
        [_ async for _ in utils.many.import_lines(lines, new_ids=False)]
    await db.execute("delete from graphile_worker._private_jobs")
    assert [step.jobs async for step in utils.many.import_lines(lines, new_ids=False)] == [5]
    after = await db.fetch("select * from graphile_worker.jobs order by id")
    unlocked = {"locked_at": None, "locked_by": None}
    assert [dict(row) for row in after] == [{**dict(row), **unlocked} for row in before]
    assert (await add(db))["id"] > 5
    assert [step.jobs async for step in utils.many.import_lines(lines, new_ids=True)] == [5]
    assert await count(db) == 11


async def test_queues_and_running_jobs_are_listed(db: asyncpg.Connection, utils: WorkerUtils) -> None:
    await lock(db, (await add(db, "a", queue_name="q"))["id"], by="w")
    await add(db, "b", queue_name="q")
    await add(db, "c", queue_name="r")
    first, second = await utils.many.queues()
    assert (first.queue_name, first.jobs, first.ready, first.locked_by) == ("q", 2, 1, "w")
    assert (second.queue_name, second.jobs, second.oldest_due is None) == ("r", 1, False)
    assert [queue.queue_name for queue in await utils.many.queues(only_locked=True)] == ["q"]
    assert [queue.queue_name for queue in await utils.many.queues(["r", "s"], limit=1)] == ["r"]
    [job] = await utils.many.running()
    assert (job.task_identifier, job.queue_name, job.locked_by) == ("a", "q", "w")


async def test_pending_migrations_has_revision_and_script(utils: WorkerUtils, empty_database: str) -> None:
    assert await utils.pending_migrations() == (20, [], "")
    async with WorkerUtils(empty_database) as other:
        pending = await other.pending_migrations()
        assert pending.revision is None
        async with other.connection() as connection:
            await connection.execute(pending.script)
        assert (await other.pending_migrations()).what == []

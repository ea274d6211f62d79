"""A job that fails on one side is retried by the other, with the same back-off."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from support.jobs import existing
from support.waiting import until

if TYPE_CHECKING:
    from interop.conftest import Shared

ORDERS = [("node", "python"), ("python", "node")]
POSTPONE = """
    update graphile_worker._private_jobs set run_at = now() + interval '1 hour'
    where last_error = 'not here' and locked_at is null returning true"""
first_by = pytest.mark.parametrize("order", ORDERS, ids=["node first", "python first"])


async def clock(db: asyncpg.Connection) -> datetime:
    now: datetime = await db.fetchval("select clock_timestamp()")
    return now


async def run_now(shared: Shared, side: str, job_id: int, task: str) -> asyncpg.Record:
    """Run the job on that side now, and return its row once it has failed."""
    before = await existing(shared.db, job_id)
    await shared.db.execute(
        "update graphile_worker._private_jobs set run_at = now() - interval '1 hour' where id = $1", job_id
    )
    await shared.side(side).once(task)

    async def recorded() -> bool:
        job = await existing(shared.db, job_id)
        return job["attempts"] != before["attempts"] and job["locked_at"] is None

    await until(recorded, f"{side} has recorded its failure")  # Node's runOnce does not wait for that
    return await existing(shared.db, job_id)


@pytest.mark.sample(2)
@first_by
async def test_retries_have_the_same_back_off_on_both_sides(shared: Shared, order: tuple[str, str]) -> None:
    job_id = await shared.side(order[1]).add("fail", {"error": "as told: ü"}, max_attempts=12, queue_name="q")
    for attempt in range(1, 13):
        started = await clock(shared.db)
        job = await run_now(shared, order[attempt % 2], job_id, "fail")
        ended = await clock(shared.db)
        assert (job["attempts"], job["last_error"], job["locked_by"]) == (attempt, "as told: ü", None)
        back_off = timedelta(seconds=math.exp(min(attempt, 10)))
        tolerance = timedelta(milliseconds=1)
        assert started + back_off - tolerance <= job["run_at"] <= ended + back_off + tolerance
    await assert_permanently_failed(shared, job_id)


async def assert_permanently_failed(shared: Shared, job_id: int) -> None:
    """Assert that neither side runs the job, however long it has been due."""
    failed = await shared.utils.get_job(id=job_id)
    assert failed is not None
    assert (failed.state, failed.attempts) == ("failed", failed.max_attempts)
    await shared.db.execute(
        "update graphile_worker._private_jobs set run_at = now() - interval '1 day' where id = $1", job_id
    )
    for side in ("python", "node"):
        await shared.side(side).once("fail")
    assert (await existing(shared.db, job_id))["attempts"] == failed.attempts


@pytest.mark.sample(2)
@first_by
async def test_retry_succeeds_on_the_other_side(mixed: Shared, order: tuple[str, str]) -> None:
    failing, other = order
    job_id = await mixed.side(other).add("hold", queue_name="q")
    await mixed.side(failing).start("hold")
    await mixed.side(failing).until_started(job_id)
    await mixed.side(failing).release(job_id, "not here")

    async def waits() -> bool:
        """Delay the retry, or the job might run here again before this side stops."""
        return bool(await mixed.db.fetchval(POSTPONE))

    await until(waits, "the job waits for its retry")
    await mixed.side(failing).stop()
    await mixed.utils.reschedule_jobs([job_id], run_at=timedelta(0))
    await mixed.side(other).start("hold")
    await mixed.side(other).until_started(job_id)
    job = await mixed.utils.get_job(id=job_id)
    assert job is not None
    assert (job.attempts, job.last_error, job.state) == (2, "not here", "running")
    await mixed.side(other).release(job_id)

    async def is_done() -> bool:
        return await mixed.utils.get_job(id=job_id) is None

    await until(is_done, "the job is done")


def items(*numbers: int) -> list[dict[str, Any]]:
    """Return batch items: even ones fail in Node, multiples of three fail in Python, 6 fails in both."""
    return [
        {"n": n, "fails": [side for side, by in (("node", 2), ("python", 3)) if n % by == 0]} for n in numbers
    ]


async def remaining_items(shared: Shared) -> list[int]:
    [job] = await shared.utils.list_jobs()
    return [item["n"] for item in job.payload]


@pytest.mark.sample(2)
@first_by
async def test_partly_failed_batch_is_retried_by_the_other_side(
    shared: Shared, order: tuple[str, str]
) -> None:
    numbers = {"python": (1, 2), "node": (3, 4), "sql": (5, 6)}
    [job_id] = {
        await shared.side(side).add("batch", items(*some), job_key="k") for side, some in numbers.items()
    }
    fails = {"node": [2, 4, 6], "python": [3, 6]}
    assert await remaining_items(shared) == [1, 2, 3, 4, 5, 6]

    job = await run_now(shared, order[0], job_id, "batch")
    assert await remaining_items(shared) == fails[order[0]]
    assert job["attempts"] == 1
    for number in fails[order[0]]:
        assert f"{number} fails in" in job["last_error"]

    job = await run_now(shared, order[1], job_id, "batch")
    assert await remaining_items(shared) == [6]
    assert (job["attempts"], job["key"]) == (2, "k")

    # Items that are added while it waits are appended to the rest, and its attempts start again.
    await shared.side(order[0]).add("batch", items(7, 8, 9), job_key="k")
    job = await existing(shared.db, job_id)
    assert (job["attempts"], job["last_error"]) == (0, None)
    assert await remaining_items(shared) == [6, 7, 8, 9]
    await run_now(shared, order[0], job_id, "batch")
    await run_now(shared, order[1], job_id, "batch")
    assert await remaining_items(shared) == [6]
    [job_left] = await shared.utils.list_jobs()
    assert job_left.payload == items(6), "items are kept as they were"


@pytest.mark.sample(2)
@first_by
async def test_batch_that_succeeds_on_the_other_side_is_deleted(
    shared: Shared, order: tuple[str, str]
) -> None:
    failing, other = order
    number = {"node": 2, "python": 3}[failing]
    job_id = await shared.side(other).add("batch", items(1, number, 5))
    await run_now(shared, failing, job_id, "batch")
    assert await remaining_items(shared) == [number]
    await shared.db.execute("update graphile_worker._private_jobs set run_at = now()")
    await shared.side(other).once("batch")

    async def is_gone() -> bool:
        return not await shared.utils.list_jobs()

    await until(is_gone, "the job is deleted")

"""What fails on one side is tried again by the other, as if it had failed there."""

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
    """Let that side run the job now; its row when it has failed."""
    before = await existing(shared.db, job_id)
    await shared.db.execute(
        "update graphile_worker._private_jobs set run_at = now() - interval '1 hour' where id = $1", job_id
    )
    await shared.side(side).once(task)

    async def recorded() -> bool:
        job = await existing(shared.db, job_id)
        return job["attempts"] != before["attempts"] and job["locked_at"] is None

    await until(recorded, f"{side} has recorded its failure")  # npm's runOnce does not wait for that
    return await existing(shared.db, job_id)


@first_by
async def test_retries_have_the_same_back_off_whoever_failed_before(
    shared: Shared, order: tuple[str, str]
) -> None:
    job_id = await shared.side(order[1]).add("fail", {"error": "as told: ü"}, max_attempts=12, queue_name="q")
    for attempt in range(1, 13):
        begun = await clock(shared.db)
        job = await run_now(shared, order[attempt % 2], job_id, "fail")
        ended = await clock(shared.db)
        assert (job["attempts"], job["last_error"], job["locked_by"]) == (attempt, "as told: ü", None)
        back_off = timedelta(seconds=math.exp(min(attempt, 10)))
        tolerance = timedelta(milliseconds=1)
        assert begun + back_off - tolerance <= job["run_at"] <= ended + back_off + tolerance
    await assert_failed_for_good(shared, job_id)


async def assert_failed_for_good(shared: Shared, job_id: int) -> None:
    """Neither side runs it, however long it has been due."""
    failed = await shared.utils.get_job(id=job_id)
    assert failed is not None
    assert (failed.state, failed.attempts) == ("failed", failed.max_attempts)
    await shared.db.execute(
        "update graphile_worker._private_jobs set run_at = now() - interval '1 day' where id = $1", job_id
    )
    for side in ("python", "node"):
        await shared.side(side).once("fail")
    assert (await existing(shared.db, job_id))["attempts"] == failed.attempts


@first_by
async def test_a_retry_is_taken_by_the_other_side_and_succeeds_there(
    beside: Shared, order: tuple[str, str]
) -> None:
    failing, other = order
    job_id = await beside.side(other).add("hold", queue_name="q")
    await beside.side(failing).start("hold")
    await beside.side(failing).until_begun(job_id)
    await beside.side(failing).release(job_id, "not here")

    async def waits() -> bool:
        """And for longer than it would by itself, or it might run here again before we stop."""
        return bool(await beside.db.fetchval(POSTPONE))

    await until(waits, "it waits for its retry")
    await beside.side(failing).stop()
    await beside.utils.reschedule_jobs([job_id], run_at=timedelta(0))
    await beside.side(other).start("hold")
    await beside.side(other).until_begun(job_id)
    job = await beside.utils.get_job(id=job_id)
    assert job is not None
    assert (job.attempts, job.last_error, job.state) == (2, "not here", "running")
    await beside.side(other).release(job_id)

    async def is_done() -> bool:
        return await beside.utils.get_job(id=job_id) is None

    await until(is_done, "it is done")


def items(*numbers: int) -> list[dict[str, Any]]:
    """Of six the even ones fail in Node, and those that three divides here: 6 fails on both sides."""
    return [
        {"n": n, "fails": [side for side, by in (("node", 2), ("python", 3)) if n % by == 0]} for n in numbers
    ]


async def left(shared: Shared) -> list[int]:
    [job] = await shared.utils.list_jobs()
    return [item["n"] for item in job.payload]


@first_by
async def test_a_batch_that_all_sides_filled_and_one_failed_in_part_is_retried_by_the_other(
    shared: Shared, order: tuple[str, str]
) -> None:
    numbers = {"python": (1, 2), "node": (3, 4), "sql": (5, 6)}
    [job_id] = {
        await shared.side(side).add("batch", items(*some), job_key="k") for side, some in numbers.items()
    }
    fails = {"node": [2, 4, 6], "python": [3, 6]}
    assert await left(shared) == [1, 2, 3, 4, 5, 6]

    job = await run_now(shared, order[0], job_id, "batch")
    assert await left(shared) == fails[order[0]]
    assert job["attempts"] == 1
    for number in fails[order[0]]:
        assert f"{number} fails in" in job["last_error"]

    job = await run_now(shared, order[1], job_id, "batch")
    assert await left(shared) == [6]
    assert (job["attempts"], job["key"]) == (2, "k")

    # What is added while it waits joins what is left, and it begins anew.
    await shared.side(order[0]).add("batch", items(7, 8, 9), job_key="k")
    job = await existing(shared.db, job_id)
    assert (job["attempts"], job["last_error"]) == (0, None)
    assert await left(shared) == [6, 7, 8, 9]
    await run_now(shared, order[0], job_id, "batch")
    await run_now(shared, order[1], job_id, "batch")
    assert await left(shared) == [6]
    [job_left] = await shared.utils.list_jobs()
    assert job_left.payload == items(6), "items are kept as they were"


@first_by
async def test_a_batch_of_which_all_succeed_on_the_second_side_is_gone(
    shared: Shared, order: tuple[str, str]
) -> None:
    failing, other = order
    number = {"node": 2, "python": 3}[failing]
    job_id = await shared.side(other).add("batch", items(1, number, 5))
    await run_now(shared, failing, job_id, "batch")
    assert await left(shared) == [number]
    await shared.db.execute("update graphile_worker._private_jobs set run_at = now()")
    await shared.side(other).once("batch")

    async def is_gone() -> bool:
        return not await shared.utils.list_jobs()

    await until(is_gone, "nothing is left of it")

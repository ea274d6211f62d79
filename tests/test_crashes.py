"""Workers are killed around the commits of their jobs, and every job has exactly one effect."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from graphile_worker.history import OUTCOMES
from support.jobs import add
from support.programs import program
from support.waiting import until
from support.workers import locked, running

if TYPE_CHECKING:
    import asyncpg

    from graphile_worker import JobContext

WORKER = Path(__file__).parent / "support" / "crashing.py"
STYLES = ("in_transaction", "on_asyncpg", "on_psycopg")
MOMENTS = ("before", "deleted", "during", "after")
MAX_CRASHES = 400


async def run_workers(
    db: asyncpg.Connection, database: str, *, probability: float, seed: int
) -> Counter[str]:
    """Keep two workers running until all jobs are done. Count how and when they were killed."""
    crashes: Counter[str] = Counter()
    done = asyncio.Event()

    async def keep_running(number: int) -> None:
        while not done.is_set():
            number += 2
            options = json.dumps({"seed": f"{seed} {number}", "probability": probability})
            async with program(sys.executable, WORKER, database, options, with_errors=True) as worker:
                ending = asyncio.create_task(worker.end_at_any_time())
                stopping = asyncio.create_task(done.wait())
                await asyncio.wait([ending, stopping], return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if not ending.done():
                    worker.send(signal.SIGTERM)
                status = await ending
                assert status == -signal.SIGKILL or done.is_set(), worker.text
                if status == -signal.SIGKILL:
                    crashes[worker.text.strip()] += 1
                assert crashes.total() <= MAX_CRASHES

    async def are_done() -> bool:
        # A job whose workers were killed twice in a row waits for its next attempt.
        await db.execute("update graphile_worker._private_jobs set run_at = now() where run_at > now()")
        jobs = await db.fetchval("select count(*) from graphile_worker._private_jobs")
        # A worker that was killed after its last job holds the queue until another one recovers it.
        return not jobs and not await locked(db)

    async with asyncio.TaskGroup() as workers:
        for number in (0, 1):
            workers.create_task(keep_running(number))
        await until(are_done, "all jobs are done", within=900)
        done.set()
    return crashes


async def audit(db: asyncpg.Connection, jobs: int) -> None:
    """Check that each job has exactly one effect, and nothing is left."""
    assert await db.fetch("select job, count(*) from effects group by job having count(*) > 1") == []
    assert await db.fetchval("select count(*) from effects") == jobs
    assert await locked(db) == []


async def audit_history(db: asyncpg.Connection, jobs: int) -> None:
    """Check that the history has one completed attempt of each job, and a dead worker for each other one."""
    rows = await db.fetch(
        "select job_id, outcome, count(*) from graphile_worker._private_python_runs group by 1, 2"
    )
    completed = [row["count"] for row in rows if OUTCOMES[row["outcome"]] == "completed"]
    assert completed == [1] * jobs
    assert {OUTCOMES[row["outcome"]] for row in rows} <= {"completed", "worker_died"}


async def add_jobs(db: asyncpg.Connection, count: int) -> None:
    """Add jobs in all styles, half of them in serial queues. Each will add a successor."""
    await db.execute("create table effects (job bigint not null, style text, moment text)")
    async with db.transaction():
        for number in range(count):
            queue = f"queue {number % 7}" if number % 2 else None
            await add(db, STYLES[number % 3], payload=1, queue_name=queue, max_attempts=1000)


async def test_effects_of_killed_workers_are_stored_exactly_once(
    db: asyncpg.Connection, database: str
) -> None:
    await add_jobs(db, 120)
    crashes = await run_workers(db, database, probability=0.03, seed=1)
    assert crashes.total() >= 3
    await audit(db, 240)
    await audit_history(db, 240)


@pytest.mark.slow
async def test_effects_are_stored_exactly_once_wherever_a_worker_is_killed(
    db: asyncpg.Connection, database: str
) -> None:
    """A thousand jobs, and kills in all styles at all moments."""
    await add_jobs(db, 500)
    crashes = await run_workers(db, database, probability=0.1, seed=2)
    await audit(db, 1000)
    await audit_history(db, 1000)
    assert set(crashes) >= {f"{style} {moment}" for style in STYLES for moment in MOMENTS}


@pytest.mark.sample(2)
@pytest.mark.parametrize("moment", ["before", "deleted"])
@pytest.mark.parametrize("style", STYLES)
async def test_worker_that_was_frozen_in_its_transaction_adds_no_second_effect(
    db: asyncpg.Connection, database: str, style: str, moment: str
) -> None:
    """The worker is declared dead while it is frozen. If its job is free by then, another worker runs it.

    The library's own transaction is ended by the server, if it freezes after the deletion of the job. A
    caller's transaction is not: it keeps the job, and completes it when the worker wakes up.
    """
    await add_jobs(db, 0)
    job = await add(db, style, payload=0)
    is_kept = moment == "deleted" and style != "in_transaction"

    async def work(_payload: object, ctx: JobContext) -> None:
        async with ctx.transaction() as connection:
            await connection.execute("insert into effects values ($1, 'other', '')", ctx.job.id)

    async def is_stored() -> bool:
        return bool(await db.fetchval("select count(*) from effects"))

    async def is_dead() -> bool:
        return bool(
            await db.fetchval(
                "select exists (select from graphile_worker._private_workers where metadata ? 'died_at')"
            )
        )

    options = json.dumps({"seed": 1, "probability": 0, "freeze": moment, "lease": 2.0, "idle": 0.5})
    async with program(sys.executable, WORKER, database, options, with_errors=True) as frozen:
        await frozen.until(f"{style} {moment}")
        async with running({style: work}, database, heartbeat_interval=0.1):
            if is_kept:
                await until(is_dead, "the frozen worker is declared dead")
                assert not await is_stored()
            else:
                await until(is_stored, "another worker has run the job")
            frozen.send(signal.SIGCONT)
            await frozen.until("awake")
            await until(is_stored, "the job has an effect")
            frozen.send(signal.SIGTERM)
            await frozen.end()
    assert [tuple(row) for row in await db.fetch("select job, style from effects")] == [
        (job["id"], style if is_kept else "other")
    ]
    await audit(db, 1)
    assert await db.fetchval("select count(*) from graphile_worker._private_jobs") == 0

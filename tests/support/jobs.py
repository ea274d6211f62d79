"""Add jobs with SQL and put them in the states in which a worker leaves them."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest

AUTOCOMMITS = pytest.mark.filterwarnings("ignore::graphile_worker.errors.AutocommitWarning")
"""Marks tests that deliberately add jobs outside a transaction."""
STATES = ("new", "retrying", "failed", "locked", "stale")
"""Unlocked and never attempted; waiting for a retry; out of attempts; running; locked for over 4 hours."""


async def fetch_one(db: asyncpg.Connection, query: str, *arguments: object) -> asyncpg.Record:
    """Return the only row of the result."""
    [row] = await db.fetch(query, *arguments)
    return row


async def add(db: asyncpg.Connection, identifier: str = "task", **arguments: Any) -> asyncpg.Record:
    """Call the SQL function add_job with named arguments."""
    if "payload" in arguments:
        arguments["payload"] = json.dumps(arguments["payload"])
    named = "".join(f", {name} => ${index}" for index, name in enumerate(arguments, 2))
    call = f"select * from graphile_worker.add_job($1{named})"
    return await fetch_one(db, call, identifier, *arguments.values())


async def get(db: asyncpg.Connection, job_id: int) -> asyncpg.Record | None:
    """Return the job's row, or None if there is none."""
    return await db.fetchrow("select * from graphile_worker._private_jobs where id = $1", job_id)


async def existing(db: asyncpg.Connection, job_id: int) -> asyncpg.Record:
    """Return the job's row, which must exist."""
    row = await get(db, job_id)
    assert row is not None
    return row


async def count(db: asyncpg.Connection) -> int:
    """Return the number of jobs."""
    total: int = await db.fetchval("select count(*) from graphile_worker._private_jobs")
    return total


async def lock(db: asyncpg.Connection, job_id: int, *, by: str = "w", age: str = "1 minute") -> None:
    """Lock a job and its queue as a worker does."""
    await db.execute(
        """with job as (
          update graphile_worker._private_jobs
          set locked_by = $2, locked_at = now() - $3::text::interval, attempts = attempts + 1
          where id = $1 returning job_queue_id, locked_at
        )
        update graphile_worker._private_job_queues as queue
        set locked_by = $2, locked_at = job.locked_at from job where queue.id = job.job_queue_id""",
        job_id,
        by,
        age,
    )


async def put_in_state(db: asyncpg.Connection, state: str, job_id: int) -> None:
    """Put a new job in one of the STATES."""
    if state == "retrying":
        await db.execute(
            """update graphile_worker._private_jobs set attempts = 3, last_error = 'oops',
            run_at = now() + interval '20 seconds' where id = $1""",
            job_id,
        )
    elif state == "failed":
        await db.execute(
            """update graphile_worker._private_jobs set attempts = max_attempts, last_error = 'oops'
            where id = $1""",
            job_id,
        )
    elif state == "locked":
        await lock(db, job_id)
    elif state == "stale":
        await lock(db, job_id, age="4 hours 1 minute")

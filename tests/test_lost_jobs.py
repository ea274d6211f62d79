"""The outcome of a job is not recorded if another worker claimed it, or it was removed, while it ran."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from graphile_worker import JobContext, RunSummary, run_once
from graphile_worker.testing import drain
from support.jobs import add
from support.workers import EventRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

once = functools.partial(run_once, handle_signals=False)


def make_tasks(db: asyncpg.Connection) -> dict[str, Callable[..., Any]]:
    """Return a task that loses its claim or fails, as its payload says."""

    async def run(payload: dict[str, Any], ctx: JobContext) -> None:
        if payload["is_lost"]:
            await db.execute(
                """update graphile_worker._private_jobs set locked_by = 'another', locked_at = now()
                where id = $1""",
                ctx.job.id,
            )
        if payload["fails"]:
            raise ValueError("on purpose")

    return {"run": run}


async def add_all(db: asyncpg.Connection) -> None:
    for is_lost in (True, False):
        for fails in (True, False):
            await add(db, "run", payload={"is_lost": is_lost, "fails": fails})


async def test_run_once_does_not_count_lost_jobs(db: asyncpg.Connection, database: str) -> None:
    recorder = EventRecorder()
    await add_all(db)
    assert await once(make_tasks(db), database, events=recorder.events, concurrency=1) == RunSummary(
        succeeded=1, failed=1
    )
    assert recorder.counts["job:lost"] == 2
    assert await db.fetchval("select count(*) from graphile_worker.jobs where locked_by = 'another'") == 2


async def test_drain_does_not_count_lost_jobs(db: asyncpg.Connection, database: str) -> None:
    await add_all(db)
    assert await drain(make_tasks(db), dsn=database) == RunSummary(succeeded=1, failed=1)


async def test_drain_does_not_raise_the_error_of_a_lost_job(db: asyncpg.Connection, database: str) -> None:
    await add(db, "run", payload={"is_lost": True, "fails": True})
    assert await drain(make_tasks(db), dsn=database, raise_errors=True) == RunSummary()

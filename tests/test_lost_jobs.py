"""A job that another worker took, or that was removed, while it ran: what it came to is not recorded."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from graphile_worker import Drained, JobContext, run_once
from graphile_worker.testing import Summary, drain
from support.jobs import add
from support.workers import Heard

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

once = functools.partial(run_once, handle_signals=False)


def tasks(db: asyncpg.Connection) -> dict[str, Callable[..., Any]]:
    """Of each kind one that ends as usual, and one that loses its job before."""

    async def run(payload: dict[str, Any], ctx: JobContext) -> None:
        if payload["is_lost"]:
            await db.execute(
                """update graphile_worker._private_jobs set locked_by = 'another', locked_at = now()
                where id = $1""",
                ctx.job.id,
            )
        if payload["fails"]:
            raise ValueError("as told")

    return {"run": run}


async def add_all(db: asyncpg.Connection) -> None:
    for is_lost in (True, False):
        for fails in (True, False):
            await add(db, "run", payload={"is_lost": is_lost, "fails": fails})


async def test_run_once_counts_only_what_is_recorded(db: asyncpg.Connection, database: str) -> None:
    heard = Heard()
    await add_all(db)
    assert await once(tasks(db), database, events=heard.events, concurrency=1) == Drained(done=1, failed=1)
    assert heard.counts["job:lost"] == 2
    assert await db.fetchval("select count(*) from graphile_worker.jobs where locked_by = 'another'") == 2


async def test_drain_counts_only_what_is_recorded(db: asyncpg.Connection, database: str) -> None:
    await add_all(db)
    assert await drain(tasks(db), dsn=database) == Summary(done=1, failed=1)


async def test_drain_raises_no_error_of_a_lost_job(db: asyncpg.Connection, database: str) -> None:
    await add(db, "run", payload={"is_lost": True, "fails": True})
    assert await drain(tasks(db), dsn=database, raise_errors=True) == Summary()

"""A worker program whose tasks share a limit. It writes when its jobs run into a ledger."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker import App, JobContext, Limit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LEDGER = """create table ledger (
  run serial primary key, pid integer, task text,
  started timestamptz default clock_timestamp(), ended timestamptz)"""
SECONDS = 0.02


@asynccontextmanager
async def connections(_app: App) -> AsyncIterator[asyncpg.Pool]:
    """Open connections for the ledger, apart from those of the worker."""
    async with asyncpg.create_pool(sys.argv[1], min_size=1, max_size=8) as pool:
        yield pool


app = App(lifespan=connections)
limit = Limit("stripe", concurrency=4)


async def write(ctx: JobContext[asyncpg.Pool]) -> None:
    """Write when the job has started and ended."""
    run = await ctx.state.fetchval(
        "insert into ledger (pid, task) values ($1, $2) returning run", os.getpid(), ctx.job.task_identifier
    )
    await asyncio.sleep(SECONDS)
    await ctx.state.execute("update ledger set ended = clock_timestamp() where run = $1", run)


@app.task(limit=limit)
async def charge(ctx: JobContext[asyncpg.Pool]) -> None:
    """Run for a moment."""
    await write(ctx)


@app.task(limit=limit, retry=[0.01])
async def refund(ctx: JobContext[asyncpg.Pool]) -> None:
    """Run for a moment, and fail the first time."""
    await write(ctx)
    if ctx.job.attempts == 1:
        raise RuntimeError("once")


if __name__ == "__main__":
    app.configure(dsn=sys.argv[1])
    asyncio.run(app.run(concurrency=6, heartbeat_interval=0.25, fast_lease=2.0, lease=10.0))

"""A worker program that kills or freezes itself at a random moment around the commit of a job.

Each job writes one effect, adds one successor and completes itself, all in one transaction. The payload says
how: with ``ctx.transaction()``, or on a connection of the task.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import sys
from typing import Any

import asyncpg
import psycopg

from graphile_worker import JobContext, run
from graphile_worker._db.connection import transactions
from graphile_worker._worker.execution import completion

MOMENTS = ("before", "deleted", "during", "after")
"""Kill before the end of the block; between the deletion of the job and COMMIT; in COMMIT; after COMMIT."""
EFFECT = "insert into effects (job, style, moment) values ({}, '{}', '{}')"

DSN, OPTIONS = sys.argv[1], json.loads(sys.argv[2])
CHOOSE = random.Random(OPTIONS["seed"])
completion.SHORT = OPTIONS.get("idle", completion.SHORT)  # type: ignore[attr-defined]


def report(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - the test reads it


def die(ctx: JobContext, moment: str) -> None:
    report(ctx.job.task_identifier, moment)
    # Sent to this thread, which could otherwise go on for a moment.
    signal.raise_signal(signal.SIGSTOP if OPTIONS.get("freeze") else signal.SIGKILL)
    report("awake")


def choose_moment() -> str:
    """Return the moment at which this job kills or freezes the worker, or an empty text."""
    if OPTIONS.get("freeze"):
        return str(OPTIONS["freeze"])
    return CHOOSE.choice(MOMENTS) if CHOOSE.random() < OPTIONS["probability"] else ""


def effect_of(ctx: JobContext, moment: str) -> str:
    return EFFECT.format(ctx.job.id, ctx.job.task_identifier, moment)


async def commit_and_die(connection: asyncpg.Connection, ctx: JobContext) -> None:
    """Send COMMIT, and die before the reply arrives."""
    committing = asyncio.create_task(connection.execute("commit"))
    await asyncio.sleep(0)
    die(ctx, "during")
    await committing


dying: dict[Any, tuple[JobContext, str]] = {}
"""The jobs that kill the worker, by the connections of their transactions."""
commit = transactions.commit


async def commit_or_die(connection: Any, own: Any) -> Any:
    ctx, moment = dying.get(connection, (None, ""))
    if ctx is not None and moment == "deleted":
        die(ctx, moment)
    if ctx is not None and moment == "during":
        await commit_and_die(connection, ctx)
    return await commit(connection, own)


completion.commit = commit_or_die  # type: ignore[attr-defined]


async def in_transaction(payload: int, ctx: JobContext) -> None:
    moment = choose_moment()
    async with ctx.transaction() as connection:
        if moment:
            dying[connection] = ctx, moment
        await connection.execute(effect_of(ctx, moment))
        if payload:
            await ctx.add_job(ctx.job.task_identifier, payload - 1, connection=connection)
        if moment == "before":
            die(ctx, moment)
    if moment == "after":
        die(ctx, moment)


async def on_asyncpg(payload: int, ctx: JobContext) -> None:
    moment = choose_moment()
    connection = await asyncpg.connect(DSN)
    await connection.execute("begin")
    await connection.execute(effect_of(ctx, moment))
    if payload:
        await ctx.add_job(ctx.job.task_identifier, payload - 1, connection=connection)
    if moment == "before":
        die(ctx, moment)
    await ctx.complete(connection=connection)
    if moment == "deleted":
        die(ctx, moment)
    if moment == "during":
        await commit_and_die(connection, ctx)
    await connection.execute("commit")
    if moment == "after":
        die(ctx, moment)
    await connection.close()


def on_psycopg(payload: int, ctx: JobContext) -> None:
    moment = choose_moment()
    with psycopg.connect(DSN) as connection:
        connection.execute(effect_of(ctx, moment))
        if payload:
            connection.execute(
                "select graphile_worker.add_job(%s, to_json(%s::int))", (ctx.job.task_identifier, payload - 1)
            )
        if moment == "before":
            die(ctx, moment)
        ctx.complete_sync(connection=connection)
        if moment == "deleted":
            die(ctx, moment)
        if moment == "during":
            connection.pgconn.send_query(b"commit")
            connection.pgconn.flush()
            die(ctx, moment)
    if moment == "after":
        die(ctx, moment)


async def main() -> None:
    tasks: dict[str, Any] = {
        function.__name__: function for function in (in_transaction, on_asyncpg, on_psycopg)
    }
    logging.disable()  # the test does not read the log
    leases: dict[str, Any] = {
        "heartbeat_interval": 0.1,
        "fast_lease": 0.5,
        "lease": OPTIONS.get("lease", 16.0),
    }
    runner = await run(tasks, DSN, concurrency=8, poll_interval=0.2, history="all", **leases)
    await runner.wait()


if __name__ == "__main__":
    asyncio.run(main())

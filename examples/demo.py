"""The program of `make demo`: a job from SQL, a retry, a serial queue, a crontab, and the remaining jobs."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import asyncpg

from graphile_worker import App, Fail, JobContext, Retry
from graphile_worker.embedded import EmbeddedPostgres

SQL = "select graphile_worker.add_job('hello', json_build_object('name', 'Bobby Tables'))"
CRONTAB = "* * * * * tick ?fill=2m"
# The state after two minutes without a worker.
TWO_MINUTES_AGO = """
    insert into graphile_worker._private_known_crontabs (identifier, known_since, last_execution)
    values ('tick', now() - interval '1 hour', date_trunc('minute', now()) - interval '2 minutes')
"""
app = App()


@app.task
async def hello(ctx: JobContext, name: str) -> None:
    """Print a greeting."""
    print(f"  Job {ctx.job.id}, attempt {ctx.job.attempts} of {ctx.job.max_attempts}:")
    print(f"Hello, {name}")


@app.task
async def charge(ctx: JobContext, order: int) -> None:
    """Fail at the first attempt, and succeed at the second."""
    if ctx.job.attempts == 1:
        print(f"  Order {order}: the bank does not answer; retry in a second")
        raise Retry("The bank does not answer", after=1)
    print(f"  Order {order} is charged, at attempt {ctx.job.attempts}")


@app.task(queue_name="invoices")
async def invoice(number: int) -> None:
    """Run one at a time because of the queue, although the worker has ten slots."""
    print(f"  Invoice {number} starts")
    await asyncio.sleep(0.2)
    print(f"  Invoice {number} ends")


@app.task
async def tick(ctx: JobContext) -> None:
    """Run as the crontab says."""
    print(f"  The cron job of {ctx.cron['ts']}, backfilled: {ctx.cron['backfilled']}")


@app.task(max_attempts=1)
async def hopeless() -> None:
    """Fail permanently."""
    raise Fail("It cannot work")


def print_heading(text: str) -> None:
    """Print a heading."""
    print(f"\n{text}", flush=True)


async def main(dsn: str) -> None:
    """Run the demo on an empty database."""
    app.configure(dsn=dsn)
    connection = await asyncpg.connect(dsn)
    print(f"An embedded PostgreSQL runs: {await connection.fetchval('show server_version')}")
    async with app:
        await app.migrate()
        print("The schema graphile_worker is installed, and the queue is empty")

        print_heading(f"A job from plain SQL: {SQL}")
        await connection.execute(SQL)
        summary = await app.run_once()
        print(f"  Succeeded: {summary.succeeded}, failed: {summary.failed}")

        print_heading("A task that fails and is retried, and a serial queue with one job at a time:")
        await charge.enqueue(order=7)
        await invoice.enqueue_many({"number": number} for number in (1, 2, 3))
        async with app.running(concurrency=10):
            await until_empty()

        print_heading(f"A crontab, after two minutes without a worker: {CRONTAB}")
        await connection.execute(TWO_MINUTES_AGO)
        backfilled = asyncio.Event()
        app.events.on("cron:started", lambda _: backfilled.set())
        async with app.running(crontab=CRONTAB):
            await backfilled.wait()
            await until_empty()

        print_heading("The remaining jobs, by task:")
        await hello.using(run_at=timedelta(days=1)).enqueue(name="tomorrow")
        await hopeless.enqueue()
        await app.run_once()
        await print_stats()
    await connection.close()


async def until_empty() -> None:
    """Wait until no job is left. Jobs that succeeded are deleted."""
    while (await app.utils.stats()).total:  # noqa: ASYNC110 - another process could run the jobs too
        await asyncio.sleep(0.05)


async def print_stats() -> None:
    """Print the counts that `graphile-worker stats` shows."""
    stats = await app.utils.stats()
    for name, task in sorted(stats.tasks.items()):
        print(f"  {name}: {task.scheduled} scheduled, {task.ready} ready, {task.failed} failed")


if __name__ == "__main__":
    logging.getLogger("graphile_worker").setLevel(logging.CRITICAL)  # the tasks print enough
    folder = Path(tempfile.gettempdir(), f"graphile-worker-demo-{os.getpid()}")
    with EmbeddedPostgres(folder, remove=True) as server:
        asyncio.run(main(server.dsn()))

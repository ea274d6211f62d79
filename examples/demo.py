"""What `make demo` shows: a job from SQL, a retry, a serial queue, a crontab, and what is left."""

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
# As a worker leaves it that has been away for two minutes.
TWO_MINUTES_AGO = """
    insert into graphile_worker._private_known_crontabs (identifier, known_since, last_execution)
    values ('tick', now() - interval '1 hour', date_trunc('minute', now()) - interval '2 minutes')
"""
app = App()


@app.task
async def hello(ctx: JobContext, name: str) -> None:
    """What everybody says first."""
    print(f"  Job {ctx.job.id}, attempt {ctx.job.attempts} of {ctx.job.max_attempts}:")
    print(f"Hello, {name}")


@app.task
async def charge(ctx: JobContext, order: int) -> None:
    """Works the second time."""
    if ctx.job.attempts == 1:
        print(f"  Order {order}: the bank does not answer; again in a second")
        raise Retry("The bank does not answer", after=1)
    print(f"  Order {order} is charged, at attempt {ctx.job.attempts}")


@app.task(queue_name="invoices")
async def invoice(number: int) -> None:
    """One at a time, because of its queue; though ten jobs could run at once."""
    print(f"  Invoice {number} begins")
    await asyncio.sleep(0.2)
    print(f"  Invoice {number} ends")


@app.task
async def tick(ctx: JobContext) -> None:
    """The crontab's."""
    print(f"  The crontab's job of {ctx.cron['ts']}, made up for: {ctx.cron['backfilled']}")


@app.task(max_attempts=1)
async def hopeless() -> None:
    """Never works."""
    raise Fail("It cannot work")


def say(what: str) -> None:
    """A heading."""
    print(f"\n{what}", flush=True)


async def main(dsn: str) -> None:
    """From nothing to jobs that ran."""
    app.configure(dsn=dsn)
    connection = await asyncpg.connect(dsn)
    print(f"A PostgreSQL of our own runs: {await connection.fetchval('show server_version')}")
    async with app:
        await app.migrate()
        print("The schema graphile_worker is installed, and there is nothing to do yet")

        say(f"A job from plain SQL: {SQL}")
        await connection.execute(SQL)
        drained = await app.run_once()
        print(f"  Done: {drained.done}, failed: {drained.failed}")

        say("A task that fails, and is tried again; and a serial queue, one job after the other:")
        await charge.enqueue(order=7)
        await invoice.enqueue_many({"number": number} for number in (1, 2, 3))
        async with app.running(concurrency=10):
            await until_empty()

        say(f"A crontab, after two minutes without a worker: {CRONTAB}")
        await connection.execute(TWO_MINUTES_AGO)
        made_up = asyncio.Event()
        app.events.on("cron:started", lambda _: made_up.set())
        async with app.running(crontab=CRONTAB):
            await made_up.wait()
            await until_empty()

        say("What is left, by task:")
        await hello.using(run_at=timedelta(days=1)).enqueue(name="tomorrow")
        await hopeless.enqueue()
        await app.run_once()
        await print_stats()
    await connection.close()


async def until_empty() -> None:
    """Until no job is left; those that succeeded are deleted."""
    while (await app.utils.stats()).total:  # noqa: ASYNC110 - whoever runs them
        await asyncio.sleep(0.05)


async def print_stats() -> None:
    """As `graphile-worker stats` shows them."""
    stats = await app.utils.stats()
    for name, task in sorted(stats.tasks.items()):
        print(f"  {name}: {task.scheduled} scheduled, {task.ready} ready, {task.failed} failed for good")


if __name__ == "__main__":
    logging.getLogger("graphile_worker").setLevel(logging.CRITICAL)  # the tasks say enough
    folder = Path(tempfile.gettempdir(), f"graphile-worker-demo-{os.getpid()}")
    with EmbeddedPostgres(folder, remove=True) as server:
        asyncio.run(main(server.dsn()))

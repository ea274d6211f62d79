"""A web server that adds jobs and runs them, in one process.

    $ pip install 'graphile-worker[embedded]' fastapi uvicorn
    $ uvicorn --app-dir examples fastapi_app:web
    $ curl localhost:8000/orders --json '{"item": "a teapot", "email": "ann@example.com"}'

It uses the database that DATABASE_URL names, or else a private one. Ctrl-C, or SIGTERM, stops it: jobs that
run have five seconds to end, and nothing stays locked. Workers in processes of their own can help, started
where this file is: graphile-worker run fastapi_app:app -j 10
"""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response, status
from pydantic import BaseModel

from graphile_worker import App, JobContext, Runner

logging.basicConfig(level=logging.INFO)  # a line for each job
app = App(os.environ.get("DATABASE_URL", "embedded:"))


@app.task(max_attempts=5, retry=[1, 10, 60])
async def send_receipt(ctx: JobContext, order: int) -> None:
    """Twice does no harm: what was sent is marked as sent."""
    async with ctx.connection() as connection, connection.transaction():
        email = await connection.fetchval(
            "update orders set receipt_sent = true where id = $1 and not receipt_sent returning email", order
        )
        if email is not None:
            ctx.logger.info("a receipt for order %s goes to %s", order, email)


@app.task(job_key="report:{day}", priority=10)
def write_report(day: str) -> None:
    """A plain function runs on a thread. However often it is asked for, one report a day is waiting."""
    print(f"The report of {day} is written")


@asynccontextmanager
async def lifespan(_web: FastAPI) -> AsyncIterator[dict[str, Runner]]:
    """A worker from the start of the server to its end; endpoints use its connections."""
    async with app.running(concurrency=10) as runner:
        async with app.utils.lend_connection() as connection:
            await connection.execute(
                "create table if not exists orders (id int generated always as identity primary key, "
                "item text not null, email text not null, receipt_sent boolean not null default false)"
            )
        yield {"runner": runner}


web = FastAPI(lifespan=lifespan)


class Order(BaseModel):
    """What a customer sends."""

    item: str
    email: str


@web.post("/orders", status_code=status.HTTP_201_CREATED)
async def place_order(order: Order) -> dict[str, int]:
    """The order and its job are committed together: there is never one without the other."""
    async with app.utils.lend_connection() as connection, connection.transaction():
        number = await connection.fetchval(
            "insert into orders (item, email) values ($1, $2) returning id", order.item, order.email
        )
        job = await send_receipt.using(connection=connection).enqueue(order=number)
    return {"order": number, "job": job.id}


@web.post("/reports/{day}", status_code=status.HTTP_202_ACCEPTED)
async def ask_for_report(day: str) -> dict[str, int]:
    """With nothing else to write there is no need for a transaction."""
    job = await write_report.enqueue(day)
    return {"job": job.id}


@web.get("/jobs/{job_id}")
async def show_job(job_id: int) -> dict[str, Any]:
    """A job that is done is deleted, so one that is not there is done, or never was."""
    job = await app.utils.get_job(id=job_id)
    if job is None:
        raise HTTPException(status.HTTP_404_NOT_FOUND, "There is no such job, or it is done.")
    return {
        "task": job.task_identifier,
        "state": job.state,
        "attempts": job.attempts,
        "error": job.last_error,
    }


@web.get("/stats")
async def show_stats() -> dict[str, int]:
    """How many jobs wait, run, and have failed for good."""
    stats = await app.utils.stats()
    return {
        "ready": stats.ready,
        "scheduled": stats.scheduled,
        "running": stats.running,
        "failed": stats.failed,
    }


@web.get("/health")
async def show_health(request: Request, response: Response) -> dict[str, Any]:
    """503 while the worker cannot claim jobs; `reason` says why."""
    health = request.state.runner.health()
    if not health.ready:
        response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return {"state": health.state, "reason": health.reason, "running": health.running}

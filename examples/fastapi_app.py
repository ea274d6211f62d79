"""A web server that adds jobs and runs them, in one process.

    $ pip install 'graphile-worker[embedded]' fastapi uvicorn
    $ uvicorn --app-dir examples fastapi_app:web
    $ curl localhost:8000/orders --json '{"item": "a teapot", "email": "ann@example.com"}'

It uses the database in DATABASE_URL, or an embedded one. Ctrl-C or SIGTERM stops it: running jobs have five
seconds to end, and nothing stays locked. More workers can run in their own processes. Start them in this
file's folder: graphile-worker run fastapi_app:app -j 10
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
    """Send a receipt once, even if the job runs twice: the order is marked in the same transaction."""
    async with ctx.connection() as connection, connection.transaction():
        email = await connection.fetchval(
            "update orders set receipt_sent = true where id = $1 and not receipt_sent returning email", order
        )
        if email is not None:
            ctx.logger.info("Sending the receipt for order %s to %s", order, email)


@app.task(job_key="report:{day}", priority=10)
def write_report(day: str) -> None:
    """Write a report, on a thread. The job key keeps at most one waiting job per day."""
    print(f"Wrote the report of {day}")


@asynccontextmanager
async def lifespan(_web: FastAPI) -> AsyncIterator[dict[str, Runner]]:
    """Run a worker while the server runs. Endpoints use its connections."""
    async with app.running(concurrency=10) as runner:
        async with app.utils.connection() as connection:
            await connection.execute(
                "create table if not exists orders (id int generated always as identity primary key, "
                "item text not null, email text not null, receipt_sent boolean not null default false)"
            )
        yield {"runner": runner}


web = FastAPI(lifespan=lifespan)


class Order(BaseModel):
    """An order as a customer sends it."""

    item: str
    email: str


@web.post("/orders", status_code=status.HTTP_201_CREATED)
async def place_order(order: Order) -> dict[str, int]:
    """Commit the order and its job together, so that there is never one without the other."""
    async with app.utils.connection() as connection, connection.transaction():
        number = await connection.fetchval(
            "insert into orders (item, email) values ($1, $2) returning id", order.item, order.email
        )
        job = await send_receipt.using(connection=connection).enqueue(order=number)
    return {"order": number, "job": job.id}


@web.post("/reports/{day}", status_code=status.HTTP_202_ACCEPTED)
async def request_report(day: str) -> dict[str, int]:
    """Add a job without a transaction, because it writes nothing else."""
    job = await write_report.enqueue(day)
    return {"job": job.id}


@web.get("/jobs/{job_id}")
async def show_job(job_id: int) -> dict[str, Any]:
    """Return a job. A completed job is deleted, so a missing job is done or never existed."""
    job = await app.utils.get_job(id=job_id)
    if job is None:
        raise HTTPException(status.HTTP_404_NOT_FOUND, "The job does not exist, or is done.")
    return {
        "task": job.task_identifier,
        "state": job.state,
        "attempts": job.attempts,
        "error": job.last_error,
    }


@web.get("/stats")
async def show_stats() -> dict[str, int]:
    """Return the numbers of waiting, running and permanently failed jobs."""
    stats = await app.utils.stats()
    return {
        "ready": stats.ready,
        "scheduled": stats.scheduled,
        "running": stats.running,
        "failed": stats.failed,
    }


@web.get("/health")
async def show_health(request: Request, response: Response) -> dict[str, Any]:
    """Return the worker's health, with status 503 while it cannot claim jobs."""
    health = request.state.runner.health()
    if not health.ready:
        response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return {"state": health.state, "reason": health.reason, "running": health.running}

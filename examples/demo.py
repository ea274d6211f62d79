"""From nothing to a job that ran: what `make demo` shows."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import asyncpg

from graphile_worker import JobContext, run_once
from graphile_worker.embedded import EmbeddedPostgres

ENQUEUE = "select graphile_worker.add_job('hello', json_build_object('name', 'Bobby Tables'))"


async def hello(payload: Any, ctx: JobContext) -> None:
    """The task."""
    print(f"Job {ctx.job.id}, attempt {ctx.job.attempts} of {ctx.job.max_attempts}:")
    print(f"Hello, {payload['name']}")


async def main(dsn: str) -> None:
    """Install, enqueue, run."""
    connection = await asyncpg.connect(dsn)
    print(f"A PostgreSQL of our own runs: {await connection.fetchval('show server_version')}")

    await run_once({"hello": hello}, dsn)
    print("The schema graphile_worker is installed, and there is nothing to do yet")

    print(f"Enqueueing with plain SQL: {ENQUEUE}")
    await connection.execute(ENQUEUE)
    await connection.close()

    drained = await run_once({"hello": hello}, dsn)
    print(f"Done: {drained.done}, failed: {drained.failed}")


if __name__ == "__main__":
    folder = Path(tempfile.gettempdir(), f"graphile-worker-demo-{os.getpid()}")
    with EmbeddedPostgres(folder, remove=True) as server:
        asyncio.run(main(server.dsn()))

"""From nothing to a job in the queue: what `make demo` shows."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import asyncpg

from graphile_worker import run_migrations
from graphile_worker.embedded import EmbeddedPostgres

ENQUEUE = "select graphile_worker.add_job('hello', json_build_object('name', 'Bobby Tables'))"


async def main(dsn: str) -> None:
    """Install, enqueue, look."""
    connection = await asyncpg.connect(dsn)
    print(f"A PostgreSQL of our own runs: {await connection.fetchval('show server_version')}")

    await run_migrations(dsn=dsn)
    print("The schema graphile_worker is installed")

    print(f"Enqueueing with plain SQL: {ENQUEUE}")
    await connection.execute(ENQUEUE)

    print("Waiting in the queue:")
    for job in await connection.fetch("select * from graphile_worker.jobs"):
        print(
            f"  job {job['id']}, task {job['task_identifier']!r}, "
            f"attempt {job['attempts']} of {job['max_attempts']}, due {job['run_at']:%H:%M:%S}"
        )
    await connection.close()


if __name__ == "__main__":
    folder = Path(tempfile.gettempdir(), f"graphile-worker-demo-{os.getpid()}")
    with EmbeddedPostgres(folder, remove=True) as server:
        asyncio.run(main(server.dsn()))

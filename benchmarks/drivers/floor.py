"""The limit of PostgreSQL itself: claim and delete in batches on one connection, with no work per job.

A queue that stores each job in a row, locks it before it runs and deletes it afterwards cannot be faster from
one process. The jobs are in Graphile Worker's schema. The driver `python` installs it and adds the jobs.
"""

from __future__ import annotations

import asyncio

import asyncpg
from protocol import Completions, Worker, serve

_BATCH = 500
_PAUSE = 0.001
# One generic plan through the indexes, whatever the table's statistics are.
_SESSION = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
_TASK = "select id from graphile_worker._private_tasks where identifier = 'trivial'"
_STEP = """
with done as (
  delete from graphile_worker._private_jobs where id = any ($1::bigint[])
), found as materialized (
  select id from graphile_worker._private_jobs
  where is_available and job_queue_id is null and task_id = $2 and run_at <= now()
  order by priority, run_at, id
  limit $3
  for update skip locked
)
update graphile_worker._private_jobs as job
set attempts = job.attempts + 1, locked_by = 'floor', locked_at = now()
where id in (select id from found)
returning job.id, job.task_id, job.payload::text, job.priority, job.run_at, job.attempts, job.max_attempts
"""


class Floor(Worker):
    """The bare loop of claims and deletes."""

    def __init__(self) -> None:
        super().__init__()
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def start(self, concurrency: int, *, tuned: bool = False) -> None:  # noqa: ARG002
        """Start the loop. It runs no tasks, so it ignores the concurrency."""
        self.completions = Completions()
        self._stopping.clear()
        connection = await asyncpg.connect(server_settings=_SESSION)
        self._running = asyncio.create_task(self._work(connection))

    async def _work(self, connection: asyncpg.Connection) -> None:
        task = await connection.fetchval(_TASK)
        step = await connection.prepare(_STEP)
        claimed: list[int] = []
        while claimed or not self._stopping.is_set():
            rows = await step.fetch(claimed, task, 0 if self._stopping.is_set() else _BATCH)
            if claimed:
                self.completions.note(len(claimed))
            claimed = [row["id"] for row in rows]
            if not claimed:
                await asyncio.sleep(_PAUSE)
        await connection.close()

    async def stop(self) -> None:
        """Delete the claimed jobs, and stop."""
        assert self._running is not None
        self._stopping.set()
        await self._running


if __name__ == "__main__":
    serve(Floor)

"""The statements of a Rust worker, with parameters as its driver sends them.

The port itself does not run here. The statements were written for this project: each has the same casts and
the same effect as the port's.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg

if TYPE_CHECKING:
    from collections.abc import Sequence

THRESHOLD = timedelta(seconds=5)
"""Silence after which the port declares a worker dead: five minutes by default."""
RESILIENT = "infrastructure_resilient"
"""A worker with such a job may be silent for three times as long."""
RESILIENT_FACTOR = 3
SWEEP_LOCK = (0x47575253, 0x53574550)

_UNLOCK_QUEUES = """
  update graphile_worker._private_job_queues as queue
  set locked_at = null, locked_by = null
  from changed where queue.id = changed.job_queue_id and queue.locked_by = $1::text"""
_CLAIM = """
with chosen as (
  select job.id, job.job_queue_id
  from graphile_worker._private_jobs as job
  where job.is_available and job.run_at <= now() and job.task_id = any ($2::integer[])
    and (job.job_queue_id is null or job.job_queue_id in (
      select queue.id from graphile_worker._private_job_queues as queue
      where queue.is_available for update skip locked
    ))
    and not coalesce(job.flags ?| $3::text[], false)
  order by job.priority, job.run_at
  limit 1
  for update skip locked
), queues as (
  update graphile_worker._private_job_queues as queue
  set locked_by = $1::text, locked_at = now()
  from chosen where queue.id = chosen.job_queue_id
)
update graphile_worker._private_jobs as job
set attempts = job.attempts + 1, locked_by = $1::text, locked_at = now()
from chosen where job.id = chosen.id
returning job.*"""
_COMPLETE = f"""
with changed as (
  delete from graphile_worker._private_jobs where id = $2::bigint returning job_queue_id
) {_UNLOCK_QUEUES}"""
_FAIL = f"""
with changed as (
  update graphile_worker._private_jobs
  set last_error = $3::text, locked_by = null, locked_at = null, payload = coalesce($4::json, payload),
    run_at = greatest(now(), run_at) + exp(least(attempts, 10)) * interval '1 second'
  where id = $2::bigint and locked_by = $1::text
  returning job_queue_id
) {_UNLOCK_QUEUES}"""
_RETURN = f"""
with changed as (
  update graphile_worker._private_jobs
  set attempts = greatest(0, attempts - 1), locked_by = null, locked_at = null
  where id = any ($2::bigint[]) and locked_by = $1::text
  returning job_queue_id
) {_UNLOCK_QUEUES}"""
_RECOVER_ONE = f"""
with changed as (
  update graphile_worker._private_jobs
  set attempts = greatest(0, attempts - 1), locked_by = null, locked_at = null, last_error = $3::text,
    run_at = greatest(run_at, now() + $4::bigint * interval '1 millisecond')
  where id = $2::bigint and locked_by = $1::text
  returning job_queue_id
) {_UNLOCK_QUEUES}"""


def milliseconds(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)


class RustWorker:
    """A Rust worker, on one connection."""

    def __init__(self, db: asyncpg.Connection, name: str = "graphile_worker_rust") -> None:
        self._db = db
        self.name = name

    async def beat(self) -> None:
        await self._db.fetch(
            "select * from graphile_worker.worker_heartbeat($1::text, $2::json)", self.name, '{"pid": 4711}'
        )

    async def deregister(self) -> None:
        await self._db.fetch("select * from graphile_worker.worker_deregister($1::text)", self.name)

    async def last_heartbeat(self, worker: str) -> datetime | None:
        found: datetime | None = await self._db.fetchval(
            "select last_heartbeat_at from graphile_worker._private_workers where id = $1::text", worker
        )
        return found

    async def holds_resilient(self, worker: str) -> bool:
        """Return whether that worker has a job with the resilient flag."""
        return bool(
            await self._db.fetchval(
                "select exists (select from graphile_worker._private_jobs "
                "where locked_by = $1::text and flags ?| $2::text[])",
                worker,
                [RESILIENT],
            )
        )

    async def locked_jobs(self, workers: Sequence[str]) -> list[asyncpg.Record]:
        """Return the jobs for which the port calls its recovery hooks."""
        rows: list[asyncpg.Record] = await self._db.fetch(
            "select job.*, task.identifier as task_identifier from graphile_worker._private_jobs as job "
            "join graphile_worker._private_tasks as task on task.id = job.task_id "
            "where job.locked_by = any ($1::text[]) order by job.id for update of job",
            list(workers),
        )
        return rows

    async def sweep(
        self, *, dry_run: bool = False, with_hooks: bool = False, delay: timedelta = timedelta(0)
    ) -> tuple[list[str], int]:
        """Recover dead workers; return their ids and the number of unlocked jobs."""
        async with self._db.transaction():
            if not await self._db.fetchval("select pg_try_advisory_xact_lock($1, $2)", *SWEEP_LOCK):
                return [], 0
            stale = [
                worker for worker in await self._list("list_stale_workers") if await self._is_dead(worker)
            ]
            dead = stale + await self._list("list_orphan_locked_workers")
            if dry_run or not dead:
                return dead, 0
            recovered = await (self._recover_each if with_hooks else self._recover)(dead, milliseconds(delay))
            await self._db.fetch("select * from graphile_worker.delete_stale_workers($1::text[])", dead)
            return dead, recovered

    async def claim(self, *tasks: str, forbidden_flags: Sequence[str] = ()) -> asyncpg.Record | None:
        known = await self._db.fetch(
            "select id from graphile_worker._private_tasks where identifier = any ($1::text[])", list(tasks)
        )
        ids = [row["id"] for row in known]
        return await self._db.fetchrow(_CLAIM, self.name, ids, list(forbidden_flags))

    async def complete(self, job_id: int) -> None:
        await self._db.execute(_COMPLETE, self.name, job_id)

    async def fail(self, job_id: int, error: str, payload: Any = None) -> None:
        await self._db.execute(
            _FAIL, self.name, job_id, error, None if payload is None else json.dumps(payload)
        )

    async def release(self, *job_ids: int) -> None:
        await self._db.execute(_RETURN, self.name, list(job_ids))

    async def work(self, task: str, until: asyncio.Event) -> None:
        """Run one slot: claim jobs, record their start and end, and complete them."""
        while not until.is_set():
            job = await self.claim(task)
            if job is None:
                await asyncio.sleep(0.005)
                continue
            run = await self._db.fetchval(
                "insert into ledger (job_id, worker, who) values ($1, $2, 'rust') returning run",
                job["id"],
                self.name,
            )
            await asyncio.sleep(json.loads(job["payload"]).get("ms", 0) / 1000)
            await self._db.execute("update ledger set ended = clock_timestamp() where run = $1", run)
            await self.complete(job["id"])

    async def _list(self, function: str) -> list[str]:
        rows = await self._db.fetch(
            f"select * from graphile_worker.{function}($1::bigint * interval '1 millisecond')",
            milliseconds(THRESHOLD),
        )
        return [row["worker_id"] for row in rows]

    async def _is_dead(self, worker: str) -> bool:
        if not await self.holds_resilient(worker):
            return True
        last = await self.last_heartbeat(worker)
        return last is None or datetime.now(UTC) - last > THRESHOLD * RESILIENT_FACTOR

    async def _recover(self, dead: list[str], delay: int) -> int:
        recovered: int = await self._db.fetchval(
            "select * from graphile_worker.recover_dead_worker_jobs"
            "($1::text[], $2::bigint * interval '1 millisecond')",
            dead,
            delay,
        )
        return recovered

    async def _recover_each(self, dead: list[str], delay: int) -> int:
        jobs = await self.locked_jobs(dead)
        for job in jobs:
            message = "Job recovered after worker interruption"
            await self._db.execute(_RECOVER_ONE, job["locked_by"], job["id"], message, delay)
        return len(jobs)

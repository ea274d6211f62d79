"""Large backlogs that SQL inserts directly, and the time that an exchange takes with them."""

from __future__ import annotations

import statistics
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg

from benchmarks.contenders import CONTENDERS
from graphile_worker._db.queries.exchange import ClaimRequest, exchange, identify_backend, register_tasks
from graphile_worker._db.sql_files import Schema

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.workbench import Workbench

_SCHEMA = Schema()
_TASK, _OTHER_TASK = "trivial", "other"
_FLAG = "forbidden"
_RUNNABLE = 100
_WARM_UP, _SAMPLES = 5, 30
_CLAIMED = 10
_LIMIT = 300.0
_EMPTY = "truncate graphile_worker._private_jobs, graphile_worker._private_job_queues"
_DELETE_STATISTICS = """
delete from pg_statistic where starelid in (
  select oid from pg_class where relnamespace = 'graphile_worker'::regnamespace
)
"""
_LOCK_QUEUE = """
insert into graphile_worker._private_job_queues (queue_name, locked_at, locked_by)
values ('locked', now(), 'other')
"""
_INSERT = """
insert into graphile_worker._private_jobs (task_id, job_queue_id, priority, run_at, attempts, flags)
select task.id, queue.id, $3, now() + $4, $5, $6::text::jsonb
from graphile_worker._private_tasks as task
left join graphile_worker._private_job_queues as queue on queue.queue_name = $2
cross join generate_series(1, $7)
where task.identifier = $1
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of the jobs. The defaults make a runnable job."""

    task: str = _TASK
    queue: str | None = None
    priority: int = 0
    delay: timedelta = timedelta()
    attempts: int = 0
    flags: str | None = None


_OVERDUE = timedelta(hours=-1)
RUNNABLE = Kind()
UNRUNNABLE = {
    "of other tasks": Kind(_OTHER_TASK, delay=_OVERDUE),
    "in a locked queue": Kind(queue="locked", delay=_OVERDUE),
    "due later, with a higher priority": Kind(priority=-1, delay=timedelta(days=1)),
    "with a forbidden flag": Kind(delay=_OVERDUE, flags=f'{{"{_FLAG}": true}}'),
    "failed permanently": Kind(delay=_OVERDUE, attempts=25),
}
"""Jobs that a worker must skip to reach the jobs that it can run."""


class Backlog:
    """The jobs of the graphile database."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection

    @classmethod
    @asynccontextmanager
    async def open(cls, workbench: Workbench) -> AsyncIterator[Backlog]:
        """Connect as a worker does."""
        contender = CONTENDERS["python"]
        await workbench.feeder(contender)
        connection = await asyncpg.connect(workbench.dsn(contender), command_timeout=_LIMIT)
        try:
            await identify_backend(connection, _SCHEMA)
            yield cls(connection)
        finally:
            await connection.close()

    async def fill(self, count: int, kind: Kind = RUNNABLE, *, analyse: bool = True) -> None:
        """Replace all jobs with a backlog. Behind unrunnable jobs, add some runnable ones."""
        await register_tasks(self.connection, _SCHEMA, [_TASK, _OTHER_TASK])
        await self.connection.execute(_EMPTY)
        await self.connection.execute(_LOCK_QUEUE)
        await self._insert(count, kind)
        if kind != RUNNABLE:
            await self._insert(_RUNNABLE, RUNNABLE)
        if analyse:
            await self.connection.execute("analyze")

    async def _insert(self, count: int, kind: Kind) -> None:
        await self.connection.execute(
            _INSERT, kind.task, kind.queue, kind.priority, kind.delay, kind.attempts, kind.flags, count
        )

    async def forget_statistics(self) -> None:
        """Delete all statistics, as if no table had ever been analysed.

        In all other respects a truncated table is new to the planner anyway.
        """
        await self.connection.execute(_DELETE_STATISTICS)

    async def claim_time(self, samples: int = _SAMPLES) -> float:
        """Return the milliseconds of an exchange that claims ten jobs. A rollback releases them."""
        tasks = await register_tasks(self.connection, _SCHEMA, [_TASK])
        request = ClaimRequest(wanted=_CLAIMED, forbidden_flags=[_FLAG])
        durations = []
        for _ in range(_WARM_UP + samples):
            transaction = self.connection.transaction()
            await transaction.start()
            begin = time.perf_counter()
            answer = await exchange(self.connection, _SCHEMA, "benchmark", (), request, tasks)
            durations.append(time.perf_counter() - begin)
            await transaction.rollback()
            assert answer.only_jobs == _CLAIMED
        return statistics.median(durations[_WARM_UP:]) * 1000

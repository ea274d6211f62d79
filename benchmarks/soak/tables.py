"""Queries on the tables of jobs and queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.soak.result import Remaining, TableState

if TYPE_CHECKING:
    import asyncpg

_STATE = """
select
  relname, n_dead_tup, n_tup_upd + n_tup_del, pg_table_size(relid), pg_indexes_size(relid), autovacuum_count
from pg_stat_user_tables
where schemaname = 'graphile_worker' and relname in ('_private_jobs', '_private_job_queues')
order by relname desc
"""
_SCHEDULE = """
insert into graphile_worker._private_jobs (task_id, payload, run_at)
select task.id, '{"number": 0}', now() + interval '1 day'
from graphile_worker._private_tasks as task
cross join generate_series(1, $1)
where task.identifier = 'work'
"""
_LEFT = """
select
  (select count(*) from graphile_worker._private_jobs where run_at < now() + interval '1 hour'),
  (select count(*) from graphile_worker._private_jobs where locked_at is not null),
  (select count(*) from graphile_worker._private_job_queues where locked_at is not null),
  jobs.n_tup_ins, jobs.n_tup_del, coalesce(queues.n_tup_hot_upd / nullif(queues.n_tup_upd, 0)::float8, 1)
from pg_stat_user_tables as jobs, pg_stat_user_tables as queues
where jobs.relid = 'graphile_worker._private_jobs'::regclass
  and queues.relid = 'graphile_worker._private_job_queues'::regclass
"""


async def table_states(connection: asyncpg.Connection) -> tuple[TableState, TableState]:
    """Return the states of the jobs table and of the queues table."""
    jobs, queues = await connection.fetch(_STATE)
    return TableState(*jobs[1:]), TableState(*queues[1:])


async def schedule(connection: asyncpg.Connection, count: int) -> None:
    """Add jobs that are due in a day. Vacuum the table, as if it had existed for long."""
    await connection.execute(_SCHEDULE, count)
    await connection.execute("vacuum (analyze) graphile_worker._private_jobs")


async def remaining(connection: asyncpg.Connection) -> Remaining:
    """Return what remains after all workers stopped and the server counted everything.

    Jobs that are due in a day do not count.
    """
    row = await connection.fetchrow(_LEFT)
    assert row is not None
    return Remaining(*row)


async def naptime(connection: asyncpg.Connection) -> float:
    """Return the seconds between two autovacuum cycles."""
    setting = "select setting::float8 from pg_settings where name = 'autovacuum_naptime'"
    return float(await connection.fetchval(setting))

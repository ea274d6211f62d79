"""What the dashboard reads: within a limit of time, and never more rows than it shows."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import asyncpg
import msgspec

from graphile_worker._db.connection.any_bytes import fetch
from graphile_worker._db.connection.session import Session
from graphile_worker._db.connection.transactions import transaction
from graphile_worker._db.queries import jobs
from graphile_worker._db.queries.failures import can_read_failures
from graphile_worker._db.sql_files import statements_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.sql_files import Schema

T = TypeVar("T")
_FILE = "web.sql"
_ATTEMPTS = 2


class LimitedSession(Session):
    """A session on another one's connections, for reading: each statement has a limit of time.

    Args:
        session: The session whose connections to use.
        seconds: How long a statement may take.
    """

    def __init__(self, session: Session, seconds: float) -> None:
        super().__init__(session.schema, session.pool, session.logger, session.max_payload_size)
        limits = statements_for(session.schema, _FILE)["limits"]
        self._limits = limits.replace("{milliseconds}", str(max(1, round(seconds * 1000))))

    async def call(
        self,
        operation: Callable[[Connection], Awaitable[T]],
        connection: Connection | None = None,
        *,
        attempts: int = _ATTEMPTS,
    ) -> T:
        """Return the result of an operation. It is repeated once only, because a viewer waits."""
        return await super().call(operation, connection, attempts=min(attempts, _ATTEMPTS))

    @asynccontextmanager
    async def connection(self, given: Connection | None = None) -> AsyncIterator[Connection]:
        """Acquire a connection, in a transaction that only reads."""
        async with super().connection(given) as connection:
            is_shared = connection.is_in_transaction()  # behind a pooler, which shares its sessions
            async with transaction(connection, isolated=True, settings=self._limits):
                if is_shared:
                    await connection.execute(self._limits)
                yield connection


class TableSize(NamedTuple):
    """How large the jobs table is."""

    jobs: float
    bytes: int
    now: Any


async def read_size(connection: Connection, schema: Schema) -> TableSize:
    """Return the size of the jobs table, by the planner's estimate."""
    row = await connection.fetchrow(_statement(schema, "read_size"), schema.quoted)
    if row is None:  # a statement on the table itself would raise the same error
        raise asyncpg.UndefinedTableError(f"There is no table {schema.name}._private_jobs")
    return TableSize(*row)


async def count_states(connection: Connection, schema: Schema, percent: float | None) -> list[asyncpg.Record]:
    """Count the jobs by task and state: all, or those in a part of the table."""
    await connection.execute(_statement(schema, "take_one_core"))
    name = "count_all" if percent is None else "count_some"
    return await fetch(connection, _statement(schema, name), percent)


async def find_running(connection: Connection, schema: Schema, limit: int) -> list[int]:
    """Return the ids of locked jobs."""
    await connection.execute(_statement(schema, "take_one_core"))
    return [row["id"] for row in await connection.fetch(_statement(schema, "find_running"), limit)]


async def find_failed(connection: Connection, schema: Schema, limit: int) -> list[int]:
    """Return the ids of the newest jobs without attempts left."""
    await connection.execute(_statement(schema, "take_one_core"))
    return [row["id"] for row in await connection.fetch(_statement(schema, "find_failed"), limit)]


async def count_up_to(connection: Connection, schema: Schema, what: str, limit: int) -> int:
    """Count ``blocked`` or ``queued_ready`` jobs, ``claimable_queues`` or ``queue_names``, up to a limit."""
    return int(str(await connection.fetchval(_statement(schema, f"count_{what}"), limit)))


async def newest_id(connection: Connection, schema: Schema, place: int) -> int | None:
    """Return the id of the job in this place, counted from the newest."""
    found: int | None = await connection.fetchval(_statement(schema, "newest_id"), place)
    return found


async def list_jobs(
    connection: Connection, schema: Schema, filters: Mapping[str, object]
) -> list[asyncpg.Record]:
    """Return jobs that match the filters, without their payloads."""
    statement, values = jobs.compose(schema, _statement(schema, "list_jobs"), filters)
    return await fetch(connection, statement, *values)


async def count_jobs(
    connection: Connection, schema: Schema, filters: Mapping[str, object], limit: int
) -> int:
    """Count the jobs that match the filters, up to a limit."""
    statement, values = jobs.compose(schema, _statement(schema, "count_jobs"), filters)
    limited = _statement(schema, "up_to").replace("{limit}", str(limit)).replace("{statement}", statement)
    return int(str(await connection.fetchval(limited, *values)))


async def estimate_jobs(connection: Connection, schema: Schema, filters: Mapping[str, object]) -> int:
    """Return the planner's estimate of how many jobs match the filters."""
    statement, values = jobs.compose(schema, _statement(schema, "count_jobs"), filters)
    plan = await connection.fetchval(f"explain (format json) {statement}", *values)
    [found] = msgspec.json.decode(plan)
    return int(found["Plan"]["Plan Rows"])


async def read_job(connection: Connection, schema: Schema, job_id: int) -> dict[str, Any] | None:
    """Return everything that the tables of the queue have about a job."""
    found = await fetch(connection, _statement(schema, "read_job"), job_id)
    if not found:
        return None
    job = dict(found[0])
    if job["error"] is not None and await can_read_failures(connection, schema):
        rows = await fetch(connection, _statement(schema, "read_failure"), job_id)
        job |= dict(rows[0]) if rows else {}
    return job


async def group_failures(
    connection: Connection, schema: Schema, jobs_limit: int, groups_limit: int
) -> tuple[list[asyncpg.Record], bool]:
    """Group failed jobs by task and error. Also return whether the times of failures are recorded."""
    await connection.execute(_statement(schema, "take_one_core"))
    timed = await can_read_failures(connection, schema)
    name = "group_failures" if timed else "group_failures_without_times"
    return await fetch(connection, _statement(schema, name), jobs_limit, groups_limit), timed


async def list_failed(
    connection: Connection, schema: Schema, newest: int, limit: int
) -> list[asyncpg.Record]:
    """Return the last failures among the newest failed jobs."""
    await connection.execute(_statement(schema, "take_one_core"))
    timed = await can_read_failures(connection, schema)
    name = "list_failed" if timed else "list_failed_without_times"
    return await fetch(connection, _statement(schema, name), newest, limit)


async def list_queues(
    connection: Connection, schema: Schema, limit: int, search: str
) -> list[asyncpg.Record]:
    """Return the queues with the most jobs, or those whose names contain a text."""
    await connection.execute(_statement(schema, "take_one_core"))
    if search:
        return await fetch(connection, _statement(schema, "find_queues"), limit, jobs.containing(search))
    return await fetch(connection, _statement(schema, "top_queues"), limit)


async def list_last_errors(connection: Connection, schema: Schema, newest: int) -> dict[str, str]:
    """Return the last error of each task, among the newest failed jobs."""
    await connection.execute(_statement(schema, "take_one_core"))
    rows = await fetch(connection, _statement(schema, "list_last_errors"), newest)
    return {row["task"]: row["error"] for row in rows if row["task"] is not None}


async def list_running(connection: Connection, schema: Schema, ids: Sequence[int]) -> list[asyncpg.Record]:
    """Return those of the jobs that are locked, the longest running ones first."""
    return await fetch(connection, _statement(schema, "list_running"), ids)


async def count_queue_locks(connection: Connection, schema: Schema) -> dict[str, int]:
    """Return how many serial queues each worker has locked."""
    rows = await fetch(connection, _statement(schema, "list_queue_locks"))
    return {row["worker"]: row["queues"] for row in rows}


async def list_cron_runs(
    connection: Connection, schema: Schema, task: str, limit: int
) -> list[asyncpg.Record]:
    """Return the last attempts of a recurring task's jobs in the history."""
    return await fetch(connection, _statement(schema, "read_cron_runs"), task, limit)


async def count_unused_queues(connection: Connection, schema: Schema) -> int:
    """Return how many serial queues have no jobs."""
    return int(str(await connection.fetchval(_statement(schema, "count_unused_queues"))))


async def count_locks(connection: Connection, schema: Schema, worker_ids: Sequence[str]) -> tuple[int, int]:
    """Return how many jobs and queues these workers have locked."""
    row = await connection.fetchrow(_statement(schema, "count_locks"), worker_ids)
    return (row["jobs"], row["queues"]) if row is not None else (0, 0)


async def can_read(connection: Connection, schema: Schema, table: str) -> bool:
    """Return whether a table of the schema exists and the role may read it."""
    return bool(await connection.fetchval(_statement(schema, "has_object"), schema.quoted, table))


def _statement(schema: Schema, name: str) -> str:
    return statements_for(schema, _FILE)[name]

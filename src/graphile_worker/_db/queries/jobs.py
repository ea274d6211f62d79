"""One typed function for each statement about jobs."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker._base.payload import as_one_line, decode_or_raw, encode_payload
from graphile_worker._db.connection.any_bytes import as_sent, fetch
from graphile_worker._db.connection.any_connection import run_own
from graphile_worker._db.connection.connect import read_committed
from graphile_worker._db.queries import by_hand
from graphile_worker._db.queries.failures import can_read_failures, record_failures, recording
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.job import Job, JobSpec, JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import asyncpg

    from graphile_worker._db.connection.connect import Connection

_NO_FLAGS: frozenset[str] = frozenset()
_STATES = {state.value: state for state in JobState}


def read_job(
    row: asyncpg.Record | Mapping[str, Any],
    task_identifier: str | None = None,
    queue_name: str | None = None,
    *,
    read_payload: Callable[[str], Any] = decode_or_raw,
) -> Job:
    """Make a job from a row with the columns of `job_columns`, and of `job_names` unless the names are given.

    If the row has names too, the given names are used where the row has None. The stored values never make
    this fail: a payload that Python cannot decode becomes a `msgspec.Raw`.
    """
    if "task_identifier" in row:
        task_identifier = row["task_identifier"] or task_identifier
        queue_name = row["queue_name"] or queue_name
    flags = row["flags"]
    return Job(
        id=row["id"],
        task_identifier=task_identifier or "",
        queue_name=None if row["job_queue_id"] is None else queue_name,
        payload=read_payload(row["payload"]),
        priority=row["priority"],
        run_at=row["run_at"],
        attempts=row["attempts"],
        max_attempts=row["max_attempts"],
        last_error=row["last_error"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        key=row["key"],
        locked_at=row["locked_at"],
        locked_by=row["locked_by"],
        revision=row["revision"],
        flags=_read_flags(flags) if flags else _NO_FLAGS,
        is_available=row["is_available"],
        task_id=row["task_id"],
        job_queue_id=row["job_queue_id"],
        state=_STATES[row["state"]],
        failed_at=row.get("failed_at"),
        error_type=row.get("error_type"),
        traceback=row.get("traceback"),
    )


def _read_flags(text: str) -> frozenset[str]:
    flags = decode_or_raw(text)
    if isinstance(flags, msgspec.Raw):
        flags = decode_or_raw(bytes(as_one_line(text)).decode())
    return frozenset(flags) if isinstance(flags, dict) else _NO_FLAGS


async def add_job(
    connection: Connection, schema: Schema, spec: JobSpec, max_payload_size: int | None = None
) -> Job:
    """Add one job."""
    statement = statements_for(schema, "jobs.sql")["add_job"]
    arguments = (
        spec.identifier,
        None if spec.payload is None else encode_payload(spec.payload, max_size=max_payload_size),
        spec.queue_name,
        *split_instant(spec.run_at),
        spec.max_attempts,
        spec.job_key,
        spec.priority,
        None if spec.flags is None else list(spec.flags),
        spec.job_key_mode,
    )
    # If npm installed the functions, adding a job by its key returns no row and adds nothing while a worker
    # claims the old job. The next call sees that the old job is running.
    while True:
        row = await connection.fetchrow(statement, *arguments)
        if row is not None and row["id"] is not None:
            return read_job(row, spec.identifier, spec.queue_name)


async def get_job(connection: Connection, schema: Schema, **filters: object) -> Job | None:
    """Return the job that the filters select; None if there is none."""
    found = await list_jobs(connection, schema, limit=1, **filters)
    return found[0] if found else None


async def list_jobs(connection: Connection, schema: Schema, *, limit: int, **filters: object) -> list[Job]:
    """Return the jobs that match all filters that are not None, in the order of their ids."""
    rows = await fetch_jobs_and_failures(connection, schema, **filters, first_jobs=limit)
    return [read_job(row) for row in rows]


async def fetch_jobs(connection: Connection, schema: Schema, **filters: object) -> list[asyncpg.Record]:
    """Return the rows that match all filters. The filters must be in the order of the statement's parts."""
    statement, values = compose(schema, statements_for(schema, "jobs.sql")["select_jobs"], filters)
    return await fetch(connection, statement, *values)


async def fetch_jobs_and_failures(
    connection: Connection, schema: Schema, **filters: object
) -> list[asyncpg.Record]:
    """Return the rows that `fetch_jobs` returns, with the recorded times of the last failures."""
    if not await can_read_failures(connection, schema):
        return await fetch_jobs(connection, schema, **filters)
    prefix = statements_for(schema, "jobs.sql")["select_jobs_and_failures"]
    statement, values = compose(schema, prefix, filters)
    return await fetch(connection, statement, *values)


async def permanently_fail_jobs(
    connection: Connection, schema: Schema, ids: Sequence[int], reason: str | None
) -> list[Job]:
    """Fail jobs permanently, and record when."""
    change = await as_sent(connection, statements_for(schema, "jobs.sql")["permanently_fail_jobs"])
    async with read_committed(connection, prepare=[change, *await recording(connection, schema)]):
        failed = await change_jobs(connection, schema, "permanently_fail_jobs", ids, reason)
        await record_failures(connection, schema, (job.id for job in failed))
        return failed


async def complete_jobs(connection: Connection, schema: Schema, ids: Sequence[int]) -> list[Job]:
    """Delete jobs as if they had succeeded."""
    change = await as_sent(connection, statements_for(schema, "jobs.sql")["complete_jobs"])
    async with read_committed(connection, prepare=[change, *await by_hand.statements(connection, schema)]):
        completed = await change_jobs(connection, schema, "complete_jobs", ids)
        await run_own(connection, by_hand.recording_completed(schema, completed))
        return completed


def compose(schema: Schema, prefix: str, filters: Mapping[str, object]) -> tuple[str, list[object]]:
    """Extend a statement by a part for each filter that is not None; return it with the filters' values."""
    statements = statements_for(schema, "jobs.sql")
    parts, values = [prefix], list[object]()
    for name, value in filters.items():
        if value is None:
            continue
        part = statements[f"having_state_{value}" if name == "having_state" else name]
        if "{value}" in part:
            values.append(value)
            part = part.replace("{value}", f"${len(values)}")
        parts.append(part)
    return "\n".join(parts), values


async def change_jobs(connection: Connection, schema: Schema, name: str, *arguments: object) -> list[Job]:
    """Call an SQL function that returns the jobs that it changed."""
    statement = statements_for(schema, "jobs.sql")[name]
    return [read_job(row) for row in await fetch(connection, statement, *arguments)]


async def force_unlock_workers(connection: Connection, schema: Schema, worker_ids: Sequence[str]) -> None:
    """Release all jobs and queues that the workers hold."""
    await connection.execute(statements_for(schema, "jobs.sql")["force_unlock_workers"], worker_ids)


async def count_jobs(connection: Connection, schema: Schema) -> list[asyncpg.Record]:
    """Count the jobs by task and state."""
    return await fetch(connection, statements_for(schema, "jobs.sql")["count_jobs"])


async def read_now(connection: Connection, schema: Schema) -> datetime:
    """Return the database's time; in a transaction, the time of its start."""
    now: datetime = await connection.fetchval(statements_for(schema, "jobs.sql")["read_now"])
    return now


async def count_queues(
    connection: Connection,
    schema: Schema,
    names: Sequence[str] | None,
    *,
    only_locked: bool,
    limit: int | None,
) -> list[asyncpg.Record]:
    """Return serial queues with the numbers of their jobs."""
    statement = statements_for(schema, "jobs.sql")["count_queues"]
    return await fetch(connection, statement, names, only_locked, limit)


async def list_running(connection: Connection, schema: Schema) -> list[asyncpg.Record]:
    """Return the locked jobs, without their payloads."""
    return await fetch(connection, statements_for(schema, "jobs.sql")["list_running"])


def containing(text: str) -> str:
    """Return a LIKE pattern for values that contain the text."""
    return "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"


def split_instant(instant: datetime | timedelta | None) -> tuple[datetime | None, float | None]:
    """Return a point in time, or a delay in seconds from the database's time: the statements take both."""
    if isinstance(instant, timedelta):
        return None, instant.total_seconds()
    return instant, None

"""One typed function for each statement about jobs."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker._db.any_bytes import fetch
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker.job import Job, JobSpec, JobState
from graphile_worker.payload import as_one_line, decode_or_raw, encode_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import asyncpg

    from graphile_worker._db.connect import Connection

_NO_FLAGS: frozenset[str] = frozenset()
_STATES = {state.value: state for state in JobState}


def read_job(
    row: asyncpg.Record,
    task_identifier: str | None = None,
    queue_name: str | None = None,
    *,
    read_payload: Callable[[str], Any] = decode_or_raw,
) -> Job:
    """A row with the columns of `job_columns`, and with `job_names` unless they are given.

    If both are there, those given stand in for names that the row does not know. Never fails because of what
    is stored: a payload that Python cannot read is a `msgspec.Raw`.
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
    # On functions that npm installed a keyed add that meets a worker comes back empty, and has added
    # nothing. Asked again it sees that the job runs.
    while True:
        row = await connection.fetchrow(statement, *arguments)
        if row is not None and row["id"] is not None:
            return read_job(row, spec.identifier, spec.queue_name)


async def get_job(connection: Connection, schema: Schema, **filters: object) -> Job | None:
    """The one job that the filters select."""
    found = await list_jobs(connection, schema, limit=1, **filters)
    return found[0] if found else None


async def list_jobs(connection: Connection, schema: Schema, *, limit: int, **filters: object) -> list[Job]:
    """Jobs in the order of their ids: those for which all filters that are not None hold."""
    return [read_job(row) for row in await fetch_jobs(connection, schema, **filters, first_jobs=limit)]


async def fetch_jobs(connection: Connection, schema: Schema, **filters: object) -> list[asyncpg.Record]:
    """Those for which all filters hold, as rows; the filters stand in the order of the statement's parts."""
    statement, values = composed(schema, statements_for(schema, "jobs.sql")["select_jobs"], filters)
    return await fetch(connection, statement, *values)


def composed(schema: Schema, beginning: str, filters: Mapping[str, object]) -> tuple[str, list[object]]:
    """A statement that goes on with a part for each filter that is not None, and the values of those."""
    statements = statements_for(schema, "jobs.sql")
    parts, values = [beginning], list[object]()
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
    """Call one of the functions that return the jobs they changed."""
    statement = statements_for(schema, "jobs.sql")[name]
    return [read_job(row) for row in await fetch(connection, statement, *arguments)]


async def force_unlock_workers(connection: Connection, schema: Schema, worker_ids: Sequence[str]) -> None:
    """Free all that these workers hold."""
    await connection.execute(statements_for(schema, "jobs.sql")["force_unlock_workers"], worker_ids)


async def count_jobs(connection: Connection, schema: Schema) -> list[asyncpg.Record]:
    """Jobs by task and state."""
    return await fetch(connection, statements_for(schema, "jobs.sql")["count_jobs"])


async def read_now(connection: Connection, schema: Schema) -> datetime:
    """The database's time: in a transaction, when that began."""
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
    """Queues and their jobs."""
    statement = statements_for(schema, "jobs.sql")["count_queues"]
    return await fetch(connection, statement, names, only_locked, limit)


async def list_running(connection: Connection, schema: Schema) -> list[asyncpg.Record]:
    """Locked jobs, without their payloads."""
    return await fetch(connection, statements_for(schema, "jobs.sql")["list_running"])


def containing(text: str) -> str:
    """A pattern for texts that contain the text."""
    return "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"


def split_instant(instant: datetime | timedelta | None) -> tuple[datetime | None, float | None]:
    """A moment, or else seconds from the database's now; the statements take both."""
    if isinstance(instant, timedelta):
        return None, instant.total_seconds()
    return instant, None

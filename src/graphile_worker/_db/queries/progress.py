"""The table of the progress that running jobs report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.job import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from graphile_worker._db.connection.connect import Connection

_FILE = "progress.sql"


class _Value(msgspec.Struct):
    """The stored JSON document."""

    value: float | None = None
    message: str | None = None


class Report(NamedTuple):
    """The latest progress of a running job."""

    job_id: int
    locked_at: datetime
    progress: Progress


async def can_read_progress(connection: Connection, schema: Schema) -> bool:
    """Return whether the table exists and the role may read it."""
    return bool(await connection.fetchval(statements_for(schema, _FILE)["reads_progress"], schema.quoted))


async def store_progress(
    connection: Connection, schema: Schema, worker_id: str, reports: Sequence[Report]
) -> set[int]:
    """Store reports of jobs that this worker still has, and return the ids of those jobs."""
    rows = await connection.fetch(
        statements_for(schema, _FILE)["store_progress"],
        worker_id,
        [report.job_id for report in reports],
        [report.locked_at for report in reports],
        [_encode(report.progress) for report in reports],
        [report.progress.at for report in reports],
    )
    return {row["job_id"] for row in rows}


async def delete_progress(connection: Connection, schema: Schema, job_ids: Sequence[int] | None) -> None:
    """Delete the progress of jobs that no longer exist: of these jobs, or with None of all jobs."""
    await connection.execute(statements_for(schema, _FILE)["delete_progress"], job_ids)


async def read_progress(
    connection: Connection, schema: Schema, job_ids: Sequence[int]
) -> dict[int, Progress]:
    """Return the progress of those jobs that have reported any, by job id."""
    if not await can_read_progress(connection, schema):
        return {}
    rows = await connection.fetch(statements_for(schema, _FILE)["read_progress"], job_ids)
    return {row["job_id"]: _decode(row["value"], row["at"]) for row in rows}


def _encode(progress: Progress) -> str:
    # Escaped as ASCII, so that a database with any encoding can store it.
    return json.dumps({"value": progress.value, "message": progress.message})


def _decode(document: str, at: datetime) -> Progress:
    stored = msgspec.json.decode(document, type=_Value)
    return Progress(value=stored.value, message=stored.message, at=at)

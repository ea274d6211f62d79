"""The statements that `graphile-worker top` runs every few seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.connection.any_bytes import fetch
from graphile_worker._db.queries.failures import can_read_failures
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.stats import FailedJob, Writes

if TYPE_CHECKING:
    from graphile_worker._db.connection.connect import Connection

_FILE = "dashboard.sql"


async def count_writes(connection: Connection, schema: Schema) -> Writes:
    """Count all jobs that were ever added and removed."""
    row = await connection.fetchrow(statements_for(schema, _FILE)["count_writes"], schema.name)
    if row is None:  # a statement on the table itself would raise the same error
        raise asyncpg.UndefinedTableError(f"There is no table {schema.name}._private_jobs")
    return Writes(**dict(row))


async def list_failures(connection: Connection, schema: Schema, limit: int) -> list[FailedJob]:
    """Return jobs whose last attempt failed, the latest failures first."""
    recorded = await can_read_failures(connection, schema)
    name = "list_failures" if recorded else "list_failures_without_times"
    rows = await fetch(connection, statements_for(schema, _FILE)[name], limit)
    return [FailedJob(**dict(row)) for row in rows]

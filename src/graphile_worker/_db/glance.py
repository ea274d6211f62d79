"""What somebody who watches a queue wants to know again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.any_bytes import fetch
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker.stats import FailedJob, Writes

if TYPE_CHECKING:
    from graphile_worker._db.connect import Connection

_FILE = "glance.sql"


async def count_writes(connection: Connection, schema: Schema) -> Writes:
    """How many jobs were ever added and removed."""
    row = await connection.fetchrow(statements_for(schema, _FILE)["count_writes"], schema.name)
    if row is None:  # the catalog says nothing of it, as a statement on the table itself would
        raise asyncpg.UndefinedTableError(f"There is no table {schema.name}._private_jobs")
    return Writes(**dict(row))


async def list_failures(connection: Connection, schema: Schema, limit: int) -> list[FailedJob]:
    """Jobs whose last attempt failed, the last ones first."""
    rows = await fetch(connection, statements_for(schema, _FILE)["list_failures"], limit)
    return [FailedJob(**dict(row)) for row in rows]

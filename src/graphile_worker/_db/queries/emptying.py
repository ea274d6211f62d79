"""Empty the queue, for tests whose database is used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphile_worker._db.sql_files import statements_for

if TYPE_CHECKING:
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.sql_files import Schema


async def empty_queue(connection: Connection, schema: Schema) -> None:
    """Remove all jobs, queues and attempts. Do nothing if the schema is not installed."""
    statements = statements_for(schema, "emptying.sql")
    if await connection.fetchval(statements["is_installed"], schema.name):
        await connection.execute(statements["empty_queue"])

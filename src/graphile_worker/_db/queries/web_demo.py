"""Write the past of the dashboard's example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker._db.sql_files import Schema, statements_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker._db.connection.connect import Connection


async def add_past(
    connection: Connection, schema: Schema, counts: Sequence[dict[str, Any]], depths: Sequence[dict[str, Any]]
) -> None:
    """Add statistics and numbers of jobs."""
    statements = statements_for(schema, "web_demo.sql")
    await connection.execute(statements["add_statistics"], msgspec.json.encode(counts).decode())
    await connection.execute(statements["add_depths"], msgspec.json.encode(depths).decode())

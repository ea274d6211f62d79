"""Create and drop whole databases, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import asyncpg

from graphile_worker._db.sql_files import quote_identifier, read_statements

if TYPE_CHECKING:
    from collections.abc import Sequence


def dsn_of(server_dsn: str, database: str) -> str:
    """Return the connection string for another database on the same server."""
    parts = urlsplit(server_dsn)
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}/{quote(database, safe='')}{query}"


async def create_database(connection: asyncpg.Connection, name: str, *, template: str = "template0") -> None:
    """Create a database as a copy of another one. The other one must have no sessions."""
    # Copying files is faster than copying through the WAL, but only newer servers offer the choice.
    variant = "create_database_by_files" if connection.get_server_version() >= (15,) else "create_database"
    statement = read_statements("databases.sql")[variant]
    await connection.execute(
        statement.format(database=quote_identifier(name), template=quote_identifier(template))
    )


async def drop_database(connection: asyncpg.Connection, name: str) -> Sequence[str]:
    """Drop a database; terminate the sessions that are still open in it, and return descriptions of them.

    PostgreSQL itself waits up to five seconds for sessions that are closing.
    """
    statements = read_statements("databases.sql")
    drop = statements["drop_database"].format(database=quote_identifier(name))
    try:
        await connection.execute(drop)
    except asyncpg.ObjectInUseError:
        sessions = await connection.fetch(statements["list_sessions"], name)
        await connection.execute(statements["end_sessions"], name)
        await connection.execute(drop)
        return [f"{row['application_name']!r} {row['state']}: {row['query']}" for row in sessions]
    return []

"""Working on the database from outside a worker."""

from __future__ import annotations

import os

from graphile_worker._db.connect import connect
from graphile_worker._db.migrate import migrate
from graphile_worker._db.sql import DEFAULT_SCHEMA, Schema


def find_schema(name: str | None) -> Schema:
    """The schema given, or else ``GRAPHILE_WORKER_SCHEMA``, or else ``graphile_worker``."""
    return Schema(name or os.environ.get("GRAPHILE_WORKER_SCHEMA") or DEFAULT_SCHEMA)


async def run_migrations(*, dsn: str | None = None, schema: str | None = None) -> None:
    """Install the schema, or adopt and complete one that Graphile Worker made.

    Safe to call at every start, by any number of processes at once. It happens in one transaction:
    whole or not at all.

    Args:
        dsn: The connection string; by default ``DATABASE_URL``, or the ``PG*`` variables.
        schema: The schema's name; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.

    Raises:
        ConfigurationError: No database was named, or the schema's name cannot be one.
        DatabaseError: The database cannot be reached, or is older than PostgreSQL 12.
        SchemaError: The schema cannot be installed here, or is too old or too new to adopt.

    Example:
        >>> import asyncio
        >>> from graphile_worker import run_migrations
        >>> asyncio.run(run_migrations(dsn=dsn))
    """
    target = find_schema(schema)
    async with connect(dsn) as connection:
        await migrate(connection, target)

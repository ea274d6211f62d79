"""Building our indexes on a schema that others are using.

Concurrently, so that nobody who adds or takes jobs has to wait. That is not possible inside a transaction, so
it comes before the one in which the rest is installed; an index without that rest harms nobody.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.sql import read_statements

if TYPE_CHECKING:
    from graphile_worker._db.connect import Connection
    from graphile_worker._db.sql import Schema

_SCRIPT = "own/002_indexes.sql"
_POLL = 0.1
# Another installer is at work on the same index.
_CLASHES = (
    asyncpg.DuplicateTableError,
    asyncpg.UndefinedObjectError,
    asyncpg.DeadlockDetectedError,
    asyncpg.UniqueViolationError,
    asyncpg.InternalServerError,  # "tuple concurrently updated"
)


async def build_indexes(connection: Connection, schema: Schema) -> None:
    """Build what is missing, and anew what an installer that died left half built."""
    for name, statement in read_statements(_SCRIPT).items():
        # Another installer may be at it, of whom we only see what it has come to.
        while not await _build(connection, schema, f"_private_python_{name}", statement):  # noqa: ASYNC110
            await asyncio.sleep(_POLL)


def index_script(schema: Schema) -> list[str]:
    """The statements that do it, where nothing is in the way."""
    return [_concurrently(schema, statement) for statement in read_statements(_SCRIPT).values()]


def _concurrently(schema: Schema, statement: str) -> str:
    return schema.render(statement.replace("create index", "create index concurrently"))


async def _build(connection: Connection, schema: Schema, name: str, statement: str) -> bool:
    statements = read_statements("migrate.sql")
    found = await connection.fetchrow(statements["inspect_index"], schema.name, name)
    try:
        if found is None:
            await connection.execute(_concurrently(schema, statement))
        elif found["is_being_built"]:
            return False
        elif not found["is_valid"]:
            await connection.execute(schema.render(statements["drop_index"]).replace("{name}", name))
            return False
    except _CLASHES:
        return False
    return True

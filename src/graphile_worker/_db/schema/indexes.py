"""Build the library's indexes on a schema that is in use.

The indexes are built concurrently, so that adding and claiming jobs does not have to wait. That is not
possible inside a transaction, so it happens before the transaction that installs the rest. The indexes alone
do no harm.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.sql_files import read_statements

if TYPE_CHECKING:
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.sql_files import Schema

_SCRIPT = "own/002_indexes.sql"
_PREFIX = "_private_python_"
_POLL = 0.1
# Another installer is building the same index.
_CLASHES = (
    asyncpg.DuplicateTableError,
    asyncpg.UndefinedObjectError,
    asyncpg.DeadlockDetectedError,
    asyncpg.UniqueViolationError,
    asyncpg.InternalServerError,  # "tuple concurrently updated"
)


async def build_indexes(connection: Connection, schema: Schema) -> None:
    """Build missing indexes, and rebuild an index that an interrupted installer left invalid."""
    for name, statement in read_statements(_SCRIPT).items():
        # Another installer may be building the index, and there is no event to wait for.
        while not await _build(connection, schema, f"{_PREFIX}{name}", statement):  # noqa: ASYNC110
            await asyncio.sleep(_POLL)


def index_script(schema: Schema) -> list[str]:
    """Return the statements that build the indexes if none of them exists."""
    return [_concurrently(schema, statement) for statement in read_statements(_SCRIPT).values()]


def index_names() -> list[str]:
    """Return the names of the library's indexes."""
    return [f"{_PREFIX}{name}" for name in read_statements(_SCRIPT)]


def index_statement(schema: Schema, name: str) -> str:
    """Return the statement that builds the index with this name."""
    return _concurrently(schema, read_statements(_SCRIPT)[name.removeprefix(_PREFIX)])


def drop_statement(schema: Schema, name: str) -> str:
    """Return the statement that drops the index with this name, which an interrupted installer left."""
    return schema.render(read_statements("migrate.sql")["drop_index"]).replace("{name}", name)


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
            await connection.execute(drop_statement(schema, name))
            return False
    except _CLASHES:
        return False
    return True

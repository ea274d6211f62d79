"""What a server, a schema and its jobs look like to somebody who examines them; one function a statement."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import asyncpg

from graphile_worker._db.connect import read_committed
from graphile_worker._db.failures import sentence, translated
from graphile_worker._db.sql import Schema, read_statements, statements_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from graphile_worker._db.connect import Connection, Pool

T = TypeVar("T")
_FILE = "doctor.sql"


class MayNotLookError(Exception):
    """The role has not the right to see it."""


class Server(NamedTuple):
    """The server, as it says."""

    version_num: int
    version: str
    role: str
    is_replica: bool
    is_read_only: bool


class Rights(NamedTuple):
    """What the role may do."""

    schema_exists: bool
    owner: str | None
    owner_is_superuser: bool
    acts_as_owner: bool
    is_member: bool
    """Of the owner; that alone is not enough, if the role does not inherit."""
    may_use_schema: bool
    may_create_schema: bool
    passes_row_security: bool
    hidden_tables: Sequence[str]
    """Tables whose rows it does not see, whatever was granted."""
    missing: Sequence[str]


class ExposedFunctions(NamedTuple):
    """Functions that resolve names by the search_path of their caller."""

    functions: Sequence[str]
    all_may_create: bool
    """Whether every role may create functions in ``public``, which is in the path by default."""


class Trigger(NamedTuple):
    """A trigger of the user's on one of our tables."""

    table: str
    name: str
    function: str
    """With its schema and its arguments."""


class Connections(NamedTuple):
    """How many there are, and how many there may be; a limit of -1 is none."""

    used: int
    of_server: int
    of_database: int
    used_in_database: int
    of_role: int
    used_by_role: int


class Table(NamedTuple):
    """A table, by what the statistics know of it."""

    name: str
    live: int
    dead: int
    seconds_since_vacuum: float | None
    is_left_out: bool
    """Whether autovacuum is off for it."""


class VacuumSettings(NamedTuple):
    """Settings of the server without which no table is vacuumed."""

    autovacuum: bool
    track_counts: bool


class Transaction(NamedTuple):
    """A transaction that has not ended."""

    name: str
    role: str | None
    application: str | None
    state: str | None
    seconds: float
    remedy: str


class StuckQueue(NamedTuple):
    """A queue that is locked though none of its jobs is."""

    name: str
    locked_by: str | None
    seconds: float
    waiting: int


class Locks(NamedTuple):
    """What one worker holds."""

    locked_by: str | None
    jobs: int
    queues: int
    seconds: float


async def look(pool: Pool, schema: Schema, at: Callable[[Connection], Awaitable[T]]) -> T:
    """What somebody sees who looks, in a transaction of its own that never takes long.

    Raises:
        MayNotLookError: The role may not see it.
    """
    with translated(schema):
        try:
            async with pool.connection() as connection, read_committed(connection):
                await connection.execute(read_statements(_FILE)["be_brief"])
                return await at(connection)
        except asyncpg.InsufficientPrivilegeError as error:
            raise MayNotLookError(sentence(error)) from error


async def read_server(connection: Connection) -> Server:
    """Which one it is."""
    [row] = await connection.fetch(read_statements(_FILE)["read_server"])
    return Server(*row)


async def read_clock(connection: Connection) -> datetime:
    """The server's time, now."""
    now: datetime = await connection.fetchval(read_statements(_FILE)["read_clock"])
    return now


async def read_rights(connection: Connection, schema: Schema) -> Rights:
    """What the role may do with the schema."""
    [row] = await connection.fetch(read_statements(_FILE)["read_rights"], schema.name)
    return Rights(*row)


async def describe_schema(connection: Connection, schema: Schema) -> dict[str, str]:
    """All objects in the schema: what they are called, and what they are."""
    statements = read_statements(_FILE)
    await connection.execute(statements["look_into_schema"], schema.name)
    rows = await connection.fetch(statements["describe_schema"], schema.quoted)
    return {f"{row['kind']} {row['name']}": row["definition"] for row in rows}


async def read_exposed_functions(connection: Connection, schema: Schema) -> ExposedFunctions:
    """Find the functions of the schema that have no search_path of their own."""
    [row] = await connection.fetch(read_statements(_FILE)["read_exposed_functions"], schema.quoted)
    return ExposedFunctions(*row)


async def read_triggers_without_path(connection: Connection, schema: Schema) -> list[Trigger]:
    """Find the triggers on our tables whose functions have no search_path of their own."""
    statement = read_statements(_FILE)["read_triggers_without_path"]
    return [Trigger(*row) for row in await connection.fetch(statement, schema.quoted)]


async def read_notification_queue(connection: Connection) -> float:
    """How full it is, from 0 to 1."""
    used: float = await connection.fetchval(read_statements(_FILE)["read_notification_queue"])
    return used


async def read_connections(connection: Connection) -> Connections:
    """How many there are."""
    [row] = await connection.fetch(read_statements(_FILE)["read_connections"])
    return Connections(*row)


async def read_tables(connection: Connection, schema: Schema) -> list[Table]:
    """The tables of the schema, the one with most dead rows first."""
    rows = await connection.fetch(read_statements(_FILE)["read_tables"], schema.quoted)
    return [Table(*row) for row in rows]


async def read_vacuum_settings(connection: Connection) -> VacuumSettings:
    """Whether anything is vacuumed."""
    [row] = await connection.fetch(read_statements(_FILE)["read_vacuum_settings"])
    return VacuumSettings(*row)


async def read_transactions(connection: Connection) -> tuple[list[Transaction], int]:
    """Open transactions, the oldest first; and how many sessions the role may not look into."""
    statements = read_statements(_FILE)
    rows = await connection.fetch(statements["read_transactions"])
    hidden: int = await connection.fetchval(statements["count_hidden_sessions"])
    return [Transaction(*row) for row in rows], hidden


async def read_stuck_queues(connection: Connection, schema: Schema) -> list[StuckQueue]:
    """Queues that are locked for nothing, those first in which most jobs wait."""
    rows = await connection.fetch(statements_for(schema, _FILE)["read_stuck_queues"])
    return [StuckQueue(*row) for row in rows]


async def read_locks(connection: Connection, schema: Schema) -> list[Locks]:
    """Who holds what, the oldest locks first."""
    rows = await connection.fetch(statements_for(schema, _FILE)["read_locks"])
    return [Locks(*row) for row in rows]

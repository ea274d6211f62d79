"""Statements for the doctor: read the state of the server, the schema and its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import asyncpg

from graphile_worker._db.connection.connect import read_committed
from graphile_worker._db.connection.error_mapping import sentence, translate_errors
from graphile_worker._db.sql_files import Schema, read_statements, statements_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from graphile_worker._db.connection.connect import Connection, Pool

T = TypeVar("T")
_FILE = "doctor.sql"


class NotPermittedError(Exception):
    """The role lacks the privilege to read this."""


class Server(NamedTuple):
    """The server's version, and the role of the session."""

    version_num: int
    version: str
    role: str
    is_replica: bool
    is_read_only: bool


class Rights(NamedTuple):
    """The privileges of the role."""

    schema_exists: bool
    owner: str | None
    owner_is_superuser: bool
    acts_as_owner: bool
    is_member: bool
    """Whether the role is a member of the owner. That is not enough if the role does not inherit."""
    may_use_schema: bool
    may_create_schema: bool
    passes_row_security: bool
    hidden_tables: Sequence[str]
    """Tables whose rows row level security hides, whatever was granted."""
    missing: Sequence[str]


class ExposedFunctions(NamedTuple):
    """Functions that resolve names by the caller's search_path."""

    functions: Sequence[str]
    all_may_create: bool
    """Whether every role may create functions in ``public``, which is in the default search_path."""


class Trigger(NamedTuple):
    """A user's trigger on one of the library's tables."""

    table: str
    name: str
    function: str
    """The trigger function, with its schema and its arguments."""


class Connections(NamedTuple):
    """The numbers of open connections, and their limits. A limit of -1 means no limit."""

    used: int
    of_server: int
    of_database: int
    used_in_database: int
    of_role: int
    used_by_role: int


class Table(NamedTuple):
    """A table, according to the server's statistics."""

    name: str
    live: int
    dead: int
    seconds_since_vacuum: float | None
    is_left_out: bool
    """Whether autovacuum is off for the table."""


class Upkeep(NamedTuple):
    """What keeps the jobs table from being cleaned up, and the server's time."""

    dead_tuples: float
    oldest_xmin_age: float
    notification_queue_usage: float
    now: datetime


class VacuumSettings(NamedTuple):
    """Server settings without which no table is vacuumed."""

    autovacuum: bool
    track_counts: bool


class Transaction(NamedTuple):
    """An open transaction."""

    name: str
    role: str | None
    application: str | None
    state: str | None
    seconds: float
    remedy: str


class StuckQueue(NamedTuple):
    """A queue that is locked, although none of its jobs is."""

    name: str
    locked_by: str | None
    seconds: float
    waiting: int


class Locks(NamedTuple):
    """The locks that one worker holds."""

    locked_by: str | None
    jobs: int
    queues: int
    seconds: float


async def examine(pool: Pool, schema: Schema, query: Callable[[Connection], Awaitable[T]]) -> T:
    """Run a query in a short transaction of its own.

    Raises:
        NotPermittedError: The role lacks the privilege.
    """
    with translate_errors(schema):
        try:
            async with pool.connection() as connection, read_committed(connection):
                await connection.execute(read_statements(_FILE)["set_timeouts"])
                return await query(connection)
        except asyncpg.InsufficientPrivilegeError as error:
            raise NotPermittedError(sentence(error)) from error


async def read_server(connection: Connection) -> Server:
    """Return the server's version, and the role of the session."""
    [row] = await connection.fetch(read_statements(_FILE)["read_server"])
    return Server(*row)


async def read_clock(connection: Connection) -> datetime:
    """Return the server's current time."""
    now: datetime = await connection.fetchval(read_statements(_FILE)["read_clock"])
    return now


async def read_rights(connection: Connection, schema: Schema) -> Rights:
    """Return the role's privileges on the schema."""
    [row] = await connection.fetch(read_statements(_FILE)["read_rights"], schema.name)
    return Rights(*row)


async def describe_schema(connection: Connection, schema: Schema) -> dict[str, str]:
    """Return the definitions of all objects in the schema, by kind and name."""
    statements = read_statements(_FILE)
    await connection.execute(statements["set_search_path"], schema.name)
    rows = await connection.fetch(statements["describe_schema"], schema.quoted)
    return {f"{row['kind']} {row['name']}": row["definition"] for row in rows}


async def read_exposed_functions(connection: Connection, schema: Schema) -> ExposedFunctions:
    """Find functions in the schema that do not set a search_path."""
    [row] = await connection.fetch(read_statements(_FILE)["read_exposed_functions"], schema.quoted)
    return ExposedFunctions(*row)


async def read_triggers_without_path(connection: Connection, schema: Schema) -> list[Trigger]:
    """Find triggers on the library's tables whose functions do not set a search_path."""
    statement = read_statements(_FILE)["read_triggers_without_path"]
    return [Trigger(*row) for row in await connection.fetch(statement, schema.quoted)]


async def read_notification_queue(connection: Connection) -> float:
    """Return how full the server's notification queue is, from 0 to 1."""
    used: float = await connection.fetchval(read_statements(_FILE)["read_notification_queue"])
    return used


async def read_connections(connection: Connection) -> Connections:
    """Return the numbers of open connections, and their limits."""
    [row] = await connection.fetch(read_statements(_FILE)["read_connections"])
    return Connections(*row)


async def read_tables(connection: Connection, schema: Schema) -> list[Table]:
    """Return the tables of the schema, the one with the most dead rows first."""
    rows = await connection.fetch(read_statements(_FILE)["read_tables"], schema.quoted)
    return [Table(*row) for row in rows]


async def read_upkeep(connection: Connection, schema: Schema) -> Upkeep:
    """Return what keeps the jobs table from being cleaned up."""
    [row] = await connection.fetch(read_statements(_FILE)["read_upkeep"], schema.quoted)
    return Upkeep(*row)


async def read_vacuum_settings(connection: Connection) -> VacuumSettings:
    """Return the server settings that vacuuming depends on."""
    [row] = await connection.fetch(read_statements(_FILE)["read_vacuum_settings"])
    return VacuumSettings(*row)


async def read_transactions(connection: Connection) -> tuple[list[Transaction], int]:
    """Return the open transactions, oldest first, and the number of sessions that the role cannot inspect."""
    statements = read_statements(_FILE)
    rows = await connection.fetch(statements["read_transactions"])
    hidden: int = await connection.fetchval(statements["count_hidden_sessions"])
    return [Transaction(*row) for row in rows], hidden


async def read_stuck_queues(connection: Connection, schema: Schema) -> list[StuckQueue]:
    """Return queues that are locked without a locked job, the one with the most waiting jobs first."""
    rows = await connection.fetch(statements_for(schema, _FILE)["read_stuck_queues"])
    return [StuckQueue(*row) for row in rows]


async def read_locks(connection: Connection, schema: Schema) -> list[Locks]:
    """Return the locks of each worker, the oldest locks first."""
    rows = await connection.fetch(statements_for(schema, _FILE)["read_locks"])
    return [Locks(*row) for row in rows]

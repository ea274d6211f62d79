"""Installing the schema, or adopting one that Graphile Worker made.

Two ledgers: ``migrations`` is Graphile Worker's, where we never write a row above 20, because its
workers decide by the highest one; ``_private_python_migrations`` is ours.

Several installers may be at work at once, npm's too. Ours take turns by an advisory lock and do
everything in one transaction. npm's commits revision by revision, so a low revision that grows is an
installer at work, which we wait for; one that stands still is an old installation, which we refuse.
"""

from __future__ import annotations

import asyncio
import shlex
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from graphile_worker._db.connect import read_committed
from graphile_worker._db.failures import sentence
from graphile_worker._db.indexes import build_indexes, index_script
from graphile_worker._db.sql import DEFAULT_SCHEMA, Schema, read_statements
from graphile_worker._db.steps import (
    BREAKING_COLUMN,
    OLDEST_ADOPTED,
    OWN_MIGRATIONS,
    REVISION,
    Found,
    script,
    steps,
)
from graphile_worker.errors import (
    DatabaseError,
    SchemaError,
    SchemaTooNewError,
    SchemaTooOldError,
)
from graphile_worker.logs import library_logger as logger

if TYPE_CHECKING:
    from graphile_worker._db.connect import Connection


_OLDEST_SERVER = 12

_ADVISED_NAME_BYTES = 32
_LEDGER_COLUMNS = frozenset({"id integer", "ts timestamp with time zone"})
_STANDSTILL = 5.0
_POLL = 0.1
# Somebody else created the same thing between our look and our attempt.
_CLASHES = (
    asyncpg.UniqueViolationError,
    asyncpg.DuplicateSchemaError,
    asyncpg.DuplicateTableError,
    asyncpg.DuplicateObjectError,
    asyncpg.DuplicateFunctionError,
    asyncpg.DeadlockDetectedError,
)
_MOST_FRUITLESS = 5


class Migrated(NamedTuple):
    """What `migrate` came to."""

    revision: int
    changed: bool


async def migrate(connection: Connection, schema: Schema, *, standstill: float = _STANDSTILL) -> Migrated:
    """Bring the schema to our revision, whole or not at all.

    `standstill` is how many seconds a revision that we cannot adopt may stay the same before we
    conclude that no installer is at work on it.
    """
    try:
        return await _migrate(connection, schema, standstill)
    except asyncpg.InsufficientPrivilegeError as error:
        raise SchemaError(
            f"The schema {schema.name!r} cannot be installed: {sentence(error)} Connect as the schema's "
            "owner; if there is none yet, let an administrator run: "
            f"create schema {schema.quoted} authorization YOUR_ROLE"
        ) from error
    except asyncpg.PostgresError as error:
        raise DatabaseError(f"The schema {schema.name!r} cannot be installed: {sentence(error)}") from error
    except (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
        raise DatabaseError(
            f"The connection was lost while the schema {schema.name!r} was being installed: "
            f"{sentence(error)} It happens whole or not at all: try again."
        ) from error


class Pending(NamedTuple):
    """What `migrate` would do."""

    revision: int | None
    """The revision of Graphile Worker's that is there, if one is."""
    what: list[str]
    """In words; empty if nothing is to be done."""
    script: str
    """In SQL."""


async def find_pending(connection: Connection, schema: Schema) -> Pending:
    """Look what `migrate` would do, and do nothing."""
    found = await inspect_schema(connection, schema)
    refuse(found, schema)
    what = [step.what for step in steps(schema, found) if step.what]
    # On a schema that is in use they are built without locking anybody out.
    first = index_script(schema) if what and found.revision is not None else []
    return Pending(found.revision, what, script(schema, found, first) if what else "")


async def check_adoptable(connection: Connection, schema: Schema) -> None:
    """Refuse a schema that `migrate` would refuse."""
    refuse(await inspect_schema(connection, schema), schema)


async def check_revisions(connection: Connection, schema: Schema) -> None:
    """Refuse a schema that was changed in a way that we do not know."""
    found = await inspect_schema(connection, schema)
    if not found.too_old:  # that another installer may be at work on
        refuse(found, schema)


async def _migrate(connection: Connection, schema: Schema, standstill: float) -> Migrated:
    found = await inspect_schema(connection, schema)
    if found.server_version_num < _OLDEST_SERVER * 10_000:
        raise DatabaseError(
            f"The server is PostgreSQL {found.server_version}; "
            f"Graphile Worker needs {_OLDEST_SERVER} or newer."
        )
    changed = False
    fruitless = 0
    while True:
        if found.too_old:
            found = await _wait_while_it_grows(connection, schema, found, standstill)
        refuse(found, schema)
        if found.complete:
            _warn_of_newer(found, schema)
            return Migrated(found.revision or 0, changed)
        before, clash = found, None
        try:
            if found.revision is not None and not connection.is_in_transaction():
                await build_indexes(connection, schema)
            changed = await _change(connection, schema) or changed
        except _CLASHES as error:
            clash = error
        found = await inspect_schema(connection, schema)
        fruitless = fruitless + 1 if found == before else 0
        if fruitless == _MOST_FRUITLESS:
            raise SchemaError(
                f"The schema {schema.name!r} holds objects that are in the way: "
                f"{sentence(clash) if clash else ''} Choose another schema, or remove them."
            ) from clash
        if fruitless:
            await asyncio.sleep(_POLL)


async def inspect_schema(connection: Connection, schema: Schema) -> Found:
    """Look into the catalog, and into the ledgers."""
    statements = read_statements("migrate.sql")
    [row] = await connection.fetch(statements["inspect_schema"], schema.name)
    columns = frozenset(row["ledger_columns"])
    revision, breaking_revision, marks_19_breaking, own_revision, own_breaking = None, None, True, 0, 0
    if columns and columns - {BREAKING_COLUMN} != _LEDGER_COLUMNS:
        raise SchemaError(
            f"The table migrations in the schema {schema.name!r} is not Graphile Worker's. "
            "Choose another schema."
        )
    if BREAKING_COLUMN in columns:
        [(revision, breaking_revision, marks_19_breaking)] = await connection.fetch(
            schema.render(statements["read_revisions"])
        )
    elif columns:
        revision = await connection.fetchval(schema.render(statements["read_revision_before_breaking_flags"]))
    if row["own_ledger_exists"]:
        [(own_revision, own_breaking)] = await connection.fetch(
            schema.render(statements["read_own_revisions"])
        )
    return Found(
        server_version_num=row["server_version_num"],
        server_version=row["server_version"],
        schema_exists=row["schema_exists"],
        owner_to_act_as=row["owner_to_act_as"],
        holds_other_relations=row["holds_other_relations"],
        ledger_columns=columns,
        revision=revision,
        breaking_revision=breaking_revision,
        marks_19_breaking=marks_19_breaking,
        own_ledger_exists=row["own_ledger_exists"],
        own_revision=own_revision,
        own_breaking_revision=own_breaking,
        workers_exist=row["workers_exist"],
        functions_are_ours=row["functions_are_ours"],
    )


async def _wait_while_it_grows(
    connection: Connection, schema: Schema, found: Found, standstill: float
) -> Found:
    seen, since = found.revision, monotonic()
    waited_for_ledger = False
    while found.too_old:
        if found.revision != seen:
            seen, since, waited_for_ledger = found.revision, monotonic(), False
        elif monotonic() - since < standstill:
            await asyncio.sleep(_POLL)
        elif not waited_for_ledger:
            # A migration may take longer than that: npm's eleventh copies all jobs.
            async with read_committed(connection):
                await connection.execute(schema.render(read_statements("migrate.sql")["wait_for_ledger"]))
            waited_for_ledger = True
        else:
            refuse(found, schema)
        found = await inspect_schema(connection, schema)
    return found


class Refusal(NamedTuple):
    """Why we do not work with a schema, and what to do about it."""

    error: type[SchemaError]
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.why} {self.remedy}"


def refusal(found: Found, schema: Schema) -> Refusal | None:
    """Why we do not work with it; None if we do."""
    if found.too_old:
        option = "" if schema.name == DEFAULT_SCHEMA else f" --schema {shlex.quote(schema.name)}"
        return Refusal(
            SchemaTooOldError,
            f"The schema {schema.name!r} is at revision {found.revision} of Graphile Worker, "
            f"and this library adopts {OLDEST_ADOPTED} or {REVISION}.",
            "Upgrade it with Graphile Worker first: "
            f"npx graphile-worker@0.18 --schema-only{option} -c YOUR_DATABASE",
        )
    if (found.breaking_revision or 0) > REVISION:
        return Refusal(
            SchemaTooNewError,
            f"The schema {schema.name!r} is at revision {found.revision} of Graphile Worker, and "
            f"its revision {found.breaking_revision} breaks with what this library knows, {REVISION}.",
            "Upgrade graphile-worker.",
        )
    if found.own_breaking_revision > OWN_MIGRATIONS[-1].id:
        return Refusal(
            SchemaTooNewError,
            f"The schema {schema.name!r} was changed by a newer release of this library, in a way that this "
            "one does not know.",
            "Upgrade graphile-worker.",
        )
    return None


def refuse(found: Found, schema: Schema) -> None:
    """Raise if we do not work with it."""
    if (why := refusal(found, schema)) is not None:
        raise why.error(str(why))


def _warn_of_newer(found: Found, schema: Schema) -> None:
    if (found.revision or 0) > REVISION:
        logger.warning(
            "The schema %r is at revision %s, and this library knows those up to %s. What came after them is "
            "marked as compatible, so work goes on. If it is Node's, consider an upgrade of graphile-worker.",
            schema.name,
            found.revision,
            REVISION,
        )


async def _change(connection: Connection, schema: Schema) -> bool:
    """Do what is left to do, in one transaction; False if another installer did it, or is at work."""
    statements = read_statements("migrate.sql")
    async with read_committed(connection):
        await connection.execute(statements["lock_installers"], schema.name)
        found = await inspect_schema(connection, schema)
        if found.complete or found.too_old or (found.breaking_revision or 0) > REVISION:
            return False
        if found.revision is None:
            _advise(schema, found)
        if found.is_new_to_us:
            _tell_of_others(found, schema)
        [before] = await connection.fetch(statements["read_session"])
        for step in steps(schema, found):
            await connection.execute(step.sql)
        # After an error the transaction is rolled back, and the role and the path with it.
        await connection.execute(statements["restore_session"], *before)
    return True


def _advise(schema: Schema, found: Found) -> None:
    size = len(schema.name.encode())
    if size > _ADVISED_NAME_BYTES:
        logger.warning(
            "The schema name %r has %d bytes; Graphile Worker advises at most %d.",
            schema.name,
            size,
            _ADVISED_NAME_BYTES,
        )
    if found.holds_other_relations:
        logger.warning(
            "The schema %r holds other tables too. A schema of its own would be easier to remove.",
            schema.name,
        )


def _tell_of_others(found: Found, schema: Schema) -> None:
    """Of revisions that are not those of Node's under the same numbers, by what can be seen of them."""
    we_write_20 = (found.revision or 0) < REVISION
    seen = []
    if not found.marks_19_breaking and we_write_20:
        seen.append("revision 19 was not marked as breaking, and is now")
    elif not found.marks_19_breaking:
        seen.append("revision 19 is not marked as breaking: Node workers older than 0.17 are not kept out")
    if found.brings_workers and not we_write_20:
        seen.append(
            "the table of workers is that of the Rust port's revision 20: if Node's was not applied before, "
            "each add_job call consumes identity values of tasks and queues"
        )
    if seen:
        logger.warning(
            "Some revisions of the schema %r are not those of Node's Graphile Worker under the same numbers, "
            "so that Node will never apply its own: %s.",
            schema.name,
            "; ".join(seen),
        )

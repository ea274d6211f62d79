"""Installing the schema, or adopting one that Graphile Worker made.

Two ledgers: ``migrations`` is Graphile Worker's, where we never write a row above 20, because its
workers decide by the highest one; ``_private_python_migrations`` is ours.

Several installers may be at work at once, npm's too. Ours take turns by an advisory lock and do
everything in one transaction. npm's commits revision by revision, so a low revision that grows is an
installer at work, which we wait for; one that stands still is an old installation, which we refuse.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from graphile_worker._db.connect import read_committed
from graphile_worker._db.failures import sentence
from graphile_worker._db.indexes import build_indexes
from graphile_worker._db.sql import DEFAULT_SCHEMA, Schema, read_script, read_statements
from graphile_worker.errors import (
    DatabaseError,
    SchemaError,
    SchemaTooNewError,
    SchemaTooOldError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from graphile_worker._db.connect import Connection

logger = logging.getLogger("graphile_worker")

REVISION = 20
"""The revision of Graphile Worker's schema that we install and work with (npm 0.18)."""
_OLDEST_ADOPTED = 19
_OLDEST_SERVER = 12

_ADVISED_NAME_BYTES = 32
_LEDGER_COLUMNS = frozenset({"id integer", "ts timestamp with time zone"})
_BREAKING_COLUMN = "breaking boolean"
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


class OwnMigration(NamedTuple):
    """A step that adds objects of ours; its script is ``own/<id>_<name>.sql``."""

    id: int
    name: str


_WORKERS = OwnMigration(1, "workers")
_OWN_MIGRATIONS: Sequence[OwnMigration] = (
    _WORKERS,
    OwnMigration(2, "indexes"),
    OwnMigration(3, "exchange"),
    OwnMigration(4, "cancellations"),
)


class Migrated(NamedTuple):
    """What `migrate` came to."""

    revision: int
    changed: bool


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What the catalog says of the server and the schema."""

    server_version_num: int
    server_version: str
    schema_exists: bool
    owner_to_act_as: str | None
    holds_other_relations: bool
    ledger_columns: frozenset[str]
    revision: int | None
    breaking_revision: int | None
    marks_19_breaking: bool
    own_ledger_exists: bool
    own_revision: int
    own_breaking_revision: int
    workers_exist: bool

    @property
    def complete(self) -> bool:
        return (self.revision or 0) >= REVISION and self.own_revision >= _OWN_MIGRATIONS[-1].id

    @property
    def too_old(self) -> bool:
        return self.revision is not None and self.revision < _OLDEST_ADOPTED

    @property
    def made_by_rust(self) -> bool:
        return self.workers_exist and self.own_revision < _WORKERS.id


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


async def check_revisions(connection: Connection, schema: Schema) -> None:
    """Refuse a schema that was changed in a way that we do not know."""
    _refuse_newer(await _inspect(connection, schema), schema)


async def _migrate(connection: Connection, schema: Schema, standstill: float) -> Migrated:
    found = await _inspect(connection, schema)
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
        _refuse_newer(found, schema)
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
        found = await _inspect(connection, schema)
        fruitless = fruitless + 1 if found == before else 0
        if fruitless == _MOST_FRUITLESS:
            raise SchemaError(
                f"The schema {schema.name!r} holds objects that are in the way: "
                f"{sentence(clash) if clash else ''} Choose another schema, or remove them."
            ) from clash
        if fruitless:
            await asyncio.sleep(_POLL)


async def _inspect(connection: Connection, schema: Schema) -> _Found:
    statements = read_statements("migrate.sql")
    [row] = await connection.fetch(statements["inspect_schema"], schema.name)
    columns = frozenset(row["ledger_columns"])
    revision, breaking_revision, marks_19_breaking, own_revision, own_breaking = None, None, True, 0, 0
    if columns and columns - {_BREAKING_COLUMN} != _LEDGER_COLUMNS:
        raise SchemaError(
            f"The table migrations in the schema {schema.name!r} is not Graphile Worker's. "
            "Choose another schema."
        )
    if _BREAKING_COLUMN in columns:
        [(revision, breaking_revision, marks_19_breaking)] = await connection.fetch(
            schema.render(statements["read_revisions"])
        )
    elif columns:
        revision = await connection.fetchval(schema.render(statements["read_revision_before_breaking_flags"]))
    if row["own_ledger_exists"]:
        [(own_revision, own_breaking)] = await connection.fetch(
            schema.render(statements["read_own_revisions"])
        )
    return _Found(
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
    )


async def _wait_while_it_grows(
    connection: Connection, schema: Schema, found: _Found, standstill: float
) -> _Found:
    seen, since = found.revision, monotonic()
    waited_for_ledger = False
    while found.too_old:
        if found.revision != seen:
            seen, since, waited_for_ledger = found.revision, monotonic(), False
        elif monotonic() - since < standstill:
            await asyncio.sleep(_POLL)
        elif not waited_for_ledger:
            # A migration may take longer than that: npm's eleventh copies all jobs.
            async with connection.transaction():
                await connection.execute(schema.render(read_statements("migrate.sql")["wait_for_ledger"]))
            waited_for_ledger = True
        else:
            option = "" if schema.name == DEFAULT_SCHEMA else f" --schema {shlex.quote(schema.name)}"
            raise SchemaTooOldError(
                f"The schema {schema.name!r} is at revision {found.revision} of Graphile Worker, "
                f"and this library adopts {_OLDEST_ADOPTED} or {REVISION}. Upgrade it with Graphile "
                f"Worker first: npx graphile-worker@0.18 --schema-only{option} -c YOUR_DATABASE"
            )
        found = await _inspect(connection, schema)
    return found


def _refuse_newer(found: _Found, schema: Schema) -> None:
    if (found.breaking_revision or 0) > REVISION:
        raise SchemaTooNewError(
            f"The schema {schema.name!r} is at revision {found.revision} of Graphile Worker, and "
            f"its revision {found.breaking_revision} breaks with what this library knows, "
            f"{REVISION}. Upgrade graphile-worker."
        )
    if found.own_breaking_revision > _OWN_MIGRATIONS[-1].id:
        raise SchemaTooNewError(
            f"The schema {schema.name!r} was changed by a newer release of this library, in a way that this "
            "one does not know. Upgrade graphile-worker."
        )


def _warn_of_newer(found: _Found, schema: Schema) -> None:
    if (found.revision or 0) > REVISION:
        logger.warning(
            "The schema %r is at revision %s of Graphile Worker, newer than the %s that this library "
            "knows, but marked as compatible. Consider an upgrade of graphile-worker.",
            schema.name,
            found.revision,
            REVISION,
        )


async def _change(connection: Connection, schema: Schema) -> bool:
    """Do what is left to do, in one transaction; False if another installer did it, or is at work."""
    statements = read_statements("migrate.sql")
    async with read_committed(connection):
        await connection.execute(statements["lock_installers"], schema.name)
        found = await _inspect(connection, schema)
        if found.complete or found.too_old or (found.breaking_revision or 0) > REVISION:
            return False
        async with _acting_as(connection, found.owner_to_act_as):
            if found.revision is None:
                await _install(connection, schema, found)
            elif found.revision < REVISION:
                # The row first: npm's installer, if at work, makes us wait here.
                await connection.execute(schema.render(statements["record_revision_20"]))
                await connection.execute(schema.render(read_statements("schema/add_jobs.sql")["functions"]))
                await connection.execute(statements["announce_revision_20"])
            await _add_own_objects(connection, schema, found)
    return True


@asynccontextmanager
async def _acting_as(connection: Connection, owner: str | None) -> AsyncIterator[None]:
    """What a member of the schema's owner makes is to belong to the owner, or it would lock the owner out."""
    if owner is None:
        yield
        return
    statements = read_statements("migrate.sql")
    before = await connection.fetchval(statements["read_role"])
    await connection.execute(statements["set_role"], owner)
    yield
    # After an error the transaction is rolled back, and the role with it.
    await connection.execute(statements["set_role"], before)


async def _install(connection: Connection, schema: Schema, found: _Found) -> None:
    statements = read_statements("migrate.sql")
    _advise(schema, found)
    if not found.schema_exists:
        await connection.execute(schema.render(statements["create_schema"]))
    if not found.ledger_columns:
        await connection.execute(schema.render(statements["create_ledger"]))
    elif _BREAKING_COLUMN not in found.ledger_columns:
        await connection.execute(schema.render(statements["add_breaking_flag"]))
    # The rows first: npm's installer, if at work, makes us wait here, or waits for us.
    await connection.execute(schema.render(statements["record_all_revisions"]))
    await connection.execute(schema.render(read_script("schema/tables.sql")))
    await connection.execute(schema.render(read_statements("schema/add_jobs.sql")["functions"]))
    await connection.execute(schema.render(read_script("schema/administer.sql")))


def _advise(schema: Schema, found: _Found) -> None:
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


async def _add_own_objects(connection: Connection, schema: Schema, found: _Found) -> None:
    statements = read_statements("migrate.sql")
    if not found.own_ledger_exists:
        await connection.execute(schema.render(statements["create_own_ledger"]))
    for migration in _OWN_MIGRATIONS[found.own_revision :]:
        if migration is _WORKERS and found.made_by_rust:
            _tell_of_rust(found, schema)
        else:
            script = read_script(f"own/{migration.id:03}_{migration.name}.sql")
            await connection.execute(schema.render(script))
        await connection.execute(schema.render(statements["record_own_revision"]), *migration)


def _tell_of_rust(found: _Found, schema: Schema) -> None:
    misses = "each of its add_job calls consumes identity values of tasks and queues"
    if not found.marks_19_breaking:
        misses += ", and Node workers older than 0.17 are not kept out"
    logger.warning(
        "The schema %r was installed by the Rust port, whose last revisions are not those of Node's "
        "Graphile Worker under the same numbers, so that Node will never apply its own: %s.",
        schema.name,
        misses,
    )

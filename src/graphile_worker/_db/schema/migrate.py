"""Install the schema, or adopt one that Graphile Worker created.

There are two ledgers. ``migrations`` belongs to Graphile Worker. This library never writes a row above 20
there, because Node workers go by the highest row. ``_private_python_migrations`` belongs to this library.

Several installers may run at once, including npm's. Python installers take turns by an advisory lock, and do
everything in one transaction. npm's installer commits revision by revision. So an old revision that keeps
changing means that npm's installer is running, and this one waits for it. If it does not change, the
installation is too old, and is rejected.
"""

from __future__ import annotations

import asyncio
import shlex
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import asyncpg

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._db.connection.connect import read_committed
from graphile_worker._db.connection.error_mapping import sentence
from graphile_worker._db.schema.indexes import build_indexes, index_script
from graphile_worker._db.schema.steps import (
    BREAKING_COLUMN,
    OLDEST_ADOPTED,
    OWN_MIGRATIONS,
    REVISION,
    Found,
    script,
    steps,
)
from graphile_worker._db.sql_files import DEFAULT_SCHEMA, Schema, read_statements
from graphile_worker.errors import (
    DatabaseError,
    SchemaError,
    SchemaTooNewError,
    SchemaTooOldError,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from graphile_worker._db.connection.connect import Connection


_OLDEST_SERVER = 12
_ADVISED_NAME_BYTES = 32
_LEDGER_COLUMNS = frozenset({"id integer", "ts timestamp with time zone"})
_STALL_TIMEOUT = 5.0
_POLL = 0.1
# Another installer created the same object after the catalog was read.
_CLASHES = (
    asyncpg.UniqueViolationError,
    asyncpg.DuplicateSchemaError,
    asyncpg.DuplicateTableError,
    asyncpg.DuplicateObjectError,
    asyncpg.DuplicateFunctionError,
    asyncpg.DeadlockDetectedError,
)
_MAX_FAILED_ATTEMPTS = 5


class Migrated(NamedTuple):
    """The result of `migrate`."""

    revision: int
    changed: bool


async def migrate(
    connection: Connection, schema: Schema, *, stall_timeout: float = _STALL_TIMEOUT
) -> Migrated:
    """Install or upgrade the schema, completely or not at all.

    `stall_timeout` is how many seconds a revision that is too old may stay the same. After that, no other
    installer is assumed to be running.
    """
    try:
        return await _migrate(connection, schema, stall_timeout)
    except asyncpg.InsufficientPrivilegeError as error:
        refuse_missing_privilege(error, schema)
    except asyncpg.PostgresError as error:
        raise DatabaseError(f"The schema {schema.name!r} cannot be installed: {sentence(error)}") from error
    except (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
        raise DatabaseError(
            f"The connection was lost while the schema {schema.name!r} was being installed: "
            f"{sentence(error)} The installation is completed or rolled back as a whole, so try again."
        ) from error


def refuse_missing_privilege(error: Exception, schema: Schema) -> NoReturn:
    """Raise the error for a role that may not install the schema."""
    raise SchemaError(
        f"The schema {schema.name!r} cannot be installed: {sentence(error)} Connect as the schema's "
        "owner. If the schema does not exist yet, let an administrator run: "
        f"create schema {schema.quoted} authorization YOUR_ROLE"
    ) from error


def refuse_old_server(found: Found) -> None:
    """Raise an error if the server is too old."""
    if found.server_version_num < _OLDEST_SERVER * 10_000:
        raise DatabaseError(
            f"The server runs PostgreSQL {found.server_version}, and Graphile Worker needs {_OLDEST_SERVER} "
            "or newer. Upgrade the server."
        )


class Pending(NamedTuple):
    """What `migrate` would do."""

    revision: int | None
    """The installed revision of Graphile Worker; None if it is not installed."""
    what: list[str]
    """Descriptions of the steps; empty if there is nothing to do."""
    script: str
    """The steps as SQL."""


async def find_pending(connection: Connection, schema: Schema) -> Pending:
    """Return what `migrate` would do, without changing anything."""
    found = await inspect_schema(connection, schema)
    refuse(found, schema)
    what = [step.what for step in steps(schema, found) if step.what]
    # On a schema that is in use, the indexes are built concurrently, before the transaction.
    first = index_script(schema) if what and found.revision is not None else []
    return Pending(found.revision, what, script(schema, found, first) if what else "")


async def check_adoptable(connection: Connection, schema: Schema) -> None:
    """Raise an error if `migrate` would reject the schema."""
    refuse(await inspect_schema(connection, schema), schema)


async def check_revisions(connection: Connection, schema: Schema) -> None:
    """Raise an error if the schema has a breaking change that this release does not know."""
    found = await inspect_schema(connection, schema)
    if not found.too_old:  # another installer may be upgrading an old schema
        refuse(found, schema)


async def _migrate(connection: Connection, schema: Schema, stall_timeout: float) -> Migrated:
    found = await inspect_schema(connection, schema)
    refuse_old_server(found)
    changed = False
    failed_attempts = 0
    while True:
        if found.too_old:
            found = await _wait_for_other_installer(connection, schema, found, stall_timeout)
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
        failed_attempts = failed_attempts + 1 if found == before else 0
        if failed_attempts == _MAX_FAILED_ATTEMPTS:
            raise SchemaError(
                f"The schema {schema.name!r} contains conflicting objects: "
                f"{sentence(clash) if clash else ''} Remove them, or choose another schema."
            ) from clash
        if failed_attempts:
            await asyncio.sleep(_POLL)


async def inspect_schema(connection: Connection, schema: Schema) -> Found:
    """Read the state of the schema from the catalog and the ledgers."""
    steps = inspecting(schema)
    try:
        statement, name = next(steps)
        while True:
            rows = await connection.fetch(statement, *([] if name is None else [name]))
            statement, name = steps.send(rows)
    except StopIteration as end:
        found: Found = end.value
        return found


def inspecting(schema: Schema) -> Generator[tuple[str, str | None], Sequence[Any], Found]:
    """Read the state of the schema, without I/O: yield statements, each with its parameter, receive rows."""
    statements = read_statements("migrate.sql")
    [row] = yield statements["inspect_schema"], schema.name
    columns = frozenset(row["ledger_columns"])
    revision, breaking_revision, marks_19_breaking, own_revision, own_breaking = None, None, True, 0, 0
    if columns and columns - {BREAKING_COLUMN} != _LEDGER_COLUMNS:
        raise SchemaError(
            f"The table migrations in the schema {schema.name!r} does not belong to Graphile Worker. "
            "Choose another schema."
        )
    if BREAKING_COLUMN in columns:
        [found] = yield schema.render(statements["read_revisions"]), None
        revision, breaking_revision, marks_19_breaking = found.values()
    elif columns:
        [found] = yield schema.render(statements["read_revision_before_breaking_flags"]), None
        [revision] = found.values()
    if row["own_ledger_exists"]:
        [found] = yield schema.render(statements["read_own_revisions"]), None
        own_revision, own_breaking = found.values()
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
        has_own_functions=row["has_own_functions"],
    )


async def _wait_for_other_installer(
    connection: Connection, schema: Schema, found: Found, stall_timeout: float
) -> Found:
    seen, since = found.revision, monotonic()
    waited_for_ledger = False
    while found.too_old:
        if found.revision != seen:
            seen, since, waited_for_ledger = found.revision, monotonic(), False
        elif monotonic() - since < stall_timeout:
            await asyncio.sleep(_POLL)
        elif not waited_for_ledger:
            # One migration may take longer than the timeout: npm's eleventh copies all jobs.
            async with read_committed(connection):
                await connection.execute(schema.render(read_statements("migrate.sql")["wait_for_ledger"]))
            waited_for_ledger = True
        else:
            refuse(found, schema)
        found = await inspect_schema(connection, schema)
    return found


class Refusal(NamedTuple):
    """The reason why a schema is rejected, and what to do about it."""

    error: type[SchemaError]
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.why} {self.remedy}"


def refusal(found: Found, schema: Schema) -> Refusal | None:
    """Return why the schema is rejected; None if it is not."""
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
            f"its revision {found.breaking_revision} is incompatible with this library, made for {REVISION}.",
            "Upgrade graphile-worker.",
        )
    if found.own_breaking_revision > OWN_MIGRATIONS[-1].id:
        return Refusal(
            SchemaTooNewError,
            f"The schema {schema.name!r} was changed by a newer release of this library, in a way that is "
            "incompatible with this release.",
            "Upgrade graphile-worker.",
        )
    return None


def refuse(found: Found, schema: Schema) -> None:
    """Raise an error if the schema is rejected."""
    if (why := refusal(found, schema)) is not None:
        raise why.error(str(why))


def _warn_of_newer(found: Found, schema: Schema) -> None:
    if (found.revision or 0) > REVISION:
        logger.warning(
            "The schema %r is at revision %s, and this library knows revisions up to %s. The later revisions "
            "are marked as compatible, so the library continues. If they come from Node, consider upgrading "
            "graphile-worker.",
            schema.name,
            found.revision,
            REVISION,
        )


async def _change(connection: Connection, schema: Schema) -> bool:
    """Apply the remaining steps in one transaction; False if another installer did, or is running."""
    statements = read_statements("migrate.sql")
    prepare = [statements[name] for name in ("lock_installers", "read_session", "restore_session")]
    async with read_committed(connection, prepare=prepare):
        await connection.execute(statements["lock_installers"], schema.name)
        found = await inspect_schema(connection, schema)
        if found.complete or found.too_old or (found.breaking_revision or 0) > REVISION:
            return False
        warn_before_installing(found, schema)
        [before] = await connection.fetch(statements["read_session"])
        for step in steps(schema, found):
            await connection.execute(step.sql)
        # After an error the rollback also restores the role and the search_path.
        await connection.execute(statements["restore_session"], *before)
    return True


def warn_before_installing(found: Found, schema: Schema) -> None:
    """Warn of what is unusual about the schema, before it is changed."""
    if found.revision is None:
        _warn_of_name_and_tables(schema, found)
    if found.is_new_to_us:
        _warn_of_foreign_revisions(found, schema)


def _warn_of_name_and_tables(schema: Schema, found: Found) -> None:
    size = len(schema.name.encode())
    if size > _ADVISED_NAME_BYTES:
        logger.warning(
            "The schema name %r has %d bytes. Graphile Worker recommends at most %d.",
            schema.name,
            size,
            _ADVISED_NAME_BYTES,
        )
    if found.holds_other_relations:
        logger.warning(
            "The schema %r contains other tables too. A separate schema would be easier to remove.",
            schema.name,
        )


def _warn_of_foreign_revisions(found: Found, schema: Schema) -> None:
    """Warn of revisions that visibly differ from Node's revisions with the same numbers."""
    upgrades_to_20 = (found.revision or 0) < REVISION
    seen = []
    if not found.marks_19_breaking and upgrades_to_20:
        seen.append("revision 19 was not marked as breaking, and is now")
    elif not found.marks_19_breaking:
        seen.append("revision 19 is not marked as breaking, so Node workers older than 0.17 can still start")
    if found.brings_workers and not upgrades_to_20:
        seen.append(
            "the workers table is from the Rust port's revision 20: if Node's revision 20 was not applied "
            "before, each add_job call uses up identity values of tasks and queues"
        )
    if seen:
        logger.warning(
            "Some revisions of the schema %r differ from Node's revisions with the same numbers, so Node "
            "will never apply its own: %s.",
            schema.name,
            "; ".join(seen),
        )

"""The steps that install or upgrade a schema, each with a description and its SQL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.sql_files import (
    Schema,
    quote_identifier,
    quote_literal,
    read_script,
    read_statements,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REVISION = 20
"""The revision of Graphile Worker's schema that this library installs and supports (npm 0.18)."""
OLDEST_ADOPTED = 19
BREAKING_COLUMN = "breaking boolean"


class OwnMigration(NamedTuple):
    """A migration with objects of this library; its script is ``own/<id>_<name>.sql``.

    Ids only increase. A missing id belonged to a migration whose objects a later one replaces.
    """

    id: int
    name: str


WORKERS = OwnMigration(1, "workers")
FUNCTIONS = OwnMigration(7, "functions")
"""Replaces add_job and add_jobs if an earlier release of this library installed them."""
ADD = OwnMigration(9, "add")
"""Makes a function of the statement with which jobs are added on a caller's connection."""
OWN_MIGRATIONS: Sequence[OwnMigration] = (
    WORKERS,
    OwnMigration(2, "indexes"),
    OwnMigration(4, "cancellations"),
    OwnMigration(6, "search_path"),
    FUNCTIONS,
    ADD,
    OwnMigration(10, "history"),
    OwnMigration(11, "statistics"),
    OwnMigration(12, "exchange"),
    OwnMigration(13, "dead_workers"),
    OwnMigration(14, "limits"),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The server and the schema, according to the catalog and the ledgers."""

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
    has_own_functions: bool

    @property
    def complete(self) -> bool:
        """Whether there are no steps left."""
        return (self.revision or 0) >= REVISION and self.own_revision >= OWN_MIGRATIONS[-1].id

    @property
    def too_old(self) -> bool:
        """Whether Graphile Worker itself has to upgrade the schema first."""
        return self.revision is not None and self.revision < OLDEST_ADOPTED

    @property
    def is_new_to_us(self) -> bool:
        """Whether this library has never installed anything in the schema."""
        return self.own_revision < WORKERS.id

    @property
    def brings_workers(self) -> bool:
        """Whether the workers table existed before, because the Rust port's revision 20 created it."""
        return self.workers_exist and self.is_new_to_us


class Step(NamedTuple):
    """A step of an installation."""

    what: str
    """A description; empty if the step belongs to the step before it."""
    sql: str


def steps(schema: Schema, found: Found) -> list[Step]:
    """Return the remaining steps, for one transaction.

    A member of the schema's owner acts as the owner. Otherwise the new objects would belong to the member,
    and the owner could not use them.
    """
    if found.complete:
        return []
    statements = read_statements("migrate.sql")
    remaining = [
        Step("", statements["set_search_path"]),
        *_graphile_steps(schema, found),
        *_own_steps(schema, found),
    ]
    if found.owner_to_act_as is not None:
        owner = quote_identifier(found.owner_to_act_as)
        remaining.insert(0, Step("", statements["act_as"].replace("{owner}", owner)))
    return remaining


def _graphile_steps(schema: Schema, found: Found) -> Iterator[Step]:
    statements = read_statements("migrate.sql")
    functions = schema.render(read_statements("schema/add_jobs.sql")["functions"])
    if found.revision is None:
        if not found.schema_exists:
            yield Step(f"create the schema {schema.name}", schema.render(statements["create_schema"]))
        if not found.ledger_columns:
            yield Step("", schema.render(statements["create_ledger"]))
        elif BREAKING_COLUMN not in found.ledger_columns:
            yield Step("", schema.render(statements["add_breaking_flag"]))
        # The rows come first. If npm's installer is running, one of the two waits for the other here.
        yield Step(
            f"install revision {REVISION} of Graphile Worker",
            schema.render(statements["record_all_revisions"]),
        )
        for text in _object_scripts():
            yield Step("", schema.render(text))
    elif found.revision < REVISION:
        # The row comes first. If npm's installer is running, this statement waits for it.
        yield Step(
            f"upgrade Graphile Worker from revision {found.revision} to {REVISION}",
            schema.render(statements["record_revision_20"]),
        )
        yield Step("", functions)
        if not found.marks_19_breaking:
            # The Rust port has a different 19. These steps lead to Node's 20, which includes Node's 19.
            mark = schema.render(statements["mark_revision_19"])
            yield Step("mark revision 19 as breaking, like Node's", mark)
        yield Step("", statements["announce_revision_20"])


def _own_steps(schema: Schema, found: Found) -> Iterator[Step]:
    statements = read_statements("migrate.sql")
    if not found.own_ledger_exists:
        yield Step("", schema.render(statements["create_own_ledger"]))
    for migration in OWN_MIGRATIONS:
        if migration.id <= found.own_revision:
            continue
        what = f"add this library's objects: {migration.name}"
        if migration is FUNCTIONS:
            what = "upgrade add_job and add_jobs, unless npm's installer created them"
        yield Step(what, schema.render(record_script(migration)))
        if migration is FUNCTIONS:
            # Not if they were created just now. Their text is in schema/add_jobs.sql, and is not repeated in
            # own/.
            if found.has_own_functions:
                yield Step("", schema.render(read_statements("schema/add_jobs.sql")["functions"]))
        elif migration is not WORKERS or not found.brings_workers:
            yield Step("", schema.render(own_script(migration)))


def base_scripts() -> list[str]:
    """Return the scripts that install Graphile Worker's own part in a schema without a ledger."""
    statements = read_statements("migrate.sql")
    return [statements["create_ledger"], statements["record_all_revisions"], *_object_scripts()]


def _object_scripts() -> list[str]:
    functions = read_statements("schema/add_jobs.sql")["functions"]
    return [read_script("schema/tables.sql"), functions, read_script("schema/administer.sql")]


def record_script(migration: OwnMigration) -> str:
    """Return the statement that records a migration in the library's ledger."""
    record = read_statements("migrate.sql")["record_own_revision"].replace("{id}", str(migration.id))
    return record.replace("{name}", migration.name)


def own_script(migration: OwnMigration) -> str:
    """Return the script of a migration."""
    script = read_script(f"own/{migration.id:03}_{migration.name}.sql")
    if migration is ADD:
        statement = read_statements("caller_jobs.sql")["add_each_job"]
        script = script.replace("{add_each_job}", statement.replace("{parameter}", "specs"))
    return script


def script(schema: Schema, found: Found, first: Sequence[str]) -> str:
    """Return the remaining steps as a script for an administrator.

    `first` are statements that cannot run in a transaction; all others run in one transaction.
    """
    statements = read_statements("migrate.sql")
    lock = statements["lock_installers"].replace("$1", quote_literal(schema.name))
    inside = ["begin", lock, *(step.sql for step in steps(schema, found)), "commit"]
    heading = f"-- What `graphile-worker migrate` would do to the schema {quote_literal(schema.name)} now."
    return "\n\n".join([heading, *(_terminated(text) for text in (*first, *inside))]) + "\n"


def _terminated(text: str) -> str:
    return text.strip().removesuffix(";") + ";"

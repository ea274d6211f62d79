"""What is to be done to a schema until it is ours: each step, in words and in SQL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.sql import Schema, quote_identifier, quote_literal, read_script, read_statements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REVISION = 20
"""The revision of Graphile Worker's schema that we install and work with (npm 0.18)."""
OLDEST_ADOPTED = 19
BREAKING_COLUMN = "breaking boolean"


class OwnMigration(NamedTuple):
    """A step that adds our own objects; its script is ``own/<id>_<name>.sql``.

    Ids only grow. One that is missing belongs to a step whose objects a later step replaces.
    """

    id: int
    name: str


WORKERS = OwnMigration(1, "workers")
FUNCTIONS = OwnMigration(7, "functions")
"""Replaces add_job and add_jobs by those of this release, where an earlier one of this library made them."""
OWN_MIGRATIONS: Sequence[OwnMigration] = (
    WORKERS,
    OwnMigration(2, "indexes"),
    OwnMigration(4, "cancellations"),
    OwnMigration(5, "exchange"),
    OwnMigration(6, "search_path"),
    FUNCTIONS,
)


@dataclass(frozen=True, kw_only=True)
class Found:
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
    functions_are_ours: bool

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return (self.revision or 0) >= REVISION and self.own_revision >= OWN_MIGRATIONS[-1].id

    @property
    def too_old(self) -> bool:
        """Whether Graphile Worker itself has to bring it further first."""
        return self.revision is not None and self.revision < OLDEST_ADOPTED

    @property
    def is_new_to_us(self) -> bool:
        """Whether no installer of ours has been there."""
        return self.own_revision < WORKERS.id

    @property
    def brings_workers(self) -> bool:
        """Whether the table of workers was there before us: with its revision 20 the Rust port makes it."""
        return self.workers_exist and self.is_new_to_us


class Step(NamedTuple):
    """A part of an installation."""

    what: str
    """Empty for what only goes with another step."""
    sql: str


def steps(schema: Schema, found: Found) -> list[Step]:
    """All that is left to do, for one transaction; whoever is the owner's member acts as the owner.

    What a member of the schema's owner makes is to belong to the owner, or it would lock the owner out.
    """
    if found.complete:
        return []
    statements = read_statements("migrate.sql")
    made = [Step("", statements["resolve_names"]), *_of_graphile(schema, found), *_of_ours(schema, found)]
    if found.owner_to_act_as is not None:
        owner = quote_identifier(found.owner_to_act_as)
        made.insert(0, Step("", statements["act_as"].replace("{owner}", owner)))
    return made


def _of_graphile(schema: Schema, found: Found) -> Iterator[Step]:
    statements = read_statements("migrate.sql")
    functions = schema.render(read_statements("schema/add_jobs.sql")["functions"])
    if found.revision is None:
        if not found.schema_exists:
            yield Step(f"create the schema {schema.name}", schema.render(statements["create_schema"]))
        if not found.ledger_columns:
            yield Step("", schema.render(statements["create_ledger"]))
        elif BREAKING_COLUMN not in found.ledger_columns:
            yield Step("", schema.render(statements["add_breaking_flag"]))
        # The rows first: npm's installer, if at work, makes us wait here, or waits for us.
        yield Step(
            f"install revision {REVISION} of Graphile Worker",
            schema.render(statements["record_all_revisions"]),
        )
        yield Step("", schema.render(read_script("schema/tables.sql")))
        yield Step("", functions)
        yield Step("", schema.render(read_script("schema/administer.sql")))
    elif found.revision < REVISION:
        # The row first: npm's installer, if at work, makes us wait here.
        yield Step(
            f"bring Graphile Worker from revision {found.revision} to {REVISION}",
            schema.render(statements["record_revision_20"]),
        )
        yield Step("", functions)
        if not found.marks_19_breaking:
            # The Rust port has another 19. What we make of it is Node's 20, which comes after Node's 19.
            mark = schema.render(statements["mark_revision_19"])
            yield Step("mark revision 19 as breaking, as Node's is", mark)
        yield Step("", statements["announce_revision_20"])


def _of_ours(schema: Schema, found: Found) -> Iterator[Step]:
    statements = read_statements("migrate.sql")
    if not found.own_ledger_exists:
        yield Step("", schema.render(statements["create_own_ledger"]))
    for migration in OWN_MIGRATIONS:
        if migration.id <= found.own_revision:
            continue
        record = statements["record_own_revision"].replace("{id}", str(migration.id))
        what = f"add objects of this library: {migration.name}"
        if migration is FUNCTIONS:
            what = "bring add_job and add_jobs to this release, unless npm's installer made them"
        yield Step(what, schema.render(record.replace("{name}", migration.name)))
        if migration is FUNCTIONS:
            # Nothing if they were made just now. There is one text of them, so it is not repeated in own/.
            if found.functions_are_ours:
                yield Step("", schema.render(read_statements("schema/add_jobs.sql")["functions"]))
        elif migration is not WORKERS or not found.brings_workers:
            yield Step("", schema.render(read_script(f"own/{migration.id:03}_{migration.name}.sql")))


def script(schema: Schema, found: Found, first: Sequence[str]) -> str:
    """The same for somebody else to run: first what cannot be in a transaction, then one transaction."""
    statements = read_statements("migrate.sql")
    lock = statements["lock_installers"].replace("$1", quote_literal(schema.name))
    inside = ["begin", lock, *(step.sql for step in steps(schema, found)), "commit"]
    heading = f"-- What `graphile-worker migrate` would do to the schema {quote_literal(schema.name)} now."
    return "\n\n".join([heading, *(_ended(text) for text in (*first, *inside))]) + "\n"


def _ended(text: str) -> str:
    return text.strip().removesuffix(";") + ";"

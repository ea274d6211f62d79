"""Rights on the schema, and whether it is as it is to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphile_worker._db import contract, migrate, symptoms
from graphile_worker._db.sql import quote_identifier
from graphile_worker._db.steps import REVISION
from graphile_worker.doctor.finding import Finding, Level
from graphile_worker.errors import SchemaError, SchemaMissingError
from graphile_worker.wording import some

if TYPE_CHECKING:
    from graphile_worker._db.contract import Difference
    from graphile_worker._db.sql import Schema
    from graphile_worker._db.symptoms import Rights
    from graphile_worker.doctor.subject import Subject

_INSTALL = "graphile-worker migrate"
_AGAIN = "Make it again, as the schema.sql of the documentation has it; or move the jobs to a fresh schema."


async def check_rights(subject: Subject) -> Finding:
    """Whether the role may do what a worker does."""
    subject.rights = rights = await subject.look(lambda on: symptoms.read_rights(on, subject.schema))
    role = subject.server.role if subject.server else "the role"
    schema = subject.schema
    missing = _missing(rights)
    details: dict[str, object] = {"role": role, "owner": rights.owner, "missing": missing}
    if not rights.schema_exists:
        if rights.may_create_schema:
            return _rights(Level.OK, f"{role} may install the schema {schema.name!r}", None, details)
        return _rights(
            Level.TROUBLE,
            f"{role} may not create the schema {schema.name!r}",
            "Let an administrator run: "
            f"create schema {schema.quoted} authorization {quote_identifier(role)};",
            details,
        )
    if rights.acts_as_owner and not missing:
        whose = "owns" if rights.owner == role else "has the rights of the owner of"
        return _rights(Level.OK, f"{role} {whose} the schema {schema.name!r}", None, details)
    if not missing:
        says = f"{role} may run workers, but not change the schema, which is {rights.owner}'s"
        return _rights(Level.NOTE, says, f"Before an upgrade, let {rights.owner} run: {_INSTALL}", details)
    says = f"{role} may not use the schema {schema.name!r}: it has no {some(missing)}"
    return _rights(Level.TROUBLE, says, _mend(rights, role, subject), details)


def _rights(level: Level, says: str, advice: str | None, details: dict[str, object]) -> Finding:
    return Finding(check="rights", level=level, says=says, advice=advice, details=details)


def _missing(rights: Rights) -> list[str]:
    if not rights.schema_exists:
        return []
    return [
        *([] if rights.may_use_schema else ["usage of the schema"]),
        *rights.missing,
        *(f"sight of the rows of {table}" for table in rights.hidden_tables),
    ]


def _mend(rights: Rights, role: str, subject: Subject) -> str:
    owner, whom = quote_identifier(rights.owner or ""), quote_identifier(role)
    if rights.is_member and not rights.acts_as_owner:
        return (
            f"{role} is a member of {rights.owner}, but does not inherit its rights. Let an administrator "
            f"run: alter role {whom} inherit; grant {owner} to {whom};"
        )
    schema = subject.schema.quoted
    granted = (
        f"grant usage on schema {schema} to {whom}; grant select, insert, update, delete on all tables in "
        f"schema {schema} to {whom}; grant execute on all functions in schema {schema} to {whom};"
    )
    if rights.passes_row_security:
        return f"Let {rights.owner} run: {granted}"
    # Row level security without a policy: whatever is granted, only the owner and its members see rows.
    if rights.owner_is_superuser:
        return (
            f"The owner, {rights.owner}, is a superuser, of whom nobody should be a member. Let a role "
            "without such rights own the schema and all that is in it; or, as an administrator, "
            f"run: alter role {whom} bypassrls; {granted}"
        )
    return f"Let an administrator run: grant {owner} to {whom};"


async def check_schema(subject: Subject) -> list[Finding]:
    """Whether each object is there, and is what it is to be."""
    try:
        found = await subject.look(lambda on: migrate.inspect_schema(on, subject.schema))
    except SchemaMissingError:
        raise
    except SchemaError as error:  # a table of somebody else's has the ledger's name
        return [Finding(check="schema", level=Level.TROUBLE, says=str(error))]
    details = {"revision": found.revision, "own_revision": found.own_revision}
    own, refusal = contract.own_revision(), migrate.refusal(found, subject.schema)
    says, advice, level = "", None, Level.OK
    if refusal is not None:  # no worker starts, and migrate says the same
        level, says, advice = Level.TROUBLE, refusal.why, refusal.remedy
    elif found.revision is None:
        says, level = f"The schema {subject.schema.name!r} is not installed", Level.TROUBLE
        advice = f"Install it: {_INSTALL}. A worker does so when it starts."
    elif not found.complete:
        says = (
            f"The schema is at revision {found.revision} of Graphile Worker, and {found.own_revision} of ours"
        )
        says += f"; this release has {REVISION} and {own}"
        level, advice = Level.WARNING, f"Complete it: {_INSTALL}. A worker does so when it starts."
    elif found.revision > REVISION or found.own_revision > own:
        says = f"The schema is at revision {found.revision} and {found.own_revision}"
        says += ", newer than this release knows"
        level = Level.WARNING
        advice = (
            "What came after is marked as compatible, so workers go on. If it is Node's, or ours, upgrade "
            "graphile-worker."
        )
    if says:  # there is nothing that it could be compared with
        return [Finding(check="schema", level=level, says=says, advice=advice, details=details)]
    objects = await subject.look(lambda on: symptoms.describe_schema(on, subject.schema))
    drift = contract.differences(objects)
    if not drift:
        says = f"Revision {found.revision}, with nothing missing or changed"
        return [Finding(check="schema", level=Level.OK, says=says, details=details)]
    return [_differs(one, subject.schema) for one in drift]


async def check_search_path(subject: Subject) -> Finding:
    """Check that no role can make the schema's functions call one of its own."""
    found = await subject.look(lambda on: symptoms.read_exposed_functions(on, subject.schema))
    exposed = sorted(contract.function_names() & set(found.functions))
    details = {"functions": exposed, "all_may_create": found.all_may_create}
    level, advice, says = Level.OK, None, "The schema's functions call no function that another role made"
    if exposed and not found.all_may_create:
        says = "Not every role may create functions in the schema public"
    elif exposed:
        level = Level.WARNING
        says = (
            f"Every role may create functions in the schema public, and {some(exposed)} would call one that "
            "fits better than the built-in, with the rights of the role that adds the job"
        )
        advice = (
            "Node's installer made these functions, without a search_path of their own. Let an administrator "
            "run: revoke create on schema public from public;"
        )
    return Finding(check="search path", level=level, says=says, advice=advice, details=details)


async def check_triggers(subject: Subject) -> Finding:
    """Check that the functions of users' triggers find the tables and functions that they name."""
    found = await subject.look(lambda on: symptoms.read_triggers_without_path(on, subject.schema))
    level, advice = Level.OK, None
    says = "No trigger on the schema's tables depends on the search_path of the session"
    if found:
        level = Level.WARNING
        named = some([f"{one.name} on {one.table} ({one.function})" for one in found])
        says = (
            "Triggers run with the search_path of workers, pg_catalog, and these fail if their functions use "
            f"names without a schema: {named}"
        )
        advice = f"alter function {found[0].function} set search_path = ...; with the schemas that it uses."
    details = {"triggers": [one._asdict() for one in found]}
    return Finding(check="triggers", level=level, says=says, advice=advice, details=details)


def _differs(one: Difference, schema: Schema) -> Finding:
    kind, _, name = one.name.partition(" ")
    level, says = Level.TROUBLE, f"The {one.name} "
    if one.how == "missing":
        says += "is missing"
        advice = _make(name, one.to_be, schema) if kind == "index" else _AGAIN
    elif one.is_.endswith("but invalid"):
        says += "is invalid: whoever was building it did not get to the end"
        advice = f"Build it anew: reindex index {schema.quoted}.{name.rpartition('.')[2]}"
    elif one.how == "changed":
        says += "was changed"
        if kind != "function":
            says += f": it is {one.is_ or 'plain'!r}, and should be {one.to_be or 'plain'!r}"
        advice = "Change it back: other workers, and upgrades, rely on it."
    elif kind == "index":
        level, says = Level.NOTE, f"{says}is not one of ours"
        advice = "Each index more makes adding and claiming jobs slower. Drop it, if nothing needs it."
    else:
        level, says = Level.WARNING, f"{says}is not one of ours"
        advice = "Upgrades do not know of it. Keep such things in a schema of your own, if you can."
    details = {"object": one.name, "how": one.how, "is": one.is_, "to_be": one.to_be}
    return Finding(check="schema", level=level, says=says, advice=advice, details=details)


def _make(name: str, definition: str, schema: Schema) -> str:
    table, _, index = name.partition(".")
    unique, _, how = definition.rpartition("using ")
    return f"create {unique.lower()}index concurrently {index} on {schema.quoted}.{table} using {how}"

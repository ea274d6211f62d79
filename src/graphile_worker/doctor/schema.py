"""Checks of the role's rights and of the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphile_worker._base.text import join_truncated
from graphile_worker._db.queries import diagnostics
from graphile_worker._db.schema import contract, migrate
from graphile_worker._db.schema.steps import REVISION
from graphile_worker._db.sql_files import quote_identifier
from graphile_worker.doctor.finding import Finding, Level
from graphile_worker.errors import SchemaError, SchemaMissingError

if TYPE_CHECKING:
    from graphile_worker._db.queries.diagnostics import Rights
    from graphile_worker._db.schema.contract import Difference
    from graphile_worker._db.sql_files import Schema
    from graphile_worker.doctor.subject import Subject

_INSTALL = "graphile-worker migrate"
_RECREATE = "Create it again, as in the documentation's schema.sql; or move the jobs to a new schema."


async def check_rights(subject: Subject) -> Finding:
    """Check that the role may do what workers do."""
    subject.rights = rights = await subject.read(
        lambda connection: diagnostics.read_rights(connection, subject.schema)
    )
    role = subject.server.role if subject.server else "the role"
    schema = subject.schema
    missing = _missing_rights(rights)
    details: dict[str, object] = {"role": role, "owner": rights.owner, "missing": missing}
    if not rights.schema_exists:
        if rights.may_create_schema:
            return _rights_finding(Level.OK, f"{role} may install the schema {schema.name!r}", None, details)
        return _rights_finding(
            Level.ERROR,
            f"{role} may not create the schema {schema.name!r}",
            "As an administrator, run: "
            f"create schema {schema.quoted} authorization {quote_identifier(role)};",
            details,
        )
    if rights.acts_as_owner and not missing:
        relation = "owns" if rights.owner == role else "has the rights of the owner of"
        return _rights_finding(Level.OK, f"{role} {relation} the schema {schema.name!r}", None, details)
    if not missing:
        message = f"{role} may run workers, but not migrate the schema, which {rights.owner} owns"
        return _rights_finding(
            Level.NOTE, message, f"Before an upgrade, run as {rights.owner}: {_INSTALL}", details
        )
    message = f"{role} may not use the schema {schema.name!r}: missing {join_truncated(missing)}"
    return _rights_finding(Level.ERROR, message, _how_to_grant(rights, role, subject), details)


def _rights_finding(level: Level, message: str, advice: str | None, details: dict[str, object]) -> Finding:
    return Finding(check="rights", level=level, message=message, advice=advice, details=details)


def _missing_rights(rights: Rights) -> list[str]:
    if not rights.schema_exists:
        return []
    return [
        *([] if rights.may_use_schema else ["usage of the schema"]),
        *rights.missing,
        *(f"access to the rows of {table}" for table in rights.hidden_tables),
    ]


def _how_to_grant(rights: Rights, role: str, subject: Subject) -> str:
    owner, grantee = quote_identifier(rights.owner or ""), quote_identifier(role)
    if rights.is_member and not rights.acts_as_owner:
        return (
            f"{role} is a member of {rights.owner}, but does not inherit its rights. As an administrator, "
            f"run: alter role {grantee} inherit; grant {owner} to {grantee};"
        )
    schema = subject.schema.quoted
    grants = (
        f"grant usage on schema {schema} to {grantee}; grant select, insert, update, delete on all tables in "
        f"schema {schema} to {grantee}; grant execute on all functions in schema {schema} to {grantee};"
    )
    if rights.passes_row_security:
        return f"As {rights.owner}, run: {grants}"
    # With row level security and no policy, only the owner and its members see rows, whatever is granted.
    if rights.owner_is_superuser:
        return (
            f"The owner, {rights.owner}, is a superuser, and no role should be a member of it. Make an "
            "ordinary role the owner of the schema and everything in it; or, as an administrator, "
            f"run: alter role {grantee} bypassrls; {grants}"
        )
    return f"As an administrator, run: grant {owner} to {grantee};"


async def check_schema(subject: Subject) -> list[Finding]:
    """Check that every object of the schema exists and has not been changed."""
    try:
        found = await subject.read(lambda connection: migrate.inspect_schema(connection, subject.schema))
    except SchemaMissingError:
        raise
    except SchemaError as error:  # another application's table has the name of the migrations table
        return [Finding(check="schema", level=Level.ERROR, message=str(error))]
    details = {"revision": found.revision, "own_revision": found.own_revision}
    own, refusal = contract.own_revision(), migrate.refusal(found, subject.schema)
    message, advice, level = "", None, Level.OK
    if refusal is not None:  # no worker starts, and migrate fails with the same message
        level, message, advice = Level.ERROR, refusal.why, refusal.remedy
    elif found.revision is None:
        message, level = f"The schema {subject.schema.name!r} is not installed", Level.ERROR
        advice = f"Install it: {_INSTALL}. Workers also install it when they start."
    elif not found.complete:
        message = (
            f"The schema is at revision {found.revision} of Graphile Worker, and at {found.own_revision} of "
            f"the Python additions; this release has {REVISION} and {own}"
        )
        level, advice = Level.WARNING, f"Migrate it: {_INSTALL}. Workers also migrate it when they start."
    elif found.revision > REVISION or found.own_revision > own:
        message = f"The schema is at revision {found.revision} of Graphile Worker, and at "
        message += f"{found.own_revision} of the Python additions, which is newer than this release"
        level = Level.WARNING
        advice = (
            "The newer migrations are marked as compatible, so workers keep running. If they come from "
            "Graphile Worker or from this package, upgrade graphile-worker."
        )
    if message:  # there is no reference to compare the objects with
        return [Finding(check="schema", level=level, message=message, advice=advice, details=details)]
    objects = await subject.read(lambda connection: diagnostics.describe_schema(connection, subject.schema))
    drift = contract.differences(objects)
    if not drift:
        message = f"Revision {found.revision}, nothing missing or changed"
        return [Finding(check="schema", level=Level.OK, message=message, details=details)]
    return [_drift_finding(difference, subject.schema) for difference in drift]


async def check_search_path(subject: Subject) -> Finding:
    """Check that no role can make the schema's functions call that role's functions."""
    found = await subject.read(
        lambda connection: diagnostics.read_exposed_functions(connection, subject.schema)
    )
    exposed = sorted(contract.function_names() & set(found.functions))
    details = {"functions": exposed, "all_may_create": found.all_may_create}
    level, advice, message = Level.OK, None, "No function of the schema can call a function of another role"
    if exposed and not found.all_may_create:
        message = "Only some roles may create functions in the schema public"
    elif exposed:
        level = Level.WARNING
        message = (
            f"Every role may create functions in the schema public, and {join_truncated(exposed)} would call "
            "such a function if it matches better than the built-in one, with the rights of the role that "
            "adds the job"
        )
        advice = (
            "Graphile Worker for Node created these functions without a search_path. As an administrator, "
            "run: revoke create on schema public from public;"
        )
    return Finding(check="search path", level=level, message=message, advice=advice, details=details)


async def check_triggers(subject: Subject) -> Finding:
    """Check that the functions of users' triggers do not depend on a search_path that workers don't set."""
    found = await subject.read(
        lambda connection: diagnostics.read_triggers_without_path(connection, subject.schema)
    )
    level, advice = Level.OK, None
    message = "No trigger on the schema's tables depends on the session's search_path"
    if found:
        level = Level.WARNING
        names = join_truncated(
            [f"{trigger.name} on {trigger.table} ({trigger.function})" for trigger in found]
        )
        message = (
            "Workers run triggers with the search_path pg_catalog. These triggers fail if their functions "
            f"use names without a schema: {names}"
        )
        advice = f"Set the schemas it uses: alter function {found[0].function} set search_path = ...;"
    details = {"triggers": [trigger._asdict() for trigger in found]}
    return Finding(check="triggers", level=level, message=message, advice=advice, details=details)


def _drift_finding(difference: Difference, schema: Schema) -> Finding:
    kind, _, name = difference.name.partition(" ")
    level, message = Level.ERROR, f"The {difference.name} "
    if difference.kind == "missing":
        message += "is missing"
        advice = _index_statement(name, difference.expected, schema) if kind == "index" else _RECREATE
    elif difference.actual.endswith("but invalid"):
        message += "is invalid, because building it was interrupted"
        advice = f"Rebuild it: reindex index {schema.quoted}.{name.rpartition('.')[2]}"
    elif difference.kind == "changed":
        message += "was changed"
        if kind != "function":
            actual, expected = difference.actual or "plain", difference.expected or "plain"
            message += f": it is {actual!r}, and should be {expected!r}"
        advice = "Change it back: other workers and migrations rely on it."
    elif kind == "index":
        level, message = Level.NOTE, f"{message}is not part of the schema"
        advice = "Each additional index slows down adding and claiming jobs. Drop it if nothing needs it."
    else:
        level, message = Level.WARNING, f"{message}is not part of the schema"
        advice = "Migrations do not expect it. If possible, keep such objects in a schema of your own."
    details = {
        "object": difference.name,
        "how": difference.kind,
        "is": difference.actual,
        "to_be": difference.expected,
    }
    return Finding(check="schema", level=level, message=message, advice=advice, details=details)


def _index_statement(name: str, definition: str, schema: Schema) -> str:
    table, _, index = name.partition(".")
    unique, _, method = definition.rpartition("using ")
    return f"create {unique.lower()}index concurrently {index} on {schema.quoted}.{table} using {method}"

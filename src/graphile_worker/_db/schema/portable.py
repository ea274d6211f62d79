"""Install the schema on a connection of another library, or as a script, as a migration tool does.

`migrate` has connections of its own, and commits. Here each statement runs in the caller's transaction. Any
driver can run it, because a ``do`` block runs a script of several statements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
import msgspec

from graphile_worker._db.connection.any_connection import Call, run_sync, translate_driver_errors
from graphile_worker._db.connection.driver_errors import as_known_error
from graphile_worker._db.connection.drivers import SyncDriver, find_driver
from graphile_worker._db.schema.indexes import drop_statement, index_names, index_statement
from graphile_worker._db.schema.migrate import (
    inspecting,
    refuse,
    refuse_missing_privilege,
    refuse_old_server,
    warn_before_installing,
)
from graphile_worker._db.schema.steps import (
    FUNCTIONS,
    OWN_MIGRATIONS,
    WORKERS,
    base_scripts,
    own_script,
    record_script,
    steps,
)
from graphile_worker._db.sql_files import (
    OneTextStatement,
    Schema,
    quote_literal,
    read_statements,
    rows_of,
)
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from graphile_worker._db.connection.any_connection import Operation
    from graphile_worker._db.schema.steps import Found


class PortableInstallation:
    """An installation on the caller's connection.

    Args:
        schema: The schema.
        connection: The caller's connection or session, which must be sync.
        execute: Runs a statement without parameters on the connection.
    """

    def __init__(self, schema: Schema, connection: Any, execute: Callable[[str], object]) -> None:
        self._schema = schema
        self._connection = connection
        self._execute_raw = execute

    def find_statements_outside(self) -> list[str]:
        """Return the statements that must run outside of a transaction, before `install`.

        They build missing indexes concurrently, if the schema exists and so may be in use.
        """
        found = self._inspect()
        if found.revision is None or found.complete:
            return []
        states = msgspec.json.decode(self._run(_one(_index_states(self._schema))))
        valid = {state["name"]: state["is_valid"] for state in states}
        statements: list[str] = []
        for name in index_names():
            if valid.get(name) is False:
                statements.append(drop_statement(self._schema, name))
            if not valid.get(name):
                statements.append(index_statement(self._schema, name))
        return statements

    def install(self) -> bool:
        """Install or upgrade the schema in the caller's transaction; False if there was nothing to do.

        Raises:
            ConfigurationError: The connection is in autocommit mode.
        """
        if self._inspect().complete:
            return False
        driver = find_driver(self._connection, is_async=False)
        assert isinstance(driver, SyncDriver)  # noqa: S101 - for the type checker
        if not driver.in_transaction:
            raise ConfigurationError(
                f"The schema {self._schema.name!r} is installed in a transaction, and the connection is in "
                "autocommit mode. Leave out autocommit_block(), or isolation_level='AUTOCOMMIT'."
            )
        portable = read_statements("portable.sql")
        self.execute(_lock(self._schema))
        found = self._inspect()  # another installer may have been at work
        if found.complete:
            return False
        warn_before_installing(found, self._schema)
        self.execute(portable["save_session"])
        for step in steps(self._schema, found):
            self.execute(_as_one(step.sql))
        self.execute(portable["restore_saved_session"])
        return True

    def drop(self) -> None:
        """Drop the schema, with all jobs."""
        self.execute(self._schema.render(read_statements("portable.sql")["drop_schema"]))

    def execute(self, statement: str) -> None:
        """Run a statement.

        Raises:
            DatabaseError: The server refuses it.
        """
        try:
            with translate_driver_errors(self._schema):
                self._execute_raw(statement)
        except Exception as error:
            cause = error.__cause__
            known = as_known_error(cause) if isinstance(cause, Exception) else None
            if isinstance(known, asyncpg.InsufficientPrivilegeError):
                refuse_missing_privilege(known, self._schema)
            raise

    def _inspect(self) -> Found:
        found: Found = self._run(_inspecting(self._schema))
        refuse_old_server(found)
        refuse(found, self._schema)
        return found

    def _run(self, operation: Operation[Any]) -> Any:
        return run_sync(self._connection, self._schema, operation)


def installation_script(schema: Schema) -> list[str]:
    """Return the statements that install the schema in one transaction, whatever is installed.

    A part that is installed is not installed again. They fail if the schema is at an older revision.
    """
    portable = read_statements("portable.sql")
    render = _Renderer(schema)
    return [
        portable["save_session"],
        _lock(schema),
        read_statements("migrate.sql")["set_search_path"],
        _with_script(render(portable["refuse_other_revisions"]), ""),
        render.conditional("schema_is_missing", read_statements("migrate.sql")["create_schema"]),
        render.conditional("ledger_is_missing", *base_scripts()),
        render.conditional("own_ledger_is_missing", read_statements("migrate.sql")["create_own_ledger"]),
        *_own_parts(render),
        portable["restore_saved_session"],
    ]


def _own_parts(render: _Renderer) -> Iterator[str]:
    for migration in OWN_MIGRATIONS:
        scripts = [record_script(migration)]
        # The functions are replaced only on an installation by a release that has never been published.
        if migration not in {FUNCTIONS, WORKERS}:
            scripts.append(own_script(migration))
        if migration is WORKERS:
            yield render.conditional("workers_are_missing", own_script(migration))
        yield render.conditional("own_revision_is_missing", *scripts, id=str(migration.id))


class _Renderer:
    """Fills in the statements of ``portable.sql``."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        names = {
            "ledger": "migrations",
            "own_ledger": "_private_python_migrations",
            "workers": "_private_workers",
        }
        self._values = {
            name: quote_literal(f"{schema.quoted}.{relation}") for name, relation in names.items()
        } | {"name": quote_literal(schema.name), "quoted_name": quote_literal(schema.quoted)}

    def __call__(self, text: str, **values: str) -> str:
        rendered = self._schema.render(text)
        for name, value in {**self._values, **values}.items():
            rendered = rendered.replace(f"{{{name}}}", value)
        return rendered

    def conditional(self, condition: str, *scripts: str, **values: str) -> str:
        """Return a statement that runs scripts if a condition holds."""
        portable = read_statements("portable.sql")
        guard = portable["run_script_if"].replace("{condition}", portable[condition])
        return _with_script(self(guard, **values), _join(map(self._schema.render, scripts)))


def _as_one(script: str) -> str:
    """Return a script as one statement."""
    return _with_script(read_statements("portable.sql")["run_script"], script)


def _with_script(block: str, script: str) -> str:
    """Fill in a block's script, and the tags that quote the block and the script."""
    tag, inner = "$graphile_worker$", "$script$"
    while tag in block + script or inner in block + script:  # the schema may have any name
        tag, inner = f"{tag[:-1]}_$", f"{inner[:-1]}_$"
    return block.replace("{tag}", tag).replace("{inner}", inner).replace("{statements}", script.strip())


def _join(scripts: Iterable[str]) -> str:
    return ";\n".join(script.strip().removesuffix(";") for script in scripts)


def _lock(schema: Schema) -> str:
    return read_statements("migrate.sql")["lock_installers"].replace("$1", quote_literal(schema.name))


def _index_states(schema: Schema) -> OneTextStatement:
    text = read_statements("migrate.sql")["inspect_indexes"].replace("$1", quote_literal(schema.name))
    return rows_of(schema, text)


def _inspecting(schema: Schema) -> Operation[Found]:
    """Return the operation that reads the state of the schema."""
    steps = inspecting(schema)
    try:
        statement, name = next(steps)
        while True:
            text = statement.replace("$1", quote_literal(name or ""))
            rows = msgspec.json.decode((yield Call(rows_of(schema, text), "")))
            statement, name = steps.send(rows)
    except StopIteration as end:
        found: Found = end.value
        return found


def _one(statement: OneTextStatement) -> Operation[str]:
    return (yield Call(statement, ""))

"""Alembic: install the schema in a revision, also as SQL, and keep autogenerate away from it.

Needs Alembic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphile_worker._db.schema.portable import PortableInstallation, installation_script
from graphile_worker.client import find_schema
from graphile_worker.errors import MissingExtraError

try:
    from alembic import op
except ImportError as error:
    raise MissingExtraError("graphile_worker.contrib.alembic needs Alembic: pip install alembic") from error

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from alembic.runtime.migration import MigrationContext

    from graphile_worker._db.sql_files import Schema

    IncludeName = Callable[[str | None, Any, MutableMapping[Any, Any]], bool]

__all__ = ["drop_schema", "include_name", "install_schema"]


def install_schema(schema: str | None = None) -> None:
    """Install or upgrade the schema, in the transaction of a revision. Call it in ``upgrade``.

    If the schema is current, nothing happens. If it exists and has jobs, indexes that are missing are first
    built concurrently, outside of the transaction: see Alembic's ``autocommit_block``. With ``--sql`` the
    script checks what is installed, and skips it.

    Args:
        schema: Name of the schema; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.

    Raises:
        SchemaError: The schema is too old or too new for this release, or the role may not install it.

    Example:
        >>> from alembic.migration import MigrationContext
        >>> from alembic.operations import Operations
        >>> from graphile_worker.contrib.alembic import install_schema
        >>> from sqlalchemy import create_engine, inspect
        >>> engine = create_engine(dsn.replace("postgresql:", "postgresql+psycopg:"))
        >>> with engine.begin() as connection:  # alembic upgrade does this, with each revision
        ...     with Operations.context(MigrationContext.configure(connection)):
        ...         install_schema()
        >>> "graphile_worker" in inspect(engine).get_schema_names()
        True
        >>> engine.dispose()
    """
    found = find_schema(schema)
    context = op.get_context()
    if context.as_sql:
        for statement in installation_script(found):
            _print(context, statement)
        return
    installation = _installation(context, found)
    if outside := installation.find_statements_outside():
        with context.autocommit_block():
            in_autocommit = _installation(context, found)
            for statement in outside:
                in_autocommit.execute(statement)
        installation = _installation(context, found)  # the block has ended the transaction
    installation.install()


def drop_schema(schema: str | None = None) -> None:
    """Drop the schema, with all jobs and everything else that is in it.

    Call it in ``downgrade`` of the revision that installs the schema first. A later revision that upgrades
    the schema needs nothing in its ``downgrade``, because older releases work with a newer schema.

    Args:
        schema: Name of the schema; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.
    """
    found = find_schema(schema)
    context = op.get_context()
    installation = PortableInstallation(found, context.connection, lambda text: _run(context, text))
    installation.drop()


def include_name(schema: str | None = None, *, also: IncludeName | None = None) -> IncludeName:
    """Return an ``include_name`` function for ``env.py`` that leaves out the queue's schema.

    With ``include_schemas=True``, ``alembic revision --autogenerate`` reads all schemas of the database.
    Without this function, it would write a revision that drops the queue's tables.

    Args:
        schema: Name of the schema; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.
        also: Your own function, for everything else.

    Example:
        >>> from graphile_worker.contrib.alembic import include_name
        >>> include = include_name()
        >>> include("graphile_worker", "schema", {}), include("sales", "schema", {})
        (False, True)
    """
    queue = find_schema(schema).name

    def include(name: str | None, kind: Any, parents: MutableMapping[Any, Any]) -> bool:
        if queue in {name if kind == "schema" else None, parents.get("schema_name")}:
            return False
        return also is None or also(name, kind, parents)

    return include


def _installation(context: MigrationContext, schema: Schema) -> PortableInstallation:
    return PortableInstallation(schema, context.connection, lambda text: _run(context, text))


def _run(context: MigrationContext, statement: str) -> None:
    """Run a statement as it is: Alembic's own operations would take ``:name`` for a parameter."""
    if context.as_sql:
        _print(context, statement)
    else:
        assert context.connection is not None  # noqa: S101 - for the type checker
        context.connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def _print(context: MigrationContext, statement: str) -> None:
    context.impl.static_output(f"{statement.strip().removesuffix(';')};")

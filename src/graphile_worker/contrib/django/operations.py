"""The migration operation that installs the queue's schema."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from django.db.migrations.operations.base import Operation

from graphile_worker._db.connection.adapted import AdaptedConnection
from graphile_worker._db.schema.migrate import find_pending, migrate
from graphile_worker.client import find_schema
from graphile_worker.contrib.django import app, configuration

if TYPE_CHECKING:
    from graphile_worker._db.sql_files import Schema


class InstallSchema(Operation):
    """Install or upgrade the schema in the queue's database, as ``graphile-worker migrate`` does.

    It does nothing in other databases. Undoing it does nothing either: other programs may use the schema.

    Args:
        number: The library's newest migration. A newer one gets an operation of its own, which Django runs.
    """

    reduces_to_sql = True
    reversible = True
    atomic = False

    def __init__(self, number: int) -> None:
        self.number = number

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return how the operation is written in a migration."""
        return type(self).__name__, [self.number], {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing: the models are not changed."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:  # noqa: ARG002
        """Install the schema; or with ``sqlmigrate``, collect the statements."""
        connection = schema_editor.connection
        if not is_queue(connection):
            return
        if schema_editor.collect_sql:
            adapted = AdaptedConnection(connection)
            schema_editor.collected_sql.append(asyncio.run(find_pending(adapted, _schema())).script)  # type: ignore[arg-type]
        else:
            install(connection)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Do nothing: see above."""

    def describe(self) -> str:
        """Return what the operation does."""
        return f"Installs Graphile Worker's schema up to {self.number}"


def is_queue(connection: Any) -> bool:
    """Return whether a Django connection leads to the queue's database."""
    return bool(connection.alias == app.database and connection.vendor == "postgresql")


def install(connection: Any) -> None:
    """Install or upgrade the schema on a Django connection."""
    asyncio.run(migrate(AdaptedConnection(connection), _schema()))  # type: ignore[arg-type]


def _schema() -> Schema:
    return find_schema(configuration.read_setting("SCHEMA"))

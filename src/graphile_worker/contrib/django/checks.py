"""Checks for ``manage.py check``: mistakes in the settings, and with ``--database`` a missing schema."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder

from graphile_worker.contrib.django import app, configuration
from graphile_worker.errors import GraphileWorkerError


@checks.register(checks.Tags.database)
def check_schema(databases: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """Check that the schema is installed, if the command may use the database."""
    alias = app.database
    if alias not in (databases or ()) or connections[alias].vendor != "postgresql":
        return []
    # Before manage.py migrate, which runs this check too, there is nothing to warn of.
    if not any(
        label == "graphile_worker" for label, _ in MigrationRecorder(connections[alias]).applied_migrations()
    ):
        return []
    try:
        app.utils.stats_sync(connection=alias)
    except GraphileWorkerError as error:
        return [
            checks.Warning(
                str(error), hint="Run manage.py graphile_worker migrate.", id="graphile_worker.W001"
            )
        ]
    return []


@checks.register()
def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Check ``settings.GRAPHILE_WORKER``."""
    try:
        found: list[checks.CheckMessage] = [
            checks.Error(
                f"settings.{configuration.SETTING} has no key {key!r}.", hint=hint, id="graphile_worker.E001"
            )
            for key, hint in configuration.unknown_keys()
        ]
        if app.settings_error is not None:
            found.append(checks.Error(str(app.settings_error), id="graphile_worker.E002"))
        configuration.find_dsn(app.database)
    except GraphileWorkerError as error:
        return [checks.Error(str(error), id="graphile_worker.E002")]
    return found

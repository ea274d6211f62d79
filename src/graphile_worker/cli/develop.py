"""``graphile-worker dev``: a worker for development."""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphile_worker.app import App
from graphile_worker.cli.control import VARIABLE
from graphile_worker.cli.run_worker import load, resolve_app_path, run_worker
from graphile_worker.cli.settings import HOST, Value
from graphile_worker.cli.show_settings import masked
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Mapping

_EMBEDDED = "embedded:"
_SOURCE = "graphile-worker dev"


def develop(settings: dict[str, Value], app_path: str | None) -> None:
    """Run a worker that restarts when a file changes, until Ctrl-C."""
    if settings["connection"].value is None and not os.environ.get("PGDATABASE"):
        settings["connection"] = Value(_EMBEDDED, _SOURCE)
    if settings["log_format"].source == "default":
        settings["log_format"] = Value("pretty", _SOURCE)
    host = HOST.get()
    if os.environ.get(VARIABLE) or (host is not None and host.reloads):  # this process is the worker itself
        run_worker(settings, app_path, dev=True)
        return
    if find_spec("watchfiles") is None:
        raise MissingExtraError(
            "graphile-worker dev needs extra packages: pip install 'graphile-worker[embedded,watch]'"
        )
    app_path = resolve_app_path(settings, app_path)
    folder = Path(settings["tasks"].value)
    if app_path is None and not folder.exists() and not folder.with_name(f"{folder.name}.py").exists():
        raise ConfigurationError(
            f"No tasks found: {folder} does not exist. Create a project: graphile-worker init. Or name an "
            "app: graphile-worker dev module:app"
        )
    with ExitStack() as server:
        _announce_database(settings, app_path, server)
        run_worker(settings, app_path, watch=True)


def _announce_database(settings: Mapping[str, Value], app_path: str | None, server: ExitStack) -> None:
    dsn, source = settings["connection"]
    if app_path is not None:
        app = load(settings, app_path)
        if isinstance(app, App) and app.settings.get("dsn") != dsn:
            dsn, source = app.settings.get("dsn"), app_path
    if dsn is not None and dsn.startswith(_EMBEDDED):
        running = server.enter_context(EmbeddedPostgres(dsn.removeprefix(_EMBEDDED) or None))
        click.echo(f"A private PostgreSQL runs until Ctrl-C. Its data is kept in {running.path}")
        shown = running.dsn()
    else:
        shown = masked(dsn) if dsn else "(from the PG* variables)"
        click.echo(f"Database from {source}:")
    click.echo(f'  psql "{shown}"')

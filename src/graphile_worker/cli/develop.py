"""``graphile-worker dev``: a worker for those who write its tasks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphile_worker.app import App
from graphile_worker.cli.control import VARIABLE
from graphile_worker.cli.run_worker import app_of, load, run_worker
from graphile_worker.cli.settings import Value
from graphile_worker.cli.show_settings import masked
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Mapping

_EMBEDDED = "embedded:"
_SOURCE = "graphile-worker dev"


def develop(settings: dict[str, Value], tasks_of: str | None) -> None:
    """Run a worker anew for all that is changed, until Ctrl-C."""
    if settings["connection"].value is None and not os.environ.get("PGDATABASE"):
        settings["connection"] = Value(_EMBEDDED, _SOURCE)
    if settings["log_format"].source == "default":
        settings["log_format"] = Value("pretty", _SOURCE)
    if os.environ.get(VARIABLE):  # this is the worker itself
        run_worker(settings, tasks_of, dev=True)
        return
    if find_spec("watchfiles") is None:
        raise MissingExtraError("dev needs two more packages: pip install 'graphile-worker[embedded,watch]'")
    tasks_of = app_of(settings, tasks_of)
    folder = Path(settings["tasks"].value)
    if tasks_of is None and not folder.exists() and not folder.with_name(f"{folder.name}.py").exists():
        raise ConfigurationError(
            f"There are no tasks here, for {folder} does not exist. Begin with: graphile-worker init. Or "
            "name an app: graphile-worker dev module:app"
        )
    with ExitStack() as server:
        _introduce(settings, tasks_of, server)
        run_worker(settings, tasks_of, watch=True)


def _introduce(settings: Mapping[str, Value], tasks_of: str | None, server: ExitStack) -> None:
    dsn, source = settings["connection"]
    if tasks_of is not None:
        what = load(settings, tasks_of)
        if isinstance(what, App) and what.settings.get("dsn") != dsn:
            dsn, source = what.settings.get("dsn"), tasks_of
    if dsn is not None and dsn.startswith(_EMBEDDED):
        running = server.enter_context(EmbeddedPostgres(dsn.removeprefix(_EMBEDDED) or None))
        click.echo(f"A PostgreSQL for this runs until Ctrl-C; its data stay, in {running.path}")
        shown = running.dsn()
    else:
        shown = masked(dsn) if dsn else "that of the PG* variables"
        click.echo(f"The database is that of {source}")
    click.echo(f'  psql "{shown}"')

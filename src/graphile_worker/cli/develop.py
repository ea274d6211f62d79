"""``graphile-worker dev``: a worker for development."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphile_worker.app import App
from graphile_worker.cli.control import VARIABLE
from graphile_worker.cli.run_worker import connection_arguments, load, resolve_app_path, run_worker
from graphile_worker.cli.settings import HOST, Value
from graphile_worker.cli.show_settings import masked
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_EMBEDDED = "embedded:"
_SOURCE = "graphile-worker dev"
_LOOPBACK = "127.0.0.1"


def develop(settings: dict[str, Value], app_path: str | None, *, web_port: int | None = None) -> None:
    """Run a worker that restarts when a file changes, until Ctrl-C.

    Args:
        settings: The settings.
        app_path: The app, if it is not a folder of tasks.
        web_port: The port of the dashboard, or a free one if it is taken; None for no dashboard.
    """
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
        app = _announce_database(settings, app_path, server)
        if web_port is not None:
            server.enter_context(_dashboard(app, web_port))
        run_worker(settings, app_path, watch=True)


def _announce_database(settings: Mapping[str, Value], app_path: str | None, server: ExitStack) -> App:
    """Start the private server if one is used, print how to connect, and return an app for the dashboard."""
    dsn, source = settings["connection"]
    app = App(**connection_arguments(settings))
    if app_path is not None:
        loaded = load(settings, app_path)
        if isinstance(loaded, App):
            app = loaded
            if app.settings.get("dsn") != dsn:
                dsn, source = app.settings.get("dsn"), app_path
    if dsn is not None and dsn.startswith(_EMBEDDED):
        running = server.enter_context(EmbeddedPostgres(dsn.removeprefix(_EMBEDDED) or None))
        click.echo(f"A private PostgreSQL runs until Ctrl-C. Its data is kept in {running.path}")
        shown = running.dsn()
    else:
        shown = masked(dsn) if dsn else "(from the PG* variables)"
        click.echo(f"Database from {source}:")
    click.echo(f'  psql "{shown}"')
    return app


@contextmanager
def _dashboard(app: App, port: int) -> Iterator[None]:
    """Serve the dashboard on a thread, with a link that works once."""
    if any(find_spec(name) is None for name in ("starlette", "jinja2", "uvicorn")):
        click.echo("For a dashboard: pip install 'graphile-worker[web]'")
        yield
        return
    from graphile_worker.web import server  # noqa: PLC0415
    from graphile_worker.web.auth import Access, OneTimeLinks  # noqa: PLC0415
    from graphile_worker.web.dashboard import Dashboard  # noqa: PLC0415

    try:
        bound = server.bind(_LOOPBACK, port)
    except ConfigurationError:
        bound = server.bind(_LOOPBACK, 0)  # another project is being developed too

    def announce(token: str) -> None:
        click.echo(f"Another browser: {server.address_of(bound, token=token)}")

    links = OneTimeLinks(Access(user="local"), on_used=announce)
    dashboard = Dashboard(app, auth=links, allowed_hosts=["localhost"])
    click.echo(f"Dashboard: {server.address_of(bound, token=links.token)}")
    with closing(bound), server.serving(dashboard, bound):
        yield
